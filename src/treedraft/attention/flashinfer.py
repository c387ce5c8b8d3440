"""FlashInfer's paged kernels over packed lists: MLA of latent 512 + rope 64, and grouped-query attention.

The kernels have no tree mask; each row gets the list of the slots it sees (attention.packed), on the pool viewed with
page size 1. Written for the interface of flashinfer-python 0.6.14:

    wrapper(workspace, static index buffers)   one for each shape of launch, kept
    wrapper.plan(lengths on the host)          once a forward: cuts all lists into equal shares. Syncs.
    wrapper.run(queries, pool)                 once a layer

The plan needs lengths on the host, so it cannot be part of a captured graph, and rounds do not overlap. `at_host` takes
the plan: it is run at once, or, while a round is captured, becomes the seam between two graphs (runner.graphs).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from treedraft.attention.packed import Lists, PackedPrefixPlan, Reserved, merge
from treedraft.attention.packed_torch import MergedTorchAttention, PackedTorchAttention
from treedraft.errors import ConfigError, InvariantError

LATENT, ROPE = 512, 64  # the only sizes that the MLA kernels exist for; with others they may write nothing at all
WORKSPACE_BYTES = 128 << 20  # partial results of lists cut in pieces; what FlashInfer recommends
PLAN_BYTES = 8 << 20  # what its wrappers take for a plan
LN_2 = 0.6931471805599453  # its grouped-query kernels give log-sum-exp to base 2


@dataclass(frozen=True)
class Part:
    """Lists of one forward, each for `rows` queries. The results of a plan's parts are merged."""

    key: str  # "all", "prefix" or "path"
    lists: Lists
    rows: int


@dataclass(frozen=True)
class Workspace:
    """Memory of a part's launches, whatever their batch: of one layer kind, they are planned and run in turn."""

    partials: Tensor  # [WORKSPACE_BYTES] uint8, used up by each run: shared by all parts and layer kinds
    plan: Tensor  # [PLAN_BYTES] uint8
    plan_host: Tensor  # the same on the host, pinned: a plan is made there, then copied

    @classmethod
    def make(cls, partials: Tensor, plan: Tensor) -> Workspace:
        """Add the host's part."""
        return cls(partials, plan, torch.empty(PLAN_BYTES, dtype=torch.uint8, pin_memory=plan.is_cuda))


@dataclass(frozen=True)
class FlashInferPlan:
    """One forward. Launches are planned by its first layer, which alone knows heads and scale."""

    parts: tuple[Part, ...]
    launches: dict[tuple, Launch] = field(default_factory=dict)


class Launch:
    """A wrapper of FlashInfer with its static buffers, for n lists of `rows` queries and one kind of layer."""

    def __init__(self, part: Part, device: torch.device) -> None:
        self.part, self.num_lists = part, len(part.lists.kv_indptr) - 1

        def ints(size: int) -> Tensor:
            return torch.zeros(size, dtype=torch.int32, device=device)

        self.qo_indptr, self.kv_indptr = ints(self.num_lists + 1), ints(self.num_lists + 1)
        self.kv_lens = ints(self.num_lists)
        self.qo_indptr_host = torch.arange(self.num_lists + 1, dtype=torch.int32) * part.rows
        self._plan_info: list[int] | None = None

    def plan(self) -> None:
        """Read the lists' lengths and cut them into shares. Syncs.

        Raise InvariantError where a captured launch would no longer fit: its grid and offsets must stay.
        """
        indptr = self.part.lists.kv_indptr.cpu().to(torch.int32)
        self.plan_host(indptr, indptr[1:] - indptr[:-1], self.part.lists.kv_indices[:0])
        info = list(self.wrapper._plan_info)
        if self._plan_info is not None and info != self._plan_info and self.is_captured:
            raise InvariantError(
                f"FlashInfer planned another launch than the captured one: {info}, not {self._plan_info}; use "
                "--disable-cuda-graph"
            )
        self._plan_info = info

    wrapper: Any
    is_captured = False

    def share(self, workspace: Workspace) -> None:
        """Replace the wrapper's own plan memory, 8 MiB on each side for each shape of launch, by the shared one."""
        self.wrapper._int_workspace_buffer = workspace.plan
        self.wrapper._pin_memory_int_workspace_buffer = workspace.plan_host

    def plan_host(self, indptr: Tensor, lens: Tensor, no_indices: Tensor) -> None:
        """Give lengths [n] and their cumulative sums [n + 1] int32, on the host, to the wrapper."""
        raise NotImplementedError


