"""Drafting: a tree from the head's recycled state, and the head's KV of every committed position.

A drafter is anything with `propose`, `prefill` and `extend`; the round knows no more of it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from treedraft.attention.base import TreeAttention
from treedraft.attention.paged import PagedPrefillAttend, PagedTreeAttend
from treedraft.config import SpeculativeConfig
from treedraft.kv.pool import LatentPool
from treedraft.models.draft.eagle3 import Eagle3MlaHead
from treedraft.runner.batch import DecodeBatch, PrefillBatch
from treedraft.runner.operators import join, logits_parts
from treedraft.runner.state import DeviceState
from treedraft.speculative.sampling import SamplingRows
from treedraft.speculative.tree import Frontier, first_level, last_level, num_words
from treedraft.types import Accepted, DraftTree


class Drafter(Protocol):
    """Proposes trees. It may be wrong in any way: the text stays the target's own."""

    def propose(
        self, batch: DecodeBatch, rows: SamplingRows, noise: Tensor | None, root_masks: Tensor | None
    ) -> DraftTree:
        """noise: [B, D, V] float32 for token positions kv_lens + 1 + d, or None when no row samples.

        root_masks: [B, 1, words] int32 of `mask_tokens`, what may follow the root; None where there is no grammar.
        """

    def prefill(self, batch: PrefillBatch, features: Tensor, next_tokens: Tensor) -> None:
        """Take chunks of prompts. features: [T, F] of their positions, next_tokens: [T] the token after each."""

    def extend(self, batch: DecodeBatch, features: Tensor, accepted: Accepted) -> None:
        """Take a round's accepted path. features: [B, P, F] of the path's nodes, root first."""


