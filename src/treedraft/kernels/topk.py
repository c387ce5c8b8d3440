"""The best next tokens of a draft row: sharpness, temperature, noise, log-softmax and top-k in one read of the logits.

The twin is `treedraft.runner.operators.TorchOperators.best_children`. Two launches:

    blocks   each 1,024 tokens of a row give their maximum, their sum of exponentials and their K best as keys
    merge    a row's blocks give the logarithm of the sum, and of K * blocks candidates the K best by (score, id)

A candidate's score is its logit, sharpened and noised, minus maximum, minus log of the sum, as torch computes it. The
sum's order differs from torch's, so that scores differ by about 1e-7 relative, and so may the order of two tokens whose
scores are that near. Everything before the sum is the same to the last bit.
"""

# mypy: disable-error-code="no-untyped-def"
# (Triton reads the annotations of a kernel: tl.constexpr or none.)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from treedraft.kernels.order import NO_KEY, index_of, keys_of, number_of, ordered_bits, ordered_of
from treedraft.speculative.sampling import GREEDY_SHARPNESS, SAMPLED_SHARPNESS

CHUNKS = 128  # strided parts of a block for each warp: with 4 to a thread, a thread holds whole chunks


def best_children_triton(
    logits: Tensor,
    temperature: Tensor,
    noise: Tensor | None,
    target_ids: Tensor | None,
    topk: int,
    block: int = 1024,
    num_warps: int = 1,
) -> tuple[Tensor, Tensor]:
    """Return the K best next tokens of each draft row: scores float32 [B, R, K] descending, target ids int64 [B, R, K].

    logits float32 [B, R, Vd]; temperature float32 [B]; noise float32 [B, Vd], or None: plain ranking; target_ids
    int64 [Vd] of the draft's ids, None where ids are the same. Equal scores are ordered by
    draft id. A row with NaN or infinity among its logits has scores -inf, at the first K ids. block: tokens of a
    program, a power of two >= 128 * num_warps. Neither changes anything but the time.
    """
    batch, rows, vocab = logits.shape
    logits = logits.contiguous()
    chunks = CHUNKS * num_warps
    num_blocks = triton.cdiv(vocab, block)
    pad_k = triton.next_power_of_2(topk)

    def empty(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=logits.device)

    keys = empty(batch * rows, num_blocks, topk, dtype=torch.int64)
    sums = empty(batch * rows, num_blocks, 2, dtype=torch.float32)
    scores = empty(batch, rows, topk, dtype=torch.float32)
    token_ids = empty(batch, rows, topk, dtype=torch.int64)
    if logits.is_meta:  # a dry run
        return scores, token_ids
    _blocks_kernel[(batch * rows, num_blocks)](
        logits,
        temperature,
        logits if noise is None else noise,
        keys,
        sums,
        rows,
        vocab,
        num_blocks,
        0 if noise is None else noise.stride(0),
        HAS_NOISE=noise is not None,
        GREEDY=GREEDY_SHARPNESS,
        SAMPLED=SAMPLED_SHARPNESS,
        TOPK=topk,
        PAD_K=pad_k,
        CHUNKS=chunks,
        WIDTH=block // chunks,
        enable_fp_fusion=False,
        num_warps=num_warps,
    )
    candidates = triton.next_power_of_2(num_blocks * topk)
    _merge_kernel[(batch * rows,)](
        keys,
        sums,
        token_ids if target_ids is None else target_ids,
        scores,
        token_ids,
        num_blocks,
        HAS_MAP=target_ids is not None,
        TOPK=topk,
        PAD_K=pad_k,
        PAD_BLOCKS=triton.next_power_of_2(num_blocks),
        PAD_CANDIDATES=candidates,
        enable_fp_fusion=False,
        num_warps=1 if candidates <= 256 else 4,
    )
    return scores, token_ids


@triton.jit
def _ranked(x, noise, scale, noise_scale, tokens, is_inside, HAS_NOISE: tl.constexpr):
    """scale * x + noise_scale * noise of the tokens, each operation rounded once as in `draft_scores`."""
    x = x * scale
    if HAS_NOISE:
        x += tl.load(noise + tokens, mask=is_inside, other=0.0) * noise_scale
    return x


