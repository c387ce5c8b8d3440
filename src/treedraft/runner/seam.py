"""The seam of a round, before sampling: the tree's tokens go out, the masks of its nodes come in.

    device:             | draft, select | copy out |   target forward   | copy in | sample, walk, commit, extend |
    host:   | root mask |                          | masks of the nodes |

What may follow the root is known before the round, so no draft of the first level is a forbidden one: 2.0 -> 2.8
tokens a round at T = 0, 1.8 -> 2.6 at T = 1 (benchmarks/notes.md). A round of a batch without a grammar has no seam.
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

    def root_masks(self, batch: int) -> Tensor:
        """int32 [B, 1, words]: what may follow the root."""

    def drafted(self, tree: DraftTree) -> None:
        """Begin the copy of the tree to the host. Of a tree of one node the host needs nothing."""

    def masks(self) -> Tensor:
        """int32 [B, N, words], see speculative.sampling.mask_tokens. Syncs with the copy alone."""


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

    def __init__(self, grammars: Grammars, vocab_size: int, device: torch.device) -> None:
        self._grammars, self._device, self._num_words = grammars, device, -(-vocab_size // 32)

    def root_masks(self, batch: int) -> Tensor:
        return self._on_device(np.full((2, batch, 1), ROOT))

    def drafted(self, tree: DraftTree) -> None:
        both = torch.stack((tree.token_ids, tree.parents))
        self._copied = None
        if both.is_meta or both.shape[-1] == 1:
            self._tree = torch.full(both.shape, ROOT, dtype=torch.int64)
            return
        self._tree = both.to("cpu", non_blocking=True)
        if both.is_cuda:
            self._copied = torch.cuda.Event()
            self._copied.record()

    def masks(self) -> Tensor:
        if self._copied is not None:
            self._copied.synchronize()
        return self._on_device(self._tree.numpy())

    def _on_device(self, tree: np.ndarray) -> Tensor:
        """The masks of tree int64 [2, B, N]: token ids, parents."""
        shape = (*tree.shape[1:], self._num_words)
        if self._device.type == "meta":
            return torch.empty(shape, dtype=torch.int32, device="meta")
        masks = torch.empty(shape, dtype=torch.int32, pin_memory=self._device.type == "cuda")
        fill_masks(self._grammars, tree, masks.numpy())
        return masks.to(self._device, non_blocking=True)


class StaticSeam:
    """Of all rounds on static buffers (runner.graphs). Its host steps are seams of a captured round.

    `begin` comes before each round; while a round is captured, `at_host` ends one graph and begins the next.
    """

    def __init__(self, max_batch: int, vocab_size: int, buffers: Buffers) -> None:
        self.at_host: Callable[[Callable[[], None]], None] = lambda host_step: host_step()
        self._max_batch, self._num_words, self._buffers = max_batch, -(-vocab_size // 32), buffers
        self._grammars: Grammars = ()
        self._copied = torch.cuda.Event() if buffers.device.type == "cuda" else None
        roots = (max_batch, 1, self._num_words)
        self._root_masks = buffers.allocate(
            "grammar.root_masks", "graph", roots, torch.int32, formula="max_batch * 1 * words", fill=-1
        )
        self._host_root_masks = self._on_host(roots, torch.int32)
        self._tree: Tensor | None = None  # [2, max_batch, N] int64 of the largest shape, on the device
        self._masks: Tensor | None = None  # [max_batch, N, words] int32
        self._host_tree = self._host_masks = torch.empty(0)
        self._shape = (0, 0)  # B, N of the round that runs or is captured

    def begin(self, grammars: Grammars) -> None:
        """Take the grammars of the next round's rows, and copy in what may follow their roots."""
        self._grammars = grammars
        if not self._root_masks.is_meta:
            fill_masks(grammars, np.full((2, self._max_batch, 1), ROOT), self._host_root_masks.numpy())
            self._root_masks.copy_(self._host_root_masks, non_blocking=True)

    def root_masks(self, batch: int) -> Tensor:
        return self._root_masks[:batch]

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
        self._host_tree, self._host_masks = self._on_host(tree, torch.int64), self._on_host(masks, torch.int32)

    def _on_host(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """All ones: roots, and masks that forbid nothing."""
        if self._buffers.device.type == "meta":
            return torch.empty(0)
        return torch.full(shape, ROOT, dtype=dtype, pin_memory=self._copied is not None)

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
        fill_masks(self._grammars, self._host_tree[:, :batch, :nodes].numpy(), host_masks.numpy())
        self._masks[:batch, :nodes].copy_(host_masks, non_blocking=True)
