"""The operators of a round that are not the model's: torch, or Triton kernels that give the same, in few launches.

`make_operators` chooses once, where the runner is built. Both have the same methods with the same results; on the meta
device each allocates what it allocates elsewhere, so that memory is budgeted for the one that will run.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Protocol

import torch
from torch import Tensor

from treedraft.kv.allocator import TRASH_PAGE
from treedraft.kv.page_table import slots_of
from treedraft.speculative.noise import gumbel
from treedraft.speculative.sampling import SamplingRows, draft_scores, mask_tokens, path_tokens, process, sample
from treedraft.speculative.select import select
from treedraft.speculative.tree import CandidatePool, Frontier, next_level, stable_topk
from treedraft.speculative.verify import walk
from treedraft.types import Accepted, DraftTree

LOGITS_BYTES = 1 << 28  # logits that exist at once are at most this much, or one sequence's


def logits_parts(batch: int, num_rows: int, vocab_size: int, dtype: torch.dtype) -> list[slice]:
    """Cut a batch so that the logits of a part, [part, num_rows, vocab_size], take at most LOGITS_BYTES.

    dtype: of the states that they are made of. A single part where all of them fit.
    """
    bytes_each = num_rows * vocab_size * (8 if dtype == torch.float64 else 4)
    size = max(1, LOGITS_BYTES // bytes_each)
    return [slice(start, min(start + size, batch)) for start in range(0, batch, size)]


def join(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """The results of the parts of a batch as one."""
    first, second = zip(*parts, strict=True)
    return torch.cat(first), torch.cat(second)


class Operators(Protocol):
    """What a round computes between the forwards of its models."""

    def noise(self, keys: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
        """Gumbel noise float32 [B, D, V], see speculative.noise."""
        ...

    def best_children(
        self, logits: Tensor, temperature: Tensor, noise: Tensor | None, target_ids: Tensor | None, topk: int
    ) -> tuple[Tensor, Tensor]:
        """The K best next tokens of draft rows: scores float32 [B, R, K], target ids int64 [B, R, K].

        logits float32 [B, R, Vd]; noise float32 [B, Vd], None: plain ranking; target_ids int64 [Vd]: of the draft's
        ids, None where they are the same.
        """
        ...

    def next_level(
        self, pool: CandidatePool, frontier: Frontier, child_ids: Tensor, child_logps: Tensor, level: int
    ) -> tuple[CandidatePool, Frontier, Tensor]:
        """See speculative.tree."""
        ...

    def select(
        self, pool: CandidatePool, root_ids: Tensor, num_draft_tokens: int, words: int, node_limits: Tensor
    ) -> DraftTree:
        """See speculative.select."""
        ...

    def path_tokens(self, tree: DraftTree, max_depth: int) -> Tensor:
        """See speculative.sampling."""
        ...

    def mask_tokens(self, logits: Tensor, masks: Tensor, token_ids: Tensor | None = None) -> Tensor:
        """See speculative.sampling."""
        ...

    def sample(
        self,
        logits: Tensor,
        rows: SamplingRows,
        paths: Tensor,
        depths: Tensor,
        kv_lens: Tensor,
        noise: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """The token at every node, int64 [B, N], and whether its logits hold a NaN, bool [B, N].

        Arguments as of `process` and `sample`. May overwrite the logits.
        """
        ...

    def walk(self, tree: DraftTree, sampled: Tensor, max_path: int, node_has_nan: Tensor) -> tuple[Accepted, Tensor]:
        """The accepted path, see speculative.verify, and whether a node of it has a NaN, bool [B]."""
        ...

    def gather(
        self, slots: Tensor, kv_lens: Tensor, roots: Tensor, table: Tensor, page_size: int, tail: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Rows of `slots` [B]: kv_lens, roots [B], page_table [B, W], tail_positions and tail_slots [B, tail]."""
        ...

    def advance(
        self,
        slots: Tensor,
        kv_lens: Tensor,
        roots: Tensor,
        accepted: Accepted,
        overflow: Tensor,
        state_kv_lens: Tensor,
        state_roots: Tensor,
        output_counts: Tensor | None,
    ) -> None:
        """Grow each slot's length by the accepted path, make the bonus token its root, and count its tokens.

        kv_lens, roots int64 [B]: of the round's start. overflow int64 [7]: of a void round, which changes nothing.
        output_counts int32 [slots, V]: None where nobody counts.
        """
        ...

    def keep_hidden(
        self, draft_hidden: Tensor, slots: Tensor, hidden: Tensor, num_accepted: Tensor, overflow: Tensor
    ) -> None:
        """Store hidden [B, P, H] at the last accepted row by slot; a void round changes nothing."""
        ...


