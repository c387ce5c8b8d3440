"""Tree attention in plain torch operators: the path of the CPU, and what other backends are compared with.

Columns of one forward, C = prefix columns + tree_len:

    column:  0 .......... num_prefix-1                    | num_prefix + j
    reads:   logical position = column, if below kv_len   | logical position kv_len + j, if a row's bits name it
             else the zero slot                           | else the zero slot

The last prefix column lies at or beyond max_kv_len, so every sequence has a column that reads the zero slot. Prefix
columns beyond kv_len carry the score BEYOND, finite and so low that beside any visible column its weight is exactly 0.
A row that sees nothing puts its whole weight on them, and their value is 0: no NaN, no special case.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from treedraft.errors import InvariantError
from treedraft.kv.allocator import NUM_RESERVED_PAGES
from treedraft.kv.page_table import slots_of
from treedraft.types import TreeRows

BEYOND = -1e30  # score of prefix columns beyond kv_len; in float32 exp(BEYOND - anything real) is 0


@dataclass(frozen=True)
class TorchPrefixPlan:
    """Prefix columns, and where the tree's columns will read."""

    slots: Tensor  # [B, Cp] int64 physical slots; the zero slot beyond kv_len
    mask: Tensor  # [B, Cp] float32 added to scores: 0, or BEYOND
    tail_slots: Tensor  # [B, tail] int64; the zero slot where a sequence owns no page


@dataclass(frozen=True)
class TorchPlan:
    """All columns of a forward."""

    slots: Tensor  # [B, C] int64 physical slots, the zero slot for columns that no row of the sequence sees
    mask: Tensor  # [B, R, C] float32 added to scores: 0, -inf or BEYOND


