"""Muon for matrices, AdamW for the rest, and the schedule that both follow."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

# Quintic Newton-Schulz iteration of Muon (Jordan et al., 2024): singular values go to about 1 in five steps.
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


def orthogonalise(matrix: Tensor, steps: int = 5) -> Tensor:
    """Bring every singular value of matrix [m, n] near 1, in bfloat16."""
    a, b, c = NEWTON_SCHULZ
    x = matrix.bfloat16()
    is_tall = x.shape[0] > x.shape[1]
    x = x.t() if is_tall else x
    x = x / (x.norm() + 1e-7)
    for _ in range(steps):
        gram = x @ x.t()
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.t() if is_tall else x).to(matrix.dtype)


class Muon(torch.optim.Optimizer):
    """Momentum whose update is orthogonalised, scaled to the size of an AdamW step (0.2 * sqrt of the longer side)."""

    def __init__(self, params: Iterable[Tensor], lr: float, weight_decay: float, momentum: float = 0.95):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                average = state.setdefault("momentum", torch.zeros_like(parameter))
                average.lerp_(parameter.grad, 1 - group["momentum"])
                update = parameter.grad.lerp(average, group["momentum"]).flatten(0, -2)
                step_size = group["lr"] * 0.2 * max(update.shape) ** 0.5
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.sub_(orthogonalise(update).view_as(parameter), alpha=step_size)


def build_optimizers(
    module: nn.Module, lr: float, weight_decay: float, use_muon: bool, tables: tuple[str, ...]
) -> list[torch.optim.Optimizer]:
    """Optimizers of every parameter. `tables`: names of matrices indexed by token, which AdamW takes in any case."""
    matrices = [p for n, p in module.named_parameters() if p.dim() >= 2 and n not in tables]
    others = [p for n, p in module.named_parameters() if p.dim() >= 2 and n in tables]
    vectors = [p for p in module.parameters() if p.dim() < 2]
    groups = [{"params": others, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    if not use_muon:
        groups.append({"params": matrices, "weight_decay": weight_decay})
    is_fused = next(module.parameters()).is_cuda
    adam = torch.optim.AdamW([g for g in groups if g["params"]], lr=lr, betas=(0.9, 0.95), eps=1e-9, fused=is_fused)
    optimizers: list[torch.optim.Optimizer] = [adam]
    if use_muon and matrices:
        optimizers.append(Muon(matrices, lr=lr, weight_decay=weight_decay))
    return optimizers


@dataclass
class Schedule:
    """Warm up, hold, then fall linearly to 2 % over the last `decay` share; ends by time or by steps."""

    lr: float
    seconds: float  # wall clock from the first call of `start`
    max_steps: int
    warmup: int
    decay: float
    started: float = 0.0

    def start(self) -> None:
        self.started = time.monotonic()

    def progress(self, step: int) -> float:
        """Share of the training that is done: 1 or more at the end."""
        return max((time.monotonic() - self.started) / self.seconds, step / self.max_steps)

    def factor(self, step: int) -> float:
        """What the learning rate is multiplied by."""
        remaining = (1 - self.progress(step)) / self.decay
        return min(1.0, (step + 1) / self.warmup) * min(1.0, max(remaining, 0.0) + 0.02)

    def apply(self, optimizers: list[torch.optim.Optimizer], step: int) -> None:
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.lr * self.factor(step)
