"""Tree attention over an MLA cache (latent 512 + rope 64, bfloat16) for sm_90, in Gluon of Triton 3.6.

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

Pairs of tiles that all rows see whole run in a loop without masks. An item's last pair, and what meets the tree, goes
through a second loop that has them. There the rounding of the weights to bfloat16 is kept count of too: outputs are
divided by the sum of the rounded ones, so that a few large ones do not err in common (short sequences have no other
tiles). The log-sum-exp is of the unrounded.

Parts of one sequence wait in memory as float16, whose rounding is an eighth of the output's. At the end of the launch
the blocks that made them wait for each other, and each merges its share of the rows, in the order of the parts.

The schedule of the halves follows the published description of FlashMLA's kernel for Hopper; the code is our own.
"""

# mypy: disable-error-code="no-untyped-def"
# (Gluon reads the annotations of a kernel: gl.constexpr or none.)

from __future__ import annotations

import torch
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
NOTES_NUMBERS = TILE + 32  # of a part: log-sum-exps in base 2, two counters, padding
LOG2_E = 1.4426950408889634

COLUMNS = gl.constexpr(mla_plan.COLUMNS)
NOTES = gl.constexpr(NOTES_NUMBERS)
LN_2 = gl.constexpr(0.6931471805599453)
LOWEST = gl.constexpr(-1e30)  # the maximum of no scores: finite, so that exp2(-inf - LOWEST) is 0 and no NaN
SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))  # 64 x 64
HALF = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16]))  # 64 x 256
WEIGHTS = gl.constexpr(gl.DotOperandLayout(0, HALF, 2))  # P as an operand from registers
CHUNK = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))  # 64 x 64 of shared memory, 16 bytes a thread
# Rows x parts x 512 columns: few parts, a row for each warp; many parts, all warps on one row.
MERGE_FEW = gl.constexpr(gl.BlockedLayout([1, 4, 16], [1, 1, 32], [4, 1, 1], [2, 1, 0]))
MERGE_MANY = gl.constexpr(gl.BlockedLayout([1, 16, 4], [1, 1, 32], [1, 1, 4], [2, 1, 0]))
LANES_OF_WARP = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))
SHARED = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
SWIZZLED = gl.constexpr(SHARED)


