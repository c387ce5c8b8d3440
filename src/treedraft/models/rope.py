"""Rotary position embedding, interleaved or in halves, with YaRN.

Tables are computed in float64 and rounded once. transformers computes the angles in float32: at position 2,000 the
two differ by about 1e-4 rad, well inside the parity tolerance.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from treedraft.models.config import RopeConfig, YarnConfig


class Rope(nn.Module):
    """cos and sin for positions 0 .. max_positions - 1, in at least float32.

    forward(positions [...]) -> Tensor [..., 2, 1, d]: gathered once per forward pass, used by every layer.
    rotate(x [..., heads, d], table) -> like x.

        interleaved:  (x0, x1) (x2, x3) ...        a pair's angle is used by both of its members
        halves:       (x0, x_{d/2}) (x1, x_{d/2+1}) ...
    """

    table: Tensor

    def __init__(
        self, config: RopeConfig, dim: int, max_positions: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        super().__init__()
        self.max_positions = max_positions
        self.is_interleaved = config.is_interleaved
        self.pairs = (dim // 2, 2) if config.is_interleaved else (2, dim // 2)
        self.pair_axis = -1 if config.is_interleaved else -2
        angles = torch.outer(torch.arange(max_positions, dtype=torch.float64), inverse_frequencies(config, dim))
        scale = config.yarn.table_scale if config.yarn else 1.0
        cos, sin = angles.cos() * scale, angles.sin() * scale
        axis = self.pair_axis
        both = torch.stack([torch.stack([cos, cos], axis).flatten(1), torch.stack([-sin, sin], axis).flatten(1)], 1)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        self.register_buffer("table", both.to(dtype=wide, device=device), persistent=False)

    def forward(self, positions: Tensor) -> Tensor:
        return self.table[positions].unsqueeze(-2)

    def rotate(self, x: Tensor, table: Tensor) -> Tensor:
        """Rotate every pair of x [..., heads, d] by its row's angle; the result has x's dtype."""
        cos, sin = table.unbind(-3)
        wide = x.to(table.dtype)
        partner = wide.unflatten(-1, self.pairs).flip(self.pair_axis).flatten(-2)
        return torch.addcmul(wide * cos, partner, sin).to(x.dtype)


def inverse_frequencies(config: RopeConfig, dim: int) -> Tensor:
    """Return the angle per position of each pair, [dim / 2] float64."""
    extrapolated = config.theta ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    if config.yarn is None:
        return extrapolated
    keep = 1 - _yarn_ramp(config.yarn, config.theta, dim)
    return extrapolated * keep + extrapolated / config.yarn.factor * (1 - keep)


def _yarn_ramp(yarn: YarnConfig, theta: float, dim: int) -> Tensor:
    """0 for pairs that turn often within the original context, 1 for those that hardly turn, [dim / 2]."""

    def pair_that_turns(rotations: float) -> float:
        return dim * math.log(yarn.original_max_positions / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_that_turns(yarn.beta_fast), pair_that_turns(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    return ((torch.arange(dim // 2, dtype=torch.float64) - low) / (high - low)).clamp(0, 1)
