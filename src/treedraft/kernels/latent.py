"""What lies between the query projection and the attention, in one launch: rope, latent norm, KV write, absorption."""

# mypy: disable-error-code="no-untyped-def"
# (Triton reads the annotations of a kernel: tl.constexpr or none.)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from treedraft.kernels.chain import chained, join
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
        **chained(q),
        num_warps=4,
    )
    return out


# Numbers of rows are many: not a kernel for each kind of them.
@triton.jit(do_not_specialize=["rows_each", "slots_batch", "slots_row", "num_rows", "num_rotations"])
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
    IS_CHAINED: tl.constexpr,
):
    """The first programs rotate and write, one for each row and HEADS heads; the others absorb, one a tile."""
    program = tl.program_id(0)
    if program < num_rotations:
        join(IS_CHAINED)
        row = (program // HEAD_BLOCKS).to(tl.int64)
        head = program % HEAD_BLOCKS * HEADS + tl.arange(0, HEADS)
        angles = table + row * 2 * ROPE
        queries = q + row * q_row + head[:, None] * q_head + NOPE
        rotated = out + (row * num_heads + head[:, None]) * (LATENT + ROPE) + LATENT
        _rotate(queries, rotated, angles, (head < num_heads)[:, None], ROPE, PAIRS_2, IS_INTERLEAVED, False)
        if program % HEAD_BLOCKS == 0:
            slot = tl.load(slots + row // rows_each * slots_batch + row % rows_each * slots_row)
            key, to_slot = kv + row * kv_row, pool + slot * pool_row
            one = tl.arange(0, 1)[:, None]
            source, target = key + LATENT + one, to_slot + LATENT + one
            _rotate(source, target, angles, one == 0, ROPE, PAIRS_2, IS_INTERLEAVED, True)
            column = tl.arange(0, LATENT_2)
            mask = column < LATENT
            x = tl.load(key + column, mask=mask, other=0.0).to(tl.float32)
            scale = tl.load(norm_weight + column, mask=mask, other=0.0).to(tl.float32)
            x = x * tl.rsqrt(tl.sum(x * x, 0) / LATENT + eps) * scale
            tl.store(to_slot + column, _not_nan(x).to(pool.dtype.element_ty), mask=mask)
    else:
        tile = program - num_rotations
        head_row = tile // COLUMN_BLOCKS
        _absorb(
            q,
            key_weight,
            out,
            (head_row % num_heads).to(tl.int64),
            (head_row // num_heads).to(tl.int64) * ROWS,
            tile % COLUMN_BLOCKS * BLOCK_N,
            num_rows,
            num_heads,
            q_row,
            q_head,
            key_head,
            key_row,
            NOPE,
            LATENT,
            ROPE,
            NOPE_2,
            ROWS,
            BLOCK_N,
            IS_CHAINED,
        )


@triton.jit
def _rotate(
    source,  # pointers [n, 1] to the first of dr numbers
    target,  # [n, 1]
    angles,  # [2, dr]: cos cos .., then -sin sin .., each in its own member's place
    mask,  # [n, 1]
    ROPE: tl.constexpr,
    PAIRS_2: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
    IS_FINITE: tl.constexpr,  # NaN as 0, see kv.pool.LatentPool.write_finite
):
    """Rotate rows of pairs."""
    pair = tl.arange(0, PAIRS_2)
    if IS_INTERLEAVED:
        first = 2 * pair
        second = first + 1
    else:
        first = pair
        second = pair + ROPE // 2
    is_pair = pair < ROPE // 2
    cos = tl.load(angles + second, mask=is_pair, other=0.0)[None, :]
    sin = tl.load(angles + ROPE + second, mask=is_pair, other=0.0)[None, :]
    first, second, mask = first[None, :], second[None, :], mask & is_pair[None, :]
    a = tl.load(source + first, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(source + second, mask=mask, other=0.0).to(tl.float32)
    dtype: tl.constexpr = target.dtype.element_ty
    c = a * cos - b * sin
    d = b * cos + a * sin
    if IS_FINITE:
        c, d = _not_nan(c), _not_nan(d)
    tl.store(target + first, c.to(dtype), mask=mask)
    tl.store(target + second, d.to(dtype), mask=mask)


@triton.jit
def _absorb(
    q,
    key_weight,
    out,
    head,
    first_row,
    first_column,
    num_rows,
    num_heads,
    q_row,
    q_head,
    key_head,
    key_row,
    NOPE: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    NOPE_2: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    IS_CHAINED: tl.constexpr,
):
    """One tile of q_nope @ key_weight."""
    row = first_row + tl.arange(0, ROWS)
    column = first_column + tl.arange(0, BLOCK_N)
    k = tl.arange(0, NOPE_2)
    is_row, is_column, is_inside = (row < num_rows)[:, None], (column < LATENT)[None, :], k < NOPE
    keys = key_weight + head * key_head + k[:, None] * key_row + column[None, :]
    weights = tl.load(keys, mask=is_column & is_inside[:, None], other=0.0)
    join(IS_CHAINED)  # the weights above are constant
    queries = tl.load(
        q + row[:, None] * q_row + head * q_head + k[None, :], mask=is_row & is_inside[None, :], other=0.0
    )
    total = tl.dot(queries, weights, input_precision="ieee")
    place = out + (row[:, None] * num_heads + head) * (LATENT + ROPE) + column[None, :]
    tl.store(place, total.to(out.dtype.element_ty), mask=is_row & is_column)


@triton.jit
def _not_nan(x):
    return tl.where(x == x, x, 0.0)