class MlaLaunch(Launch):
    """Absorbed MLA."""

    def __init__(self, part: Part, workspace: Workspace, num_heads: int, scale: float, dtype: torch.dtype) -> None:
        super().__init__(part, workspace.plan.device)
        self.num_heads, self.scale, self.dtype = num_heads, scale, dtype
        self.wrapper = _package().mla.BatchMLAPagedAttentionWrapper(
            workspace.partials,
            use_cuda_graph=True,
            qo_indptr=self.qo_indptr,
            kv_indptr=self.kv_indptr,
            kv_indices=part.lists.kv_indices,
            kv_len_arr=self.kv_lens,
            backend="auto",
        )
        self.share(workspace)

    def plan_host(self, indptr: Tensor, lens: Tensor, no_indices: Tensor) -> None:
        self.wrapper.plan(
            self.qo_indptr_host,
            indptr,
            no_indices,  # they are in place already
            lens,
            self.num_heads,
            LATENT,
            ROPE,
            1,  # page size
            False,  # causal
            self.scale,
            self.dtype,
            self.dtype,
        )

    def run(self, q: Tensor, kv: Tensor) -> tuple[Tensor, Tensor]:
        """q [n * rows, h, 576], kv [slots, 576] -> out [n * rows, h, 512], lse [n * rows, h] base e."""
        return self.wrapper.run(
            q[..., :LATENT],
            q[..., LATENT:],
            kv[:, None, :LATENT],
            kv[:, None, LATENT:],
            return_lse=True,
            return_lse_base_on_e=True,
        )


