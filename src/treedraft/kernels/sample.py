"""From logits to tokens: penalties, bias, min_tokens, temperature, filters and noise. Two launches.

The twin is `treedraft.speculative.sampling.process` and `sample`. The tokens are the same: every stage is computed with
the same operations in the same order, each rounded once.

    blocks   each 8,192 tokens of a row give their best token as a key (kernels.order). Without filters that is all,
             and the logits are read once. A row with filters has its z written over its logits instead
    choose   the best of a row's blocks; with filters the thresholds by search, then the best of what is left

The filters keep a run of (z - max z descending, token id ascending), see `process`. Its end is found without a sort:
a histogram over steps of 1/64 of z - max z, then histograms over the bits of the one step in which the end lies, 11
at a time, until one number is left; of tokens at that number the first ones by id. Numbers of tokens (top-k) are
counted in shared memory. Masses (top-p) are 64-bit integers, floor(exp(z - max z) * 2^32) as in the twin, added to
the histogram in any order with one result. Tokens that together cannot hold (1 - top_p) / 2 of the mass of the first
one are left out of it; they still count for the total. The exponential is the CUDA library's, as in torch; in Triton's
interpreter it is numpy's, which may differ in the last bit of a mass.
"""

# mypy: disable-error-code="no-untyped-def"
# (Triton reads the annotations of a kernel: tl.constexpr or none.)

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from treedraft.kernels.order import NO_KEY, index_of, keys_of, number_of, ordered_bits, ordered_of
from treedraft.speculative.sampling import MASS_ONE, SamplingRows

BINS = 2048  # of a histogram
_FILTERS = ("top_k", "top_p", "min_p")

if os.environ.get("TRITON_INTERPRET") == "1":  # the interpreter has no libraries

    @triton.jit
    def _exp(x):
        return tl.exp(x)
else:

    @triton.jit
    def _exp(x):
        return libdevice.exp(x)


def sample_nodes_triton(
    logits: Tensor,
    rows: SamplingRows,
    paths: Tensor,
    depths: Tensor,
    kv_lens: Tensor,
    noise: Tensor | None,
    block: int | None = None,
    tile: int = 4096,
) -> tuple[Tensor, Tensor]:
    """Return the token at every node, int64 [B, N], and whether its logits hold a NaN, bool [B, N].

    logits float32 [B, N, V], contiguous: overwritten where a sequence has a filter. The others as of `process` and
    `sample`. block, tile: tokens that a program works on at once in the two launches, powers of two; they change
    nothing but the time. A row whose best logit is infinite, or NaN, is not filtered.
    """
    batch, nodes, vocab = logits.shape
    device = logits.device
    block = block or (4096 if vocab <= 4096 else 8192)
    num_blocks = triton.cdiv(vocab, block)
    stages = rows.stages
    has_filters = bool(stages & set(_FILTERS))
    keys = torch.empty((batch * nodes, num_blocks), dtype=torch.int64, device=device)
    token_ids = torch.empty((batch, nodes), dtype=torch.int64, device=device)
    has_nan = torch.empty((batch, nodes), dtype=torch.bool, device=device)
    masses = torch.empty((batch * nodes, BINS) if "top_p" in stages else (0,), dtype=torch.int64, device=device)
    # Of the twin's own logarithm: the threshold is then the same to the last bit.
    log_min_p = rows.min_p.log() if "min_p" in stages else rows.min_p
    if logits.is_meta:  # a dry run
        return token_ids, has_nan
    flags = {
        "NOISE": "noise" in stages and noise is not None,
        "TOP_K": "top_k" in stages,
        "TOP_P": "top_p" in stages,
        "MIN_P": "min_p" in stages,
    }
    depths = depths.contiguous()
    noise_rows = logits if noise is None else noise
    num_depths = 1 if noise is None else noise.shape[1]
    _blocks_kernel[(batch * nodes, num_blocks)](
        logits,
        rows.temperature,
        rows.top_k,
        rows.top_p,
        rows.min_p,
        rows.repetition_penalty,
        rows.presence_penalty,
        rows.frequency_penalty,
        rows.prompt_lens,
        rows.min_tokens,
        rows.stop_ids,
        rows.prompt_seen,
        rows.output_counts,
        rows.logit_bias,
        paths.contiguous(),
        depths,
        kv_lens,
        noise_rows,
        keys,
        nodes,
        vocab,
        num_blocks,
        num_depths,
        paths.shape[-1],
        PENALTIES="penalties" in stages,
        BIAS="bias" in stages,
        MIN_TOKENS="min_tokens" in stages,
        NUM_STOPS=rows.stop_ids.shape[1],
        BLOCK=block,
        enable_fp_fusion=False,
        num_warps=8 if block >= 4096 else 4,
        **flags,
    )
    _choose_kernel[(batch * nodes,)](
        keys,
        logits,
        rows.temperature,
        rows.top_k,
        rows.top_p,
        rows.min_p,
        log_min_p,
        depths,
        noise_rows,
        masses,
        token_ids,
        has_nan,
        nodes,
        vocab,
        num_blocks,
        num_depths,
        PAD_BLOCKS=triton.next_power_of_2(num_blocks),
        BINS=BINS,
        MASS_ONE=MASS_ONE,
        TILE=tile,
        enable_fp_fusion=False,
        num_warps=8 if has_filters else 1,
        **flags,
    )
    return token_ids, has_nan


