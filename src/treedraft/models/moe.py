"""Mixture of experts with the routers of DeepSeek-V2 and V3.

One parameter holds every expert, the shared ones last; a shared MLP of n times an expert's width is n experts whose
weight is always 1. Three forms compute the same function:

    gathered  few rows: each row's experts are copied out and multiplied           static
    dense     every expert for every row, unchosen ones weighted by 0: two GEMMs   static
    grouped   many rows: each expert sees the rows that chose it                   waits for the device
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from treedraft.models.config import MoeConfig
from treedraft.models.layers import NamedViews, at_least_float32, empty_weight


class Routing(NamedTuple):
    """scores: [T, E], before bias, groups and scaling. indices, weights: [T, k]. All at least float32 but indices."""

    scores: Tensor
    indices: Tensor
    weights: Tensor


class Router(nn.Module):
    """Chooses k experts for each row, in at least float32."""

    def __init__(self, config: MoeConfig, hidden_size: int, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.config = config
        self.weight = empty_weight(config.num_experts, hidden_size, dtype=dtype, device=device)

    def logits(self, x: Tensor) -> Tensor:
        """Return [T, E] in at least float32, under autocast too: two experts' gap is often below bfloat16's step."""
        if torch.is_autocast_enabled(x.device.type):
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
    kept = torch.zeros_like(group_scores, dtype=torch.bool).scatter(-1, group_scores.topk(keep, -1).indices, True)
    grouped = scores.unflatten(-1, (group_scores.shape[-1], -1))
    return grouped.masked_fill(~kept.unsqueeze(-1), fill).flatten(-2)


class MoE(nn.Module):
    """Routed and shared experts: [..., H] -> [..., H]."""

    shared_row: Tensor
    shared_indices: Tensor

    def __init__(self, config: MoeConfig, hidden_size: int, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.config = config
        self.num_all = config.num_experts + config.num_shared_experts
        width = self.num_all * config.intermediate_size
        router = SigmoidRouter if config.topk_method == "noaux_tc" else SoftmaxRouter
        self.router = router(config, hidden_size, dtype, device)
        self.gate_up = empty_weight(2, width, hidden_size, dtype=dtype, device=device)
        self.down = empty_weight(width, hidden_size, dtype=dtype, device=device)  # transposed: experts stack by rows
        is_shared = torch.arange(self.num_all, device=device) >= config.num_experts
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        self.register_buffer("shared_row", is_shared.to(wide).unsqueeze(0), persistent=False)
        shared = torch.arange(config.num_experts, self.num_all, device=device).unsqueeze(0)
        self.register_buffer("shared_indices", shared, persistent=False)

    def forward(self, x: Tensor, is_static: bool) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        routing = self.router(rows)
        num_rows, num_pairs = rows.shape[0], routing.indices.numel()
        if num_pairs <= self.config.num_experts:
            out = self.gathered(rows, routing)
        elif is_static or num_rows < GROUPED_MIN_ROWS:
            out = self.dense(rows, routing)
        else:
            out = self.grouped(rows, routing)
        return out.view(x.shape)

    def gathered(self, x: Tensor, routing: Routing) -> Tensor:
        """Copy each row's experts and multiply. x: [T, H]. Static; reads T * (k + shared) experts."""
        num_rows = x.shape[0]
        indices = torch.cat([routing.indices, self.shared_indices.expand(num_rows, -1)], -1).flatten()
        weights = F.pad(routing.weights, (0, self.config.num_shared_experts), value=1.0)
        size = self.config.intermediate_size
        # [2, T, chosen * I, H] as 2T matrices: gates of every row, then ups of every row.
        gate_up = self.gate_up.unflatten(1, (self.num_all, size)).index_select(1, indices)
        gate_up = gate_up.view(2 * num_rows, -1, x.shape[-1])
        pairs = x.expand(2, -1, -1).reshape(2 * num_rows, 1, -1)
        gate, up = torch.bmm(pairs, gate_up.transpose(1, 2)).view(2, num_rows, -1, size)
        hidden = F.silu(gate) * up * weights.to(x.dtype).unsqueeze(-1)
        down = self.down.unflatten(0, (self.num_all, size)).index_select(0, indices)
        return torch.bmm(hidden.view(num_rows, 1, -1), down.view(num_rows, -1, x.shape[-1])).squeeze(1)

    def dense(self, x: Tensor, routing: Routing) -> Tensor:
        """Run every expert on every row. x: [T, H]. Static; two large products."""
        weights = self.shared_row.expand(x.shape[0], -1).scatter(-1, routing.indices, routing.weights)
        gate, up = F.linear(x, self.gate_up.flatten(0, 1)).chunk(2, -1)
        hidden = (F.silu(gate) * up).unflatten(-1, (self.num_all, -1)) * weights.to(x.dtype).unsqueeze(-1)
        return torch.mm(hidden.flatten(-2), self.down)

    def grouped(self, x: Tensor, routing: Routing) -> Tensor:
        """Run each expert on the rows that chose it. x: [T, H]. Syncs."""
        c = self.config
        size, k = c.intermediate_size, c.num_experts_per_tok
        order = routing.indices.flatten().argsort(stable=True)
        counts = routing.indices.flatten().bincount(minlength=c.num_experts).tolist()
        rows = order // k
        weights = routing.weights.flatten()[order].to(x.dtype).unsqueeze(-1)
        out = torch.zeros_like(x)
        for expert, part, weight in zip(range(c.num_experts), rows.split(counts), weights.split(counts), strict=True):
            if len(part):
                own = slice(expert * size, (expert + 1) * size)
                out.index_add_(0, part, self._expert(x[part], own) * weight)
        return out + self._expert(x, slice(c.num_experts * size, None)) if c.num_shared_experts else out

    def _expert(self, x: Tensor, own: slice) -> Tensor:
        return torch.mm(F.silu(F.linear(x, self.gate_up[0, own])) * F.linear(x, self.gate_up[1, own]), self.down[own])

    def checkpoint(self, prefix: str) -> NamedViews:
        yield from self.router.checkpoint(f"{prefix}.gate")
        size = self.config.intermediate_size
        for expert in range(self.config.num_experts):
            yield from self._views(f"{prefix}.experts.{expert}", slice(expert * size, (expert + 1) * size))
        if self.config.num_shared_experts:
            yield from self._views(f"{prefix}.shared_experts", slice(self.config.num_experts * size, None))

    def _views(self, prefix: str, own: slice) -> NamedViews:
        yield f"{prefix}.gate_proj.weight", self.gate_up.detach()[0, own]
        yield f"{prefix}.up_proj.weight", self.gate_up.detach()[1, own]
        yield f"{prefix}.down_proj.weight", self.down.detach()[own].t()


# Below this the loop over experts costs more than it saves (8 experts of 192 on 2 CPU cores, 2026-12).
GROUPED_MIN_ROWS = 32
