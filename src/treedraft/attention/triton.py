"""Tree attention by the Triton kernels: page table, lengths and ancestor bits as they are, no index lists.

    round:    plan_prefix -> cuts all prefixes into equal shares, when first asked for a number of query rows
    forward:  plan_tree   -> nothing; the bits are the plan
    layer:    run_mla     -> one kernel over the shares, one to combine what was cut

`DeterministicTritonAttention` is the form whose output for a row does not depend, in any bit, on the rows, sequences
and tree beside it. The engine forwards prompts through it a token a row; `plan_chain` plans a chunk of them at once,
with the same bits.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from importlib.util import find_spec

import torch
from torch import Tensor

from treedraft.attention.reference import check_room
from treedraft.attention.splits import path_lists
from treedraft.errors import ConfigError
from treedraft.kernels.paged_gqa import gqa_tiles, paged_gqa_fixed_triton, paged_gqa_triton
from treedraft.kernels.paged_launch import Pages, Splits, Tiles, num_groups, plan_splits_triton
from treedraft.kernels.paged_mla import mla_tiles, paged_mla_fixed_triton, paged_mla_triton
from treedraft.kv.allocator import NUM_RESERVED_PAGES
from treedraft.kv.page_table import slots_of
from treedraft.types import TreeRows

INTERPRETED_PROGRAMS = 7  # on a CPU, in the tests: a few, so that sequences are cut
LARGEST_GPU = 132  # multiprocessors, of a dry run on the meta device
MIN_TILES = 2  # of a share; a shorter one would cost more to combine than it saves


@dataclass(frozen=True)
class TritonPrefixPlan:
    """What the forwards of a round share."""

    pages: Pages
    max_kv_len: int
    tail_slots: Tensor  # [B, tail] int64
    splits: dict[tuple[int, int], Splits] = field(default_factory=dict)  # by groups and keys of a tile, made once each

    def splits_for(self, row_tiles: int, tiles: Tiles) -> Splits:
        """The shares for kernels of `row_tiles` query tiles a sequence. Launches a kernel the first time."""
        kv_lens, tail = self.pages.kv_lens, self.tail_slots.shape[1]
        most = len(kv_lens) * -(-(self.max_kv_len + tail) // tiles.block_n)
        groups = num_groups(row_tiles, _num_programs(kv_lens.device, tiles), most)
        key = (groups, tiles.block_n)
        if key not in self.splits:
            self.splits[key] = plan_splits_triton(kv_lens, tail, tiles.block_n, groups, MIN_TILES)
        return self.splits[key]


@dataclass(frozen=True)
class TritonPlan:
    """One forward."""

    prefix: TritonPrefixPlan
    ancestor_bits: Tensor  # [B, R, words] int64
    tree_len: int


@dataclass(frozen=True)
class FixedPlan:
    """One forward of the deterministic form."""

    pages: Pages
    row_lens: Tensor  # [B, R] int64: keys that a row sees
    path_slots: Tensor | None  # [B, R, tree_len] int64; None: a chain
    max_len: int


class TritonTreeAttention:
    """attention.base.TreeAttention on a GPU, or, to test it, on a CPU under TRITON_INTERPRET=1."""

    def plan_prefix(
        self, page_table: Tensor, kv_lens: Tensor, max_kv_len: int, tail_slots: Tensor, page_size: int
    ) -> TritonPrefixPlan:
        """See base.TreeAttention.plan_prefix. Raise ConfigError on a CPU without Triton's interpreter."""
        check_room(page_table, max_kv_len, page_size)
        return TritonPrefixPlan(_pages(page_table, kv_lens, page_size), max_kv_len, tail_slots)

    def plan_tree(self, prefix: TritonPrefixPlan, ancestor_bits: Tensor, tree_len: int) -> TritonPlan:
        """See base.TreeAttention.plan_tree."""
        return TritonPlan(prefix, ancestor_bits.contiguous(), tree_len)

    def plan(self, rows: TreeRows, page_size: int) -> TritonPlan:
        """See base.TreeAttention.plan."""
        return self.plan_tree(_prefix(self, rows, page_size), rows.ancestor_bits, rows.tree_len)

    def check_fits(self, batch: int, sum_kv_lens: int) -> None:
        """See base.TreeAttention.check_fits: there are no lists."""

    def run_mla(self, plan: TritonPlan, kv: Tensor, q: Tensor, v_width: int, scale: float) -> Tensor:
        """See base.TreeAttention.run_mla."""
        return self.run_mla_with_lse(plan, kv, q, v_width, scale)[0]

    def run_mla_with_lse(
        self, plan: TritonPlan, kv: Tensor, q: Tensor, v_width: int, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See base.TreeAttention.run_mla_with_lse."""
        q, pages, num_rows = _unit_stride(q), plan.prefix.pages, q.shape[1] * q.shape[2]
        tiles = mla_tiles(q.dtype, v_width, len(q), num_rows)
        splits = plan.prefix.splits_for(-(-num_rows // tiles.block_m), tiles)
        return paged_mla_triton(q, kv, pages, plan.ancestor_bits, plan.tree_len, splits, v_width, scale, tiles)

    def run_gqa(self, plan: TritonPlan, k: Tensor, v: Tensor, q: Tensor, scale: float) -> Tensor:
        """See base.TreeAttention.run_gqa."""
        tiles, q = gqa_tiles(q.dtype, k.shape[-1]), _unit_stride(q)
        row_tiles = -(-q.shape[1] * (q.shape[2] // k.shape[1]) // tiles.block_m) * k.shape[1]
        splits = plan.prefix.splits_for(row_tiles, tiles)
        return paged_gqa_triton(q, k, v, plan.prefix.pages, plan.ancestor_bits, plan.tree_len, splits, scale, tiles)[0]


class DeterministicTritonAttention:
    """attention.base.TreeAttention of which a row's bits depend on its own query and keys alone.

    The same for a token in plain decoding, in any tree, in a chunk of its prompt, and in any batch.
    """

    def plan_prefix(
        self, page_table: Tensor, kv_lens: Tensor, max_kv_len: int, tail_slots: Tensor, page_size: int
    ) -> TritonPrefixPlan:
        """See base.TreeAttention.plan_prefix. Raise ConfigError on a CPU without Triton's interpreter."""
        check_room(page_table, max_kv_len, page_size)
        owned = tail_slots * (tail_slots >= NUM_RESERVED_PAGES * page_size)
        return TritonPrefixPlan(_pages(page_table, kv_lens, page_size), max_kv_len, owned)

    def plan_tree(self, prefix: TritonPrefixPlan, ancestor_bits: Tensor, tree_len: int) -> FixedPlan:
        """See base.TreeAttention.plan_tree."""
        row_lens, path_slots = path_lists(prefix.pages.kv_lens, prefix.tail_slots, ancestor_bits, tree_len)
        return FixedPlan(prefix.pages, row_lens, path_slots, prefix.max_kv_len + tree_len)

    def plan_chain(
        self, page_table: Tensor, kv_lens: Tensor, num_rows: int, max_kv_len: int, page_size: int
    ) -> FixedPlan:
        """Plan num_rows consecutive rows of each sequence, such as a chunk of a prompt behind kv_lens positions.

        Row r sees positions 0 .. kv_lens + r. page_table [B, W] int32, kv_lens [B] int64 at most max_kv_len.
        """
        row_lens = kv_lens[:, None] + torch.arange(1, num_rows + 1, device=kv_lens.device)
        return FixedPlan(_pages(page_table, kv_lens, page_size), row_lens, None, max_kv_len + num_rows)

    def plan(self, rows: TreeRows, page_size: int) -> FixedPlan:
        """See base.TreeAttention.plan."""
        return self.plan_tree(_prefix(self, rows, page_size), rows.ancestor_bits, rows.tree_len)

    def check_fits(self, batch: int, sum_kv_lens: int) -> None:
        """See base.TreeAttention.check_fits: there are no lists that could overflow."""

    def run_mla(self, plan: FixedPlan, kv: Tensor, q: Tensor, v_width: int, scale: float) -> Tensor:
        """See base.TreeAttention.run_mla."""
        return self.run_mla_with_lse(plan, kv, q, v_width, scale)[0]

    def run_mla_with_lse(
        self, plan: FixedPlan, kv: Tensor, q: Tensor, v_width: int, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See base.TreeAttention.run_mla_with_lse."""
        q = _unit_stride(q)
        return paged_mla_fixed_triton(q, kv, plan.pages, plan.row_lens, plan.path_slots, plan.max_len, v_width, scale)

    def run_gqa(self, plan: FixedPlan, k: Tensor, v: Tensor, q: Tensor, scale: float) -> Tensor:
        """See base.TreeAttention.run_gqa."""
        q = _unit_stride(q)
        return paged_gqa_fixed_triton(q, k, v, plan.pages, plan.row_lens, plan.path_slots, plan.max_len, scale)[0]


def is_available() -> bool:
    """Whether Triton is installed."""
    return find_spec("triton") is not None


def _pages(page_table: Tensor, kv_lens: Tensor, page_size: int) -> Pages:
    if page_table.device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ConfigError(
            "the attention backends triton and triton-deterministic need a GPU; on the CPU use torch "
            "(TRITON_INTERPRET=1 runs them very slowly, for tests)"
        )
    return Pages(page_table, kv_lens, page_size, NUM_RESERVED_PAGES)


def _prefix(
    backend: TritonTreeAttention | DeterministicTritonAttention, rows: TreeRows, page_size: int
) -> TritonPrefixPlan:
    tail = rows.kv_lens[:, None] + torch.arange(rows.tree_len, device=rows.kv_lens.device)
    tail_slots = slots_of(rows.page_table, tail, page_size)
    return backend.plan_prefix(rows.page_table, rows.kv_lens, rows.max_kv_len, tail_slots, page_size)


def _unit_stride(q: Tensor) -> Tensor:
    return q if q.stride(-1) == 1 else q.contiguous()


def _num_programs(device: torch.device, tiles: Tiles) -> int:
    if device.type != "cuda":
        return INTERPRETED_PROGRAMS if device.type == "cpu" else LARGEST_GPU * tiles.per_sm
    return torch.cuda.get_device_properties(device).multi_processor_count * tiles.per_sm