class GqaLaunch(Launch):
    """Grouped-query attention: the decode kernel for lists of one query, the prefill kernel for more."""

    def __init__(
        self,
        part: Part,
        workspace: Workspace,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        scale: float,
        dtype: Any,
    ) -> None:
        super().__init__(part, workspace.plan.device)
        self.sizes = num_heads, num_kv_heads, head_dim
        self.scale, self.dtype = scale, dtype
        self.last_page_lens = torch.ones(self.num_lists, dtype=torch.int32, device=workspace.plan.device)
        if part.rows == 1:
            self.wrapper = _package().BatchDecodeWithPagedKVCacheWrapper(
                workspace.partials,
                use_cuda_graph=True,
                use_tensor_cores=num_heads // num_kv_heads >= 4,
                paged_kv_indptr_buffer=self.kv_indptr,
                paged_kv_indices_buffer=part.lists.kv_indices,
                paged_kv_last_page_len_buffer=self.last_page_lens,
            )
        else:
            self.wrapper = _package().BatchPrefillWithPagedKVCacheWrapper(
                workspace.partials,
                use_cuda_graph=True,
                qo_indptr_buf=self.qo_indptr,
                paged_kv_indptr_buf=self.kv_indptr,
                paged_kv_indices_buf=part.lists.kv_indices,
                paged_kv_last_page_len_buf=self.last_page_lens,
            )
        self.share(workspace)

    def plan_host(self, indptr: Tensor, lens: Tensor, no_indices: Tensor) -> None:
        last = (lens > 0).to(torch.int32)  # of page size 1: the last page of a list is full, unless there is none
        settings: dict[str, Any] = {"sm_scale": self.scale, "q_data_type": self.dtype, "kv_data_type": self.dtype}
        if self.part.rows == 1:
            self.wrapper.plan(indptr, no_indices, last, *self.sizes, 1, **settings)
        else:
            self.wrapper.plan(self.qo_indptr_host, indptr, no_indices, last, *self.sizes, 1, causal=False, **settings)

    def run(self, q: Tensor, kv: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """q [n * rows, h, d], kv: keys and values [slots, hk, d] -> out [n * rows, h, d], lse base e."""
        out, lse = self.wrapper.run(q, tuple(x[:, None] for x in kv), return_lse=True)
        return out, lse * LN_2


class FlashInferAttention(PackedTorchAttention):
    """attention.base.TreeAttention by one list for each row."""

    name = "flashinfer"
    plans_on_host = True

    def __init__(self, reserved: Reserved | None = None, index_bits: int = 32) -> None:
        """See PackedTorchAttention. Raise ConfigError when the package is missing."""
        if reserved is None or reserved.memory.device.type != "meta":  # a dry run has no kernels
            _package()
        super().__init__(reserved, index_bits)
        self.at_host: Callable[[Callable[[], None]], None] = _run_now
        self._launches: dict[tuple, Launch] = {}
        self._workspaces: dict[tuple, Workspace] = {}  # by part and kind of layer, all alive through a forward
        self._reserved: dict[str, Tensor] = {}
        if reserved is not None:
            uses = {"attention": WORKSPACE_BYTES} | {f"{part} plan": PLAN_BYTES for part in self.parts}
            self._reserved = {
                use: reserved.memory.allocate(
                    f"{reserved.limits.forward} {use} workspace",
                    "workspace",
                    (size,),
                    torch.uint8,
                    self.name,
                    "bytes that FlashInfer asks for",
                )
                for use, size in uses.items()
            }

    def plan_tree(self, prefix: PackedPrefixPlan, ancestor_bits: Tensor, tree_len: int) -> FlashInferPlan:  # type: ignore[override]
        """See base.TreeAttention.plan_tree."""
        lists = self._build("all", prefix, prefix.kv_lens, ancestor_bits, tree_len, prefix.max_kv_len)
        return FlashInferPlan((Part("all", lists, 1),))

    def run_mla_with_lse(  # type: ignore[override]
        self, plan: FlashInferPlan, kv: Tensor, q: Tensor, v_width: int, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See base.TreeAttention.run_mla_with_lse."""
        if (v_width, q.shape[-1] - v_width) != (LATENT, ROPE):
            raise InvariantError(
                f"FlashInfer's MLA kernels are for latent {LATENT} + rope {ROPE}; got {v_width} + "
                f"{q.shape[-1] - v_width}, which must be refused at start"
            )
        sizes = (q.shape[2], scale, q.dtype)
        return self._run(plan, ("mla", *sizes), lambda part, memory: MlaLaunch(part, memory, *sizes), q, kv)

    def run_gqa(self, plan: FlashInferPlan, k: Tensor, v: Tensor, q: Tensor, scale: float) -> Tensor:  # type: ignore[override]
        """See base.TreeAttention.run_gqa. Keys and values of one head size."""
        sizes = (q.shape[2], k.shape[1], k.shape[2], scale, q.dtype)
        return self._run(plan, ("gqa", *sizes), lambda part, memory: GqaLaunch(part, memory, *sizes), q, (k, v))[0]

    def _run(
        self, plan: FlashInferPlan, key: tuple, make: Callable[[Part, Workspace], Any], q: Tensor, kv: Any
    ) -> tuple[Tensor, Tensor]:
        """q [B, R, h, d] -> out [B, R, h, dv], lse [B, R, h]."""
        batch, num_rows, num_heads = q.shape[:3]
        if q.is_meta:
            width = LATENT if key[0] == "mla" else q.shape[-1]
            return q.new_empty(batch, num_rows, num_heads, width), q.new_empty(q.shape[:3], dtype=torch.float32)
        rows = q.flatten(0, 1)
        results = []
        for part in plan.parts:
            launch = self._launch(plan, part, key, make)
            out, lse = launch.run(rows, kv)
            is_empty = (part.lists.kv_indptr[1:] == part.lists.kv_indptr[:-1]).repeat_interleave(
                part.rows, output_size=len(rows)
            )
            results.append(
                (out.masked_fill(is_empty[:, None, None], 0), lse.masked_fill(is_empty[:, None], -torch.inf))
            )
        out, lse = results[0]
        wide = torch.promote_types(q.dtype, torch.float32)
        for other_out, other_lse in results[1:]:
            out, lse = merge(out.to(wide), lse, other_out.to(wide), other_lse)
        return out.to(q.dtype).unflatten(0, (batch, num_rows)), lse.unflatten(0, (batch, num_rows))

    def _launch(self, plan: FlashInferPlan, part: Part, key: tuple, make: Callable[[Part, Workspace], Any]) -> Any:
        """The part's launch, planned for this forward."""
        where = (part.key, *key)
        if where not in plan.launches:
            kept = (*where, len(part.lists.kv_indptr), part.rows)
            launch = self._launches.get(kept)
            if launch is None:
                launch = make(part, self._workspace(where, part.lists.kv_indptr.device))
                if self._lists:  # the lists stay where they are, so the launch may stay too
                    self._launches[kept] = launch
            launch.is_captured |= self.at_host is not _run_now
            self.at_host(launch.plan)
            plan.launches[where] = launch
        return plan.launches[where]

    def _workspace(self, where: tuple, device: torch.device) -> Workspace:
        if where not in self._workspaces:
            others = self._workspaces.values()
            partials = next((w.partials for w in others), self._reserved.get("attention"))
            plan = self._reserved.pop(f"{where[0]} plan", None)  # the first kind of layer takes what was reserved
            if partials is None:
                partials = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
            if plan is None:
                plan = torch.empty(PLAN_BYTES, dtype=torch.uint8, device=device)
            self._workspaces[where] = Workspace.make(partials, plan)
        return self._workspaces[where]


class MergedFlashInferAttention(FlashInferAttention, MergedTorchAttention):
    """attention.base.TreeAttention by two lists: a sequence's prefix for all its rows, and each row's path."""

    name = "flashinfer-merged"

    def plan_tree(self, prefix: PackedPrefixPlan, ancestor_bits: Tensor, tree_len: int) -> FlashInferPlan:  # type: ignore[override]
        """See base.TreeAttention.plan_tree."""
        assert prefix.prefix is not None, "planned by another backend"
        path = self._build("path", prefix, torch.zeros_like(prefix.kv_lens), ancestor_bits, tree_len, 0)
        return FlashInferPlan((Part("prefix", prefix.prefix, ancestor_bits.shape[1]), Part("path", path, 1)))


def _run_now(host_step: Callable[[], None]) -> None:
    host_step()


def _package() -> Any:
    try:
        import flashinfer
    except ImportError as error:
        raise ConfigError(
            f"the attention backends flashinfer and flashinfer-merged need the package flashinfer-python ({error}); "
            "install it with: pip install 'treedraft[gpu]'"
        ) from error
    return flashinfer