@gluon.jit
def _read(pointer):
    """Read an int32 that all threads read.

    The exchange tells the assembler that they agree, so that loops and addresses that follow from it take uniform
    registers: without it operands' addresses spill.
    """
    return gl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $1, 0, 31, 0xffffffff;",
        "=r,r",
        [gl.load(pointer)],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def _begin(plan, ROW_TILES: gl.constexpr, LANES: gl.constexpr, FULL_GROUPS: gl.constexpr, REST_LANES: gl.constexpr):
    """The block's work: (where its group's first item is, begin, end, first row tile, distance to the next, turns).

    Each of the items begin .. end is done once for each of the block's row tiles, its turns. Every partition asks for
    itself, since what is handed to a partition takes a register from its start to its end.
    """
    block = gl.program_id(0)
    group = block // LANES
    lane = block % LANES
    stride = LANES
    turns = (ROW_TILES - lane + LANES - 1) // LANES
    if REST_LANES > 0:
        is_rest = block >= LANES * FULL_GROUPS
        rest_lane = block - LANES * FULL_GROUPS
        group = gl.where(is_rest, FULL_GROUPS, group)
        turns = gl.where(is_rest, (ROW_TILES - rest_lane + REST_LANES - 1) // REST_LANES, turns)
        lane = gl.where(is_rest, rest_lane, lane)
        stride = gl.where(is_rest, REST_LANES, LANES)
    head = plan + group * COLUMNS
    return head, _read(head + 9), _read(head + 10), lane, stride, turns


@gluon.jit
def _item(plan, head, begin, number, FIRST_ITEM: gl.constexpr):
    """Where an item of the block is: its group's first is in the plan's head."""
    return gl.where(number == begin, head, plan + (FIRST_ITEM + number) * COLUMNS)


@gluon.jit
def _num_whole(lo, hi, kv_len):
    """Leading pairs of tiles that every row sees whole, the item's last even tile and what follows it excepted."""
    return gl.minimum((hi - lo - 1) // 2, gl.maximum(kv_len // 64 - lo, 0) // 2)


@gluon.jit
def _load_piece(full, buffer, kv_desc, slots, column, PAGE: gl.constexpr):
    """Load 64 keys' 64 columns; slots: the first slot of each page's share."""
    mbarrier.expect(full, 64 * 64 * 2)
    share: gl.constexpr = min(PAGE, 64)
    for i in gl.static_range(64 // share):
        to = buffer if share == 64 else buffer.slice(i * share, share, dim=0)
        tma.async_copy_global_to_shared(kv_desc, [slots[i], column], full, to)


@gluon.jit
def _slots(row_of_table, tile, PAGE: gl.constexpr):
    """First slot of each page's share of a key tile, four of them: of pages of 16, 32 or a multiple of 64 slots."""
    if PAGE >= 64:
        first = _read(row_of_table + tile // (PAGE // 64)) * PAGE + tile % (PAGE // 64) * 64
        return first, first, first, first
    else:
        pages: gl.constexpr = 64 // PAGE
        at = row_of_table + tile * pages
        first = _read(at) * PAGE
        last = _read(at + pages - 1) * PAGE
        if PAGE == 32:
            return first, last, first, first
        else:
            return first, _read(at + 1) * PAGE, _read(at + 2) * PAGE, last


@gluon.jit
def _prefetch_slots(pool, slot, size, is_on):
    """Fetch `size` bytes from a slot on into L2: one instruction of one thread."""
    address = (pool + slot.to(gl.int64) * 576).to(gl.int64, bitcast=True)
    gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .u32 lane; mov.u32 lane, %laneid; setp.eq.u32 p, lane, 0; setp.ne.and.u32 p, $2, 0, p; "
        "@p cp.async.bulk.prefetch.L2.global [$1], $3; mov.u32 $0, 0; }",
        "=r,l,r,r",
        [address, is_on.to(gl.int32), size],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _prefetch_line(address):
    """Fetch what each thread's address points to into L1."""
    gl.inline_asm_elementwise(
        "prefetch.global.L1 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [address.to(gl.int64, bitcast=True)],
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
    num_slots,
    page_table,
    table_stride,
    bits,
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
    WARMS_BITS: gl.constexpr,
    AHEAD: gl.constexpr,
    PAGE: gl.constexpr,
    TOKENS: gl.constexpr,
    HEADS: gl.constexpr,
    WORDS: gl.constexpr,
    LANES: gl.constexpr,
    FULL_GROUPS: gl.constexpr,
    REST_LANES: gl.constexpr,
):
    """Load one column half of every even or odd key tile.

    Two of the loaders load roped keys too, one the queries, and one fetches ancestor bits into L1 ahead of their use.
    """
    ROWS: gl.constexpr = TOKENS * HEADS
    q_left, q_right, q_rope = queries
    q_full, q_empty = barriers
    row_tiles: gl.constexpr = (ROWS + 63) // 64
    first_item: gl.constexpr = FULL_GROUPS + (REST_LANES > 0)
    head, begin, end, first_tile, stride, turns = _begin(plan, row_tiles, LANES, FULL_GROUPS, REST_LANES)
    uses = begin * 0
    steps = begin * 0
    for number in range(begin, end):
        at = _item(plan, head, begin, number, first_item)
        sequence = _read(at)
        lo = _read(at + 1)
        hi = _read(at + 2)
        first_page = _read(at + 7 + ODD)
        last_tile = hi - 1
        row_of_table = page_table + sequence * table_stride
        for turn in range(turns):
            row_tile = first_tile + turn * stride
            if WARMS_BITS:
                if hi * 64 > _read(at + 3):
                    token = gl.minimum(row_tile * 64 // HEADS + 2 * gl.arange(0, 32, LANES_OF_WARP), TOKENS - 1)
                    _prefetch_line(bits + (sequence * TOKENS + token) * WORDS)
            if LOADS_Q:
                mbarrier.wait(q_empty, (steps & 1) ^ 1)
                row = sequence * ROWS + row_tile * 64
                mbarrier.expect(q_full, 64 * 576 * 2)
                for c in gl.static_range(4):
                    tma.async_copy_global_to_shared(
                        q_desc, [row, c * 64], q_full, q_left.index(0).slice(c * 64, 64, dim=1)
                    )
                tma.async_copy_global_to_shared(q_desc, [row, 512], q_full, q_rope.index(0))
                for c in gl.static_range(4):
                    tma.async_copy_global_to_shared(
                        q_desc, [row, 256 + c * 64], q_full, q_right.index(0).slice(c * 64, 64, dim=1)
                    )
            steps += 1
            if PAGE == 64:  # known already: the first loads need not wait for the page table
                slots = (first_page * 64, first_page * 64, first_page * 64, first_page * 64)
            else:
                slots = _slots(row_of_table, gl.minimum(lo + ODD, last_tile), PAGE)
            for t in range((hi - lo + 1 - ODD) // 2):
                if AHEAD > 0:
                    later = lo + 2 * (t + AHEAD) + ODD
                    far = _slots(row_of_table, gl.minimum(later, last_tile), PAGE)
                    for i in gl.static_range(64 // min(PAGE, 64)):
                        is_on = (later < hi) & (t % stride == first_tile) & (far[i] >= 0) & (far[i] < num_slots)
                        _prefetch_slots(pool, far[i], gl.to_tensor(min(PAGE, 64) * 1152), is_on)
                mbarrier.wait(empty, (uses & 1) ^ 1)
                if LOADS_ROPE and not ODD:
                    _load_piece(full_rope, rope, kv_desc, slots, 512, PAGE)
                for c in gl.static_range(4):
                    piece = buffer.slice(c * 64, 64, dim=1)
                    _load_piece(full.index(c), piece, kv_desc, slots, RIGHT * 256 + c * 64, PAGE)
                if LOADS_ROPE and ODD:
                    _load_piece(full_rope, rope, kv_desc, slots, 512, PAGE)
                uses += 1
                slots = _slots(row_of_table, gl.minimum(lo + 2 * (t + 1) + ODD, last_tile), PAGE)


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
def _scores(q, keys, full_left, full_rope, full_right, phase, zero):
    """Scores 64 x 64 over all columns; nothing is under way at the end."""
    q_left, q_right, q_rope = q
    left, right, rope = keys
    scores = gl.zeros([64, 64], gl.float32, SCORES)
    scores = _scores_of_half(scores, q_left.index(zero), left, full_left, phase, True)
    mbarrier.wait(full_rope, phase)
    scores = warpgroup_mma(q_rope.index(zero), rope.permute((1, 0)), scores, is_async=True)
    scores = _scores_of_half(scores, q_right.index(zero), right, full_right, phase, False)
    return warpgroup_mma_wait(0, deps=[scores])


@gluon.jit
def _mask(scores, key, kv_len, bits, at, row_tile, TOKENS: gl.constexpr, HEADS: gl.constexpr, WORDS: gl.constexpr):
    """Give -inf to keys of the tile from `key` on that a row does not see. bits: [B, TOKENS, WORDS] int64.

    The two words that meet the tile are joined to one, whose bit j says whether the row sees key + j. Bits before
    kv_len are ones, bits beyond the last word zeros.
    """
    row = row_tile * 64 + gl.arange(0, 64, gl.SliceLayout(1, SCORES))
    words = bits + (_read(at) * TOKENS + gl.minimum(row // HEADS, TOKENS - 1)) * WORDS
    word = (key - kv_len) >> 6
    shift = ((key - kv_len) & 63).to(gl.uint64)
    before = gl.full([64], -1, gl.int64, gl.SliceLayout(1, SCORES))
    low = gl.load(words + word, mask=(word >= 0) & (word < WORDS) & (before < 0), other=0)
    high = gl.load(words + word + 1, mask=(word >= -1) & (word + 1 < WORDS) & (before < 0), other=0)
    low = gl.where(word < 0, before, low).to(gl.uint64, bitcast=True)
    high = gl.where(word < -1, before, high).to(gl.uint64, bitcast=True)
    seen = (low >> shift) | ((high << 1) << (63 - shift))
    column = gl.arange(0, 64, gl.SliceLayout(0, SCORES))
    bit = gl.full([64], 1, gl.uint64, gl.SliceLayout(0, SCORES)) << column.to(gl.uint64)
    return gl.where((seen[:, None] & bit[None, :]) != 0, scores, -float("inf"))


@gluon.jit
def _make_finite(values):
    """Write the largest number over Inf and NaN in 64 x 256 values."""
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
def _fade(acc, factor):
    """Multiply the rows of 64 x 256."""
    return acc * gl.convert_layout(factor, gl.SliceLayout(1, HALF))[:, None]


@gluon.jit
def _publish_max(m, maximum, ready):
    maximum.store(m)
    gl.thread_barrier()
    mbarrier.arrive(ready, count=1)


@gluon.jit
def _publish_weights(weights, place, ready):
    """Let the other half multiply with bfloat16 weights."""
    place.store(weights)
    fence_async_shared()
    gl.thread_barrier()
    mbarrier.arrive(ready, count=1)


@gluon.jit
def _arrive(counter):
    """Tell other blocks that what the partition's threads have stored is there. Each of 8 warps of a block counts."""
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
        [counter.to(gl.int64, bitcast=True), parts * 8],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )
    gl.thread_barrier()


@gluon.jit
def _to_float16(x):
    """Two float32 to one register of float16, as bits of bfloat16. Beyond float16 the largest that there is."""
    return gl.inline_asm_elementwise(
        "cvt.rn.satfinite.f16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=gl.bfloat16, is_pure=True, pack=2
    )


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
    """Write a finished item: to the output when it is its sequence's only part, else beside the other parts.

    last_buffer: the item's last, which the item goes through, and which is freed then.
    """
    out, out_lse, _, notes, partial_desc = output
    sequence = _read(at)
    parts = _read(at + 4)
    row = gl.arange(0, 64, gl.SliceLayout(1, SCORES))
    num_rows = ROWS - row_tile * 64
    first_row = sequence * ROWS + row_tile * 64
    if parts == 1:
        last_buffer.store(acc.to(gl.bfloat16))
    else:
        last_buffer.store(_to_float16(acc))
    fence_async_shared()
    gl.thread_barrier()
    if parts > 1:
        slot = _read(at + 6)
        place = slot * ROW_TILES + row_tile
        for c in gl.static_range(4):
            piece = last_buffer.slice(c * 64, 64, dim=1)
            tma.async_copy_shared_to_global(partial_desc, [place * 64, RIGHT * 256 + c * 64], piece)
        if not RIGHT:
            gl.store(notes + place * NOTES + row, lse)
        gl.inline_asm_elementwise(  # not only read: written
            "cp.async.bulk.wait_group 0; mov.u32 $0, 0;", "=r,r", [place], dtype=gl.int32, is_pure=False, pack=1
        )
        _arrive(notes + ((slot - _read(at + 5)) * ROW_TILES + row_tile) * NOTES + 64)
    else:
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
        if not RIGHT:
            gl.store(out_lse + first_row + row, lse * LN_2, mask=row < num_rows)
    gl.thread_barrier()
    mbarrier.arrive(empty, count=1)


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
    """Merge the parts of the block's sequences, in order.

    Each block takes its share of the 64 rows, each half every other row of it, or every other four.
    """
    row_tiles: gl.constexpr = (ROWS + 63) // 64
    first_item: gl.constexpr = FULL_GROUPS + (REST_LANES > 0)
    head, begin, end, first_tile, stride, turns = _begin(plan, row_tiles, LANES, FULL_GROUPS, REST_LANES)
    for number in range(begin, end):
        at = _item(plan, head, begin, number, first_item)
        parts = _read(at + 4)
        if parts > 1:
            part = _read(at + 5)
            first_slot = _read(at + 6) - part
            for turn in range(turns):
                row_tile = first_tile + turn * stride
                place = first_slot * row_tiles + row_tile
                first_row = _read(at) * ROWS + row_tile * 64
                end_row = gl.minimum(64 * (part + 1) // parts, ROWS - row_tile * 64)
                _wait_for_all(output[3] + place * NOTES + 64, parts)
                if parts <= 4:
                    for row in range(64 * part // parts + 4 * RIGHT, end_row, 8):
                        _merge_rows(output, place, row_tiles, parts, row, end_row, first_row, 4, 4, MERGE_FEW)
                else:
                    for row in range(64 * part // parts + RIGHT, end_row, 2):
                        _merge_rows(output, place, row_tiles, parts, row, end_row, first_row, 1, 16, MERGE_MANY)


@gluon.jit
def _merge_rows(
    output,
    first_place,
    stride,
    parts,
    first,
    end_row,
    first_row,
    AT_ONCE: gl.constexpr,
    PARTS: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    """Merge the parts, `stride` places apart, of rows first .. first + AT_ONCE - 1 below end_row, and write them."""
    out, out_lse, partial, notes, _ = output
    by_row: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT))
    row = first + gl.arange(0, AT_ONCE, by_row)
    column = gl.arange(0, 512, gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))
    of_output: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(1, LAYOUT))
    acc = gl.zeros([AT_ONCE, 512], gl.float32, gl.SliceLayout(1, LAYOUT))
    m = gl.full([AT_ONCE], LOWEST, gl.float32, by_row)
    weight = gl.zeros([AT_ONCE], gl.float32, by_row)
    for first_part in range(0, parts, PARTS):
        part = first_part + gl.arange(0, PARTS, gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))
        place = first_place + part * stride
        is_part = (part < parts)[None, :] & (row < end_row)[:, None]
        lse = gl.load(
            notes + (place * NOTES)[None, :] + row[:, None], mask=is_part, other=-float("inf"), cache_modifier=".cg"
        )
        at = (place[None, :] * 64 + row[:, None]).to(gl.int64) * 512
        x = gl.load(
            partial + at[:, :, None] + column[None, None, :],
            mask=is_part[:, :, None],
            other=0.0,
            cache_modifier=".cg",
        )
        new_m = gl.maximum(m, gl.max(lse, 1))
        faded = gl.exp2(m - new_m)
        w = gl.exp2(lse - new_m[:, None])
        acc = acc * gl.convert_layout(faded, of_output)[:, None] + gl.sum(x.to(gl.float32) * w[:, :, None], 1)
        weight = weight * faded + gl.sum(w, 1)
        m = new_m
    inverse = gl.convert_layout(gl.where(weight > 0, 1.0 / weight, 0.0), of_output)
    to_row = first + gl.arange(0, AT_ONCE, of_output)
    to_column = gl.arange(0, 512, gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))
    to = out + (first_row + to_row).to(gl.int64)[:, None] * 512 + to_column[None, :]
    gl.store(to, (acc * inverse[:, None]).to(gl.bfloat16), mask=(to_row < end_row)[:, None])
    merged_lse = gl.where(weight > 0, (m + gl.log2(weight)) * LN_2, -float("inf"))
    gl.store(out_lse + first_row + row, merged_lse, mask=row < end_row)


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
    evens = begin * 0
    odds = begin * 0
    steps = begin * 0
    for number in range(begin, end):
        at = _item(plan, head, begin, number, FIRST_ITEM)
        lo = _read(at + 1)
        hi = _read(at + 2)
        kv_len = _read(at + 3)
        num_whole = _num_whole(lo, hi, kv_len)
        for turn in range(turns):
            row_tile = first_tile + turn * stride
            m = gl.full([64], LOWEST, gl.float32, gl.SliceLayout(1, SCORES))
            total = gl.zeros([64], gl.float32, gl.SliceLayout(1, SCORES))
            acc = gl.zeros([64, 256], gl.float32, HALF)
            mbarrier.wait(q_full, steps & 1)
            # An index that is 0, but not to the compiler: else every operand's address is computed before the loops,
            # and 80 of them do not fit into registers.
            zero = steps >> 20
            even_keys = (left.index(zero), right.index(zero), rope.index(zero))
            scores = _scores(queries, even_keys, full_0_left, full_rope.index(0), full_0_right, evens & 1, zero)
            for t in range(num_whole):
                zero = t >> 20
                m0 = gl.maximum(m, gl.max(scores, 1) * scale)
                _publish_max(m0, maxima.index(0), max0_ready)
                faded = gl.exp2(m - m0)
                p = gl.exp2(scores * scale - m0[:, None])
                acc = _fade(acc, faded)
                under_way = warpgroup_mma(
                    gl.convert_layout(p.to(gl.bfloat16), WEIGHTS), left.index(zero), acc, is_async=True
                )
                total = total * faded + gl.sum(p, 1)
                mbarrier.wait(p1_ready, odds & 1)
                m = maxima.index(1).load(gl.SliceLayout(1, SCORES))
                faded = gl.exp2(m0 - m)
                total = total * faded
                _publish_weights((p * faded[:, None]).to(gl.bfloat16), rope.index(zero), p0_ready)
                acc = warpgroup_mma_wait(0, deps=[under_way])
                gl.thread_barrier()
                mbarrier.arrive(empty.index(0), count=1)
                acc = _fade(acc, faded)
                under_way = warpgroup_mma(rope.index(zero + 1), left.index(zero + 1), acc, is_async=True)
                evens += 1
                odds += 1
                next_scores = gl.zeros([64, 64], gl.float32, SCORES)
                next_scores = _scores_of_half(
                    next_scores, q_left.index(zero), left.index(zero), full_0_left, evens & 1, True
                )
                acc = warpgroup_mma_wait(4, deps=[under_way])
                gl.thread_barrier()
                mbarrier.arrive(empty.index(2), count=1)
                mbarrier.wait(full_rope.index(0), evens & 1)
                next_scores = warpgroup_mma(
                    q_rope.index(zero), rope.index(zero).permute((1, 0)), next_scores, is_async=True
                )
                next_scores = _scores_of_half(
                    next_scores, q_right.index(zero), right.index(zero), full_0_right, evens & 1, False
                )
                scores = warpgroup_mma_wait(0, deps=[next_scores])

            excess = gl.zeros([64], gl.float32, gl.SliceLayout(1, SCORES))  # of rounded weights over the unrounded
            for t in range(num_whole, (hi - lo + 1) // 2):
                zero = t >> 20
                key = (lo + 2 * t) * 64
                has_odd = lo + 2 * t + 1 < hi
                if t > num_whole:
                    even_keys = (left.index(zero), right.index(zero), rope.index(zero))
                    scores = _scores(queries, even_keys, full_0_left, full_rope.index(0), full_0_right, evens & 1, zero)
                gl.thread_barrier()
                mbarrier.arrive(q_empty, count=1, pred=lo + 2 * t + 2 >= hi)
                if key + 64 > kv_len:
                    scores = _mask(scores, key, kv_len, bits, at, row_tile, TOKENS, HEADS, WORDS)
                m0 = gl.maximum(m, gl.max(scores, 1) * scale)
                _publish_max(m0, maxima.index(0), max0_ready)
                faded = gl.exp2(m - m0)
                m = m0
                p = gl.exp2(scores * scale - m0[:, None])
                weights = p.to(gl.bfloat16)
                if key + 64 > kv_len:
                    _make_finite(left.index(zero))
                acc = warpgroup_mma(gl.convert_layout(weights, WEIGHTS), left.index(zero), _fade(acc, faded))
                total = total * faded + gl.sum(p, 1)
                excess = excess * faded + gl.sum(weights.to(gl.float32) - p, 1)
                if has_odd:
                    mbarrier.wait(p1_ready, odds & 1)
                    m = maxima.index(1).load(gl.SliceLayout(1, SCORES))
                    faded = gl.exp2(m0 - m)
                    total = total * faded
                    excess = excess * faded
                    p = p * faded[:, None]
                _publish_weights(p.to(gl.bfloat16), rope.index(zero), p0_ready)
                if has_odd:
                    mbarrier.arrive(empty.index(0), count=1)
                    if key + 128 > kv_len:
                        _make_finite(left.index(zero + 1))
                    acc = warpgroup_mma(rope.index(zero + 1), left.index(zero + 1), _fade(acc, faded))
                    gl.thread_barrier()
                    mbarrier.arrive(empty.index(2), count=1, pred=lo + 2 * t + 2 < hi)
                    odds += 1
                evens += 1

            mbarrier.wait(sums_ready.index(0), steps & 1)
            total = total + sums.index(2).load(gl.SliceLayout(1, SCORES))
            rounded = total + excess + sums.index(3).load(gl.SliceLayout(1, SCORES))
            sums.index(0).store(rounded)
            gl.thread_barrier()
            mbarrier.arrive(sums_ready.index(1), count=1)
            acc = _fade(acc, gl.where(rounded > 0, 1.0 / rounded, 0.0))
            lse = gl.where(total > 0, m + gl.log2(total), -float("inf"))
            last = (hi - lo - 1) & 1
            buffer, freed = left.index(last), empty.index(2 * last)
            _finish(acc, lse, at, row_tile, buffer, freed, out_desc, output, ROWS, ROW_TILES, False)
            steps += 1
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
    evens = begin * 0
    odds = begin * 0
    steps = begin * 0
    for number in range(begin, end):
        at = _item(plan, head, begin, number, FIRST_ITEM)
        lo = _read(at + 1)
        hi = _read(at + 2)
        kv_len = _read(at + 3)
        num_whole = _num_whole(lo, hi, kv_len)
        for turn in range(turns):
            row_tile = first_tile + turn * stride
            m = gl.full([64], LOWEST, gl.float32, gl.SliceLayout(1, SCORES))
            total = gl.zeros([64], gl.float32, gl.SliceLayout(1, SCORES))
            acc = gl.zeros([64, 256], gl.float32, HALF)
            mbarrier.wait(q_full, steps & 1)
            for t in range(num_whole):
                zero = t >> 20  # see _left
                values1 = right.index(zero + 1)
                rope1 = rope.index(zero + 1)
                scores = gl.zeros([64, 64], gl.float32, SCORES)
                scores = _scores_of_half(scores, q_right.index(zero), values1, full_1_right, odds & 1, True)
                scores = _scores_of_half(scores, q_left.index(zero), left.index(zero + 1), full_1_left, odds & 1, False)
                mbarrier.wait(full_rope.index(1), odds & 1)
                scores = warpgroup_mma(q_rope.index(zero), rope1.permute((1, 0)), scores, is_async=True)
                scores = warpgroup_mma_wait(0, deps=[scores])
                own_max = gl.max(scores, 1) * scale
                mbarrier.wait(max0_ready, evens & 1)
                m1 = gl.maximum(maxima.index(0).load(gl.SliceLayout(1, SCORES)), own_max)
                faded = gl.exp2(m - m1)
                p = gl.exp2(scores * scale - m1[:, None])
                maxima.index(1).store(m1)
                weights = p.to(gl.bfloat16)
                _publish_weights(weights, rope1, p1_ready)
                acc = warpgroup_mma(gl.convert_layout(weights, WEIGHTS), values1, _fade(acc, faded), is_async=True)
                total = total * faded + gl.sum(p, 1)
                m = m1
                mbarrier.wait(p0_ready, evens & 1)
                acc = warpgroup_mma(rope.index(zero), right.index(zero), acc, is_async=True)
                acc = warpgroup_mma_wait(1, deps=[acc])
                gl.thread_barrier()
                mbarrier.arrive(empty.index(3), count=1, pred=lo + 2 * t + 2 < hi)
                acc = warpgroup_mma_wait(0, deps=[acc])
                gl.thread_barrier()
                mbarrier.arrive(empty.index(1), count=1)
                evens += 1
                odds += 1

            excess = gl.zeros([64], gl.float32, gl.SliceLayout(1, SCORES))  # see _left
            for t in range(num_whole, (hi - lo + 1) // 2):
                zero = t >> 20
                key = (lo + 2 * t + 1) * 64  # of the odd tile
                has_odd = lo + 2 * t + 1 < hi
                if has_odd:
                    odd_keys = (left.index(zero + 1), right.index(zero + 1), rope.index(zero + 1))
                    scores = _scores(queries, odd_keys, full_1_left, full_rope.index(1), full_1_right, odds & 1, zero)
                    if key + 64 > kv_len:
                        scores = _mask(scores, key, kv_len, bits, at, row_tile, TOKENS, HEADS, WORDS)
                    own_max = gl.max(scores, 1) * scale
                    mbarrier.wait(max0_ready, evens & 1)
                    m1 = gl.maximum(maxima.index(0).load(gl.SliceLayout(1, SCORES)), own_max)
                    faded = gl.exp2(m - m1)
                    p = gl.exp2(scores * scale - m1[:, None])
                    maxima.index(1).store(m1)
                    weights = p.to(gl.bfloat16)
                    _publish_weights(weights, rope.index(zero + 1), p1_ready)
                    total = total * faded + gl.sum(p, 1)
                    excess = excess * faded + gl.sum(weights.to(gl.float32) - p, 1)
                    if key + 64 > kv_len:
                        _make_finite(right.index(zero + 1))
                    acc = warpgroup_mma(gl.convert_layout(weights, WEIGHTS), right.index(zero + 1), _fade(acc, faded))
                    gl.thread_barrier()
                    mbarrier.arrive(empty.index(3), count=1, pred=lo + 2 * t + 2 < hi)
                    odds += 1
                    m = m1
                else:
                    mbarrier.wait(max0_ready, evens & 1)
                    m1 = maxima.index(0).load(gl.SliceLayout(1, SCORES))
                    faded = gl.exp2(m - m1)
                    total = total * faded
                    excess = excess * faded
                    acc = _fade(acc, faded)
                    m = m1
                gl.thread_barrier()
                mbarrier.arrive(q_empty, count=1, pred=lo + 2 * t + 2 >= hi)
                if key > kv_len:
                    _make_finite(right.index(zero))
                mbarrier.wait(p0_ready, evens & 1)
                acc = warpgroup_mma(rope.index(zero), right.index(zero), acc)
                gl.thread_barrier()
                mbarrier.arrive(empty.index(1), count=1, pred=has_odd)
                evens += 1

            sums.index(2).store(total)
            sums.index(3).store(excess)
            gl.thread_barrier()
            mbarrier.arrive(sums_ready.index(0), count=1)
            mbarrier.wait(sums_ready.index(1), steps & 1)
            rounded = sums.index(0).load(gl.SliceLayout(1, SCORES))
            acc = _fade(acc, gl.where(rounded > 0, 1.0 / rounded, 0.0))
            last = (hi - lo - 1) & 1
            buffer, freed = right.index(last), empty.index(1 + 2 * last)
            _finish(acc, m, at, row_tile, buffer, freed, out_desc, output, ROWS, ROW_TILES, True)
            steps += 1
    _merge(plan, output, ROWS, True, LANES, FULL_GROUPS, REST_LANES)


@gluon.jit(do_not_specialize=["num_slots", "table_stride"])  # else each batch would compile its own
def _mla_kernel(
    q_desc,  # [B * ROWS, 576]
    kv_desc,  # [slots, 576], boxes of min(PAGE, 64) slots
    out_desc,  # [B * ROWS, 512]
    pool,  # [slots, 576] bf16, the same as kv_desc
    num_slots,
    page_table,  # [B, W] int32
    table_stride,
    bits,  # [B, TOKENS, WORDS] int64
    plan,  # [groups + items, mla_plan.COLUMNS] int32: heads, then items
    out,  # [B * ROWS, 512] bf16, the same as out_desc
    out_lse,  # [B * ROWS] float32, base e
    partial_desc,  # [partials * row tiles * 64, 512], of `partial` as bfloat16
    partial,  # [partials, row tiles, 64, 512] float16: parts of sequences
    notes,  # [partials, row tiles, NOTES] float32; counters are zero between launches
    scale,  # of scores, base 2
    TOKENS: gl.constexpr,
    HEADS: gl.constexpr,
    WORDS: gl.constexpr,
    LANES: gl.constexpr,
    FULL_GROUPS: gl.constexpr,
    REST_LANES: gl.constexpr,
    AHEAD: gl.constexpr,
    PAGE: gl.constexpr,
):
    _prefetch_line(plan + gl.program_id(0) // LANES * COLUMNS)
    q_left = gl.allocate_shared_memory(gl.bfloat16, [1, 64, 256], SWIZZLED)
    q_right = gl.allocate_shared_memory(gl.bfloat16, [1, 64, 256], SWIZZLED)
    q_rope = gl.allocate_shared_memory(gl.bfloat16, [1, 64, 64], SWIZZLED)
    left = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 256], SWIZZLED)
    right = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 256], SWIZZLED)
    rope = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 64], SWIZZLED)
    maxima = gl.allocate_shared_memory(gl.float32, [2, 64], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    sums = gl.allocate_shared_memory(gl.float32, [4, 64], gl.SwizzledSharedLayout(1, 1, 1, [0]))
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
    output = (out, out_lse, partial, notes, partial_desc)
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
                plan, kv_desc, q_desc, pool, num_slots, page_table, table_stride, bits, queries, loads_q,
                left.index(0), full_0_left, empty.index(0), rope.index(0), full_rope.index(0),
                0, 0, False, False, True, AHEAD, PAGE, TOKENS, HEADS, WORDS, LANES, FULL_GROUPS, REST_LANES)),
            (_load, (
                plan, kv_desc, q_desc, pool, num_slots, page_table, table_stride, bits, queries, loads_q,
                right.index(0), full_0_right, empty.index(1), rope.index(0), full_rope.index(0),
                0, 1, False, True, False, 0, PAGE, TOKENS, HEADS, WORDS, LANES, FULL_GROUPS, REST_LANES)),
            (_load, (
                plan, kv_desc, q_desc, pool, num_slots, page_table, table_stride, bits, queries, loads_q,
                left.index(1), full_1_left, empty.index(2), rope.index(1), full_rope.index(1),
                1, 0, False, True, False, 0, PAGE, TOKENS, HEADS, WORDS, LANES, FULL_GROUPS, REST_LANES)),
            (_load, (
                plan, kv_desc, q_desc, pool, num_slots, page_table, table_stride, bits, queries, loads_q,
                right.index(1), full_1_right, empty.index(3), rope.index(1), full_rope.index(1),
                1, 1, True, False, False, AHEAD, PAGE, TOKENS, HEADS, WORDS, LANES, FULL_GROUPS, REST_LANES)),
        ],
        [4, 1, 1, 1, 1],
        [240, 24, 24, 24, 24],
    )  # fmt: skip


