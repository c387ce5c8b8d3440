"""Prefix and tail: FlashMLA's dense decode kernel over the committed prefix, one kernel of ours for the tree.

    prefix   FlashMLA, no mask: every row of a sequence sees it whole          -> out, log-sum-exp
    tail     kernels.tree_tail: the tree slots that a row's bits name, and the merge of the two

For the wheel sgl-flash-mla 1.0, whose dense kernel is its legacy half (upstream removed it). The schedule is computed
on the device, inside a captured graph too, so rounds need no host.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from treedraft.attention.packed import merge
from treedraft.attention.reference import check_room, unpack_bits
from treedraft.errors import ConfigError, InvariantError
from treedraft.kernels.paged_launch import Pages
from treedraft.kv.allocator import NUM_RESERVED_PAGES
from treedraft.kv.page_table import slots_of
from treedraft.types import TreeRows

LATENT, ROPE, PAGE_SIZE = 512, 64, 64  # all that its dense kernel knows


@dataclass(frozen=True)
class FlashMlaPrefixPlan:
    """What the forwards of a round share."""

    pages: Pages
    seqlens: Tensor  # [B] int32
    schedules: dict[tuple[int, int], tuple[Tensor, Tensor]] = field(default_factory=dict)  # by rows and heads

    def schedule(self, num_rows: int, num_heads: int) -> Any:
        """FlashMLA's schedule for that many rows a sequence. Launches its planner the first time."""
        interface = _package()
        key = (num_rows, num_heads)
        if key not in self.schedules:
            self.schedules[key] = interface.get_mla_decoding_metadata(
                self.seqlens, num_heads * num_rows, 1, num_heads, False, None, use_legacy=True
            )
        made = interface.get_mla_metadata()[0]
        made.tile_scheduler_metadata, made.num_splits = self.schedules[key]
        return made


@dataclass(frozen=True)
class FlashMlaPlan:
    """One forward."""

    prefix: FlashMlaPrefixPlan
    ancestor_bits: Tensor  # [B, R, words] int64
    tree_len: int


