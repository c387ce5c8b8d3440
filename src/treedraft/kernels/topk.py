"""The best next tokens of a draft row: sharpness, temperature, noise, log-softmax and top-k in one read of the logits.

The twin is `treedraft.runner.operators.TorchOperators.best_children`. Two launches:

    chunks   each 32 tokens of a row, all in one thread, give their best as a key and their sum of exponentials
    merge    the K best lie in the K chunks whose best are first; these are read again. The sums give the logarithm

A candidate's score is its logit, sharpened and noised, minus maximum, minus log of the sum, as torch computes it. The
sum's order differs from torch's, so that scores differ by about 1e-7 relative, and so may the order of two tokens whose
scores are that near. Everything before the sum is the same to the last bit.

    a block of 4,096 tokens:    8 rows of 512;  chunk c holds tokens 4 c .. 4 c + 3 of each row
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

DEPTH, LINE, SIDE = 8, 512, 4  # rows of a block, tokens of a row, neighbours of one chunk


def best_children_triton(
    logits: Tensor, temperature: Tensor, noise: Tensor | None, target_ids: Tensor | None, topk: int
) -> tuple[Tensor, Tensor]:
    """Return the K best next tokens of each draft row: scores float32 [B, R, K] descending, target ids int64 [B, R, K].

    logits float32 [B, R, Vd]; temperature float32 [B]; noise float32 [B, Vd], or None: plain ranking; target_ids
    int64 [Vd] of the draft's ids, None where ids are the same. Equal scores are ordered by draft id. A row with NaN or
    infinity among its logits has scores -inf, at the first K ids.
    """
    batch, rows, vocab = logits.shape
    logits = logits.contiguous()
    num_blocks = triton.cdiv(vocab, DEPTH * LINE)
    num_chunks = num_blocks * (LINE // SIDE)

    def empty(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=logits.device)

    keys = empty(batch * rows, num_chunks, dtype=torch.int64)
    sums = empty(batch * rows, num_chunks, dtype=torch.float32)
    scores = empty(batch, rows, topk, dtype=torch.float32)
    token_ids = empty(batch, rows, topk, dtype=torch.int64)
    if logits.is_meta:  # a dry run
        return scores, token_ids
    shared = {
        "noise_stride": 0 if noise is None else noise.stride(0),
        "HAS_NOISE": noise is not None,
        "GREEDY": GREEDY_SHARPNESS,
        "SAMPLED": SAMPLED_SHARPNESS,
        "DEPTH": DEPTH,
        "LINE": LINE,
        "SIDE": SIDE,
        "enable_fp_fusion": False,
    }
    noise = logits if noise is None else noise
    _chunks_kernel[(batch * rows, num_blocks)](
        logits, temperature, noise, keys, sums, rows, vocab, num_chunks, num_warps=4, **shared
    )
    pad_chunks = triton.next_power_of_2(num_chunks)
    _merge_kernel[(batch * rows,)](
        logits,
        temperature,
        noise,
        keys,
        sums,
        token_ids if target_ids is None else target_ids,
        scores,
        token_ids,
        rows,
        vocab,
        num_chunks,
        HAS_MAP=target_ids is not None,
        TOPK=topk,
        PAD_K=triton.next_power_of_2(topk),
        PAD_CHUNKS=pad_chunks,
        num_warps=1 if pad_chunks <= 256 else 4 if pad_chunks <= 2048 else 8,
        **shared,
    )
    return scores, token_ids


@triton.jit
def _scales(temperature, b, HAS_NOISE: tl.constexpr, GREEDY: tl.constexpr, SAMPLED: tl.constexpr):
    """What a sequence's logits and its noise are multiplied by, computed as in `draft_scores`."""
    heat = tl.load(temperature + b)
    is_warm = heat > 0
    if HAS_NOISE:
        scale = tl.where(is_warm, tl.div_rn(1.0, tl.where(is_warm, heat, 1.0)) * SAMPLED, GREEDY)
    else:
        scale = tl.where(is_warm, 1.0, GREEDY)
    return scale, tl.where(is_warm, SAMPLED, 0.0)


@triton.jit
def _ranked(logits, noise, scale, noise_scale, tokens, is_inside, HAS_NOISE: tl.constexpr):
    """scale * logit + noise_scale * noise of the tokens, each operation rounded once as in `draft_scores`."""
    x = tl.load(logits + tokens, mask=is_inside, other=0.0) * scale
    if HAS_NOISE:
        x += tl.load(noise + tokens, mask=is_inside, other=0.0) * noise_scale
    return x


