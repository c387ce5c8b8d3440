"""Gumbel noise in one kernel: the twin of `treedraft.speculative.noise.gumbel`, bit for bit."""

# mypy: disable-error-code="no-untyped-def"
# (Triton reads the annotations of a kernel: tl.constexpr or none.)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from treedraft.speculative.noise import (
    LOG_FIRST_CELL,
    LOG_SHIFT,
    PHILOX_M0,
    PHILOX_M1,
    PHILOX_ROUNDS,
    PHILOX_W0,
    PHILOX_W1,
    STREAM_TOKEN,
    log_pairs,
)


def gumbel_triton(keys: Tensor, positions: Tensor, vocab_size: int, block: int = 256) -> Tensor:
    """Return Gumbel(0, 1) noise float32 [B, D, V] of keys int64 [B] at positions int64 [B, D].

    block: counters a program works on, four tokens each, a power of two. It changes nothing but the time.
    """
    batch, depth = positions.shape
    out = torch.empty((batch, depth, vocab_size), dtype=torch.float32, device=keys.device)
    if out.is_meta:  # a dry run
        return out
    pairs = log_pairs(keys.device)
    grid = (batch * depth, triton.cdiv(vocab_size, 4 * block))
    # Without fp fusion: a fused multiply-add would round once where the torch twin rounds twice.
    _gumbel_kernel[grid](
        keys.contiguous(),
        positions.contiguous(),
        pairs,
        out,
        depth,
        vocab_size,
        M0=PHILOX_M0,
        M1=PHILOX_M1,
        W0=PHILOX_W0,
        W1=PHILOX_W1,
        ROUNDS=PHILOX_ROUNDS,
        STREAM=STREAM_TOKEN,
        SHIFT=LOG_SHIFT,
        FIRST_CELL=LOG_FIRST_CELL,
        BLOCK=block,
        enable_fp_fusion=False,
    )
    return out


@triton.jit
def _neg_log(x, pairs, SHIFT: tl.constexpr, FIRST_CELL: tl.constexpr):
    cell = (x.to(tl.int64, bitcast=True) >> SHIFT) - FIRST_CELL
    # Both entries of a cell in one access of 16 bytes: these are what the kernel waits for.
    inverse, log = tl.split(tl.load(pairs + cell[:, None] * 2 + tl.arange(0, 2)[None, :]))
    r = inverse * x - 1.0
    third = tl.full([], 0.3333333333333333, tl.float64)  # a bare literal may be taken for a float32
    # One rounding for each product and each sum, in the order of the torch twin.
    series = r * 0.25
    series = (series - third) * r
    series = (series + 0.5) * r
    series = (series - 1.0) * r
    return series + log


@triton.jit
def _gumbel_of(word, pairs, SHIFT: tl.constexpr, FIRST_CELL: tl.constexpr):
    u = (word.to(tl.float64) + 0.5) * 2.3283064365386963e-10  # 2^-32
    g = _neg_log(_neg_log(u, pairs, SHIFT, FIRST_CELL), pairs, SHIFT, FIRST_CELL)
    return g.to(tl.float32)


@triton.jit
def _gumbel_kernel(
    keys,  # [B] int64
    positions,  # [B, D] int64
    pairs,  # [cells, 2] float64, log_pairs
    out,  # [B, D, V] float32
    depth,
    vocab_size,
    M0: tl.constexpr,
    M1: tl.constexpr,
    W0: tl.constexpr,
    W1: tl.constexpr,
    ROUNDS: tl.constexpr,
    STREAM: tl.constexpr,
    SHIFT: tl.constexpr,
    FIRST_CELL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    key = tl.load(keys + row // depth)
    position = tl.load(positions + row)
    zero = tl.zeros([BLOCK], dtype=tl.uint32)
    c0 = block.to(tl.uint32)
    c1 = zero + (position & 0xFFFFFFFF).to(tl.uint32)
    c2 = zero + ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)
    c3 = zero + STREAM
    k0 = zero + (key & 0xFFFFFFFF).to(tl.uint32)
    k1 = zero + ((key >> 32) & 0xFFFFFFFF).to(tl.uint32)
    m0 = tl.full([BLOCK], M0, tl.uint32)
    m1 = tl.full([BLOCK], M1, tl.uint32)
    for _ in tl.static_range(ROUNDS):
        high0 = tl.umulhi(c0, m0)
        high2 = tl.umulhi(c2, m1)
        c3_next = c0 * m0
        c1_next = c2 * m1
        c0 = high2 ^ c1 ^ k0
        c2 = high0 ^ c3 ^ k1
        c1 = c1_next
        c3 = c3_next
        k0 += W0
        k1 += W1
    # Side by side, so that a thread stores its counter's four words at once.
    even = tl.join(_gumbel_of(c0, pairs, SHIFT, FIRST_CELL), _gumbel_of(c2, pairs, SHIFT, FIRST_CELL))
    odd = tl.join(_gumbel_of(c1, pairs, SHIFT, FIRST_CELL), _gumbel_of(c3, pairs, SHIFT, FIRST_CELL))
    noise = tl.reshape(tl.join(even, odd), [BLOCK * 4])
    token = tl.program_id(1) * (BLOCK * 4) + tl.arange(0, BLOCK * 4)
    tl.store(out + row * vocab_size + token, noise, mask=token < vocab_size)
