"""Accepted nodes' KV to its place, all layers in one launch: the twin of `treedraft.kv.pool.move_rows`, bit for bit."""

# mypy: disable-error-code="no-untyped-def"
# (Triton reads the annotations of a kernel: tl.constexpr or none.)

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


def move_rows_triton(data: Tensor, src: Tensor, dst: Tensor) -> None:
    """Copy slots src [B, P] int64 to dst [B, P] int64 in every layer of data [layers, slots, width].

    A program owns one chunk of columns of all P rows of a sequence, and moves them in ascending order. That is safe
    where no row is the source of a later one after it was written: src[b, j] lies at or behind dst[b, j], and both
    ascend in logical order, as an accepted path does (a_j >= j, a increasing). Each thread reads and writes the same
    columns of every row, so its own order is enough. Sequences share no slot but the trash page's.
    """
    batch, path = src.shape
    layers, _, width = data.shape
    block = min(512, triton.next_power_of_2(width))
    _move_kernel[(batch, layers, triton.cdiv(width, block))](
        data,
        src.contiguous(),
        dst.contiguous(),
        data.stride(0),
        data.stride(1),
        path,
        width,
        BLOCK=block,
        num_warps=2,
    )


@triton.jit
def _move_kernel(
    data,  # [layers, slots, width]
    src,  # [B, P] int64
    dst,  # [B, P] int64
    layer_stride,
    slot_stride,
    path,
    width,
    BLOCK: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    column = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    layer = data + tl.program_id(1).to(tl.int64) * layer_stride + column
    for row in range(path):
        source = tl.load(src + b * path + row)
        target = tl.load(dst + b * path + row)
        if source != target:
            values = tl.load(layer + source * slot_stride, mask=column < width)
            tl.store(layer + target * slot_stride, values, mask=column < width)
