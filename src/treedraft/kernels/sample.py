"""From logits to tokens: penalties, bias, min_tokens, temperature, filters and noise.

The twin is `treedraft.speculative.sampling.process` and `sample`. The tokens are the same: every stage is computed with
the same operations in the same order, each rounded once.

Without filters, two launches and one read of the logits:

    blocks   each 8,192 tokens of a row (4,096 with noise) give their best token as a key (kernels.order)
    choose   the best of a row's blocks

With filters two more between them, and one more read, of rows that have a filter:

    blocks   such a row's blocks also give the largest z of each of 128 parts, and a sum of exponentials
    bounds   from the parts' largest: how far below the best the last token that is kept can be. A guess for top-p
    collect  a list of the tokens that are no farther, in any order, and the exact mass of the row
    choose   the filters' ends among the list, by bisection; the best of what is left

The filters keep a run of (z - max z descending, token id ascending), see `process`. A token's mass is a 64-bit integer,
floor(exp(z - max z) * 2^32) as in the twin, so sums are exact in any order. Where the list is too short or too long
(flat logits, top_k in the thousands) a row's end is found over all its tokens instead: a histogram over steps of 1/64
of z - max z, then over the bits of the one step in which the end lies, 11 at a time. The result is the same.

The exponential is the CUDA library's, as in torch; in Triton's interpreter it is numpy's, which may differ in the last
bit of a mass.
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
PARTS = 128  # of a block, strided: token i belongs to part i % 128
LIST = 4096  # the longest list of a row's tokens
MAX_TOP_K = 1024  # beyond it no list is made
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

    logits float32 [B, N, V], contiguous: may be overwritten. The others as of `process` and
    `sample`. block, tile: tokens that a program works on at once in the two launches, powers of two; they change
    nothing but the time. A row whose best logit is infinite, or NaN, is not filtered.
    """
    batch, nodes, vocab = logits.shape
    device, stages = logits.device, rows.stages
    block = block or (8192 if noise is None and vocab > 4096 else 4096)
    num_blocks, num_rows = triton.cdiv(vocab, block), batch * nodes
    has_filters = noise is not None and bool(stages & set(_FILTERS))

    def empty(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    keys, token_ids, has_nan = empty(num_rows, num_blocks), empty(batch, nodes), empty(batch, nodes, dtype=torch.bool)
    of_filters = num_rows if has_filters else 0
    heads = empty(of_filters, num_blocks, PARTS, dtype=torch.float32)
    sums = empty(of_filters, num_blocks, dtype=torch.float32)
    cuts, counts = empty(2, of_filters, dtype=torch.int32).unbind()
    totals, lists, bins = empty(of_filters), empty(of_filters, LIST), empty(of_filters, BINS)
    # Of the twin's own logarithm: the threshold is then the same to the last bit.
    log_min_p = rows.min_p.log() if "min_p" in stages else rows.min_p
    if logits.is_meta:  # a dry run
        return token_ids, has_nan
    settings = (rows.temperature, rows.top_k, rows.top_p, rows.min_p)
    flags = {
        "NOISE": noise is not None,
        "TOP_K": has_filters and "top_k" in stages,
        "TOP_P": has_filters and "top_p" in stages,
        "MIN_P": has_filters and "min_p" in stages,
        "IS_EDITED": bool(stages & {"penalties", "bias", "min_tokens"}),
    }
    depths = depths.contiguous()
    noise_rows = logits if noise is None else noise
    num_depths = 1 if noise is None else noise.shape[1]
    grid = (num_rows, num_blocks)
    _blocks_kernel[grid](
        logits,
        *settings,
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
        heads,
        sums,
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
        PARTS=PARTS,
        enable_fp_fusion=False,
        num_warps=8,
        **flags,
    )
    pad_blocks = triton.next_power_of_2(num_blocks)
    if has_filters:
        _bounds_kernel[(num_rows,)](
            keys,
            *settings,
            log_min_p,
            heads,
            sums,
            cuts,
            counts,
            totals,
            nodes,
            vocab,
            num_blocks,
            PAD_BLOCKS=pad_blocks,
            PARTS=PARTS,
            MAX_TOP_K=MAX_TOP_K,
            LIST=LIST,
            num_warps=4,
            **flags,
        )
        _collect_kernel[grid](
            keys,
            logits,
            rows.temperature,
            cuts,
            counts,
            totals,
            lists,
            nodes,
            vocab,
            num_blocks,
            PAD_BLOCKS=pad_blocks,
            BLOCK=block,
            LIST=LIST,
            MASS_ONE=MASS_ONE,
            enable_fp_fusion=False,
            num_warps=8,
            TOP_P=flags["TOP_P"],
            IS_EDITED=flags["IS_EDITED"],
        )
    _choose_kernel[(num_rows,)](
        keys,
        logits,
        *settings,
        log_min_p,
        depths,
        noise_rows,
        counts,
        totals,
        lists,
        bins,
        token_ids,
        has_nan,
        nodes,
        vocab,
        num_blocks,
        num_depths,
        PAD_BLOCKS=pad_blocks,
        LIST=LIST,
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
    heads,  # [B * N, blocks, PARTS] float32
    sums,  # [B * N, blocks] float32
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
    PARTS: tl.constexpr,
    NOISE: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_P: tl.constexpr,
    MIN_P: tl.constexpr,
    IS_EDITED: tl.constexpr,
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
            if IS_EDITED:
                tl.store(logits + row * vocab + token, z, mask=is_inside)
            parts = tl.max(tl.reshape(z, [BLOCK // PARTS, PARTS]), axis=0)
            out = row * num_blocks + block
            tl.store(heads + out * PARTS + tl.arange(0, PARTS), parts)
            best = tl.max(parts, axis=0)
            tl.store(sums + out, tl.sum(tl.exp(z - tl.where(best == float("-inf"), 0.0, best)), axis=0))
        elif heat > 0.0:
            at = (b * num_depths + tl.load(depths + row)) * vocab + token
            z = tl.load(noise + at, mask=is_inside, other=0.0) + z
    # As in torch, a NaN is the best of all.
    ordered = tl.where(z != z, 0x7FFFFFFE, ordered_bits(z))
    ordered = tl.where(is_nan, 0x7FFFFFFF, ordered)
    key = tl.where(is_inside, keys_of(ordered, token), NO_KEY)
    tl.store(keys + row * num_blocks + block, tl.max(key, axis=0))


@triton.jit
def _best_of(keys, row, num_blocks, PAD_BLOCKS: tl.constexpr):
    """The best key of a row's blocks."""
    block = tl.arange(0, PAD_BLOCKS)
    return tl.max(tl.load(keys + row * num_blocks + block, mask=block < num_blocks, other=NO_KEY), axis=0)


@triton.jit
def _heat_of(temperature, b, IS_EDITED: tl.constexpr):
    """What the stored logits of a sequence with a filter are divided by to give z."""
    heat = tl.load(temperature + b)
    if IS_EDITED:
        heat = heat * 0.0 + 1.0
    return heat


@triton.jit
def _distances(z, heat, start, maximum, vocab, TILE: tl.constexpr):
    """Of a tile: tokens, whether they exist, max z - z as float32 >= 0, and its bits, which order alike."""
    token = start + tl.arange(0, TILE)
    is_inside = token < vocab
    # As the twin divides and subtracts. A missing token is at infinity.
    values = tl.load(z + token, mask=is_inside, other=float("-inf"))
    distance = tl.abs(tl.div_rn(values, tl.zeros([TILE], tl.float32) + heat) - maximum)
    return token, is_inside, distance, distance.to(tl.int32, bitcast=True)


@triton.jit
def _mass_of(distance, MASS_ONE: tl.constexpr):
    """Fixed-point mass of a token, as in the twin."""
    return (_exp(-distance) * MASS_ONE).to(tl.int64)


@triton.jit
def _first_reaching(values, weights, target, last):
    """The smallest number up to `last` at which the weights of the values up to it reach target; else `last`."""
    low = tl.zeros([], tl.int32)
    high = tl.zeros([], tl.int32) + last
    while low < high:
        middle = low + ((high - low) >> 1)
        is_reached = tl.sum(tl.where(values <= middle, weights, 0), axis=0) >= target
        high = tl.where(is_reached, middle, high)
        low = tl.where(is_reached, low, middle + 1)
    return low


@triton.jit
def _bounds_kernel(
    keys,  # [B * N, blocks] int64
    temperature,  # [B] float32
    top_k,  # [B] int64
    top_p,  # [B] float32
    min_p,  # [B] float32
    log_min_p,  # [B] float32
    heads,  # [B * N, blocks, PARTS] float32
    sums,  # [B * N, blocks] float32
    cuts,  # [B * N] int32: bits of the distance up to which tokens are listed; -1: none
    counts,  # [B * N] int32: length of the list, more than LIST where none is made
    totals,  # [B * N] int64: mass of the row
    nodes,
    vocab,
    num_blocks,
    PAD_BLOCKS: tl.constexpr,
    PARTS: tl.constexpr,
    MAX_TOP_K: tl.constexpr,
    LIST: tl.constexpr,
    NOISE: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_P: tl.constexpr,
    MIN_P: tl.constexpr,
    IS_EDITED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    b = row // nodes
    cut = tl.full([], -1, tl.int32)
    count = tl.zeros([], tl.int32)
    maximum = number_of(ordered_of(_best_of(keys, row, num_blocks, PAD_BLOCKS)))
    filtered = _is_filtered(temperature, top_k, top_p, min_p, b, vocab, NOISE, TOP_K, TOP_P, MIN_P)
    if (filtered > 0) & (tl.abs(maximum) < float("inf")):
        k = tl.zeros([], tl.int64)
        share = tl.full([], 1.0, tl.float32)
        if TOP_K:
            k = tl.load(top_k + b)
            k = tl.where(k < vocab, k, 0)
        if TOP_P:
            share = tl.load(top_p + b)
        if MIN_P:
            cut = tl.abs(tl.load(log_min_p + b)).to(tl.int32, bitcast=True)
        if k > MAX_TOP_K:
            cut = tl.full([], -1, tl.int32)
            count = tl.full([], LIST + 1, tl.int32)
        elif (k > 0) | (share < 1.0):
            part = tl.arange(0, PAD_BLOCKS * PARTS)
            is_part = part < num_blocks * PARTS
            head = tl.load(heads + row * num_blocks * PARTS + part, mask=is_part, other=float("-inf"))
            distance = tl.abs(head - maximum)
            bits = distance.to(tl.int32, bitcast=True)
            # A part's best is one token: the first k are no farther than the k-th of the parts' best, and the tokens
            # up to a distance hold at least the mass of the parts' best up to it.
            if k > 0:
                weight = tl.where(is_part, 1.0, 0.0)
                target = k.to(tl.float32)
            else:
                block = tl.arange(0, PAD_BLOCKS)
                is_block = block < num_blocks
                at = row * num_blocks + block
                best = number_of(ordered_of(tl.load(keys + at, mask=is_block, other=0)))
                parts = tl.load(sums + at, mask=is_block, other=0.0) * tl.exp(best - maximum)
                total = tl.sum(tl.where(is_block, parts, 0.0), axis=0)
                weight = tl.exp(-distance)
                target = total * share * 1.001  # rounding; too little is found out later
            cut = _first_reaching(bits, weight, target, 0x7F800000)
    tl.store(cuts + row, cut)
    tl.store(counts + row, count)
    tl.store(totals + row, tl.zeros([], tl.int64))


@triton.jit
def _collect_kernel(
    keys,  # [B * N, blocks] int64
    z,  # [B * N, V] float32
    temperature,  # [B] float32
    cuts,  # [B * N] int32
    counts,  # [B * N] int32
    totals,  # [B * N] int64
    lists,  # [B * N, LIST] int64: bits of the distance, then the token's id
    nodes,
    vocab,
    num_blocks,
    PAD_BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    LIST: tl.constexpr,
    MASS_ONE: tl.constexpr,
    TOP_P: tl.constexpr,
    IS_EDITED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    cut = tl.load(cuts + row)
    if cut >= 0:
        maximum = number_of(ordered_of(_best_of(keys, row, num_blocks, PAD_BLOCKS)))
        heat = _heat_of(temperature, row // nodes, IS_EDITED)
        start = tl.program_id(1) * BLOCK
        token, is_inside, distance, own = _distances(z + row * vocab, heat, start, maximum, vocab, BLOCK)
        if TOP_P:
            tl.atomic_add(totals + row, tl.sum(_mass_of(distance, MASS_ONE), axis=0), sem="relaxed")
        is_listed = is_inside & (own <= cut)
        number = tl.sum(is_listed.to(tl.int32), axis=0)
        if number > 0:
            place = tl.atomic_add(counts + row, number, sem="relaxed") + tl.cumsum(is_listed.to(tl.int32), 0) - 1
            entry = (own.to(tl.int64) << 32) | token.to(tl.int64)
            tl.store(lists + row * LIST + place, entry, mask=is_listed & (place < LIST))


@triton.jit
def _end_of(own, token, weights, target):
    """The end (bits, token id) of the shortest run of the list whose weights reach target; they do."""
    bits = _first_reaching(own, weights, target, 0x7F800000)
    rest = target - tl.sum(tl.where(own < bits, weights, 0), axis=0)
    tied = tl.where(own == bits, weights, 0)
    last_id = tl.full([], 0x7FFFFFFF, tl.int32)
    if rest < tl.sum(tied, axis=0):
        last_id = _first_reaching(token, tied, rest, 0x7FFFFFFF)
    return bits, last_id


@triton.jit
def _coarse(distance, BINS: tl.constexpr):
    """The step of 1/64 in which a distance lies; the last one holds all beyond."""
    return tl.minimum(distance * 64.0, BINS - 1.0).to(tl.int32)


@triton.jit
def _shift_of(width, BINS: tl.constexpr):
    """How far bits below `width` must be shifted to be below BINS."""
    shift = tl.zeros([], tl.int32)
    while ((width - 1) >> shift) >= BINS:
        shift += 1
    return shift


@triton.jit
def _nth_tie(z, heat, maximum, vocab, bits, last_id, n, TILE: tl.constexpr):
    """Id of the n-th token at these bits, n >= 1, of those up to last_id."""
    found = tl.full([], -1, tl.int32)
    seen = tl.zeros([], tl.int32)
    for start in range(0, vocab, TILE):
        token, is_inside, distance, own = _distances(z, heat, start, maximum, vocab, TILE)
        is_tie = (is_inside & (own == bits) & (token <= last_id)).to(tl.int32)
        rank = tl.cumsum(is_tie, 0) + seen
        found = tl.maximum(found, tl.max(tl.where((is_tie > 0) & (rank == n), token, -1), axis=0))
        seen += tl.sum(is_tie, axis=0)
    return found


@triton.jit
def _end_of_all(
    z,
    heat,
    maximum,
    vocab,
    last_bits,
    last_id,
    k,
    share,
    scratch,  # [BINS] int64
    BINS: tl.constexpr,
    MASS_ONE: tl.constexpr,
    TILE: tl.constexpr,
):
    """The end of the first k tokens (k > 0), or of the share of the mass of those up to (last_bits, last_id)."""
    bins = tl.arange(0, BINS)
    # Tokens of at most this mass hold, all together, less than half of what the filter may drop: no need to add them.
    least = tl.where(k > 0, 0, ((1.0 - share) * (0.5 * MASS_ONE) / vocab).to(tl.int64))
    first = tl.zeros([], tl.int32)
    width = tl.full([], 0x7F800001, tl.int32)
    rest = k
    each = tl.full([], 1, tl.int64)
    inside = tl.zeros([], tl.int64)
    is_coarse = tl.full([], 1, tl.int32)
    while width > 1:
        shift = _shift_of(width, BINS)
        total = tl.zeros([], tl.int64)
        tl.debug_barrier()
        tl.store(scratch + bins, tl.zeros([BINS], tl.int64))
        tl.debug_barrier()
        for start in range(0, vocab, TILE):
            token, is_inside, distance, own = _distances(z, heat, start, maximum, vocab, TILE)
            is_left = is_inside & ((own < last_bits) | ((own == last_bits) & (token <= last_id)))
            mass = tl.where(k > 0, 1, _mass_of(distance, MASS_ONE))
            total += tl.sum(tl.where(is_left, mass, 0), axis=0)
            is_here = is_left & (own >= first) & (own - first < width) & (mass > least)
            fine = (own - first) >> shift
            place = tl.where(is_here, tl.where(is_coarse > 0, _coarse(distance, BINS), fine), 0)
            tl.atomic_add(scratch + place, mass, mask=is_here, sem="relaxed")
        tl.debug_barrier()
        if (is_coarse > 0) & (k == 0):
            rest = tl.ceil(total.to(tl.float64) * share.to(tl.float64)).to(tl.int64)
        histogram = tl.load(scratch + bins, cache_modifier=".cg")
        place = tl.minimum(tl.sum((tl.cumsum(histogram, 0) < rest).to(tl.int32), axis=0), BINS - 1)
        rest -= tl.sum(tl.where(bins < place, histogram, 0), axis=0)
        inside = tl.sum(tl.where(bins == place, histogram, 0), axis=0)
        if is_coarse > 0:
            first = (place.to(tl.float32) * 0.015625).to(tl.int32, bitcast=True)
            end = ((place + 1).to(tl.float32) * 0.015625).to(tl.int32, bitcast=True)
            width = tl.where(place == BINS - 1, 0x7F800001, end) - first
        else:
            first += place << shift
            width = tl.minimum(tl.full([], 1, tl.int32) << shift, width - (place << shift))
        is_coarse = tl.zeros([], tl.int32)
    if k == 0:
        each = tl.maximum(_mass_of(first.to(tl.float32, bitcast=True), MASS_ONE), 1)
    wanted = (rest + each - 1) // each
    end_id = tl.where(first == last_bits, last_id, 0x7FFFFFFF)
    if wanted < inside // each:
        end_id = _nth_tie(z, heat, maximum, vocab, first, end_id, wanted.to(tl.int32), TILE)
    return first, end_id


@triton.jit
def _best_of_all(z, heat, noise, maximum, vocab, last_bits, last_id, lowest, TILE: tl.constexpr):
    """The key of the best noised z among all tokens up to (last_bits, last_id) and no farther than `lowest`."""
    best = tl.full([], NO_KEY, tl.int64)
    for start in range(0, vocab, TILE):
        token, is_inside, distance, own = _distances(z, heat, start, maximum, vocab, TILE)
        is_kept = (own < last_bits) | ((own == last_bits) & (token <= last_id))
        is_kept = is_inside & is_kept & (own <= lowest)
        score = tl.load(z + token, mask=is_kept, other=0.0)
        score = tl.div_rn(score, tl.zeros([TILE], tl.float32) + heat)
        score = tl.load(noise + token, mask=is_kept, other=0.0) + score
        key = tl.where(is_kept, keys_of(ordered_bits(score), token), NO_KEY)
        best = tl.maximum(best, tl.max(key, axis=0))
    return best


@triton.jit
def _choose_kernel(
    keys,  # [B * N, blocks] int64
    z,  # [B * N, V] float32
    temperature,  # [B] float32
    top_k,  # [B] int64
    top_p,  # [B] float32
    min_p,  # [B] float32
    log_min_p,  # [B] float32
    depths,  # [B * N] int64
    noise,  # [B, depths, V] float32
    counts,  # [B * N] int32
    totals,  # [B * N] int64
    lists,  # [B * N, LIST] int64
    scratch,  # [B * N, BINS] int64
    token_ids,  # [B * N] int64
    has_nan,  # [B * N] bool
    nodes,
    vocab,
    num_blocks,
    num_depths,
    PAD_BLOCKS: tl.constexpr,
    LIST: tl.constexpr,
    BINS: tl.constexpr,
    MASS_ONE: tl.constexpr,
    TILE: tl.constexpr,
    NOISE: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_P: tl.constexpr,
    MIN_P: tl.constexpr,
    IS_EDITED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    b = row // nodes
    best = _best_of(keys, row, num_blocks, PAD_BLOCKS)
    tl.store(has_nan + row, ordered_of(best) == 0x7FFFFFFF)
    maximum = number_of(ordered_of(best))
    filtered = _is_filtered(temperature, top_k, top_p, min_p, b, vocab, NOISE, TOP_K, TOP_P, MIN_P)
    if TOP_K or TOP_P or MIN_P:
        if (filtered > 0) & (tl.abs(maximum) < float("inf")):
            z += row * vocab
            heat = _heat_of(temperature, b, IS_EDITED)
            k = tl.zeros([], tl.int64)
            share = tl.full([], 1.0, tl.float32)
            if TOP_K:
                k = tl.maximum(tl.load(top_k + b), 0)
                k = tl.where(k < vocab, k, 0)
            if TOP_P:
                share = tl.load(top_p + b)
            noise += (b * num_depths + tl.load(depths + row)) * vocab
            last_bits = tl.full([], 0x7F800000, tl.int32)  # the end of what is kept
            last_id = tl.full([], 0x7FFFFFFF, tl.int32)
            lowest = tl.full([], 0x7F800000, tl.int32)
            if MIN_P:
                lowest = tl.abs(tl.load(log_min_p + b)).to(tl.int32, bitcast=True)

            length = tl.load(counts + row)
            place = tl.arange(0, LIST)
            is_listed = place < tl.minimum(length, LIST)
            entry = tl.load(lists + row * LIST + place, mask=is_listed, other=0x7FFFFFFFFFFFFFFF)
            own, token = (entry >> 32).to(tl.int32), (entry & 0x7FFFFFFF).to(tl.int32)
            mass = tl.where(is_listed, _mass_of(own.to(tl.float32, bitcast=True), MASS_ONE), 0)
            target = tl.zeros([], tl.int64)
            if TOP_P:
                target = tl.ceil(tl.load(totals + row).to(tl.float64) * share.to(tl.float64)).to(tl.int64)
            is_enough = (k > 0) | (share >= 1.0) | (tl.sum(mass, axis=0) >= target)
            if (length <= LIST) & is_enough:
                if TOP_K:
                    if k > 0:
                        last_bits, last_id = _end_of(own, token, is_listed.to(tl.int64), k)
                if TOP_P:
                    if share < 1.0:
                        if k > 0:
                            is_left = (own < last_bits) | ((own == last_bits) & (token <= last_id))
                            mass = tl.where(is_left, mass, 0)
                            left = tl.sum(mass, axis=0).to(tl.float64)
                            target = tl.ceil(left * share.to(tl.float64)).to(tl.int64)
                        bits, end_id = _end_of(own, token, mass, target)
                        last_id = tl.where(bits == last_bits, tl.minimum(last_id, end_id), end_id)
                        last_bits = bits
                is_kept = (own < last_bits) | ((own == last_bits) & (token <= last_id))
                is_kept = is_listed & is_kept & (own <= lowest)
                score = tl.div_rn(tl.load(z + token, mask=is_kept, other=0.0), tl.zeros([LIST], tl.float32) + heat)
                score = tl.load(noise + token, mask=is_kept, other=0.0) + score
                best = tl.max(tl.where(is_kept, keys_of(ordered_bits(score), token), NO_KEY), axis=0)
            else:
                scratch += row * BINS
                if TOP_K:
                    if k > 0:
                        last_bits, last_id = _end_of_all(
                            z, heat, maximum, vocab, last_bits, last_id, k, share, scratch, BINS, MASS_ONE, TILE
                        )
                if TOP_P:
                    if share < 1.0:
                        last_bits, last_id = _end_of_all(
                            z, heat, maximum, vocab, last_bits, last_id, k * 0, share, scratch, BINS, MASS_ONE, TILE
                        )
                best = _best_of_all(z, heat, noise, maximum, vocab, last_bits, last_id, lowest, TILE)
    tl.store(token_ids + row, index_of(best).to(tl.int64))