@triton.jit
def _is_filtered(
    temperature,
    top_k,
    top_p,
    min_p,
    b,
    vocab,
    NOISE: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_P: tl.constexpr,
    MIN_P: tl.constexpr,
):
    """Whether a filter can change the sequence's token: int32 0 or 1. At T = 0 none can."""
    found = tl.zeros([], tl.int32)
    if NOISE:
        if TOP_K:
            k = tl.load(top_k + b)
            found |= ((k > 0) & (k < vocab)).to(tl.int32)
        if TOP_P:
            found |= (tl.load(top_p + b) < 1.0).to(tl.int32)
        if MIN_P:
            found |= (tl.load(min_p + b) > 0.0).to(tl.int32)
        found &= (tl.load(temperature + b) > 0.0).to(tl.int32)
    return found


@triton.jit
def _blocks_kernel(
    logits,  # [B * N, V] float32
    temperature,  # [B] float32
    top_k,  # [B] int64
    top_p,  # [B] float32
    min_p,  # [B] float32
    repetition_penalty,  # [B] float32
    presence_penalty,  # [B] float32
    frequency_penalty,  # [B] float32
    prompt_lens,  # [B] int64
    min_tokens,  # [B] int64
    stop_ids,  # [B, 16] int64
    prompt_seen,  # [B, V] bool
    output_counts,  # [B, V] int32
    logit_bias,  # [B, V] float32
    paths,  # [B * N, D] int64
    depths,  # [B * N] int64
    kv_lens,  # [B] int64
    noise,  # [B, depths, V] float32
    keys,  # [B * N, blocks] int64
    nodes,
    vocab,
    num_blocks,
    num_depths,
    path_width,
    PENALTIES: tl.constexpr,
    BIAS: tl.constexpr,
    MIN_TOKENS: tl.constexpr,
    NUM_STOPS: tl.constexpr,
    BLOCK: tl.constexpr,
    NOISE: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_P: tl.constexpr,
    MIN_P: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    b = row // nodes
    token = block * BLOCK + tl.arange(0, BLOCK)
    is_inside = token < vocab
    z = tl.load(logits + row * vocab + token, mask=is_inside, other=float("-inf"))
    is_nan = z != z
    of_sequence = b * vocab + token
    if PENALTIES:
        repetition = tl.load(repetition_penalty + b)
        presence = tl.load(presence_penalty + b)
        frequency = tl.load(frequency_penalty + b)
        if (repetition != 1.0) | (presence != 0.0) | (frequency != 0.0):
            count = tl.load(output_counts + of_sequence, mask=is_inside, other=0)
            for depth in range(path_width):
                count += (token == tl.load(paths + row * path_width + depth)).to(tl.int32)
            is_seen = (tl.load(prompt_seen + of_sequence, mask=is_inside, other=0) != 0) | (count > 0)
            factor = tl.where(is_seen, repetition, 1.0)
            offset = frequency * count.to(tl.float32) + presence * (count > 0).to(tl.float32)
            z = tl.div_rn(tl.where(z < 0.0, 0.0, z), factor) + tl.where(z > 0.0, 0.0, z) * factor - offset
    if BIAS:
        z += tl.load(logit_bias + of_sequence, mask=is_inside, other=0.0)
    if MIN_TOKENS:
        output_index = tl.load(kv_lens + b) + tl.load(depths + row) + 1 - tl.load(prompt_lens + b)
        if output_index < tl.load(min_tokens + b):
            for i in range(NUM_STOPS):
                z = tl.where(token == tl.load(stop_ids + b * NUM_STOPS + i), float("-inf"), z)
    if NOISE:
        heat = tl.load(temperature + b)
        z = tl.div_rn(z, tl.zeros([BLOCK], tl.float32) + tl.where(heat > 0.0, heat, 1.0))
        if _is_filtered(temperature, top_k, top_p, min_p, b, vocab, NOISE, TOP_K, TOP_P, MIN_P) > 0:
            tl.store(logits + row * vocab + token, z, mask=is_inside)
        elif heat > 0.0:
            at = (b * num_depths + tl.load(depths + row)) * vocab + token
            z = tl.load(noise + at, mask=is_inside, other=0.0) + z
    # As in torch, a NaN is the best of all.
    ordered = tl.where(z != z, 0x7FFFFFFE, ordered_bits(z))
    ordered = tl.where(is_nan, 0x7FFFFFFF, ordered)
    key = tl.where(is_inside, keys_of(ordered, token), NO_KEY)
    tl.store(keys + row * num_blocks + block, tl.max(key, axis=0))


@triton.jit
def _distances(z, start, maximum, vocab, TILE: tl.constexpr):
    """Of a tile: tokens, whether they exist, max z - z as float32 >= 0, and its bits, which order alike."""
    token = start + tl.arange(0, TILE)
    is_inside = token < vocab
    # As the twin subtracts it. A missing token is at infinity.
    distance = tl.abs(tl.load(z + token, mask=is_inside, other=float("-inf")) - maximum)
    return token, is_inside, distance, distance.to(tl.int32, bitcast=True)


@triton.jit
def _coarse(distance, BINS: tl.constexpr):
    """The step of 1/64 in which a distance lies; the last one holds all beyond."""
    return tl.minimum(distance * 64.0, BINS - 1.0).to(tl.int32)


@triton.jit
def _coarse_range(step, BINS: tl.constexpr):
    """First bits of a step, and the number of them."""
    first = (step.to(tl.float32) * 0.015625).to(tl.int32, bitcast=True)
    end = ((step + 1).to(tl.float32) * 0.015625).to(tl.int32, bitcast=True)
    return first, tl.where(step == BINS - 1, 0x7F800001, end) - first


@triton.jit
def _shift_of(width, BINS: tl.constexpr):
    """How far bits below `width` must be shifted to be below BINS."""
    shift = tl.zeros([], tl.int32)
    while ((width - 1) >> shift) >= BINS:
        shift += 1
    return shift


@triton.jit
def _bin_of(histogram, target, BINS: tl.constexpr):
    """The first bin at which the running sum reaches target, what comes before it, and what is in it."""
    bins = tl.arange(0, BINS)
    found = tl.minimum(tl.sum((tl.cumsum(histogram, 0) < target).to(tl.int32), axis=0), BINS - 1)
    before = tl.sum(tl.where(bins < found, histogram, 0), axis=0)
    return found, before, tl.sum(tl.where(bins == found, histogram, 0), axis=0)


@triton.jit
def _nth_tie(z, maximum, vocab, bits, last_id, n, TILE: tl.constexpr):
    """Id of the n-th token at these bits, n >= 1, of those up to last_id."""
    found = tl.full([], -1, tl.int32)
    seen = tl.zeros([], tl.int32)
    for start in range(0, vocab, TILE):
        token, is_inside, distance, own = _distances(z, start, maximum, vocab, TILE)
        is_tie = (is_inside & (own == bits) & (token <= last_id)).to(tl.int32)
        rank = tl.cumsum(is_tie, 0) + seen
        found = tl.maximum(found, tl.max(tl.where((is_tie > 0) & (rank == n), token, -1), axis=0))
        seen += tl.sum(is_tie, axis=0)
    return found


@triton.jit
def _count_search(z, maximum, vocab, k, BINS: tl.constexpr, TILE: tl.constexpr):
    """Bits of the k-th token, and the last id of those at these bits that belong to the first k."""
    bins = tl.arange(0, BINS)
    num_tiles = tl.cdiv(vocab, TILE)
    counts = tl.zeros([BINS], tl.int32)
    for start in range(0, vocab, TILE):
        token, is_inside, distance, own = _distances(z, start, maximum, vocab, TILE)
        counts += tl.histogram(_coarse(distance, BINS), BINS)
    counts -= tl.where(bins == BINS - 1, num_tiles * TILE - vocab, 0)  # tokens that do not exist
    step, before, inside = _bin_of(counts, k, BINS)
    rest = k - before
    first, width = _coarse_range(step, BINS)
    while width > 1:
        shift = _shift_of(width, BINS)
        counts = tl.zeros([BINS], tl.int32)
        others = tl.zeros([], tl.int32)
        for start in range(0, vocab, TILE):
            token, is_inside, distance, own = _distances(z, start, maximum, vocab, TILE)
            is_here = is_inside & (own >= first) & (own - first < width)
            counts += tl.histogram(tl.where(is_here, (own - first) >> shift, BINS - 1), BINS)
            others += TILE - tl.sum(is_here.to(tl.int32), axis=0)
        counts -= tl.where(bins == BINS - 1, others, 0)
        digit, before, inside = _bin_of(counts, rest, BINS)
        rest -= before
        first += digit << shift
        width = tl.minimum(tl.full([], 1, tl.int32) << shift, width - (digit << shift))
    last_id = tl.full([], 0x7FFFFFFF, tl.int32)
    if rest < inside:
        last_id = _nth_tie(z, maximum, vocab, first, last_id, rest, TILE)
    return first, last_id


@triton.jit
def _mass_of(distance, MASS_ONE: tl.constexpr):
    """Fixed-point mass of a token, as in the twin."""
    return (_exp(-distance) * MASS_ONE).to(tl.int64)


@triton.jit
def _mass_search(
    z, maximum, vocab, last_bits, last_id, share, masses, BINS: tl.constexpr, MASS_ONE: tl.constexpr, TILE: tl.constexpr
):
    """As `_count_search`, of the share of the mass of the tokens up to (last_bits, last_id). masses: [BINS] scratch."""
    bins = tl.arange(0, BINS)
    # Tokens of at most this mass hold, all together, less than half of what the filter may drop.
    least = ((1.0 - share) * (0.5 * MASS_ONE) / vocab).to(tl.int64)
    total = tl.zeros([], tl.int64)
    tl.store(masses + bins, tl.zeros([BINS], tl.int64))
    tl.debug_barrier()
    for start in range(0, vocab, TILE):
        token, is_inside, distance, own = _distances(z, start, maximum, vocab, TILE)
        is_left = is_inside & ((own < last_bits) | ((own == last_bits) & (token <= last_id)))
        mass = tl.where(is_left, _mass_of(distance, MASS_ONE), 0)
        total += tl.sum(mass, axis=0)
        tl.atomic_add(masses + _coarse(distance, BINS), mass, mask=mass > least, sem="relaxed")
    tl.debug_barrier()
    rest = tl.ceil(total.to(tl.float64) * share.to(tl.float64)).to(tl.int64)
    step, before, inside = _bin_of(tl.load(masses + bins, cache_modifier=".cg"), rest, BINS)
    rest -= before
    first, width = _coarse_range(step, BINS)
    while width > 1:
        shift = _shift_of(width, BINS)
        tl.debug_barrier()
        tl.store(masses + bins, tl.zeros([BINS], tl.int64))
        tl.debug_barrier()
        for start in range(0, vocab, TILE):
            token, is_inside, distance, own = _distances(z, start, maximum, vocab, TILE)
            is_left = is_inside & ((own < last_bits) | ((own == last_bits) & (token <= last_id)))
            is_here = is_left & (own >= first) & (own - first < width)
            digit = tl.where(is_here, (own - first) >> shift, 0)
            tl.atomic_add(masses + digit, _mass_of(distance, MASS_ONE), mask=is_here, sem="relaxed")
        tl.debug_barrier()
        digit, before, inside = _bin_of(tl.load(masses + bins, cache_modifier=".cg"), rest, BINS)
        rest -= before
        first += digit << shift
        width = tl.minimum(tl.full([], 1, tl.int32) << shift, width - (digit << shift))
    each = tl.maximum(_mass_of(first.to(tl.float32, bitcast=True), MASS_ONE), 1)
    wanted = (rest + each - 1) // each
    end_id = tl.where(first == last_bits, last_id, 0x7FFFFFFF)
    if wanted < inside // each:
        end_id = _nth_tie(z, maximum, vocab, first, end_id, wanted.to(tl.int32), TILE)
    return first, end_id


@triton.jit
def _choose_kernel(
    keys,  # [B * N, blocks] int64
    z,  # [B * N, V] float32, of sequences with a filter
    temperature,  # [B] float32
    top_k,  # [B] int64
    top_p,  # [B] float32
    min_p,  # [B] float32
    log_min_p,  # [B] float32
    depths,  # [B * N] int64
    noise,  # [B, depths, V] float32
    masses,  # [B * N, BINS] int64
    token_ids,  # [B * N] int64
    has_nan,  # [B * N] bool
    nodes,
    vocab,
    num_blocks,
    num_depths,
    PAD_BLOCKS: tl.constexpr,
    BINS: tl.constexpr,
    MASS_ONE: tl.constexpr,
    TILE: tl.constexpr,
    NOISE: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_P: tl.constexpr,
    MIN_P: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    b = row // nodes
    block = tl.arange(0, PAD_BLOCKS)
    best = tl.max(tl.load(keys + row * num_blocks + block, mask=block < num_blocks, other=NO_KEY), axis=0)
    tl.store(has_nan + row, ordered_of(best) == 0x7FFFFFFF)
    maximum = number_of(ordered_of(best))
    is_finite = tl.abs(maximum) < float("inf")
    filtered = _is_filtered(temperature, top_k, top_p, min_p, b, vocab, NOISE, TOP_K, TOP_P, MIN_P)
    if NOISE and (TOP_K or TOP_P or MIN_P):
        if (filtered > 0) & is_finite:
            z += row * vocab
            last_bits = tl.full([], 0x7F800000, tl.int32)  # the end of what is kept
            last_id = tl.full([], 0x7FFFFFFF, tl.int32)
            if TOP_K:
                k = tl.load(top_k + b)
                if (k > 0) & (k < vocab):
                    last_bits, last_id = _count_search(z, maximum, vocab, k.to(tl.int32), BINS, TILE)
            if TOP_P:
                share = tl.load(top_p + b)
                if share < 1.0:
                    scratch = masses + row * BINS
                    last_bits, last_id = _mass_search(
                        z, maximum, vocab, last_bits, last_id, share, scratch, BINS, MASS_ONE, TILE
                    )
            if MIN_P:
                bits = tl.abs(tl.load(log_min_p + b)).to(tl.int32, bitcast=True)
                last_id = tl.where(bits < last_bits, 0x7FFFFFFF, last_id)
                last_bits = tl.minimum(bits, last_bits)
            noise += (b * num_depths + tl.load(depths + row)) * vocab
            best = tl.full([], NO_KEY, tl.int64)
            for start in range(0, vocab, TILE):
                token, is_inside, distance, own = _distances(z, start, maximum, vocab, TILE)
                is_kept = is_inside & ((own < last_bits) | ((own == last_bits) & (token <= last_id)))
                score = tl.load(noise + token, mask=is_kept, other=0.0) + tl.load(z + token, mask=is_kept, other=0.0)
                key = tl.where(is_kept, keys_of(ordered_bits(score), token), NO_KEY)
                best = tl.maximum(best, tl.max(key, axis=0))
    tl.store(token_ids + row, index_of(best).to(tl.int64))
