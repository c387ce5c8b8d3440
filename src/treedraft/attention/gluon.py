"""Trees over an MLA cache on Hopper: the warp-specialised kernel of kernels.gluon_mla.

plan_prefix, plan_tree   keep tensors, launch nothing
first run_mla            cuts the batch into equal shares (kernels.mla_plan, one launch), since only now the number
                         of heads is known; the forward's other layers use the same schedule
each run_mla             one launch; parts of a sequence are merged at its end
"""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, NoReturn

import torch
from torch import Tensor

from treedraft.attention.reference import check_room
from treedraft.errors import ConfigError, InvariantError
from treedraft.types import TreeRows

if TYPE_CHECKING:
    from treedraft.kernels.mla_plan import Schedule

LATENT, ROPE = 512, 64
PAGE_SIZES = (16, 32, 64, 128, 256)
TRITON = "3.6."  # 3.9, for one, has no thread_barrier


@dataclass(frozen=True)
class GluonPrefixPlan:
    """What is read where: see TreeAttention.plan_prefix."""

    page_table: Tensor  # [B, W] int32
    kv_lens: Tensor  # [B] int64
    max_kv_len: int
    page_size: int


@dataclass(frozen=True)
class GluonPlan:
    """One forward. schedules: by number of heads, made when a layer first asks."""

    prefix: GluonPrefixPlan
    ancestor_bits: Tensor  # [B, R, words] int64
    tree_len: int
    schedules: dict[int, Schedule] = field(default_factory=dict)


class GluonTreeAttention:
    """attention.base.TreeAttention for latent 512 + rope 64 in bfloat16, compute capability 9.0."""

    def __init__(self, part_tiles: int | None = None) -> None:
        """part_tiles: cut sequences at multiples of so many tiles of 64 keys, so that a row's sums have the same order
        in any batch; None: into equal shares, the fastest.

        Raise ConfigError on another GPU, or with a Triton whose Gluon the kernel was not written for.
        """
        _check_device()
        self.part_tiles = part_tiles
        self._workspaces: list[tuple[Tensor, Tensor]] = []

    def plan_prefix(
        self, page_table: Tensor, kv_lens: Tensor, max_kv_len: int, tail_slots: Tensor, page_size: int
    ) -> GluonPrefixPlan:
        """See base.TreeAttention.plan_prefix."""
        check_room(page_table, max_kv_len, page_size)
        if page_size not in PAGE_SIZES:
            raise InvariantError(f"the gluon kernel reads pages of {PAGE_SIZES} slots; got page_size {page_size}")
        return GluonPrefixPlan(page_table, kv_lens, max_kv_len, page_size)

    def plan_tree(self, prefix: GluonPrefixPlan, ancestor_bits: Tensor, tree_len: int) -> GluonPlan:
        """See base.TreeAttention.plan_tree."""
        return GluonPlan(prefix, ancestor_bits.contiguous(), tree_len)

    def plan(self, rows: TreeRows, page_size: int) -> GluonPlan:
        """See base.TreeAttention.plan."""
        prefix = self.plan_prefix(rows.page_table, rows.kv_lens, rows.max_kv_len, rows.kv_lens, page_size)
        return self.plan_tree(prefix, rows.ancestor_bits, rows.tree_len)

    def check_fits(self, batch: int, sum_kv_lens: int) -> None:
        """See base.TreeAttention.check_fits: there are no lists."""

    def run_mla(self, plan: GluonPlan, kv: Tensor, q: Tensor, v_width: int, scale: float) -> Tensor:
        """See base.TreeAttention.run_mla."""
        return self.run_mla_with_lse(plan, kv, q, v_width, scale)[0]

    def run_mla_with_lse(
        self, plan: GluonPlan, kv: Tensor, q: Tensor, v_width: int, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See base.TreeAttention.run_mla_with_lse."""
        if (v_width, q.shape[-1] - v_width, q.dtype) != (LATENT, ROPE, torch.bfloat16):
            raise InvariantError(
                f"the gluon kernel is for latent {LATENT} + rope {ROPE} in bfloat16; got {v_width} + "
                f"{q.shape[-1] - v_width} in {q.dtype}, which must be refused at start"
            )
        out = q.new_empty(*q.shape[:-1], v_width)
        lse = q.new_empty(q.shape[:-1], dtype=torch.float32)
        if q.is_meta:
            return out, lse
        from treedraft.kernels.gluon_mla import mla_tree_attention

        schedule = self._schedule(plan, q)
        mla_tree_attention(
            q.contiguous(),
            kv,
            plan.prefix.page_table,
            plan.prefix.page_size,
            plan.ancestor_bits,
            schedule,
            self._workspace(schedule, q.device),
            scale,
            out,
            lse,
        )
        return out, lse

    def run_gqa(self, plan: GluonPlan, k: Tensor, v: Tensor, q: Tensor, scale: float) -> NoReturn:
        """See base.TreeAttention.run_gqa: there is none, and the registry says so."""
        raise InvariantError("the gluon backend has no grouped-query attention, which must be refused at start")

    def _schedule(self, plan: GluonPlan, q: Tensor) -> Schedule:
        from treedraft.kernels.mla_plan import lay_grid, plan_items

        num_rows, num_heads = q.shape[1:3]
        if num_heads not in plan.schedules:
            grid = lay_grid(num_rows * num_heads, torch.cuda.get_device_properties(q.device).multi_processor_count)
            prefix = plan.prefix
            plan.schedules[num_heads] = plan_items(
                prefix.page_table, prefix.kv_lens, plan.tree_len, prefix.max_kv_len, grid, self.part_tiles
            )
        return plan.schedules[num_heads]

    def _workspace(self, schedule: Schedule, device: torch.device) -> tuple[Tensor, Tensor]:
        """Where parts of sequences wait for each other. Kept when outgrown, since captured graphs hold its address."""
        from treedraft.kernels.gluon_mla import make_workspace, num_places
        from treedraft.kernels.mla_plan import TILE

        places = num_places(schedule)
        for partial, notes in self._workspaces:
            if partial.device == device and len(partial) >= places * TILE:
                return partial, notes
        self._workspaces.append(make_workspace(places, device))
        return self._workspaces[-1]


def is_available() -> bool:
    """Whether this process has the GPU and the Triton that the kernel needs."""
    try:
        _check_device()
    except ConfigError:
        return False
    return True


def _check_device() -> None:
    if not torch.cuda.is_available():
        raise ConfigError("the attention backend gluon needs a GPU of compute capability 9.0; there is no CUDA device")
    capability = torch.cuda.get_device_capability()
    if capability != (9, 0):
        raise ConfigError(
            "the attention backend gluon needs a GPU of compute capability 9.0 (H100, H200); "
            f"this one has {capability[0]}.{capability[1]}"
        )
    found = _installed_triton()
    if not found.startswith(TRITON):
        raise ConfigError(
            f"the attention backend gluon needs Triton {TRITON}x, since Gluon changes between releases; "
            f"installed: {found}. Install triton=={TRITON}0 or use another backend"
        )


def _installed_triton() -> str:
    try:
        return version("triton")
    except PackageNotFoundError:
        return "none"