def pairs_ahead(row_tiles: int) -> int:
    """How many pairs of tiles ahead their pages are fetched into L2, by the row tiles that share them.

    Microseconds on an H200 (2026-12) at 0, 1, 2, 4 pairs: 2 row tiles 84, 87; 4 row tiles 132, 127; 16 row tiles (64
    tokens, batch 16, 8k) 439, -, 420, 426 and (8 tokens of 128 heads, batch 64, 4k) 863, -, 823, 820.
    """
    return 0 if row_tiles < 4 else 1 if row_tiles < 8 else 2


def num_places(schedule: Schedule) -> int:
    """Parts of row tiles that a schedule may have to keep."""
    return schedule.num_partials * schedule.grid.row_tiles


def make_workspace(places: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Memory for that many parts of row tiles. It holds counters, so it must be zero at first and then left alone."""
    partial = torch.empty(places * TILE, LATENT, dtype=torch.float16, device=device)
    return partial, torch.zeros(places * NOTES_NUMBERS, dtype=torch.float32, device=device)


def mla_tree_attention(
    q: Tensor,
    kv: Tensor,
    page_table: Tensor,
    page_size: int,
    ancestor_bits: Tensor,
    schedule: Schedule,
    workspace: tuple[Tensor, Tensor],
    scale: float,
    out: Tensor,
    lse: Tensor,
) -> None:
    """Write out [B, R, h, 512] bfloat16 and lse [B, R, h] float32, base e. Does not sync.

    q: [B, R, h, 576] bfloat16, contiguous; kv: [slots, 576], contiguous; page_table: [B, W] int32;
    page_size: 16, 32 or a multiple of 64; ancestor_bits: [B, R, words] int64, contiguous;
    workspace: of make_workspace, for at least num_places(schedule).
    """
    batch, tokens, heads, width = q.shape
    rows, grid = tokens * heads, schedule.grid
    partial, notes = workspace

    def described(x: Tensor, box: int = TILE) -> TensorDescriptor:
        return TensorDescriptor.from_tensor(x, [box, 64], SHARED)

    _mla_kernel[(grid.num_blocks,)](
        described(q.view(batch * rows, width)),
        described(kv, min(page_size, TILE)),
        described(out.view(batch * rows, LATENT)),
        kv,
        kv.shape[0],
        page_table,
        page_table.stride(0),
        ancestor_bits,
        schedule.table,
        out,
        lse,
        described(partial.view(torch.bfloat16)),
        partial,
        notes,
        scale * LOG2_E,
        TOKENS=tokens,
        HEADS=heads,
        WORDS=ancestor_bits.shape[-1],
        LANES=grid.lanes,
        FULL_GROUPS=grid.full_groups,
        REST_LANES=grid.rest_lanes,
        AHEAD=pairs_ahead(grid.row_tiles),
        PAGE=page_size,
        num_warps=4,
        launch_cooperative_grid=True,  # blocks wait for each other's parts, so all must run at once
    )
