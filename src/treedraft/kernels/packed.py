"""Index lists in one kernel: the twin of `treedraft.attention.packed.fill_packed`, word for word."""

# mypy: disable-error-code="no-untyped-def"
# (Triton reads the annotations of a kernel: tl.constexpr or none.)

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

PARTS = 8  # programs that share one row's prefix


def fill_packed_triton(
    page_table: Tensor,
    prefix_lens: Tensor,
    tail_slots: Tensor,
    ancestor_bits: Tensor,
    tree_len: int,
    max_len: int,
    page_size: int,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    block: int = 1024,
) -> None:
    """Write kv_indices where kv_indptr says, and nowhere else. Arguments as of attention.packed.build_packed.

    block: words that a program writes at once, a power of two. It changes nothing but the time.
    """
    batch, rows, words = ancestor_bits.shape
    if max_len == 0:
        return
    _fill_kernel[(batch * rows, PARTS)](
        page_table,
        prefix_lens,
        tail_slots,
        ancestor_bits.contiguous(),
        kv_indptr,
        kv_indices,
        kv_indices.numel(),
        page_table.stride(0),
        tail_slots.stride(0),
        rows,
        words,
        tree_len,
        page_size,
        PARTS=PARTS,
        BLOCK=block,
        TREE=triton.next_power_of_2(max(tree_len, 1)),
    )


@triton.jit
def _fill_kernel(
    page_table,  # [B, W] int32
    prefix_lens,  # [B] int64
    tail_slots,  # [B, tail] int64
    ancestor_bits,  # [B, R, words] int64
    kv_indptr,  # [B * R + 1] int64
    kv_indices,  # [width] int32
    width,
    table_stride,
    tail_stride,
    rows,
    words,
    tree_len,
    page_size,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    TREE: tl.constexpr,
):
    query = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    b = query // rows
    start = tl.load(kv_indptr + query)
    end = tl.load(kv_indptr + query + 1)
    if end > start:  # all zeros where the lists do not fit
        prefix_len = tl.load(prefix_lens + b)
        last = tl.minimum(end, width)  # belt and braces: no word beyond the row
        for first in range(part * BLOCK, prefix_len, PARTS * BLOCK):
            column = first + tl.arange(0, BLOCK)
            is_inside = (column < prefix_len) & (start + column < last)
            page = tl.load(page_table + b * table_stride + column // page_size, mask=is_inside, other=0)
            slot = page.to(tl.int64) * page_size + column % page_size
            tl.store(kv_indices + start + column, slot.to(tl.int32), mask=is_inside)
        if part == 0:
            node = tl.arange(0, TREE)
            in_tree = node < tree_len
            word = tl.load(ancestor_bits + query * words + node // 64, mask=in_tree, other=0)
            is_ancestor = ((word >> (node % 64).to(tl.int64)) & 1).to(tl.int32)  # 63: the sign's copies are cut by & 1
            place = start + prefix_len + tl.cumsum(is_ancestor, 0) - 1
            is_written = (is_ancestor == 1) & (place < last)
            slot = tl.load(tail_slots + b * tail_stride + node, mask=is_written, other=0)
            tl.store(kv_indices + place, slot.to(tl.int32), mask=is_written)