@triton.jit
def _blocks_kernel(
    logits,  # [B * R, Vd] float32
    temperature,  # [B] float32
    noise,  # [B, Vd] float32
    keys,  # [B * R, blocks, K] int64
    sums,  # [B * R, blocks, 2] float32: maximum, sum of exp(x - maximum)
    rows,
    vocab,
    num_blocks,
    noise_stride,
    HAS_NOISE: tl.constexpr,
    GREEDY: tl.constexpr,
    SAMPLED: tl.constexpr,
    TOPK: tl.constexpr,
    PAD_K: tl.constexpr,
    CHUNKS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    b = row // rows
    heat = tl.load(temperature + b)
    is_warm = heat > 0
    if HAS_NOISE:
        scale = tl.where(is_warm, tl.div_rn(1.0, tl.where(is_warm, heat, 1.0)) * SAMPLED, GREEDY)
    else:
        scale = tl.where(is_warm, 1.0, GREEDY)
    noise_scale = tl.where(is_warm, SAMPLED, 0.0)
    logits += row * vocab
    noise += b * noise_stride
    start = block * (CHUNKS * WIDTH)

    chunk = tl.arange(0, CHUNKS)
    across = tl.arange(0, WIDTH)
    tokens = start + across[:, None] * CHUNKS + chunk[None, :]
    is_inside = tokens < vocab
    x = tl.load(logits + tokens, mask=is_inside, other=0.0)
    x = _ranked(x, noise, scale, noise_scale, tokens, is_inside, HAS_NOISE)
    key = tl.where(is_inside, keys_of(ordered_bits(x), tokens), NO_KEY)
    heads = tl.max(key, axis=0)  # each chunk's best

    # The K best lie in the K chunks with the best heads: keys never tie.
    place = tl.arange(0, PAD_K)
    chosen = tl.full([PAD_K], 0, tl.int32)
    for k in tl.static_range(TOPK):
        best = tl.max(heads, axis=0)
        if k == 0:
            top = best
        chosen = tl.where(place == k, (index_of(best) - start) % CHUNKS, chosen)
        heads = tl.where(heads == best, NO_KEY, heads)

    maximum = number_of(ordered_of(top))
    # All at -inf: a sum of zero, which the merge understands. NaN and +inf make the sum NaN.
    shift = tl.where(maximum == float("-inf"), 0.0, maximum)
    total = tl.sum(tl.sum(tl.where(is_inside, tl.exp(x - shift), 0.0), axis=0), axis=0)
    out = row * num_blocks + block
    tl.store(sums + out * 2, maximum)
    tl.store(sums + out * 2 + 1, total)

    tokens = start + across[:, None] * CHUNKS + chosen[None, :]
    is_inside = (tokens < vocab) & (place[None, :] < TOPK)
    x = tl.load(logits + tokens, mask=is_inside, other=0.0)
    x = _ranked(x, noise, scale, noise_scale, tokens, is_inside, HAS_NOISE)
    key = tl.where(is_inside, keys_of(ordered_bits(x), tokens), NO_KEY)
    for k in tl.static_range(TOPK):
        best = tl.max(tl.max(key, axis=0), axis=0)
        tl.store(keys + out * TOPK + k, best)
        key = tl.where(key == best, NO_KEY, key)


@triton.jit
def _merge_kernel(
    keys,  # [B * R, blocks, K] int64
    sums,  # [B * R, blocks, 2] float32
    target_ids,  # [Vd] int64
    scores,  # [B * R, K] float32
    token_ids,  # [B * R, K] int64
    num_blocks,
    HAS_MAP: tl.constexpr,
    TOPK: tl.constexpr,
    PAD_K: tl.constexpr,
    PAD_BLOCKS: tl.constexpr,
    PAD_CANDIDATES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, PAD_BLOCKS)
    is_block = block < num_blocks
    at = sums + (row * num_blocks + block) * 2
    maxima = tl.load(at, mask=is_block, other=float("-inf"))
    parts = tl.load(at + 1, mask=is_block, other=0.0)
    maximum = tl.max(maxima, axis=0)
    # A block of only -inf has a sum of 0; exp(-inf - -inf) must not make NaN of it.
    total = tl.sum(tl.where(parts == 0.0, 0.0, parts * tl.exp(maxima - maximum)), axis=0)
    is_sound = total > 0.0  # not so of NaN, nor where all is -inf
    log_total = tl.log(tl.where(is_sound, total, 1.0))

    place = tl.arange(0, PAD_CANDIDATES)
    key = tl.load(keys + row * num_blocks * TOPK + place, mask=place < num_blocks * TOPK, other=NO_KEY)
    score = number_of(ordered_of(key)) - maximum - log_total
    key = tl.where(key == NO_KEY, NO_KEY, keys_of(ordered_bits(score), index_of(key)))

    column = tl.arange(0, PAD_K)
    found = tl.full([PAD_K], NO_KEY, tl.int64)
    for k in tl.static_range(TOPK):
        best = tl.max(key, axis=0)
        found = tl.where(column == k, best, found)
        key = tl.where(key == best, NO_KEY, key)
    score = tl.where(is_sound, number_of(ordered_of(found)), float("-inf"))
    draft_id = tl.where(is_sound, index_of(found), column)
    is_column = column < TOPK
    token = draft_id.to(tl.int64)
    if HAS_MAP:
        token = tl.load(target_ids + draft_id, mask=is_column, other=0)
    tl.store(scores + row * TOPK + column, score, mask=is_column)
    tl.store(token_ids + row * TOPK + column, token, mask=is_column)