class FlashMlaAttention:
    """attention.base.TreeAttention for MLA of latent 512 + rope 64 in bfloat16, pages of 64, on a Hopper GPU."""

    def plan_prefix(
        self, page_table: Tensor, kv_lens: Tensor, max_kv_len: int, tail_slots: Tensor, page_size: int
    ) -> FlashMlaPrefixPlan:
        """See base.TreeAttention.plan_prefix. Raise ConfigError when the package is missing."""
        if not kv_lens.is_meta:  # a dry run has no kernels
            _package()
        check_room(page_table, max_kv_len, page_size)
        pages = Pages(page_table.contiguous(), kv_lens, page_size, NUM_RESERVED_PAGES)
        return FlashMlaPrefixPlan(pages, kv_lens.to(torch.int32))

    def plan_tree(self, prefix: FlashMlaPrefixPlan, ancestor_bits: Tensor, tree_len: int) -> FlashMlaPlan:
        """See base.TreeAttention.plan_tree."""
        return FlashMlaPlan(prefix, ancestor_bits.contiguous(), tree_len)

    def plan(self, rows: TreeRows, page_size: int) -> FlashMlaPlan:
        """See base.TreeAttention.plan."""
        none = rows.kv_lens.new_empty((len(rows.kv_lens), 0))
        prefix = self.plan_prefix(rows.page_table, rows.kv_lens, rows.max_kv_len, none, page_size)
        return self.plan_tree(prefix, rows.ancestor_bits, rows.tree_len)

    def check_fits(self, batch: int, sum_kv_lens: int) -> None:
        """See base.TreeAttention.check_fits: there are no lists."""

    def run_mla(self, plan: FlashMlaPlan, kv: Tensor, q: Tensor, v_width: int, scale: float) -> Tensor:
        """See base.TreeAttention.run_mla."""
        return self.run_mla_with_lse(plan, kv, q, v_width, scale)[0]

    def run_mla_with_lse(
        self, plan: FlashMlaPlan, kv: Tensor, q: Tensor, v_width: int, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See base.TreeAttention.run_mla_with_lse."""
        if (v_width, q.shape[-1] - v_width) != (LATENT, ROPE):
            raise InvariantError(
                f"FlashMLA is for latent {LATENT} + rope {ROPE}; got {v_width} + {q.shape[-1] - v_width}, which must "
                "be refused at start"
            )
        num_rows, num_heads = q.shape[1:3]
        q, pages = q.contiguous(), plan.prefix.pages
        if q.is_meta:  # FlashMLA's partial results take memory of their own, which is not seen here
            out = q.new_empty(*q.shape[:3], v_width)
            return torch.empty_like(out), q.new_empty(q.shape[:3], dtype=torch.float32)
        from treedraft.kernels.tree_tail import attend_tail_triton

        schedule = plan.prefix.schedule(num_rows, num_heads)
        _end_chain(q)
        out, lse = _package().flash_mla_with_kvcache(
            q,
            kv.view(-1, PAGE_SIZE, 1, kv.shape[-1]),
            pages.page_table,
            plan.prefix.seqlens,
            v_width,
            schedule,
            softmax_scale=scale,
            causal=False,
            use_legacy=True,
        )
        if q.is_cuda and torch.cuda.is_current_stream_capturing():
            _wait_for_both_kernels()
        return attend_tail_triton(q, kv, pages, plan.ancestor_bits, plan.tree_len, out, lse, v_width, scale)

    def run_gqa(self, plan: FlashMlaPlan, k: Tensor, v: Tensor, q: Tensor, scale: float) -> Tensor:
        """See base.TreeAttention.run_gqa. Raise InvariantError: FlashMLA has none."""
        raise InvariantError("FlashMLA has no grouped-query attention, which must be refused at start")


def attend_tail(
    q: Tensor,
    kv: Tensor,
    pages: Pages,
    ancestor_bits: Tensor,
    tree_len: int,
    prefix_out: Tensor,
    prefix_lse: Tensor,
    v_width: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Attend over each row's tree slots and join with the prefix: the twin of kernels.tree_tail.attend_tail_triton."""
    positions = pages.kv_lens[:, None] + torch.arange(tree_len, device=q.device)
    slots = slots_of(pages.page_table, positions, pages.page_size)
    slots = slots * (slots >= pages.num_reserved * pages.page_size)
    sees = unpack_bits(ancestor_bits, tree_len).bool()  # [B, R, n]
    keys = kv[slots * sees.any(1)].float()  # slots that no row sees may hold NaN: the zero slot instead
    scores = torch.einsum("brhd,bnd->brhn", q.float(), keys) * scale
    scores = scores.masked_fill(~sees[:, :, None], -torch.inf)
    lse = scores.logsumexp(-1)
    probs = (scores - lse.masked_fill(lse == -torch.inf, 0)[..., None]).exp()
    out = torch.einsum("brhn,bnd->brhd", probs, keys[..., :v_width])
    other_lse = prefix_lse.transpose(1, 2)
    other_lse = other_lse.masked_fill(other_lse == torch.inf, -torch.inf)
    other_out = prefix_out.float().masked_fill((other_lse == -torch.inf)[..., None], 0)
    out, lse = merge(out, lse, other_out, other_lse)
    return out.to(q.dtype), lse


def _end_chain(x: Tensor) -> None:
    """Put a fill between our kernels and FlashMLA's, which starts as soon as the kernel before it lets others start.

    Ours let others start at once (kernels.chain), and FlashMLA's does not wait: it would read queries and keys that are
    still being written. Nothing overlaps with a fill.
    """
    x.new_empty(1).zero_()


def _wait_for_both_kernels() -> None:
    """In a graph, let what comes next wait for the attention kernel too, not only for the one that joins its splits.

    The joining kernel starts while the other runs, and its blocks exit before they wait for it where a sequence was not
    split. A stream keeps its order all the same; a graph keeps no more than its edges.
    """
    from cuda.bindings import runtime

    def checked(status: Any, *values: Any) -> tuple[Any, ...]:
        if status != runtime.cudaError_t.cudaSuccess:
            raise InvariantError(f"the graph's dependencies could not be extended: {status!r}")
        return values

    stream = torch.cuda.current_stream().cuda_stream
    last = checked(*runtime.cudaStreamGetCaptureInfo(stream))[3]
    for node in last:
        number = checked(*runtime.cudaGraphNodeGetDependencies(node))[-1]
        before = checked(*runtime.cudaGraphNodeGetDependencies(node, number))[0]
        checked(*runtime.cudaStreamUpdateCaptureDependencies(stream, before, None, len(before), 0))  # 0: add


def _package() -> Any:
    try:
        import_module("cuda.bindings.runtime")  # for captures
        return import_module("flash_mla.flash_mla_interface")
    except ImportError as error:
        raise ConfigError(
            f"the attention backend flashmla needs the packages sgl-flash-mla and cuda-bindings ({error}); install "
            "them with: pip install cuda-bindings, and pip install --no-deps sgl-flash-mla (its wheel asks for a newer "
            "torch than it needs)"
        ) from error
