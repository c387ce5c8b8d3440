"""Tree attention over an MLA cache (latent 512 + rope 64, bfloat16, pages of 64) for sm_90, in Gluon of Triton 3.6.

A thread block works on 64 query rows (token * heads + head) and a range of key tiles of 64 keys, item after item
(kernels.mla_plan), 12 warps:

    left     4 warps   even key tiles: scores and softmax;  output columns   0 .. 255 of all tiles
    right    4 warps   odd key tiles: scores and softmax;   output columns 256 .. 511 of all tiles
    loaders  4 x 1     one for each (tile parity, column half): it waits for one buffer alone, so none blocks another

A key tile is loaded once and serves as keys and as values. While one half multiplies, the other is in its softmax; for
each pair of tiles they exchange the row maximum and the weights P (in the place of the tile's roped keys):

    left:   S0 -> m0 -> P0 V0[left] ............... wait P1 -> P1 V1[left] -> next S0
    right:  S1 ......... wait m0 -> m1, P1 -> P1 V1[right], wait P0 -> P0 V0[right] -> next S1

Keys below kv_len are seen by all rows. Key kv_len + j is seen by a token whose ancestor bit j is set. In tiles that
reach beyond kv_len, scores of unseen keys become -inf, and values that are no numbers become numbers: slots that no
row sees may hold NaN, and 0 * NaN is NaN. Page numbers beyond the pool read zeros.

The schedule of the halves follows the published description of FlashMLA's kernel for Hopper; the code is our own.
"""

# mypy: disable-error-code="no-untyped-def"
# (Gluon reads the annotations of a kernel: gl.constexpr or none.)

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from treedraft.kernels import mla_plan
from treedraft.kernels.mla_plan import TILE, Schedule

LATENT, ROPE = 512, 64
PREFETCH_FROM = 8  # row tiles that share a key range: from here on its pages are fetched into L2 ahead of their use
PREFETCH_PAIRS = 4  # how far ahead
PLACE_NUMBERS = TILE * LATENT + 2 * TILE + 64  # of a part: output, log-sum-exps for each half, 2 x 2 counters, padding
LOG2_E = 1.4426950408889634

COLUMNS = gl.constexpr(mla_plan.COLUMNS)
PLACE = gl.constexpr(PLACE_NUMBERS)
LN_2 = gl.constexpr(0.6931471805599453)
LOWEST = gl.constexpr(-1e30)  # the maximum of no scores: finite, so that exp2(-inf - LOWEST) is 0 and no NaN
SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))  # 64 x 64
HALF = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16]))  # 64 x 256
WEIGHTS = gl.constexpr(gl.DotOperandLayout(0, HALF, 2))  # P as an operand from registers
CHUNK = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))  # 64 x 64 of shared memory, 16 bytes a thread
MERGE = gl.constexpr(gl.BlockedLayout([16, 2], [1, 32], [1, 4], [1, 0]))  # 16 parts x 256 columns, a column a thread
SHARED = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
SWIZZLED = gl.constexpr(SHARED)