class TorchOperators:
    """Plain torch on any device: the definitions, in `speculative`."""

    def noise(self, keys: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
        return gumbel(keys, positions, vocab_size)

    def best_children(
        self, logits: Tensor, temperature: Tensor, noise: Tensor | None, target_ids: Tensor | None, topk: int
    ) -> tuple[Tensor, Tensor]:
        scores, draft_ids = stable_topk(draft_scores(logits, temperature, noise), topk)
        return scores, draft_ids if target_ids is None else target_ids[draft_ids]

    def next_level(
        self, pool: CandidatePool, frontier: Frontier, child_ids: Tensor, child_logps: Tensor, level: int
    ) -> tuple[CandidatePool, Frontier, Tensor]:
        return next_level(pool, frontier, child_ids, child_logps, level)

    def select(
        self, pool: CandidatePool, root_ids: Tensor, num_draft_tokens: int, words: int, node_limits: Tensor
    ) -> DraftTree:
        return select(pool, root_ids, num_draft_tokens, words, node_limits)

    def path_tokens(self, tree: DraftTree, max_depth: int) -> Tensor:
        return path_tokens(tree, max_depth)

    def mask_tokens(self, logits: Tensor, masks: Tensor, token_ids: Tensor | None = None) -> Tensor:
        return mask_tokens(logits, masks, token_ids)

    def sample(
        self,
        logits: Tensor,
        rows: SamplingRows,
        paths: Tensor,
        depths: Tensor,
        kv_lens: Tensor,
        noise: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        z = process(logits, rows, paths, depths, kv_lens)
        return sample(z, noise, depths, rows.temperature), logits.amax(-1).isnan()

    def walk(self, tree: DraftTree, sampled: Tensor, max_path: int, node_has_nan: Tensor) -> tuple[Accepted, Tensor]:
        accepted = walk(tree, sampled, max_path)
        on_path = torch.arange(accepted.columns.shape[1], device=sampled.device) <= accepted.num_accepted[:, None]
        return accepted, (node_has_nan.gather(1, accepted.columns) & on_path).any(-1)

    def gather(
        self, slots: Tensor, kv_lens: Tensor, roots: Tensor, table: Tensor, page_size: int, tail: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        kv_lens, page_table = kv_lens[slots], table.index_select(0, slots)
        tail_positions = kv_lens[:, None] + torch.arange(tail, device=slots.device)
        tail_slots = slots_of(page_table, tail_positions, page_size)
        return kv_lens, roots[slots], page_table, tail_positions, tail_slots

    def advance(
        self,
        slots: Tensor,
        kv_lens: Tensor,
        roots: Tensor,
        accepted: Accepted,
        overflow: Tensor,
        state_kv_lens: Tensor,
        state_roots: Tensor,
        output_counts: Tensor | None,
    ) -> None:
        is_void = overflow[-1] > 0
        bonus = accepted.token_ids.gather(1, accepted.num_accepted[:, None])[:, 0]
        state_kv_lens[slots] = kv_lens + (accepted.num_accepted + 1) * ~is_void
        state_roots[slots] = torch.where(is_void, roots, bonus)
        if output_counts is not None:
            token_ids = accepted.token_ids.masked_fill(is_void, -1)
            flat = (slots[:, None] * output_counts.shape[1] + token_ids.clamp(min=0)).flatten()
            output_counts.view(-1).index_add_(0, flat, (token_ids >= 0).int().flatten())

    def keep_hidden(
        self, draft_hidden: Tensor, slots: Tensor, hidden: Tensor, num_accepted: Tensor, overflow: Tensor
    ) -> None:
        last = num_accepted[:, None, None].expand(-1, 1, hidden.shape[-1])
        draft_hidden[slots] = torch.where(overflow[-1] > 0, draft_hidden[slots], hidden.gather(1, last)[:, 0])


class TritonOperators:
    """Kernels for CUDA, of float32 logits. Triton is imported when the first of them runs."""

    def noise(self, keys: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
        from treedraft.kernels.noise import gumbel_triton

        return gumbel_triton(keys, positions, vocab_size)

    def best_children(
        self, logits: Tensor, temperature: Tensor, noise: Tensor | None, target_ids: Tensor | None, topk: int
    ) -> tuple[Tensor, Tensor]:
        from treedraft.kernels.topk import best_children_triton

        return best_children_triton(logits, temperature, noise, target_ids, topk)

    def next_level(
        self, pool: CandidatePool, frontier: Frontier, child_ids: Tensor, child_logps: Tensor, level: int
    ) -> tuple[CandidatePool, Frontier, Tensor]:
        from treedraft.kernels.tree import next_level_triton

        return next_level_triton(pool, frontier, child_ids, child_logps, level)

    def select(
        self, pool: CandidatePool, root_ids: Tensor, num_draft_tokens: int, words: int, node_limits: Tensor
    ) -> DraftTree:
        from treedraft.kernels.tree import select_triton

        return select_triton(pool, root_ids, num_draft_tokens, words, node_limits)

    def path_tokens(self, tree: DraftTree, max_depth: int) -> Tensor:
        from treedraft.kernels.tree import path_tokens_triton

        return path_tokens_triton(tree, max_depth)

    def mask_tokens(self, logits: Tensor, masks: Tensor, token_ids: Tensor | None = None) -> Tensor:
        from treedraft.kernels.mask import mask_tokens_triton

        return mask_tokens_triton(logits, masks, token_ids)

    def sample(
        self,
        logits: Tensor,
        rows: SamplingRows,
        paths: Tensor,
        depths: Tensor,
        kv_lens: Tensor,
        noise: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        from treedraft.kernels.sample import sample_nodes_triton

        return sample_nodes_triton(logits, rows, paths, depths, kv_lens, noise)

    def walk(self, tree: DraftTree, sampled: Tensor, max_path: int, node_has_nan: Tensor) -> tuple[Accepted, Tensor]:
        from treedraft.kernels.verify import walk_triton

        return walk_triton(tree, sampled, max_path, node_has_nan)

    def gather(
        self, slots: Tensor, kv_lens: Tensor, roots: Tensor, table: Tensor, page_size: int, tail: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        from treedraft.kernels.state import gather_triton

        return gather_triton(slots, kv_lens, roots, table, page_size, tail, TRASH_PAGE)

    def advance(
        self,
        slots: Tensor,
        kv_lens: Tensor,
        roots: Tensor,
        accepted: Accepted,
        overflow: Tensor,
        state_kv_lens: Tensor,
        state_roots: Tensor,
        output_counts: Tensor | None,
    ) -> None:
        from treedraft.kernels.verify import advance_triton

        advance_triton(slots, kv_lens, roots, accepted, overflow, state_kv_lens, state_roots, output_counts)

    def keep_hidden(
        self, draft_hidden: Tensor, slots: Tensor, hidden: Tensor, num_accepted: Tensor, overflow: Tensor
    ) -> None:
        from treedraft.kernels.verify import keep_hidden_triton

        keep_hidden_triton(draft_hidden, slots, hidden, num_accepted, overflow)


def make_operators(device_type: str, dtype: torch.dtype) -> Operators:
    """The kernels on CUDA, where Triton is installed; torch for a model in float64 and everywhere else.

    device_type: of the device, or what the meta device stands for.
    """
    has_kernels = device_type == "cuda" and dtype != torch.float64 and find_spec("triton") is not None
    return TritonOperators() if has_kernels else TorchOperators()