class TorchTreeAttention:
    """attention.base.TreeAttention on any device of torch. Gathers the visible slots of a layer, then two products."""

    def plan_prefix(
        self, page_table: Tensor, kv_lens: Tensor, max_kv_len: int, tail_slots: Tensor, page_size: int
    ) -> TorchPrefixPlan:
        """See base.TreeAttention.plan_prefix."""
        num_pages = check_room(page_table, max_kv_len, page_size)
        device = page_table.device
        first = page_table[:, :num_pages, None] * page_size  # int32 holds every slot: see LatentPool
        slots = (first + torch.arange(page_size, device=device)).flatten(1)
        is_beyond = torch.arange(slots.shape[1], device=device) >= kv_lens[:, None]
        return TorchPrefixPlan(
            slots=slots.masked_fill_(is_beyond, 0),
            mask=is_beyond * BEYOND,
            tail_slots=tail_slots * (tail_slots >= NUM_RESERVED_PAGES * page_size),
        )

    def plan_tree(self, prefix: TorchPrefixPlan, ancestor_bits: Tensor, tree_len: int) -> TorchPlan:
        """See base.TreeAttention.plan_tree."""
        is_visible = unpack_bits(ancestor_bits, tree_len)
        tail_slots = prefix.tail_slots[:, :tree_len] * is_visible.amax(1)
        prefix_mask = prefix.mask[:, None].expand(-1, is_visible.shape[1], -1)
        return TorchPlan(
            slots=torch.cat((prefix.slots, tail_slots), 1),
            mask=torch.cat((prefix_mask, is_visible.log()), 2),  # log 1 = 0, log 0 = -inf
        )

    def plan(self, rows: TreeRows, page_size: int) -> TorchPlan:
        """See base.TreeAttention.plan."""
        tail = rows.kv_lens[:, None] + torch.arange(rows.tree_len, device=rows.kv_lens.device)
        tail_slots = slots_of(rows.page_table, tail, page_size)
        prefix = self.plan_prefix(rows.page_table, rows.kv_lens, rows.max_kv_len, tail_slots, page_size)
        return self.plan_tree(prefix, rows.ancestor_bits, rows.tree_len)

    def check_fits(self, batch: int, sum_kv_lens: int) -> None:
        """See base.TreeAttention.check_fits: there are no lists."""

    def run_mla(self, plan: TorchPlan, kv: Tensor, q: Tensor, v_width: int, scale: float) -> Tensor:
        """See base.TreeAttention.run_mla."""
        k = _gather(kv, plan.slots)
        probs = _scores(plan, k, q, scale).softmax(-1)
        return _weigh(probs, k[..., :v_width]).to(q.dtype)

    def run_mla_with_lse(
        self, plan: TorchPlan, kv: Tensor, q: Tensor, v_width: int, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See base.TreeAttention.run_mla_with_lse."""
        k = _gather(kv, plan.slots)
        scores = _scores(plan, k, q, scale)
        lse = scores.logsumexp(-1).transpose(1, 2)
        lse = lse.masked_fill(lse < BEYOND / 2, -torch.inf)
        return _weigh(scores.softmax(-1), k[..., :v_width]).to(q.dtype), lse

    def run_gqa(self, plan: TorchPlan, k: Tensor, v: Tensor, q: Tensor, scale: float) -> Tensor:
        """See base.TreeAttention.run_gqa."""
        (batch, num_rows, num_heads, head_dim), num_kv_heads = q.shape, k.shape[1]
        keys, values = (_gather(x.flatten(1), plan.slots).unflatten(-1, x.shape[1:]) for x in (k, v))
        grouped = q.to(keys.dtype).view(batch, num_rows, num_kv_heads, -1, head_dim)
        scores = torch.einsum("brkgd,bckd->bkgrc", grouped, keys) * scale + plan.mask[:, None, None]
        out = torch.einsum("bkgrc,bckd->brkgd", scores.softmax(-1), values)
        return out.reshape(batch, num_rows, num_heads, -1).to(q.dtype)


def check_room(page_table: Tensor, max_kv_len: int, page_size: int) -> int:
    """Return the pages that cover logical positions 0..max_kv_len. Raise InvariantError when a row holds fewer."""
    num_pages = max_kv_len // page_size + 1
    if num_pages > page_table.shape[1]:
        raise InvariantError(
            f"a page-table row of {page_table.shape[1]} pages x page_size {page_size} has no room for a tree "
            f"behind max_kv_len {max_kv_len}"
        )
    return num_pages


def unpack_bits(ancestor_bits: Tensor, num_bits: int) -> Tensor:
    """Return bits 0 .. num_bits-1 as 0 and 1: [..., words] int64 -> [..., num_bits] int64. Bit 63 is the sign bit."""
    bits = torch.arange(num_bits, device=ancestor_bits.device)
    if ancestor_bits.shape[-1] == 1:
        return (ancestor_bits >> bits) & 1
    return (ancestor_bits.index_select(-1, bits >> 6) >> (bits & 63)) & 1


def _gather(kv: Tensor, slots: Tensor) -> Tensor:
    """Read slots [B, C] of kv [num_slots, w] as [B, C, w], in at least float32."""
    rows = kv.index_select(0, slots.view(-1)).view(*slots.shape, kv.shape[1])
    return rows if rows.dtype in (torch.float32, torch.float64) else rows.float()


def _scores(plan: TorchPlan, k: Tensor, q: Tensor, scale: float) -> Tensor:
    """Return masked, scaled scores [B, h, R, C] of q [B, R, h, w] over k [B, C, w], in k's dtype."""
    batch, num_rows, num_heads, width = q.shape
    q = q.to(k.dtype).transpose(1, 2)
    keys = k.transpose(1, 2)
    if batch == 1 and num_rows > 1:
        # One product for each head, all over the same keys: 95 us where one product of all rows takes 180
        # (8 heads x 16 rows x 529 columns, 2 threads, MKL splits the small one badly; 2026-12).
        scores = torch.bmm(q[0], keys.expand(num_heads, -1, -1))
    else:
        scores = torch.bmm(q.reshape(batch, num_heads * num_rows, width), keys)
    scores = scores.view(batch, num_heads, num_rows, -1)
    return torch.add(plan.mask[:, None], scores, alpha=scale, out=scores)


def _weigh(probs: Tensor, v: Tensor) -> Tensor:
    """Return sums of v [B, C, dv] weighed by probs [B, h, R, C]: [B, R, h, dv], heads outside rows in memory."""
    batch, num_heads, num_rows, _ = probs.shape
    return torch.bmm(probs.flatten(1, 2), v).view(batch, num_heads, num_rows, -1).transpose(1, 2)
