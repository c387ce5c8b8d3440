"""What lies between the query projection and the attention, in one launch: rope, latent norm, KV write, absorption."""

# mypy: disable-error-code="no-untyped-def"
# (Triton reads the annotations of a kernel: tl.constexpr or none.)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from treedraft.kernels.linear import ROWS

HEADS = 16  # heads that one program rotates


def absorb_and_write_triton(
    q: Tensor,
    kv: Tensor,
    table: Tensor,
    norm_weight: Tensor,
    eps: float,
    key_weight: Tensor,
    slots: Tensor,
    pool: Tensor,
    is_interleaved: bool,
) -> Tensor:
    """Write the rows' KV at their slots, NaN as 0, and return the absorbed queries [B, R, h, c + dr], contiguous.

    q: [B, R, h, dn + dr], kv: [B, R, c + dr], the latent before its norm and the key before its rotation, slices of
    contiguous rows; table: [B, R, 2, 1, dr] float32, models.rope.Rope's rows; norm_weight: [c]; key_weight:
    [h, dn, c]; slots: [B, R] int64, any strides; pool: [num_slots, c + dr], written. Twin: the torch operators of
    models.mla and attention.paged.PagedTreeAttend.mla.
    """
    (batch, rows_each, num_heads, _), (_, nope, latent) = q.shape, key_weight.shape
    rope, num_rows = kv.shape[-1] - latent, batch * rows_each
    out = torch.empty((batch, rows_each, num_heads, latent + rope), dtype=q.dtype, device=q.device)
    q, kv = q.flatten(0, 1), kv.flatten(0, 1)
    if num_rows == 0:
        return out
    block_n = 32 if q.dtype == torch.float32 else 64
    column_blocks, head_blocks = triton.cdiv(latent, block_n), triton.cdiv(num_heads, HEADS)
    num_rotations = num_rows * head_blocks
    _absorb_and_write_kernel[(num_rotations + triton.cdiv(num_rows, ROWS) * num_heads * column_blocks,)](
        q,
        kv,
        table,
        norm_weight,
        key_weight,
        slots,
        pool,
        out,
        rows_each,
        slots.stride(0),
        slots.stride(1),
        num_rows,
        num_heads,
        num_rotations,
        q.stride(0),
        q.stride(1),
        kv.stride(0),
        key_weight.stride(0),
        key_weight.stride(1),
        pool.stride(0),
        eps,
        NOPE=nope,
        LATENT=latent,
        ROPE=rope,
        NOPE_2=max(16, triton.next_power_of_2(nope)),
        LATENT_2=triton.next_power_of_2(latent),
        PAIRS_2=triton.next_power_of_2(rope // 2),
        IS_INTERLEAVED=is_interleaved,
        HEADS=HEADS,
        HEAD_BLOCKS=head_blocks,
        COLUMN_BLOCKS=column_blocks,
        ROWS=ROWS,
        BLOCK_N=block_n,
        num_warps=4,
    )
    return out


@triton.jit
def _absorb_and_write_kernel(
    q,  # [T, h, dn + dr]
    kv,  # [T, c + dr]
    table,  # [T, 2, 1, dr] float32
    norm_weight,  # [c]
    key_weight,  # [h, dn, c]
    slots,  # [B, R] int64
    pool,  # [num_slots, c + dr]
    out,  # [T, h, c + dr]
    rows_each,  # R
    slots_batch,
    slots_row,
    num_rows,
    num_heads,
    num_rotations,
    q_row,
    q_head,
    kv_row,
    key_head,
    key_row,
    pool_row,
    eps,
    NOPE: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    NOPE_2: tl.constexpr,
    LATENT_2: tl.constexpr,
    PAIRS_2: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_BLOCKS: tl.constexpr,
    COLUMN_BLOCKS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """The first programs rotate and write, one for each row and HEADS heads; the others absorb, one a tile."""
    program = tl.program_id(0)
    WIDTH: tl.constexpr = LATENT + ROPE
    if program < num_rotations:
        row = (program // HEAD_BLOCKS).to(tl.int64)
        head = program % HEAD_BLOCKS * HEADS + tl.arange(0, HEADS)
        place = tl.arange(0, PAIRS_2)
        is_pair = place < ROPE // 2
        # The two members of a pair; the table holds cos cos .. and -sin sin .. in the members' own places.
        if IS_INTERLEAVED:
            first, second = 2 * place, 2 * place + 1
        else:
            first, second = place, place + ROPE // 2
        cos = tl.load(table + row * 2 * ROPE + second, mask=is_pair, other=0.0)
        sin = tl.load(table + row * 2 * ROPE + ROPE + second, mask=is_pair, other=0.0)
        is_head = (head < num_heads)[:, None] & is_pair[None, :]
        of_heads = q + row * q_row + head[:, None] * q_head + NOPE
        a = tl.load(of_heads + first[None, :], mask=is_head, other=0.0).to(tl.float32)
        b = tl.load(of_heads + second[None, :], mask=is_head, other=0.0).to(tl.float32)
        to_heads = out + (row * num_heads + head[:, None]) * WIDTH + LATENT
        dtype: tl.constexpr = out.dtype.element_ty
        tl.store(to_heads + first[None, :], (a * cos[None, :] - b * sin[None, :]).to(dtype), mask=is_head)
        tl.store(to_heads + second[None, :], (b * cos[None, :] + a * sin[None, :]).to(dtype), mask=is_head)
        if program % HEAD_BLOCKS == 0:
            slot = tl.load(slots + row // rows_each * slots_batch + row % rows_each * slots_row)
            to_slot = pool + slot * pool_row
            a = tl.load(kv + row * kv_row + LATENT + first, mask=is_pair, other=0.0).to(tl.float32)
            b = tl.load(kv + row * kv_row + LATENT + second, mask=is_pair, other=0.0).to(tl.float32)
            tl.store(to_slot + LATENT + first, _not_nan(a * cos - b * sin).to(dtype), mask=is_pair)
            tl.store(to_slot + LATENT + second, _not_nan(b * cos + a * sin).to(dtype), mask=is_pair)
            column = tl.arange(0, LATENT_2)
            is_latent = column < LATENT
            x = tl.load(kv + row * kv_row + column, mask=is_latent, other=0.0).to(tl.float32)
            scale = tl.load(norm_weight + column, mask=is_latent, other=0.0).to(tl.float32)
            x = x * tl.rsqrt(tl.sum(x * x, 0) / LATENT + eps) * scale
            tl.store(to_slot + column, _not_nan(x).to(dtype), mask=is_latent)
    else:
        tile = program - num_rotations
        column = tile % COLUMN_BLOCKS * BLOCK_N + tl.arange(0, BLOCK_N)
        head = (tile // COLUMN_BLOCKS % num_heads).to(tl.int64)
        row = (tile // COLUMN_BLOCKS // num_heads).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        k = tl.arange(0, NOPE_2)
        is_row, is_column, is_inside = (row < num_rows)[:, None], (column < LATENT)[None, :], k < NOPE
        keys = key_weight + head * key_head + k[:, None] * key_row + column[None, :]
        b = tl.load(keys, mask=is_column & is_inside[:, None], other=0.0)
        rows = q + row[:, None] * q_row + head * q_head + k[None, :]
        a = tl.load(rows, mask=is_row & is_inside[None, :], other=0.0)
        total = tl.dot(a, b, input_precision="ieee")
        place = out + (row[:, None] * num_heads + head) * WIDTH + column[None, :]
        tl.store(place, total.to(out.dtype.element_ty), mask=is_row & is_column)


@triton.jit
def _not_nan(x):
    return tl.where(x == x, x, 0.0)
