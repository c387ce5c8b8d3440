"""Attention over packed lists in plain torch: the layout that FlashInfer's kernels read, tested without a GPU.

Two forms. `PackedTorchAttention` gives each row one list, prefix and path, and so reads the prefix once for each row.
`MergedTorchAttention` reads the prefix once for all rows of a sequence, then each row's path, and merges the two:

    per branch:  row -> | prefix | path |          merged:  rows of a sequence -> | prefix |
                                                            row                -> | path |     joined by log-sum-exp
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from treedraft.attention import packed
from treedraft.attention.packed import IndexLists, Lists, PackedPrefixPlan, Reserved, RowLimits, merge, new_record
from treedraft.kv.buffers import Buffers
from treedraft.kv.page_table import slots_of
from treedraft.types import TreeRows


@dataclass(frozen=True)
class Columns:
    """Lists read out to a rectangle: query i sees slots[i] where is_visible[i]."""

    slots: Tensor  # [n, C] int64, the zero slot where not visible
    is_visible: Tensor  # [n, C] bool


@dataclass(frozen=True)
class PackedPlan:
    """One forward's lists; their results are merged. Queries [B, R] are cut into n = len(slots) equal groups."""

    parts: tuple[Columns, ...]


class PackedTorchAttention:
    """attention.base.TreeAttention by one list for each row."""

    name = "packed-torch"
    parts: tuple[str, ...] = ("all",)  # the lists it needs, see packed.IndexLists

    def __init__(self, reserved: Reserved | None = None, index_bits: int = 64):
        """reserved: the forwards it will plan, whose lists are allocated now. None: lists are made when planned."""
        self._index_bits = index_bits
        self._lists: dict[str, IndexLists] = {}
        if reserved is not None:
            parts = [part for part in self.parts if part != "prefix" or reserved.limits.has_prefix]
            self._lists = {part: IndexLists(reserved, part, self.name, index_bits) for part in parts}

    def plan_prefix(
        self, page_table: Tensor, kv_lens: Tensor, max_kv_len: int, tail_slots: Tensor, page_size: int
    ) -> PackedPrefixPlan:
        """See base.TreeAttention.plan_prefix."""
        return packed.plan_prefix(page_table, kv_lens, max_kv_len, tail_slots, page_size)

    def plan_tree(self, prefix: PackedPrefixPlan, ancestor_bits: Tensor, tree_len: int) -> PackedPlan:
        """See base.TreeAttention.plan_tree."""
        lists = self._build("all", prefix, prefix.kv_lens, ancestor_bits, tree_len, prefix.max_kv_len)
        return PackedPlan((_columns(lists),))

    def plan(self, rows: TreeRows, page_size: int) -> PackedPlan:
        """See base.TreeAttention.plan."""
        tail = rows.kv_lens[:, None] + torch.arange(rows.tree_len, device=rows.kv_lens.device)
        tail_slots = slots_of(rows.page_table, tail, page_size)
        prefix = self.plan_prefix(rows.page_table, rows.kv_lens, rows.max_kv_len, tail_slots, page_size)
        return self.plan_tree(prefix, rows.ancestor_bits, rows.tree_len)

    def check_fits(self, batch: int, sum_kv_lens: int) -> None:
        """See base.TreeAttention.check_fits."""
        for lists in self._lists.values():
            lists.check_fits(batch, sum_kv_lens)

    def run_mla(self, plan: PackedPlan, kv: Tensor, q: Tensor, v_width: int, scale: float) -> Tensor:
        """See base.TreeAttention.run_mla."""
        return self.run_mla_with_lse(plan, kv, q, v_width, scale)[0]

    def run_mla_with_lse(
        self, plan: PackedPlan, kv: Tensor, q: Tensor, v_width: int, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See base.TreeAttention.run_mla_with_lse."""
        k = kv[:, None]
        return _attend(plan, k, k[..., :v_width], q, scale)

    def run_gqa(self, plan: PackedPlan, k: Tensor, v: Tensor, q: Tensor, scale: float) -> Tensor:
        """See base.TreeAttention.run_gqa."""
        return _attend(plan, k, v, q, scale)[0]

    def _build(
        self,
        part: str,
        prefix: PackedPrefixPlan,
        prefix_lens: Tensor,
        ancestor_bits: Tensor,
        tree_len: int,
        max_prefix_len: int,
    ) -> Lists:
        lists = self._lists.get(part)
        if lists is None:
            batch, rows = ancestor_bits.shape[:2]
            limits = RowLimits("rows", batch, rows, 0, max_prefix_len, tail=tree_len, longest_path=tree_len)
            memory = Buffers(prefix.kv_lens.device)
            lists = IndexLists(Reserved(limits, memory, new_record(memory)), part, self.name, self._index_bits)
        return lists.build(
            prefix.page_table,
            prefix_lens,
            prefix.tail_slots,
            ancestor_bits,
            tree_len,
            max_prefix_len,
            prefix.page_size,
        )


class MergedTorchAttention(PackedTorchAttention):
    """attention.base.TreeAttention by two lists: a sequence's prefix for all its rows, and each row's path."""

    name = "packed-torch-merged"
    parts = ("prefix", "path")

    def plan_prefix(
        self, page_table: Tensor, kv_lens: Tensor, max_kv_len: int, tail_slots: Tensor, page_size: int
    ) -> PackedPrefixPlan:
        """See base.TreeAttention.plan_prefix."""
        plan = super().plan_prefix(page_table, kv_lens, max_kv_len, tail_slots, page_size)
        no_path = torch.zeros(len(kv_lens), 1, 1, dtype=torch.int64, device=kv_lens.device)
        return replace(plan, prefix=self._build("prefix", plan, kv_lens, no_path, 0, max_kv_len))

    def plan_tree(self, prefix: PackedPrefixPlan, ancestor_bits: Tensor, tree_len: int) -> PackedPlan:
        """See base.TreeAttention.plan_tree."""
        assert prefix.prefix is not None, "planned by another backend"
        no_prefix = torch.zeros_like(prefix.kv_lens)
        path = self._build("path", prefix, no_prefix, ancestor_bits, tree_len, 0)
        return PackedPlan((_columns(prefix.prefix), _columns(path)))


def _columns(lists: Lists) -> Columns:
    """Read lists out. Reads no word beyond the last one written."""
    starts, ends = lists.kv_indptr[:-1, None], lists.kv_indptr[1:, None]
    word = starts + torch.arange(lists.max_len, device=starts.device)
    is_visible = word < ends
    slots = lists.kv_indices[word * is_visible].long() * is_visible
    return Columns(slots, is_visible)


def _attend(plan: PackedPlan, k: Tensor, v: Tensor, q: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """k [slots, hk, d], v [slots, hk, dv], q [B, R, h, d] -> out [B, R, h, dv] of q's dtype, lse [B, R, h]."""
    batch, rows = q.shape[:2]
    results = [
        _attend_columns(part, k, v, q.flatten(0, 1).unflatten(0, (len(part.slots), -1)), scale) for part in plan.parts
    ]
    out, lse = results[0]
    for other in results[1:]:
        shape = (batch, rows)
        pairs = [x.flatten(0, 1).unflatten(0, shape) for x in (out, lse, *other)]
        out, lse = merge(*pairs)
    shaped = [x.flatten(0, 1).unflatten(0, (batch, rows)) for x in (out, lse)]
    return shaped[0].to(q.dtype), shaped[1]


def _attend_columns(columns: Columns, k: Tensor, v: Tensor, q: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """q [n, r, h, d], all r rows of a group see the same columns -> out [n, r, h, dv], lse [n, r, h], >= float32."""
    dtype = torch.promote_types(k.dtype, torch.float32)
    keys, values = k[columns.slots].to(dtype), v[columns.slots].to(dtype)  # [n, C, hk, .]
    grouped = q.to(dtype).unflatten(2, (k.shape[1], -1))
    scores = torch.einsum("nrkgd,nckd->nrkgc", grouped, keys) * scale
    scores = scores.masked_fill(~columns.is_visible[:, None, None, None], -torch.inf)
    lse = scores.logsumexp(-1)
    probs = (scores - lse.masked_fill(lse == -torch.inf, 0)[..., None]).exp()
    out = torch.einsum("nrkgc,nckd->nrkgd", probs, values)
    return out.flatten(2, 3), lse.flatten(2, 3)
