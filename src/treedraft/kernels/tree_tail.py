"""The tree's part of absorbed MLA, joined with a prefix that another kernel attended: one launch after that one."""

# mypy: disable-error-code="no-untyped-def"
# (Triton reads the annotations of a kernel: tl.constexpr or none.)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from treedraft.kernels.paged_launch import LOG2_E, Pages, Shape, Tiles, precision
from treedraft.kernels.paged_tree import (
    LN_2,
    SIZES,
    add_keys,
    finish,
    load_keys,
    load_queries,
    score,
    sees_nodes,
    slots_at,
)

FEW_ROWS = Tiles(block_m=16, block_n=32, num_warps=4, num_stages=1)
MANY_ROWS = Tiles(block_m=64, block_n=64, num_warps=8, num_stages=1)
MANY = 16384  # query rows in all from which large tiles fill a GPU


def attend_tail_triton(
    q: Tensor,
    kv: Tensor,
    pages: Pages,
    ancestor_bits: Tensor,
    tree_len: int,
    prefix_out: Tensor,
    prefix_lse: Tensor,
    v_width: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Attend over each row's tree slots and join: out [B, R, h, v_width] of q's dtype, lse [B, R, h] float32, base e.

    q [B, R, h, w] and kv [slots, w], last strides 1; ancestor_bits [B, R, words] int64 name tree slots below tree_len;
    prefix_out [B, R, h, v_width] contiguous and prefix_lse [B, h, R] float32, base e: the prefix alone, -inf or +inf
    where it was empty. Twin: attention.flashmla.attend_tail.
    """
    batch, num_tokens, num_heads, _ = q.shape
    shape = Shape(key=v_width, rope=kv.shape[-1] - v_width, value=v_width, shared_value=True)
    tiles = MANY_ROWS if batch * num_tokens * num_heads >= MANY and q.dtype == torch.bfloat16 else FEW_ROWS
    out = q.new_empty((batch, num_tokens, num_heads, v_width))
    lse = q.new_empty((batch, num_tokens, num_heads), dtype=torch.float32)
    if q.is_meta or out.numel() == 0:
        return out, lse
    tail_kernel[(triton.cdiv(num_tokens * num_heads, tiles.block_m), batch)](
        q,
        kv,
        pages.page_table,
        pages.kv_lens,
        ancestor_bits,
        prefix_out,
        prefix_lse,
        out,
        lse,
        scale * LOG2_E,
        *q.stride()[:3],
        kv.stride(0),
        *prefix_lse.stride(),
        pages.page_table.stride(0),
        pages.page_table.shape[1],
        num_tokens,
        num_heads,
        tree_len,
        PAGE_SIZE=pages.page_size,
        RESERVED=pages.num_reserved,
        WORDS=ancestor_bits.shape[-1],
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        PRECISION=precision(q),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        **shape.constants,
    )
    return out, lse


@triton.jit(do_not_specialize=SIZES)
def tail_kernel(
    q,  # [B, R, h, DK + DR], any strides but the last
    kv,  # [slots, DK + DR]
    page_table,  # [B, W] int32
    kv_lens,  # [B] int64
    ancestor_bits,  # [B, R, WORDS] int64
    prefix_out,  # [B, R, h, DV]
    prefix_lse,  # [B, h, R] float32, any strides
    out,  # [B, R, h, DV]
    lse,  # [B, R, h] float32
    scale,  # times log2(e)
    q_stride_b,
    q_stride_r,
    q_stride_h,
    k_stride,
    lse_stride_b,
    lse_stride_h,
    lse_stride_r,
    table_stride,
    table_width,
    num_tokens,
    num_heads,
    tree_len,
    PAGE_SIZE: tl.constexpr,
    RESERVED: tl.constexpr,
    WORDS: tl.constexpr,
    DK: tl.constexpr,
    DK_PAD: tl.constexpr,
    DR: tl.constexpr,
    DR_PAD: tl.constexpr,
    DV: tl.constexpr,
    DV_PAD: tl.constexpr,
    SHARED_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    b = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    token = row // num_heads
    head = row % num_heads
    is_row = token < num_tokens
    kv_len = tl.load(kv_lens + b).to(tl.int32)
    q_at = b * q_stride_b + token * q_stride_r + head * q_stride_h
    queries = load_queries(q, q_at, is_row, DK, DK_PAD)
    query_ropes = queries
    if DR > 0:
        query_ropes = load_queries(q + DK, q_at, is_row, DR, DR_PAD)
    bits_row = ancestor_bits + (b * num_tokens + token) * WORDS
    high = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, DV_PAD], tl.float32)
    for tile in range(0, (tree_len + BLOCK_N - 1) // BLOCK_N):
        first_node = tl.full([], 0, tl.int32) + tile * BLOCK_N
        sees = sees_nodes(bits_row, first_node, is_row, WORDS, BLOCK_N)
        is_read = tl.max(sees.to(tl.int32), 0) > 0  # what no row sees may be NaN, as key and as value
        position = kv_len + first_node + tl.arange(0, BLOCK_N)
        slot = slots_at(page_table + b * table_stride, position, is_read, table_width, PAGE_SIZE, RESERVED)
        keys = load_keys(kv, slot, is_read, k_stride, DK, DK_PAD, True)
        ropes = keys
        if DR > 0:
            ropes = load_keys(kv + DK, slot, is_read, k_stride, DR, DR_PAD, True)
        s = score(queries, query_ropes, keys, ropes, scale, DR > 0, PRECISION, False)
        s = tl.where(sees, s, float("-inf"))
        high, total, acc = add_keys(s, keys, high, total, acc, num_tokens, prefix_lse, PRECISION, False)
    own, own_lse = finish(high, total, acc)

    dim = tl.arange(0, DV_PAD)
    to_store = is_row[:, None] & (dim < DV)[None, :]
    out_row = (b * num_tokens + token) * num_heads + head
    lse_at = b * lse_stride_b + head * lse_stride_h + token * lse_stride_r
    other_lse = tl.load(prefix_lse + lse_at, mask=is_row, other=float("-inf")) * 1.4426950408889634
    other_lse = tl.where(other_lse == float("inf"), float("-inf"), other_lse)
    has_other = other_lse > float("-inf")
    other = tl.load(prefix_out + out_row[:, None] * DV + dim[None, :], mask=to_store & has_other[:, None], other=0.0)
    top = tl.maximum(own_lse, other_lse)
    base = tl.where(top == float("-inf"), 0.0, top)
    weight = tl.exp2(own_lse - base)
    other_weight = tl.exp2(other_lse - base)
    both = weight + other_weight
    divisor = tl.where(both == 0.0, 1.0, both)
    joined = (own * weight[:, None] + other.to(tl.float32) * other_weight[:, None]) / divisor[:, None]
    tl.store(out + out_row[:, None] * DV + dim[None, :], joined.to(out.dtype.element_ty), mask=to_store)
    row_lse = tl.where(both == 0.0, float("-inf"), (base + tl.log2(divisor)) * LN_2)
    tl.store(lse + out_row, row_lse, mask=is_row)