@triton.jit
def _chunks_kernel(
    logits,  # [B * R, Vd] float32
    temperature,  # [B] float32
    noise,  # [B, Vd] float32
    keys,  # [B * R, chunks] int64
    sums,  # [B * R, chunks] float32: of exp(x - the chunk's largest x)
    rows,
    vocab,
    num_chunks,
    noise_stride,
    HAS_NOISE: tl.constexpr,
    GREEDY: tl.constexpr,
    SAMPLED: tl.constexpr,
    DEPTH: tl.constexpr,
    LINE: tl.constexpr,
    SIDE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    b = row // rows
    scale, noise_scale = _scales(temperature, b, HAS_NOISE, GREEDY, SAMPLED)
    line = block * (DEPTH * LINE) + tl.arange(0, DEPTH) * LINE
    tokens = line[:, None] + tl.arange(0, LINE)[None, :]
    is_inside = tokens < vocab
    x = _ranked(logits + row * vocab, noise + b * noise_stride, scale, noise_scale, tokens, is_inside, HAS_NOISE)
    key = tl.where(is_inside, keys_of(ordered_bits(x), tokens), NO_KEY)
    best = tl.max(tl.max(tl.reshape(key, [DEPTH, LINE // SIDE, SIDE]), axis=2), axis=0)
    largest = number_of(ordered_of(best))
    # A chunk of -inf alone has a sum of zero. NaN and +inf make it NaN.
    shift = tl.where((best == NO_KEY) | (largest == float("-inf")), 0.0, largest)
    x = tl.where(is_inside, x, float("-inf"))
    parts = tl.exp(tl.reshape(x, [DEPTH, LINE // SIDE, SIDE]) - shift[None, :, None])
    chunk = row * num_chunks + block * (LINE // SIDE) + tl.arange(0, LINE // SIDE)
    tl.store(keys + chunk, best)
    tl.store(sums + chunk, tl.sum(tl.sum(parts, axis=2), axis=0))


@triton.jit
def _merge_kernel(
    logits,  # [B * R, Vd] float32
    temperature,  # [B] float32
    noise,  # [B, Vd] float32
    keys,  # [B * R, chunks] int64
    sums,  # [B * R, chunks] float32
    target_ids,  # [Vd] int64
    scores,  # [B * R, K] float32
    token_ids,  # [B * R, K] int64
    rows,
    vocab,
    num_chunks,
    noise_stride,
    HAS_NOISE: tl.constexpr,
    HAS_MAP: tl.constexpr,
    GREEDY: tl.constexpr,
    SAMPLED: tl.constexpr,
    TOPK: tl.constexpr,
    PAD_K: tl.constexpr,
    PAD_CHUNKS: tl.constexpr,
    DEPTH: tl.constexpr,
    LINE: tl.constexpr,
    SIDE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    b = row // rows
    chunk = tl.arange(0, PAD_CHUNKS)
    is_chunk = chunk < num_chunks
    head = tl.load(keys + row * num_chunks + chunk, mask=is_chunk, other=NO_KEY)
    parts = tl.load(sums + row * num_chunks + chunk, mask=is_chunk, other=0.0)
    first = tl.max(head, axis=0)
    maximum = number_of(ordered_of(first))
    # A sum of zero is of a chunk of -inf or of nothing: exp(-inf - -inf) must not make NaN of it.
    parts = tl.where(parts == 0.0, 0.0, parts * tl.exp(number_of(ordered_of(head)) - maximum))
    total = tl.sum(parts, axis=0)
    is_sound = total > 0.0  # not so of NaN, nor where all is -inf
    log_total = tl.log(tl.where(is_sound, total, 1.0))

    column = tl.arange(0, PAD_K)
    chosen = tl.full([PAD_K], -1, tl.int32)  # a token of each chunk; -1: there are not so many
    best = first
    for k in tl.static_range(TOPK):
        chosen = tl.where(column == k, tl.where(best == NO_KEY, -1, index_of(best)), chosen)
        best = tl.max(tl.where(head < best, head, NO_KEY), axis=0)

    base = chosen // (DEPTH * LINE) * (DEPTH * LINE) + chosen % LINE // SIDE * SIDE
    member = tl.arange(0, DEPTH * SIDE)
    tokens = base[:, None] + (member // SIDE * LINE + member % SIDE)[None, :]
    is_inside = (tokens < vocab) & (chosen >= 0)[:, None]
    scale, noise_scale = _scales(temperature, b, HAS_NOISE, GREEDY, SAMPLED)
    x = _ranked(logits + row * vocab, noise + b * noise_stride, scale, noise_scale, tokens, is_inside, HAS_NOISE)
    key = tl.where(is_inside, keys_of(ordered_bits(x - maximum - log_total), tokens), NO_KEY)
    key = tl.reshape(key, [PAD_K * DEPTH * SIDE])
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
