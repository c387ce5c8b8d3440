"""The residual sum and the norm after it in one launch, and silu(gate) * up. A row's result depends on no other row."""

# mypy: disable-error-code="no-untyped-def"
# (Triton reads the annotations of a kernel: tl.constexpr or none.)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from treedraft.kernels.chain import chained, join


def add_rms_norm_triton(delta: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return (norm(sum) * weight, sum), sum being delta + residual. Twin: models.layers.RMSNorm.add on torch operators.

    residual: [..., H] in the model's dtype, or None. delta: as residual, or parts [..., P, H] in float32, summed in
    order. The sum is rounded to the model's dtype, that of `weight`, before it is normed.
    """
    size = weight.shape[0]
    num_parts = delta.shape[-2] if residual is not None and delta.dim() > residual.dim() else 1
    shape = delta.shape if residual is None else residual.shape
    rows = delta.reshape(-1, size)
    normed = torch.empty(shape, dtype=weight.dtype, device=weight.device)
    total = delta if residual is None else torch.empty_like(normed)
    num_rows = normed.numel() // size
    if num_rows:
        _add_norm_kernel[(num_rows,)](
            rows,
            rows if residual is None else residual.reshape(-1, size).contiguous(),  # may be one row, expanded
            weight,
            normed,
            total,
            rows.stride(0),
            size,
            eps,
            HAS_RESIDUAL=residual is not None,
            PARTS=num_parts,
            BLOCK=triton.next_power_of_2(size),
            **chained(weight),
            num_warps=8 if size >= 2048 else 4,
        )
    return normed, total


@triton.jit
def load_sum(
    delta,
    residual,
    row,
    column,
    mask,
    delta_row,
    size,
    DTYPE: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    PARTS: tl.constexpr,
):
    """The residual stream of one row, float32 after rounding to the model's dtype."""
    base = delta + row * PARTS * delta_row + column
    total = tl.load(base, mask=mask, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        total += tl.load(base + part * delta_row, mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        total += tl.load(residual + row * size + column, mask=mask, other=0.0).to(tl.float32)
    return total.to(DTYPE).to(tl.float32)


@triton.jit
def _add_norm_kernel(
    delta,  # [T * P, H]
    residual,  # [T, H]
    weight,  # [H]
    normed,  # [T, H]
    total,  # [T, H]
    delta_row,
    size,
    eps,
    HAS_RESIDUAL: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_CHAINED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < size
    scale = tl.load(weight + column, mask=mask, other=0.0).to(tl.float32)
    join(IS_CHAINED)
    x = load_sum(delta, residual, row, column, mask, delta_row, size, weight.dtype.element_ty, HAS_RESIDUAL, PARTS)
    if HAS_RESIDUAL:
        tl.store(total + row * size + column, x.to(total.dtype.element_ty), mask=mask)
    x = x * tl.rsqrt(tl.sum(x * x, 0) / size + eps) * scale
    tl.store(normed + row * size + column, x.to(normed.dtype.element_ty), mask=mask)


def silu_and_mul_triton(gate_up: Tensor, block: int = 1024) -> Tensor:
    """Return silu(gate) * up of gate_up [..., 2 * size] -> [..., size]. Twin: F.silu(gate) * up."""
    size = gate_up.shape[-1] // 2
    rows = gate_up.reshape(-1, 2 * size)
    out = torch.empty((*gate_up.shape[:-1], size), dtype=gate_up.dtype, device=gate_up.device)
    if len(rows):
        grid = (len(rows), triton.cdiv(size, block))
        _silu_and_mul_kernel[grid](rows, out, rows.stride(0), size, BLOCK=block, **chained(rows))
    return out


@triton.jit
def _silu_and_mul_kernel(gate_up, out, gate_up_row, size, BLOCK: tl.constexpr, IS_CHAINED: tl.constexpr):
    join(IS_CHAINED)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < size
    gate = tl.load(gate_up + row * gate_up_row + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * gate_up_row + size + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * size + column, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=mask)
