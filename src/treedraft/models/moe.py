"""Mixture of experts with the routers of DeepSeek-V2 and V3.

One parameter holds every expert, the shared ones last; a shared MLP of n times an expert's width is n experts whose
weight is always 1. Six forms compute the same function; shapes and device choose:

    summed    few rows on a CPU: rows of the chosen experts' weights are summed in place        static
    few       few rows on a GPU: Triton kernels read each chosen expert once                    static
    segmented many rows, on a GPU in bfloat16: in order of experts, torch's grouped product     static
    gathered  few rows on a GPU otherwise: each row's experts are copied out and multiplied     static
    dense     every expert for every row, unchosen ones weighted by 0: two large products       static
    grouped   many rows: each expert sees the rows that chose it                                waits for the device
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from treedraft.models.config import MoeConfig
from treedraft.models.layers import (
    Matrix,
    NamedViews,
    Products,
    RMSNorm,
    at_least_float32,
    empty_weight,
    is_autocast,
    is_served,
)


class Routing(NamedTuple):
    """scores: [T, E], before bias, groups and scaling. indices, weights: [T, k]. All at least float32 but indices."""

    scores: Tensor
    indices: Tensor
    weights: Tensor


class Router(nn.Module):
    """Chooses k experts for each row, in at least float32."""

    arrivals: Tensor

    def __init__(self, config: MoeConfig, hidden_size: int, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.config = config
        self.weight = empty_weight(config.num_experts, hidden_size, dtype=dtype, device=device)
        # Counts programs while a kernel runs, see kernels.router.
        arrivals = torch.zeros(FEW_ROWS, dtype=torch.int32, device=device)
        self.register_buffer("arrivals", arrivals, persistent=False)

    def logits(self, x: Tensor) -> Tensor:
        """Return [T, E] in at least float32, under autocast too: two experts' gap is often below bfloat16's step."""
        if is_autocast(x):
            with torch.autocast(x.device.type, enabled=False):
                return F.linear(at_least_float32(x), at_least_float32(self.weight))
        return F.linear(at_least_float32(x), at_least_float32(self.weight))

    def checkpoint(self, prefix: str) -> NamedViews:
        yield f"{prefix}.weight", self.weight.detach()


class SoftmaxRouter(Router):
    """DeepSeek-V2: softmax; "group_limited_greedy" keeps the groups whose best expert is best; no normalisation."""

    def forward(self, x: Tensor) -> Routing:
        c = self.config
        scores = self.logits(x).softmax(-1)
        choice = scores
        if c.topk_method == "group_limited_greedy":
            best = scores.unflatten(-1, (c.num_groups, -1)).amax(-1)
            choice = mask_groups(scores, best, c.topk_groups, 0.0)
        weights, indices = choice.topk(c.num_experts_per_tok, -1)
        return Routing(scores, indices, weights * c.routed_scaling_factor)


class SigmoidRouter(Router):
    """DeepSeek-V3 "noaux_tc": sigmoid; a bias takes part in the choice only; groups rank by their two best."""

    bias: Tensor

    def __init__(self, config: MoeConfig, hidden_size: int, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__(config, hidden_size, dtype, device)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        self.register_buffer("bias", torch.zeros(config.num_experts, dtype=wide, device=device))

    def forward(self, x: Tensor) -> Routing:
        c = self.config
        scores = self.logits(x).sigmoid()
        choice = scores + self.bias
        if c.topk_groups < c.num_groups:
            best = choice.unflatten(-1, (c.num_groups, -1)).topk(2, -1).values.sum(-1)
            choice = mask_groups(choice, best, c.topk_groups, float("-inf"))
        indices = choice.topk(c.num_experts_per_tok, -1).indices
        weights = scores.gather(-1, indices)
        if c.norm_topk_prob:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        if c.routed_scaling_factor != 1.0:
            weights = weights * c.routed_scaling_factor
        return Routing(scores, indices, weights)

    def checkpoint(self, prefix: str) -> NamedViews:
        yield from super().checkpoint(prefix)
        yield f"{prefix}.e_score_correction_bias", self.bias.detach()


def mask_groups(scores: Tensor, group_scores: Tensor, keep: int, fill: float) -> Tensor:
    """Return scores [T, E] with `fill` in all but the `keep` best groups; group_scores: [T, groups]."""
    # 1, not True: a record (runner.capture) has no operator that scatters a bool.
    kept = torch.zeros_like(group_scores, dtype=torch.bool).scatter(-1, group_scores.topk(keep, -1).indices, 1)
    grouped = scores.unflatten(-1, (group_scores.shape[-1], -1))
    return grouped.masked_fill(~kept.unsqueeze(-1), fill).flatten(-2)


class MoE(nn.Module):
    """Routed and shared experts: [..., H] -> [..., H]."""

    shared_row: Tensor
    shared_indices: Tensor
    hidden_range: Tensor
    inner_range: Tensor

    def __init__(self, config: MoeConfig, hidden_size: int, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.config = config
        self.hidden_size = hidden_size
        self.size = config.intermediate_size
        self.num_all = config.num_experts + config.num_shared_experts
        self.packed: tuple[Matrix, Matrix] | None = None
        self.products: Products = "fast"
        self.stands_for: str | None = None  # on the meta device, the type of the device whose form is to run
        router = SigmoidRouter if config.topk_method == "noaux_tc" else SoftmaxRouter
        self.router = router(config, hidden_size, dtype, device)
        # Transposed: one expert's product with a row is a weighted sum of rows, and experts stack by rows.
        self.gate_up = empty_weight(self.num_all, hidden_size, 2 * self.size, dtype=dtype, device=device)
        self.down = empty_weight(self.num_all, self.size, hidden_size, dtype=dtype, device=device)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        experts = torch.arange(self.num_all, device=device).unsqueeze(0)
        self.register_buffer("shared_row", (experts >= config.num_experts).to(wide), persistent=False)
        self.register_buffer("shared_indices", experts[:, config.num_experts :], persistent=False)
        self.register_buffer("hidden_range", torch.arange(hidden_size, device=device), persistent=False)
        self.register_buffer("inner_range", torch.arange(self.size, device=device), persistent=False)

    def forward(self, x: Tensor, is_static: bool) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        routing = self.router(rows)
        pairs_per_expert = routing.indices.numel() / self.config.num_experts
        is_cpu = (x.device.type if self.stands_for is None else self.stands_for) == "cpu"
        if not is_cpu and (is_served(x) or (x.is_meta and not torch.is_grad_enabled())):
            if len(rows) <= FEW_ROWS or self.products == "invariant":
                return self.few(rows, routing).view(x.shape)
            if x.dtype == torch.bfloat16 and self._can_segment:
                return self.segmented(rows, routing).view(x.shape)
        is_float32_on_cpu = is_cpu and x.dtype == torch.float32 and not torch.is_grad_enabled()
        if is_float32_on_cpu and self._can_segment and pairs_per_expert > DENSE_MAX_PAIRS:
            return self.segmented(rows, routing).view(x.shape)
        summed_max_pairs = SUMMED_MAX_PAIRS if self.packed is None else SUMMED_MAX_PAIRS_IF_PACKED
        if pairs_per_expert <= (summed_max_pairs if is_cpu else GATHERED_MAX_PAIRS):
            form = self.summed if is_cpu else self.gathered
        else:
            form = self.dense if is_static else self.grouped
        return form(rows, routing).view(x.shape)

    @property
    def _can_segment(self) -> bool:
        """Whether torch's grouped product takes these sizes: rows of 16 bytes or a multiple."""
        return self.hidden_size % 8 == self.size % 8 == 0

    def summed(self, x: Tensor, routing: Routing) -> Tensor:
        """Sum weight rows of the chosen experts, scaled by the inputs, without copying them. x: [T, H]. Static."""
        experts, weights = self._chosen(routing)
        scales = x.unsqueeze(1).expand(-1, experts.shape[1], -1).reshape(-1)
        rows = torch.add(self.hidden_range, experts.view(-1, 1), alpha=self.hidden_size)
        gate, up = weighted_row_sums(self.gate_up.flatten(0, 1), rows, scales).chunk(2, -1)
        hidden = F.silu(gate) * up * weights.to(x.dtype).view(-1, 1)
        rows = torch.add(self.inner_range, experts.unsqueeze(-1), alpha=self.size).flatten(1)
        return weighted_row_sums(self.down.flatten(0, 1), rows, hidden.view(-1))

    def is_fused(self, x: Tensor) -> bool:
        """Whether `fused` serves rows such as x. Who listens to the router (debug.differences) gets it called."""
        few = x.numel() <= FEW_ROWS * self.hidden_size or self.products == "invariant"
        return few and is_served(x) and not self.router._forward_hooks

    def fused(self, delta: Tensor, residual: Tensor, norm: RMSNorm) -> tuple[Tensor, Tensor]:
        """Norm delta + residual, route and run the experts. delta, residual: [..., H]. Static.

        Returns parts [..., P, H] float32, whose sum is what `forward` returns for the norm, and delta + residual.
        """
        from treedraft.kernels.router import Choice, norm_route_triton  # here: triton is needed on a GPU alone

        c, router = self.config, self.router
        bias = getattr(router, "bias", None)
        choice = Choice(
            is_sigmoid=bias is not None,
            topk=c.num_experts_per_tok,
            num_groups=c.num_groups,
            topk_groups=c.topk_groups,
            norm_topk_prob=c.norm_topk_prob,
            scale=c.routed_scaling_factor,
        )
        sums, parts = [], []
        chunks = (x.reshape(-1, self.hidden_size).split(FEW_ROWS) for x in (delta, residual))
        for rows, residuals in zip(*chunks, strict=True):
            normed, total, indices, weights = norm_route_triton(
                rows, residuals, norm.weight, norm.eps_host, router.weight, bias, choice, router.arrivals
            )
            sums.append(total)
            parts.append(self._parts(normed, indices, weights))
        return joined(parts).unflatten(0, residual.shape[:-1]), joined(sums).view(residual.shape)

    def few(self, x: Tensor, routing: Routing) -> Tensor:
        """Read each chosen expert once, in Triton kernels. x: [T, H]. Static."""
        indices, weights = routing.indices.int(), routing.weights.float()
        chunks = zip(x.split(FEW_ROWS), indices.split(FEW_ROWS), weights.split(FEW_ROWS), strict=True)
        return joined([self._parts(*chunk).sum(1).to(x.dtype) for chunk in chunks])

    def _parts(self, x: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        """Each row's weighted experts, [T, k + shared, H] float32."""
        num_each = indices.shape[1] + self.config.num_shared_experts
        hidden = x.new_empty((len(x), num_each, self.size))
        parts = torch.empty((len(x), num_each, self.hidden_size), dtype=torch.float32, device=x.device)
        if not x.is_meta:
            from treedraft.kernels.moe import experts_triton  # here: triton is needed on a GPU alone

            experts_triton(x, indices, weights, self.gate_up, self.down, hidden, parts)
        return parts

    def segmented(self, x: Tensor, routing: Routing) -> Tensor:
        """Put rows in the order of their experts and run torch's grouped product. x: [T, H], not float64. Static."""
        num_experts, k = self.config.num_experts, self.config.num_experts_per_tok
        experts, order = routing.indices.flatten().sort(stable=True)
        ends = torch.searchsorted(experts, torch.arange(num_experts, device=x.device), right=True).int()
        gate, up = grouped_product(x.index_select(0, order // k), self.gate_up[:num_experts], ends).chunk(2, -1)
        pairs = grouped_product(F.silu(gate) * up, self.down[:num_experts], ends)
        place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=x.device))
        out = torch.bmm(routing.weights.to(x.dtype).unsqueeze(1), pairs[place].view(len(x), k, -1)).squeeze(1)
        for expert in range(num_experts, self.num_all):
            out = out + self._expert(expert, x)
        return out

    def gathered(self, x: Tensor, routing: Routing) -> Tensor:
        """Copy each row's experts out and multiply. x: [T, H]. Static."""
        experts, weights = self._chosen(routing)
        pairs = x.unsqueeze(1).expand(-1, experts.shape[1], -1).reshape(-1, 1, x.shape[-1])
        gate, up = torch.bmm(pairs, self.gate_up.index_select(0, experts.flatten())).chunk(2, -1)
        hidden = F.silu(gate) * up * weights.to(x.dtype).view(-1, 1, 1)
        down = self.down.index_select(0, experts.flatten()).view(len(x), -1, x.shape[-1])
        return torch.bmm(hidden.view(len(x), 1, -1), down).squeeze(1)

    def dense(self, x: Tensor, routing: Routing) -> Tensor:
        """Run every expert on every row, unchosen ones weighted by 0. x: [T, H]. Static."""
        weights = self.shared_row.expand(len(x), -1).scatter(-1, routing.indices, routing.weights)
        if self.packed is not None and x.dtype == torch.float32 and not torch.is_grad_enabled():
            to_gate_up, to_hidden = self.packed
            gate, up = to_gate_up.linear(x).unflatten(-1, (self.num_all, -1)).chunk(2, -1)
            return to_hidden.linear((F.silu(gate) * up * weights.to(x.dtype).unsqueeze(-1)).flatten(1))
        gate, up = torch.bmm(x.expand(self.num_all, -1, -1), self.gate_up).chunk(2, -1)
        hidden = F.silu(gate) * up * weights.to(x.dtype).t().unsqueeze(-1)
        return torch.mm(hidden.transpose(0, 1).flatten(1), self.down.flatten(0, 1))

    def pack(self, device_type: str | None = None) -> None:
        """Copy the experts for the dense form, once the weights are final; see layers.Matrix for where it serves."""
        self.stands_for = device_type
        if (device_type or self.gate_up.device.type) != "cpu" or self.gate_up.dtype != torch.float32:
            return
        all_gate_ups = self.gate_up.detach().transpose(1, 2).flatten(0, 1)
        matrices = Matrix(all_gate_ups), Matrix(self.down.detach().flatten(0, 1).t())
        for matrix in matrices:
            matrix.pack(device_type)
        if all(m.packed is not None for m in matrices):
            self.packed = matrices

    def packed_bytes(self, device_type: str) -> int:
        """Bytes that `pack` takes for good: both copies, and the transposed matrix that one was made from."""
        sizes = [Matrix(x).packed_bytes(device_type) for x in (self.gate_up, self.down)]
        return 2 * sizes[0] + sizes[1] if self.gate_up.dtype == torch.float32 and all(sizes) else 0

    def grouped(self, x: Tensor, routing: Routing) -> Tensor:
        """Run each expert on the rows that chose it. x: [T, H]. Syncs."""
        num_experts, k = self.config.num_experts, self.config.num_experts_per_tok
        order = routing.indices.flatten().argsort(stable=True)
        counts = routing.indices.flatten().bincount(minlength=num_experts).tolist()
        weights = routing.weights.flatten()[order].to(x.dtype).unsqueeze(-1)
        out = torch.zeros_like(x)
        parts = zip((order // k).split(counts), weights.split(counts), strict=True)
        for expert, (rows, weight) in enumerate(parts):
            if len(rows):
                out.index_add_(0, rows, self._expert(expert, x[rows]) * weight)
        for expert in range(num_experts, self.num_all):
            out += self._expert(expert, x)
        return out

    def _chosen(self, routing: Routing) -> tuple[Tensor, Tensor]:
        """Indices and weights of every expert that a row needs, the shared ones last: [T, k + shared]."""
        shared = self.shared_indices.expand(len(routing.indices), -1)
        ones = self.shared_row[:, self.config.num_experts :].expand(len(routing.indices), -1)
        return torch.cat([routing.indices, shared], -1), torch.cat([routing.weights, ones], -1)

    def _expert(self, expert: int, x: Tensor) -> Tensor:
        gate, up = torch.mm(x, self.gate_up[expert]).chunk(2, -1)
        return torch.mm(F.silu(gate) * up, self.down[expert])

    def checkpoint(self, prefix: str) -> NamedViews:
        yield from self.router.checkpoint(f"{prefix}.gate")
        gate, up = self.gate_up.detach().transpose(1, 2).split(self.size, 1)
        down = self.down.detach()
        for expert in range(self.config.num_experts):
            yield f"{prefix}.experts.{expert}.gate_proj.weight", gate[expert]
            yield f"{prefix}.experts.{expert}.up_proj.weight", up[expert]
            yield f"{prefix}.experts.{expert}.down_proj.weight", down[expert].t()
        if self.config.num_shared_experts:
            shared = slice(self.config.num_experts, None)
            yield f"{prefix}.shared_experts.gate_proj.weight", gate[shared]
            yield f"{prefix}.shared_experts.up_proj.weight", up[shared]
            yield f"{prefix}.shared_experts.down_proj.weight", down[shared].flatten(0, 1).t()


def grouped_product(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Rows up to ends[e] times weights[e]. x: [T, n], weights: [E, n, m], ends: [E] int32 -> [T, m]."""
    if x.is_meta:  # torch's form there knows bfloat16 alone
        return x.new_empty((len(x), weights.shape[-1]))
    return F.grouped_mm(x, weights, offs=ends)


def weighted_row_sums(table: Tensor, rows: Tensor, scales: Tensor) -> Tensor:
    """Return sum_j scales[i, j] * table[rows[i, j]]. table: [n, d], rows: [m, j] int64, scales: [m * j] -> [m, d]."""
    starts = torch.arange(0, rows.numel(), rows.shape[1], device=rows.device)
    return torch.embedding_bag(table, rows.flatten(), starts, False, 0, False, scales)[0]


def joined(chunks: list[Tensor]) -> Tensor:
    """Return the chunks as one tensor, without a copy if there is one."""
    return chunks[0] if len(chunks) == 1 else torch.cat(chunks)


# Rows of one launch of the Triton kernels; more are segmented. A whole verify of DeepSeek-V2-Lite's shape on an H200:
# 128 rows 11.3 ms in the kernels, 256 rows 23.3 in the kernels, 512 rows 19.0 segmented (2026-12-01).
FEW_ROWS = 128

# Rows times k over experts up to which a form pays. CPU, demo model, one core: one row 72 us summed, 117 gathered, 500
# dense; 16 rows 660 summed, 840 dense (2026-12-01).
SUMMED_MAX_PAIRS = 4
SUMMED_MAX_PAIRS_IF_PACKED = 1.5  # 16 rows 450 dense where the experts are packed
DENSE_MAX_PAIRS = 6  # 32 rows 876 dense, 657 segmented; 256 rows 7080 and 3340
GATHERED_MAX_PAIRS = 1