@gluon.jit
def _begin(plan, ROW_TILES: gl.constexpr, LANES: gl.constexpr, FULL_GROUPS: gl.constexpr, REST_LANES: gl.constexpr):
    """The block's work: (where its group's first item is, begin, end, first row tile, distance to the next, turns).

    Items begin*turns .. end*turns: each is done once for each of the block's row tiles. Every partition asks for
    itself, since what is handed to a partition takes a register from its start to its end.
    """
    block = gl.program_id(0)
    is_rest = block >= LANES * FULL_GROUPS
    group = gl.where(is_rest, FULL_GROUPS, block // LANES)
    lane = gl.where(is_rest, block - LANES * FULL_GROUPS, block % LANES)
    stride = gl.where(is_rest, REST_LANES, LANES)
    head = plan + group * COLUMNS
    return head, gl.load(head + 9), gl.load(head + 10), lane, stride, (ROW_TILES - lane + stride - 1) // stride


@gluon.jit
def _item(plan, head, begin, turns, i, FIRST_ITEM: gl.constexpr):
    """Where the item of the block's i-th step is, and which of the block's row tiles it is for."""
    number = i // turns
    return gl.where(number == begin, head, plan + (FIRST_ITEM + number) * COLUMNS), i % turns


@gluon.jit
def _expect(full, buffer, desc, row, column):
    """Load a piece of 64 columns."""
    mbarrier.expect(full, 64 * 64 * 2)
    tma.async_copy_global_to_shared(desc, [row, column], full, buffer)


@gluon.jit
def _prefetch_page(pool, page, is_on):
    """Fetch a page of 64 x 576 numbers into L2: one instruction of one thread."""
    address = (pool + page.to(gl.int64) * (64 * 576)).to(gl.int64, bitcast=True)
    gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .u32 lane; mov.u32 lane, %laneid; setp.eq.u32 p, lane, 0; setp.ne.and.u32 p, $2, 0, p; "
        "@p cp.async.bulk.prefetch.L2.global [$1], 73728; mov.u32 $0, 0; }",
        "=r,l,r",
        [address, is_on.to(gl.int32)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _load(
    plan,
    kv_desc,
    q_desc,
    pool,
    num_pages,
    page_table,
    table_stride,
    queries,
    barriers,
    buffer,
    full,
    empty,
    rope,
    full_rope,
    ODD: gl.constexpr,
    RIGHT: gl.constexpr,
    LOADS_Q: gl.constexpr,
    LOADS_ROPE: gl.constexpr,
    AHEAD: gl.constexpr,
    ROWS: gl.constexpr,
    LANES: gl.constexpr,
    FULL_GROUPS: gl.constexpr,
    REST_LANES: gl.constexpr,
):
    """Load one column half of every even or odd key tile; two of the loaders load roped keys too, one the queries."""
    q_left, q_right, q_rope = queries
    q_full, q_empty = barriers
    row_tiles: gl.constexpr = (ROWS + 63) // 64
    first_item: gl.constexpr = FULL_GROUPS + (REST_LANES > 0)
    head, begin, end, first_tile, stride, turns = _begin(plan, row_tiles, LANES, FULL_GROUPS, REST_LANES)
    uses = begin * 0
    for i in range(begin * turns, end * turns):
        at, turn = _item(plan, head, begin, turns, i, first_item)
        sequence = gl.load(at)
        lo = gl.load(at + 1)
        hi = gl.load(at + 2)
        page = gl.load(at + 7 + ODD)
        if LOADS_Q:
            mbarrier.wait(q_empty, ((i - begin * turns) & 1) ^ 1)
            row = sequence * ROWS + (first_tile + turn * stride) * 64
            mbarrier.expect(q_full, 64 * 576 * 2)
            for c in gl.static_range(4):
                tma.async_copy_global_to_shared(q_desc, [row, c * 64], q_full, q_left.index(0).slice(c * 64, 64, dim=1))
            tma.async_copy_global_to_shared(q_desc, [row, 512], q_full, q_rope.index(0))
            for c in gl.static_range(4):
                tma.async_copy_global_to_shared(
                    q_desc, [row, 256 + c * 64], q_full, q_right.index(0).slice(c * 64, 64, dim=1)
                )
        row_of_table = page_table + sequence * table_stride
        for t in range((hi - lo + 1 - ODD) // 2):
            if AHEAD > 0:
                later = lo + 2 * (t + AHEAD) + ODD
                far = gl.load(row_of_table + gl.minimum(later, hi - 1))
                is_on = (later < hi) & (t % stride == first_tile) & (far >= 0) & (far < num_pages)
                _prefetch_page(pool, far, is_on)
            mbarrier.wait(empty, (uses & 1) ^ 1)
            if LOADS_ROPE and not ODD:
                _expect(full_rope, rope, kv_desc, page * 64, 512)
            for c in gl.static_range(4):
                _expect(full.index(c), buffer.slice(c * 64, 64, dim=1), kv_desc, page * 64, RIGHT * 256 + c * 64)
            if LOADS_ROPE and ODD:
                _expect(full_rope, rope, kv_desc, page * 64, 512)
            uses += 1
            page = gl.load(row_of_table + gl.minimum(lo + 2 * (t + 1) + ODD, hi - 1))


@gluon.jit
def _scores_of_half(scores, q, keys, full, phase, IS_FIRST: gl.constexpr):
    for c in gl.static_range(4):
        mbarrier.wait(full.index(c), phase)
        scores = warpgroup_mma(
            q.slice(c * 64, 64, dim=1),
            keys.slice(c * 64, 64, dim=1).permute((1, 0)),
            scores,
            use_acc=(not IS_FIRST) or c > 0,
            is_async=True,
        )
    return scores


@gluon.jit
def _mask(scores, key, kv_len, bits, at, row_tile, TOKENS: gl.constexpr, HEADS: gl.constexpr, WORDS: gl.constexpr):
    """Give -inf to keys of the tile from `key` on that a row does not see. bits: [B, TOKENS, WORDS] int64.

    The two words that meet the tile are joined to one, whose bit j says whether the row sees key + j. Bits before
    kv_len are ones, bits beyond the last word zeros.
    """
    if key + 64 > kv_len:
        row = row_tile * 64 + gl.arange(0, 64, gl.SliceLayout(1, SCORES))
        token = gl.minimum(row // HEADS, TOKENS - 1)
        words = bits + (gl.load(at) * TOKENS + token) * WORDS
        word = (key - kv_len) >> 6
        shift = ((key - kv_len) & 63).to(gl.uint64)
        none = gl.zeros([64], gl.int64, gl.SliceLayout(1, SCORES))
        low = gl.load(words + word, mask=(word >= 0) & (word < WORDS) & (none == 0), other=0)
        low = gl.where(word < 0, none - 1, low).to(gl.uint64, bitcast=True)
        high = gl.load(words + word + 1, mask=(word + 1 < WORDS) & (none == 0), other=0).to(gl.uint64, bitcast=True)
        seen = (low >> shift) | ((high << 1) << (63 - shift))
        column = gl.arange(0, 64, gl.SliceLayout(0, SCORES)).to(gl.uint64)
        is_seen = ((seen[:, None] >> column[None, :]) & 1) != 0
        scores = gl.where(is_seen, scores, -float("inf"))
    return scores


@gluon.jit
def _make_finite(values, key, kv_len):
    """Write the largest number over Inf and NaN in 64 x 256 values of a tile that reaches beyond kv_len."""
    if key + 64 > kv_len:
        for c in gl.static_range(4):
            piece = values.slice(c * 64, 64, dim=1)
            x = gl.inline_asm_elementwise(
                "{ .reg .b32 most, least; mov.b32 most, 0x7F7F7F7F; mov.b32 least, 0xFF7FFF7F; "
                "min.bf16x2 $0, $1, most; max.bf16x2 $0, $0, least; }",
                "=r,r",
                [piece.load(CHUNK)],
                dtype=gl.bfloat16,
                is_pure=True,
                pack=2,
            )
            piece.store(x)
        fence_async_shared()
        gl.thread_barrier()


@gluon.jit
def _even_first(
    scores,
    acc,
    m,
    total,
    scale,
    key,
    mask,
    values,
    maxima,
    max0_ready,
    TOKENS: gl.constexpr,
    HEADS: gl.constexpr,
    WORDS: gl.constexpr,
):
    """Softmax of the even tile over its own maximum, and its product with the left values, under way."""
    kv_len, bits, at, row_tile = mask
    scores = _mask(scores, key, kv_len, bits, at, row_tile, TOKENS, HEADS, WORDS)
    m0 = gl.maximum(m, gl.max(scores, 1) * scale)
    maxima.index(0).store(m0)
    gl.thread_barrier()
    mbarrier.arrive(max0_ready, count=1)
    faded = gl.exp2(m - m0)
    p = gl.exp2(scores * scale - m0[:, None])
    acc = acc * gl.convert_layout(faded, gl.SliceLayout(1, HALF))[:, None]
    _make_finite(values, key, kv_len)
    acc = warpgroup_mma(gl.convert_layout(p.to(gl.bfloat16), WEIGHTS), values, acc, is_async=True)
    return acc, p, m0, total * faded + gl.sum(p, 1)


@gluon.jit
def _publish_weights(p, weights, ready):
    weights.store(p.to(gl.bfloat16))
    fence_async_shared()
    gl.thread_barrier()
    mbarrier.arrive(ready, count=1)


@gluon.jit
def _even_pair(
    scores,
    acc,
    m,
    total,
    scale,
    key,
    odd_phase,
    mask,
    values0,
    values1,
    weights0,
    weights1,
    maxima,
    ready,
    empty0,
    TOKENS: gl.constexpr,
    HEADS: gl.constexpr,
    WORDS: gl.constexpr,
):
    """The left half's part in a pair of tiles. The product with the odd tile's values is under way at the end."""
    max0_ready, p1_ready, p0_ready = ready
    acc, p, m0, total = _even_first(
        scores, acc, m, total, scale, key, mask, values0, maxima, max0_ready, TOKENS, HEADS, WORDS
    )
    mbarrier.wait(p1_ready, odd_phase)
    m1 = maxima.index(1).load(gl.SliceLayout(1, SCORES))
    faded = gl.exp2(m0 - m1)
    total = total * faded
    _publish_weights(p * faded[:, None], weights0, p0_ready)
    acc = warpgroup_mma_wait(0, deps=[acc])
    gl.thread_barrier()
    mbarrier.arrive(empty0, count=1)
    acc = acc * gl.convert_layout(faded, gl.SliceLayout(1, HALF))[:, None]
    _make_finite(values1, key + 64, mask[0])
    acc = warpgroup_mma(weights1, values1, acc, is_async=True)
    return acc, m1, total


@gluon.jit
def _counter(workspace, first_slot, row_tile, ROW_TILES: gl.constexpr, RIGHT: gl.constexpr):
    """The two counts of a row tile's parts, beside the first of them: warps that arrived, and that left again."""
    place = workspace + (first_slot * ROW_TILES + row_tile).to(gl.int64) * PLACE
    return place + (64 * 512 + 128 + RIGHT * 2)


@gluon.jit
def _arrive(counter):
    """Tell other blocks that what the partition's threads have stored is there. Each of 4 warps counts one."""
    gl.thread_barrier()
    gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .u32 lane; mov.u32 lane, %laneid; setp.eq.u32 p, lane, 0; "
        "@p red.release.gpu.global.add.s32 [$1], 1; mov.u32 $0, 0; }",
        "=r,l",
        [counter.to(gl.int64, bitcast=True)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _wait_for_all(counter, parts):
    """Wait until all parts have arrived; the last warp to leave clears both counts for the next launch."""
    gl.inline_asm_elementwise(
        "{ .reg .pred p, q; .reg .u32 lane; .reg .s32 n; mov.u32 lane, %laneid; setp.eq.u32 p, lane, 0;\n"
        "@!p bra DONE;\n"
        "AGAIN: ld.acquire.gpu.global.s32 n, [$1]; setp.lt.s32 q, n, $2; @q bra AGAIN;\n"
        "atom.relaxed.gpu.global.add.s32 n, [$1+4], 1; add.s32 n, n, 1; setp.eq.s32 q, n, $2;\n"
        "@q st.relaxed.gpu.global.s32 [$1], 0; @q st.relaxed.gpu.global.s32 [$1+4], 0;\n"
        "DONE: bar.warp.sync 0xffffffff; mov.u32 $0, 0; }",
        "=r,l,r",
        [counter.to(gl.int64, bitcast=True), parts * 4],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )
    gl.thread_barrier()


@gluon.jit
def _finish(
    acc,
    lse,
    at,
    row_tile,
    last_buffer,
    empty,
    out_desc,
    output,
    ROWS: gl.constexpr,
    ROW_TILES: gl.constexpr,
    RIGHT: gl.constexpr,
):
    """Write a finished item: to the output when it is its sequence's only part, else beside the other parts."""
    out, out_lse, workspace = output
    sequence = gl.load(at)
    parts = gl.load(at + 4)
    row = gl.arange(0, 64, gl.SliceLayout(1, SCORES))
    num_rows = ROWS - row_tile * 64
    first_row = sequence * ROWS + row_tile * 64
    if parts == 1:
        last_buffer.store(acc.to(gl.bfloat16))
        fence_async_shared()
        gl.thread_barrier()
        if ROWS % 64 == 0 or num_rows >= 64:
            for c in gl.static_range(4):
                tma.async_copy_shared_to_global(
                    out_desc, [first_row, RIGHT * 256 + c * 64], last_buffer.slice(c * 64, 64, dim=1)
                )
            tma.store_wait(0)
        else:
            rows = gl.arange(0, 64, gl.SliceLayout(1, CHUNK))
            columns = RIGHT * 256 + gl.arange(0, 64, gl.SliceLayout(0, CHUNK))
            to = out + (first_row + rows[:, None]).to(gl.int64) * 512 + columns[None, :]
            for c in gl.static_range(4):
                x = last_buffer.slice(c * 64, 64, dim=1).load(CHUNK)
                gl.store(to + c * 64, x, mask=(rows < num_rows)[:, None])
        gl.thread_barrier()
        mbarrier.arrive(empty, count=1)
        if not RIGHT:
            gl.store(out_lse + first_row + row, lse * LN_2, mask=row < num_rows)
    else:
        gl.thread_barrier()
        mbarrier.arrive(empty, count=1)
        slot = gl.load(at + 6)
        place = workspace + (slot * ROW_TILES + row_tile).to(gl.int64) * PLACE
        rows = gl.arange(0, 64, gl.SliceLayout(1, HALF))
        columns = gl.arange(0, 256, gl.SliceLayout(0, HALF))
        to = place + RIGHT * 256 + rows[:, None] * 512 + columns[None, :]
        gl.store(to, acc, mask=(rows < num_rows)[:, None])
        gl.store(place + (64 * 512 + RIGHT * 64) + row, lse)
        _arrive(_counter(workspace, slot - gl.load(at + 5), row_tile, ROW_TILES, RIGHT))


@gluon.jit
def _merge(
    plan,
    output,
    ROWS: gl.constexpr,
    RIGHT: gl.constexpr,
    LANES: gl.constexpr,
    FULL_GROUPS: gl.constexpr,
    REST_LANES: gl.constexpr,
):
    """Merge the parts of the block's sequences, in order: each block takes its share of the 64 rows."""
    out, out_lse, workspace = output
    row_tiles: gl.constexpr = (ROWS + 63) // 64
    first_item: gl.constexpr = FULL_GROUPS + (REST_LANES > 0)
    head, begin, end, first_tile, stride, turns = _begin(plan, row_tiles, LANES, FULL_GROUPS, REST_LANES)
    columns = RIGHT * 256 + gl.arange(0, 256, gl.SliceLayout(0, MERGE))
    some = gl.arange(0, 16, gl.SliceLayout(1, MERGE))
    for i in range(begin * turns, end * turns):
        at, turn = _item(plan, head, begin, turns, i, first_item)
        parts = gl.load(at + 4)
        if parts > 1:
            row_tile = first_tile + turn * stride
            part = gl.load(at + 5)
            first_slot = gl.load(at + 6) - part
            first_row = gl.load(at) * ROWS + row_tile * 64
            num_rows = gl.minimum(ROWS - row_tile * 64, 64)
            _wait_for_all(_counter(workspace, first_slot, row_tile, row_tiles, RIGHT), parts)
            for row in range(64 * part // parts, gl.minimum(64 * (part + 1) // parts, num_rows)):
                acc = gl.zeros([256], gl.float32, gl.SliceLayout(0, MERGE))
                m = row * 0.0 + LOWEST
                weight = row * 0.0
                for first in range(0, parts, 16):
                    is_part = first + some < parts
                    place = workspace + ((first_slot + first + some) * row_tiles + row_tile).to(gl.int64) * PLACE
                    lse = gl.load(
                        place + (64 * 512 + RIGHT * 64) + row, mask=is_part, other=-float("inf"), cache_modifier=".cg"
                    )
                    x = gl.load(
                        place[:, None] + row * 512 + columns[None, :],
                        mask=is_part[:, None],
                        other=0.0,
                        cache_modifier=".cg",
                    )
                    new_m = gl.maximum(m, gl.max(lse, 0))
                    faded = gl.exp2(m - new_m)
                    w = gl.exp2(lse - new_m)
                    acc = acc * faded + gl.sum(x * w[:, None], 0)
                    weight = weight * faded + gl.sum(w, 0)
                    m = new_m
                inverse = gl.where(weight > 0, 1.0 / weight, 0.0)
                gl.store(out + (first_row + row).to(gl.int64) * 512 + columns, (acc * inverse).to(gl.bfloat16))
                if not RIGHT:
                    lse = gl.where(weight > 0, (m + gl.log2(weight)) * LN_2, -float("inf"))
                    gl.store(out_lse + first_row + row, lse)


@gluon.jit
def _left(
    plan,
    scale,
    queries,
    keys,
    maxima,
    sums,
    barriers,
    bits,
    out_desc,
    output,
    TOKENS: gl.constexpr,
    HEADS: gl.constexpr,
    WORDS: gl.constexpr,
    LANES: gl.constexpr,
    FULL_GROUPS: gl.constexpr,
    REST_LANES: gl.constexpr,
):
    """Even key tiles, and the left half of the output."""
    q_left, q_right, q_rope = queries
    left, right, rope = keys
    q_full, q_empty, ready, sums_ready, full_rope, full_0_left, full_0_right, _, _, empty = barriers
    max0_ready, p1_ready, p0_ready = ready
    ROWS: gl.constexpr = TOKENS * HEADS
    ROW_TILES: gl.constexpr = (ROWS + 63) // 64
    FIRST_ITEM: gl.constexpr = FULL_GROUPS + (REST_LANES > 0)
    head, begin, end, first_tile, stride, turns = _begin(plan, ROW_TILES, LANES, FULL_GROUPS, REST_LANES)
    no_scores = gl.zeros([64, 64], gl.float32, SCORES)
    evens = begin * 0
    odds = begin * 0
    for i in range(begin * turns, end * turns):
        at, turn = _item(plan, head, begin, turns, i, FIRST_ITEM)
        lo = gl.load(at + 1)
        hi = gl.load(at + 2)
        kv_len = gl.load(at + 3)
        row_tile = first_tile + turn * stride
        item_phase = (i - begin * turns) & 1
        masking = (kv_len, bits, at, row_tile)
        acc = gl.zeros([64, 256], gl.float32, HALF)
        m = gl.full([64], LOWEST, gl.float32, gl.SliceLayout(1, SCORES))
        total = gl.zeros([64], gl.float32, gl.SliceLayout(1, SCORES))
        mbarrier.wait(q_full, item_phase)
        scores = _scores_of_half(no_scores, q_left.index(0), left.index(0), full_0_left, evens & 1, True)
        mbarrier.wait(full_rope.index(0), evens & 1)
        scores = warpgroup_mma(q_rope.index(0), rope.index(0).permute((1, 0)), scores, is_async=True)
        scores = _scores_of_half(scores, q_right.index(0), right.index(0), full_0_right, evens & 1, False)
        scores = warpgroup_mma_wait(0, deps=[scores])
        for t in range((hi - lo - 1) // 2):
            # An index that is 0, but not to the compiler: else every operand's address is computed before the loop,
            # and 80 of them do not fit into registers.
            zero = t >> 20
            acc, m, total = _even_pair(
                scores, acc, m, total, scale, (lo + 2 * t) * 64, odds & 1, masking,
                left.index(zero), left.index(zero + 1), rope.index(zero), rope.index(zero + 1), maxima, ready,
                empty.index(0), TOKENS, HEADS, WORDS,
            )  # fmt: skip
            odds += 1
            evens += 1
            scores = _scores_of_half(no_scores, q_left.index(zero), left.index(zero), full_0_left, evens & 1, True)
            acc = warpgroup_mma_wait(4, deps=[acc])
            gl.thread_barrier()
            mbarrier.arrive(empty.index(2), count=1)
            mbarrier.wait(full_rope.index(0), evens & 1)
            scores = warpgroup_mma(q_rope.index(zero), rope.index(zero).permute((1, 0)), scores, is_async=True)
            scores = _scores_of_half(scores, q_right.index(zero), right.index(zero), full_0_right, evens & 1, False)
            scores = warpgroup_mma_wait(0, deps=[scores])
        gl.thread_barrier()
        mbarrier.arrive(q_empty, count=1)
        last_key = (hi - 1 - ((hi - lo - 1) & 1)) * 64
        if ((hi - lo) & 1) == 0:
            acc, m, total = _even_pair(
                scores, acc, m, total, scale, last_key, odds & 1, masking,
                left.index(0), left.index(1), rope.index(0), rope.index(1), maxima, ready, empty.index(0),
                TOKENS, HEADS, WORDS,
            )  # fmt: skip
            odds += 1
            acc = warpgroup_mma_wait(0, deps=[acc])
        else:
            acc, p, m, total = _even_first(
                scores, acc, m, total, scale, last_key, masking, left.index(0), maxima, max0_ready, TOKENS, HEADS, WORDS
            )
            _publish_weights(p, rope.index(0), p0_ready)
            acc = warpgroup_mma_wait(0, deps=[acc])
        evens += 1
        mbarrier.wait(sums_ready.index(0), item_phase)
        total = total + sums.index(1).load(gl.SliceLayout(1, SCORES))
        sums.index(0).store(total)
        gl.thread_barrier()
        mbarrier.arrive(sums_ready.index(1), count=1)
        acc = acc * gl.convert_layout(gl.where(total > 0, 1.0 / total, 0.0), gl.SliceLayout(1, HALF))[:, None]
        lse = gl.where(total > 0, m + gl.log2(total), -float("inf"))
        last = (hi - lo - 1) & 1
        buffer, freed = left.index(last), empty.index(2 * last)
        _finish(acc, lse, at, row_tile, buffer, freed, out_desc, output, ROWS, ROW_TILES, False)
    _merge(plan, output, ROWS, False, LANES, FULL_GROUPS, REST_LANES)


@gluon.jit
def _right(
    plan,
    scale,
    queries,
    keys,
    maxima,
    sums,
    barriers,
    bits,
    out_desc,
    output,
    TOKENS: gl.constexpr,
    HEADS: gl.constexpr,
    WORDS: gl.constexpr,
    LANES: gl.constexpr,
    FULL_GROUPS: gl.constexpr,
    REST_LANES: gl.constexpr,
):
    """Odd key tiles, and the right half of the output."""
    q_left, q_right, q_rope = queries
    left, right, rope = keys
    q_full, q_empty, ready, sums_ready, full_rope, _, _, full_1_left, full_1_right, empty = barriers
    max0_ready, p1_ready, p0_ready = ready
    ROWS: gl.constexpr = TOKENS * HEADS
    ROW_TILES: gl.constexpr = (ROWS + 63) // 64
    FIRST_ITEM: gl.constexpr = FULL_GROUPS + (REST_LANES > 0)
    head, begin, end, first_tile, stride, turns = _begin(plan, ROW_TILES, LANES, FULL_GROUPS, REST_LANES)
    no_scores = gl.zeros([64, 64], gl.float32, SCORES)
    evens = begin * 0
    odds = begin * 0
    for i in range(begin * turns, end * turns):
        at, turn = _item(plan, head, begin, turns, i, FIRST_ITEM)
        lo = gl.load(at + 1)
        hi = gl.load(at + 2)
        kv_len = gl.load(at + 3)
        row_tile = first_tile + turn * stride
        item_phase = (i - begin * turns) & 1
        num_odd = (hi - lo) // 2
        acc = gl.zeros([64, 256], gl.float32, HALF)
        m = gl.full([64], LOWEST, gl.float32, gl.SliceLayout(1, SCORES))
        total = gl.zeros([64], gl.float32, gl.SliceLayout(1, SCORES))
        mbarrier.wait(q_full, item_phase)
        for t in range(num_odd):
            zero = t >> 20  # see _left
            values1 = right.index(zero + 1)
            rope1 = rope.index(zero + 1)
            scores = _scores_of_half(no_scores, q_right.index(zero), values1, full_1_right, odds & 1, True)
            scores = _scores_of_half(scores, q_left.index(zero), left.index(zero + 1), full_1_left, odds & 1, False)
            mbarrier.wait(full_rope.index(1), odds & 1)
            scores = warpgroup_mma(q_rope.index(zero), rope1.permute((1, 0)), scores, is_async=True)
            scores = warpgroup_mma_wait(0, deps=[scores])
            gl.thread_barrier()
            mbarrier.arrive(q_empty, count=1, pred=t == num_odd - 1)
            key = (lo + 2 * t + 1) * 64
            scores = _mask(scores, key, kv_len, bits, at, row_tile, TOKENS, HEADS, WORDS)
            own_max = gl.max(scores, 1) * scale
            mbarrier.wait(max0_ready, evens & 1)
            m1 = gl.maximum(maxima.index(0).load(gl.SliceLayout(1, SCORES)), own_max)
            faded = gl.exp2(m - m1)
            p = gl.exp2(scores * scale - m1[:, None])
            maxima.index(1).store(m1)
            weights = p.to(gl.bfloat16)
            rope1.store(weights)
            fence_async_shared()
            gl.thread_barrier()
            mbarrier.arrive(p1_ready, count=1)
            acc = acc * gl.convert_layout(faded, gl.SliceLayout(1, HALF))[:, None]
            _make_finite(values1, key, kv_len)
            _make_finite(right.index(zero), key - 64, kv_len)
            acc = warpgroup_mma(gl.convert_layout(weights, WEIGHTS), values1, acc, is_async=True)
            total = total * faded + gl.sum(p, 1)
            m = m1
            mbarrier.wait(p0_ready, evens & 1)
            acc = warpgroup_mma(rope.index(zero), right.index(zero), acc, is_async=True)
            acc = warpgroup_mma_wait(1, deps=[acc])
            gl.thread_barrier()
            mbarrier.arrive(empty.index(3), count=1, pred=(lo + 2 * t + 2) < hi)
            acc = warpgroup_mma_wait(0, deps=[acc])
            gl.thread_barrier()
            mbarrier.arrive(empty.index(1), count=1)
            evens += 1
            odds += 1
        if ((hi - lo) & 1) != 0:
            mbarrier.arrive(q_empty, count=1, pred=num_odd == 0)
            mbarrier.wait(max0_ready, evens & 1)
            m1 = maxima.index(0).load(gl.SliceLayout(1, SCORES))
            faded = gl.exp2(m - m1)
            acc = acc * gl.convert_layout(faded, gl.SliceLayout(1, HALF))[:, None]
            total = total * faded
            _make_finite(right.index(0), (hi - 1) * 64, kv_len)
            mbarrier.wait(p0_ready, evens & 1)
            acc = warpgroup_mma(rope.index(0), right.index(0), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc])
            m = m1
            evens += 1
        sums.index(1).store(total)
        gl.thread_barrier()
        mbarrier.arrive(sums_ready.index(0), count=1)
        mbarrier.wait(sums_ready.index(1), item_phase)
        total = sums.index(0).load(gl.SliceLayout(1, SCORES))
        acc = acc * gl.convert_layout(gl.where(total > 0, 1.0 / total, 0.0), gl.SliceLayout(1, HALF))[:, None]
        lse = gl.where(total > 0, m + gl.log2(total), -float("inf"))
        last = (hi - lo - 1) & 1
        buffer, freed = right.index(last), empty.index(1 + 2 * last)
        _finish(acc, lse, at, row_tile, buffer, freed, out_desc, output, ROWS, ROW_TILES, True)
    _merge(plan, output, ROWS, True, LANES, FULL_GROUPS, REST_LANES)


@gluon.jit(do_not_specialize=["num_pages", "table_stride"])  # else each batch would compile its own
def _mla_kernel(
    q_desc,  # [B * ROWS, 576]
    kv_desc,  # [slots, 576]
    out_desc,  # [B * ROWS, 512]
    pool,  # [slots, 576] bf16, the same as kv_desc
    num_pages,
    page_table,  # [B, W] int32
    table_stride,
    bits,  # [B, TOKENS, WORDS] int64
    plan,  # [groups + items, mla_plan.COLUMNS] int32: heads, then items
    out,  # [B * ROWS, 512] bf16, the same as out_desc
    out_lse,  # [B * ROWS] float32, base e
    workspace,  # [partials, row tiles, PLACE] float32; counters are zero between launches
    scale,  # of scores, base 2
    TOKENS: gl.constexpr,
    HEADS: gl.constexpr,
    WORDS: gl.constexpr,
    LANES: gl.constexpr,
    FULL_GROUPS: gl.constexpr,
    REST_LANES: gl.constexpr,
    AHEAD: gl.constexpr,
):
    ROWS: gl.constexpr = TOKENS * HEADS
    q_left = gl.allocate_shared_memory(gl.bfloat16, [1, 64, 256], SWIZZLED)
    q_right = gl.allocate_shared_memory(gl.bfloat16, [1, 64, 256], SWIZZLED)
    q_rope = gl.allocate_shared_memory(gl.bfloat16, [1, 64, 64], SWIZZLED)
    left = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 256], SWIZZLED)
    right = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 256], SWIZZLED)
    rope = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 64], SWIZZLED)
    maxima = gl.allocate_shared_memory(gl.float32, [2, 64], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    sums = gl.allocate_shared_memory(gl.float32, [2, 64], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    one: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [1], one)
    q_empty = gl.allocate_shared_memory(gl.int64, [1], one)
    max0_ready = gl.allocate_shared_memory(gl.int64, [1], one)
    p1_ready = gl.allocate_shared_memory(gl.int64, [1], one)
    p0_ready = gl.allocate_shared_memory(gl.int64, [1], one)
    sums_ready = gl.allocate_shared_memory(gl.int64, [2, 1], one)
    full_rope = gl.allocate_shared_memory(gl.int64, [2, 1], one)
    full_0_left = gl.allocate_shared_memory(gl.int64, [4, 1], one)
    full_0_right = gl.allocate_shared_memory(gl.int64, [4, 1], one)
    full_1_left = gl.allocate_shared_memory(gl.int64, [4, 1], one)
    full_1_right = gl.allocate_shared_memory(gl.int64, [4, 1], one)
    # By loader: 0 even left, 1 even right and rope, 2 odd left and rope, 3 odd right. Each is freed by one half.
    empty = gl.allocate_shared_memory(gl.int64, [4, 1], one)
    mbarrier.init(q_full, count=1)
    mbarrier.init(q_empty, count=2)
    mbarrier.init(max0_ready, count=1)
    mbarrier.init(p1_ready, count=1)
    mbarrier.init(p0_ready, count=1)
    for i in gl.static_range(2):
        mbarrier.init(sums_ready.index(i), count=1)
        mbarrier.init(full_rope.index(i), count=1)
    for i in gl.static_range(4):
        mbarrier.init(full_0_left.index(i), count=1)
        mbarrier.init(full_0_right.index(i), count=1)
        mbarrier.init(full_1_left.index(i), count=1)
        mbarrier.init(full_1_right.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    fence_async_shared()

    queries = (q_left, q_right, q_rope)
    keys = (left, right, rope)
    ready = (max0_ready, p1_ready, p0_ready)
    barriers = (
        q_full, q_empty, ready, sums_ready, full_rope, full_0_left, full_0_right, full_1_left, full_1_right, empty,
    )  # fmt: skip
    output = (out, out_lse, workspace)
    loads_q = (q_full, q_empty)
    # Constants are written into each call: a name for a tuple of them would make numbers of them that are not constant.
    gl.warp_specialize(
        [
            (_left, (
                plan, scale, queries, keys, maxima, sums, barriers, bits, out_desc, output,
                TOKENS, HEADS, WORDS, LANES, FULL_GROUPS, REST_LANES)),
            (_right, (
                plan, scale, queries, keys, maxima, sums, barriers, bits, out_desc, output,
                TOKENS, HEADS, WORDS, LANES, FULL_GROUPS, REST_LANES)),
            (_load, (
                plan, kv_desc, q_desc, pool, num_pages, page_table, table_stride, queries, loads_q,
                left.index(0), full_0_left, empty.index(0), rope.index(0), full_rope.index(0),
                0, 0, True, False, AHEAD, ROWS, LANES, FULL_GROUPS, REST_LANES)),
            (_load, (
                plan, kv_desc, q_desc, pool, num_pages, page_table, table_stride, queries, loads_q,
                right.index(0), full_0_right, empty.index(1), rope.index(0), full_rope.index(0),
                0, 1, False, True, 0, ROWS, LANES, FULL_GROUPS, REST_LANES)),
            (_load, (
                plan, kv_desc, q_desc, pool, num_pages, page_table, table_stride, queries, loads_q,
                left.index(1), full_1_left, empty.index(2), rope.index(1), full_rope.index(1),
                1, 0, False, True, 0, ROWS, LANES, FULL_GROUPS, REST_LANES)),
            (_load, (
                plan, kv_desc, q_desc, pool, num_pages, page_table, table_stride, queries, loads_q,
                right.index(1), full_1_right, empty.index(3), rope.index(1), full_rope.index(1),
                1, 1, False, False, AHEAD, ROWS, LANES, FULL_GROUPS, REST_LANES)),
        ],
        [4, 1, 1, 1, 1],
        [240, 24, 24, 24, 24],
    )  # fmt: skip


def workspace_numbers(schedule: Schedule) -> int:
    """float32 numbers that a schedule's parts need, zeros at first."""
    return schedule.num_partials * schedule.grid.row_tiles * PLACE_NUMBERS


def mla_tree_attention(
    q: Tensor,
    kv: Tensor,
    page_table: Tensor,
    ancestor_bits: Tensor,
    schedule: Schedule,
    workspace: Tensor,
    scale: float,
    out: Tensor,
    lse: Tensor,
) -> None:
    """Write out [B, R, h, 512] bfloat16 and lse [B, R, h] float32, base e. Does not sync.

    q: [B, R, h, 576] bfloat16, contiguous; kv: [slots, 576], contiguous; page_table: [B, W] int32, pages of 64;
    ancestor_bits: [B, R, words] int64, contiguous. workspace: at least workspace_numbers of
    float32, zeros at first and then left alone.
    """
    batch, tokens, heads, width = q.shape
    rows, grid = tokens * heads, schedule.grid

    def described(x: Tensor) -> TensorDescriptor:
        return TensorDescriptor.from_tensor(x, [TILE, 64], SHARED)

    _mla_kernel[(grid.num_blocks,)](
        described(q.view(batch * rows, width)),
        described(kv),
        described(out.view(batch * rows, LATENT)),
        kv,
        kv.shape[0] // TILE,
        page_table,
        page_table.stride(0),
        ancestor_bits,
        schedule.table,
        out,
        lse,
        workspace,
        scale * LOG2_E,
        TOKENS=tokens,
        HEADS=heads,
        WORDS=ancestor_bits.shape[-1],
        LANES=grid.lanes,
        FULL_GROUPS=grid.full_groups,
        REST_LANES=grid.rest_lanes,
        AHEAD=PREFETCH_PAIRS if grid.row_tiles >= PREFETCH_FROM else 0,
        num_warps=4,
        launch_cooperative_grid=True,  # blocks wait for each other's parts, so all must run at once
    )