@dataclass(frozen=True)
class EagleDrafter:
    """EAGLE-3: one decoder layer over the target's features (EAGLE-3 paper, section 3; EAGLE-2 trees, section 4).

    Draft row i pairs the target's feature at i with the embedding of token i + 1. A node of depth d is draft row
    kv_len + d - 1; its KV lies in the sequence's next free slots, in the order in which nodes are made:

        logical slot:  0 ........ kv_len-1 | kv_len ..+K-1 | +K ..+2K-1 | ...
                       committed rows      | level 2's rows | level 3's | (levels 2..S forward the frontier before)
    """

    head: Eagle3MlaHead
    attention: TreeAttention  # of the levels
    extension: TreeAttention  # the same backend, of the extension
    plans_prefix: bool  # it is another backend than the target's, whose plan of the prefixes it cannot read
    pool: LatentPool
    state: DeviceState
    shape: SpeculativeConfig

    @cached_property
    def target_ids(self) -> Tensor | None:
        """Target id of each draft id: [Vd] int64; None where they are the same."""
        return self.head.draft_to_target

    def propose(
        self, batch: DecodeBatch, rows: SamplingRows, noise: Tensor | None, root_masks: Tensor | None
    ) -> DraftTree:
        topk, num_steps = self.shape.topk, self.shape.num_steps
        words = num_words(self.shape.num_draft_tokens, topk, num_steps)
        hidden = self.state.draft_hidden[batch.slots][:, None]  # [B, 1, H]
        scores, token_ids = self._best_children(hidden, rows, noise, 1, root_masks)
        pool, frontier = first_level(token_ids[:, 0], scores[:, 0], words)
        batch = self._with_own_prefix(batch)
        hidden = hidden.expand(-1, topk, -1)
        for level in range(2, num_steps + 1):
            hidden = self._forward_frontier(batch, frontier, hidden, level)
            scores, token_ids = self._best_children(hidden, rows, noise, level)
            if level == num_steps:
                pool = last_level(pool, frontier, token_ids, scores)
                break
            pool, frontier, parent_rows = self.state.operators.next_level(pool, frontier, token_ids, scores, level)
            hidden = hidden.gather(1, parent_rows[..., None].expand(-1, -1, hidden.shape[-1]))
        select = self.state.operators.select
        return select(pool, batch.roots, self.shape.num_draft_tokens, words, batch.node_limits)

    def prefill(self, batch: PrefillBatch, features: Tensor, next_tokens: Tensor) -> None:
        attend = PagedPrefillAttend(self.pool, batch.sequences, batch.write_slots, batch.page_table, batch.page_size)
        hidden = self.head(self.head.fuse(features), next_tokens, batch.positions, attend)
        self.state.draft_hidden[batch.slots] = hidden[batch.last_rows]

    def extend(self, batch: DecodeBatch, features: Tensor, accepted: Accepted) -> None:
        num_rows = features.shape[1]
        batch = self._with_own_prefix(batch)
        plan = self.extension.plan_tree(batch.prefix, batch.chain_bits(num_rows), num_rows)
        attend = PagedTreeAttend(self.extension, plan, self.pool, batch.tail_slots[:, :num_rows])
        positions = batch.tail_positions[:, :num_rows]
        hidden = self.head(self.head.fuse(features), accepted.token_ids.clamp(min=0), positions, attend)
        state = self.state
        state.operators.keep_hidden(state.draft_hidden, batch.slots, hidden, accepted.num_accepted, state.overflow)

    def _with_own_prefix(self, batch: DecodeBatch) -> DecodeBatch:
        if not self.plans_prefix:
            return batch
        prefix = self.attention.plan_prefix(
            batch.page_table, batch.kv_lens, batch.max_kv_len, batch.tail_slots, batch.page_size
        )
        return replace(batch, prefix=prefix)

    def _forward_frontier(self, batch: DecodeBatch, frontier: Frontier, hidden: Tensor, level: int) -> Tensor:
        """Forward the K nodes of depth level - 1: draft rows kv_len + level - 2. Returns [B, K, H]."""
        topk, start = self.shape.topk, (level - 2) * self.shape.topk
        plan = self.attention.plan_tree(batch.prefix, frontier.ancestor_bits, start + topk)
        attend = PagedTreeAttend(self.attention, plan, self.pool, batch.tail_slots[:, start : start + topk])
        positions = (batch.kv_lens[:, None] + (level - 2)).expand(-1, topk)
        return self.head(hidden, frontier.token_ids, positions, attend)

    def _best_children(
        self, hidden: Tensor, rows: SamplingRows, noise: Tensor | None, level: int, masks: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The K best next tokens of each row: scores [B, R, K] float32, target token ids [B, R, K].

        masks: [B, R, words] int32, which tokens may be proposed; None: any.
        """
        best_children, target_ids, topk = self.state.operators.best_children, self.target_ids, self.shape.topk
        at_level = None if noise is None or not self.shape.shared_noise else noise[:, level - 1]
        if at_level is not None and target_ids is not None:
            at_level = at_level[:, target_ids]
        batch_size, num_rows, _ = hidden.shape
        parts = logits_parts(batch_size, num_rows, self.head.draft_vocab_size, hidden.dtype)

        def logits_of(part: slice) -> Tensor:
            logits = self.head.logits(hidden[part])
            return logits if masks is None else self.state.operators.mask_tokens(logits, masks[part], target_ids)

        if len(parts) == 1:
            return best_children(logits_of(parts[0]), rows.temperature, at_level, target_ids, topk)
        return join(
            [
                best_children(
                    logits_of(part),
                    rows.temperature[part],
                    None if at_level is None else at_level[part],
                    target_ids,
                    topk,
                )
                for part in parts
            ]
        )


def chain_bits(num_rows: int, device: torch.device) -> Tensor:
    """Ancestor bits of a chain: row r sees tree slots 0..r. Returns [num_rows, words] int64."""
    words = -(-num_rows // 64)
    visible = torch.ones(num_rows, words * 64, dtype=torch.bool).tril()
    weights = torch.tensor([1 << i if i < 63 else -(1 << 63) for i in range(64)], dtype=torch.int64)
    return (visible.view(num_rows, words, 64) * weights).sum(-1).to(device)
