"""The seam of a round, before sampling: the tree's tokens go out, the masks of its nodes come in.

    device:   | draft, select | copy out |   target forward   | copy in | sample, walk, commit, extend |
    host:                                | masks of the nodes |

A round of a batch without a grammar has no seam.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from treedraft.kv.buffers import Buffers
from treedraft.types import DraftTree, Grammar

ROOT = -1  # the root's parent; of its token nobody asks
Grammars = Sequence[Grammar | None]  # of the batch's rows; those beyond it are padded


class Seam(Protocol):
    """What a round calls, in this order."""

    def drafted(self, tree: DraftTree) -> None:
        """Begin the copy of the tree to the host. Of a tree of one node the host needs nothing."""

    def masks(self) -> Tensor:
        """int32 [B, N, words], see speculative.sampling.mask_tokens. Syncs with that copy alone."""


def fill_masks(grammars: Grammars, tree: np.ndarray, masks: np.ndarray) -> None:
    """Fill in masks int32 [B, N, words] of the nodes of tree int64 [2, B, N]: token ids, parents."""
    for row, of_row in enumerate(masks):
        grammar = grammars[row] if row < len(grammars) else None
        if grammar is None:
            of_row.fill(-1)
        else:
            grammar.fill_masks(tree[0, row].tolist(), tree[1, row].tolist(), of_row)


class EagerSeam:
    """Of one round that is made anew."""

    def __init__(self, grammars: Grammars, vocab_size: int) -> None:
        self._grammars, self._num_words = grammars, -(-vocab_size // 32)

    def drafted(self, tree: DraftTree) -> None:
        both = torch.stack((tree.token_ids, tree.parents))
        self._device, self._copied = both.device, None
        if both.is_meta:
            self._tree = both
        elif both.shape[-1] == 1:
            self._tree = torch.full(both.shape, ROOT, dtype=torch.int64)
        else:
            self._tree = both.to("cpu", non_blocking=True)
            if both.is_cuda:
                self._copied = torch.cuda.Event()
                self._copied.record()

    def masks(self) -> Tensor:
        shape = (*self._tree.shape[1:], self._num_words)
        if self._device.type == "meta":
            return torch.empty(shape, dtype=torch.int32, device="meta")
        if self._copied is not None:
            self._copied.synchronize()
        masks = torch.empty(shape, dtype=torch.int32, pin_memory=self._device.type == "cuda")
        fill_masks(self._grammars, self._tree.numpy(), masks.numpy())
        return masks.to(self._device, non_blocking=True)


class StaticSeam:
    """Of all rounds on static buffers (runner.graphs). Its host steps are seams of a captured round.

    `grammars` is set before each round; while a round is captured, `at_host` ends one graph and begins the next.
    """

    def __init__(self, max_batch: int, vocab_size: int, buffers: Buffers) -> None:
        self.grammars: Grammars = ()
        self.at_host: Callable[[Callable[[], None]], None] = lambda host_step: host_step()
        self._max_batch, self._num_words, self._buffers = max_batch, -(-vocab_size // 32), buffers
        self._copied = torch.cuda.Event() if buffers.device.type == "cuda" else None
        self._tree: Tensor | None = None  # [2, max_batch, N] int64 of the largest shape, on the device
        self._masks: Tensor | None = None  # [max_batch, N, words] int32
        self._host_tree = self._host_masks = torch.empty(0)
        self._shape = (0, 0)  # B, N of the round that runs or is captured

    def drafted(self, tree: DraftTree) -> None:
        batch, nodes = tree.token_ids.shape
        self._shape = batch, nodes
        if self._tree is None:
            self._allocate(nodes)
        assert self._tree is not None
        self._tree[0, :batch, :nodes].copy_(tree.token_ids)
        self._tree[1, :batch, :nodes].copy_(tree.parents)
        if nodes > 1:
            self._at_host(self._copy_out)

    def masks(self) -> Tensor:
        batch, nodes = self._shape
        assert self._masks is not None
        self._at_host(lambda: self._fill(batch, nodes))
        return self._masks[:batch, :nodes]

    def _allocate(self, nodes: int) -> None:
        """The first round is one of the largest shape."""
        tree, masks = (2, self._max_batch, nodes), (self._max_batch, nodes, self._num_words)
        self._tree = self._buffers.allocate(
            "grammar.tree", "graph", tree, torch.int64, formula="2 * max_batch * num_draft_tokens"
        )
        self._masks = self._buffers.allocate(
            "grammar.masks", "graph", masks, torch.int32, formula="max_batch * num_draft_tokens * words"
        )
        is_cuda = self._copied is not None
        if not self._tree.is_meta:
            self._host_tree = torch.full(tree, ROOT, dtype=torch.int64, pin_memory=is_cuda)
            self._host_masks = torch.full(masks, -1, dtype=torch.int32, pin_memory=is_cuda)

    def _at_host(self, host_step: Callable[[], None]) -> None:
        if self._buffers.device.type != "meta":
            self.at_host(host_step)

    def _copy_out(self) -> None:
        assert self._tree is not None
        self._host_tree.copy_(self._tree, non_blocking=True)
        if self._copied is not None:
            self._copied.record()

    def _fill(self, batch: int, nodes: int) -> None:
        assert self._masks is not None
        if self._copied is not None and nodes > 1:
            self._copied.synchronize()
        host_masks = self._host_masks[:batch, :nodes]
        fill_masks(self.grammars, self._host_tree[:, :batch, :nodes].numpy(), host_masks.numpy())
        self._masks[:batch, :nodes].copy_(host_masks, non_blocking=True)
