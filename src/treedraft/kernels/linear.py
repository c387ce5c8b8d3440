"""Linear maps of few rows: the weight is read once, at the memory's speed, and no row's sum depends on its neighbours.

A program walks its columns' whole sums in order, 16 products at a time, as the matrix units do in any tile shape. So a
row's result is the same bits alone and among others, which is what `--deterministic` asks for (tests/gpu compares tile
shapes); for few rows it is also fast.
"""

# mypy: disable-error-code="no-untyped-def"
# (Triton reads the annotations of a kernel: tl.constexpr or none.)

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from treedraft.kernels.chain import chained, join

ROWS = 16  # of a tile, the fewest that the matrix units take


class Tile(NamedTuple):
    """Shape of a program's work. It changes the time alone: in bfloat16 on Hopper every shape gave the same bits."""

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    block_m: int = ROWS


def tile_of(num_rows: int, num_columns: int, dtype: torch.dtype) -> Tile:
    """Choose a tile for so many rows and columns of all heads, as measured (benchmarks/notes.md)."""
    if dtype == torch.float32:
        return Tile(32, 32, 4, 2)
    if num_rows <= ROWS:
        if num_columns >= WIDE_COLUMNS:
            return Tile(64, 128, 4, 4)
        return Tile(32, 128, 4, 6) if num_columns >= MEDIUM_COLUMNS else Tile(16, 256, 4, 6)
    block_m = 32 if num_rows <= 32 else 64
    if num_columns >= WIDE_COLUMNS:
        return Tile(64, 64, 4, 6, block_m)
    return Tile(32, 128, 4, 4, block_m) if num_columns >= MEDIUM_COLUMNS else Tile(16, 256, 4, 4, block_m)


WIDE_COLUMNS = 16384  # enough programs of 64 columns for every multiprocessor
MEDIUM_COLUMNS = 3072


def linear_triton(x: Tensor, weight: Tensor, out_dtype: torch.dtype | None = None, tile: Tile | None = None) -> Tensor:
    """Return x @ weight.T: x [..., K], weight [N, K] -> [..., N] in out_dtype, x's if None. Twin: F.linear.

    bfloat16 or float32; sums in float32.
    """
    rows = x.reshape(-1, x.shape[-1])
    out = linear_heads_triton(rows.unsqueeze(1), weight.unsqueeze(0), out_dtype, tile)
    return out.view(*x.shape[:-1], weight.shape[0])


def linear_heads_triton(
    x: Tensor, weight: Tensor, out_dtype: torch.dtype | None = None, tile: Tile | None = None
) -> Tensor:
    """Return each head's own map: x [T, h, K] of any strides but a last of 1, weight [h, N, K] -> [T, h, N] contiguous.

    Twin: torch.einsum("thk,hnk->thn", x, weight).
    """
    (num_rows, num_heads, width), num_columns = x.shape, weight.shape[1]
    out = torch.empty((num_rows, num_heads, num_columns), dtype=out_dtype or x.dtype, device=x.device)
    if num_rows == 0:
        return out
    tile = tile or tile_of(num_rows, num_heads * num_columns, x.dtype)
    grid = (triton.cdiv(num_rows, tile.block_m), triton.cdiv(num_columns, tile.block_n), num_heads)
    _linear_kernel[grid](
        x,
        weight,
        out,
        num_rows,
        num_columns,
        width,
        x.stride(0),
        x.stride(1),
        weight.stride(0),
        weight.stride(1),
        out.stride(0),
        out.stride(1),
        ROWS=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        IS_EVEN=width % tile.block_k == 0,
        **chained(x),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return out


@triton.jit(do_not_specialize=["num_rows"])
def _linear_kernel(
    x,  # [T, h, K]
    weight,  # [h, N, K]
    out,  # [T, h, N]
    num_rows,
    num_columns,
    width,
    x_row,
    x_head,
    weight_head,
    weight_row,
    out_row,
    out_head,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    IS_EVEN: tl.constexpr,  # width is a multiple of BLOCK_K
    IS_CHAINED: tl.constexpr,
):
    head = tl.program_id(2).to(tl.int64)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    join(IS_CHAINED)
    k = tl.arange(0, BLOCK_K)
    is_row, is_column = (row < num_rows)[:, None], (column < num_columns)[None, :]
    x_tile = x + head * x_head + row[:, None] * x_row + k[None, :]
    weight_tile = weight + head * weight_head + column[None, :] * weight_row + k[:, None]
    total = tl.zeros([ROWS, BLOCK_N], tl.float32)
    for start in range(0, width, BLOCK_K):
        if IS_EVEN:
            a = tl.load(x_tile + start, mask=is_row, other=0.0)
            b = tl.load(weight_tile + start, mask=is_column, other=0.0)
        else:
            is_inside = start + k < width
            a = tl.load(x_tile + start, mask=is_row & is_inside[None, :], other=0.0)
            b = tl.load(weight_tile + start, mask=is_column & is_inside[:, None], other=0.0)
        total = tl.dot(a, b, total, input_precision="ieee")
    place = out + row[:, None] * out_row + head * out_head + column[None, :]
    tl.store(place, total.to(out.dtype.element_ty), mask=is_row & is_column)
