"""What the paged tree attention kernels share: the split of KV ranges over a GPU, the walk over them, the combine.

Query rows of a sequence are (tree token, head), token-major, in tiles of BLOCK_M. A sequence's keys are its logical
positions, in tiles of BLOCK_N at absolute positions:

    position:  0 ................ full | full .. kv_len | kv_len .. kv_len + tree_len
               no mask, every row sees | by position    | by the ancestor bits of the row's token

Two ways to split the keys over programs:

- `split_kernel`, for `tree_kernel`: all tiles of all sequences, joined, are cut into equal shares, one a program, from
  lengths on the device alone. A share may begin and end inside a sequence; such pieces are combined.
- by position alone, for `fixed_kernel`: split i covers positions [split_start(i), split_start(i + 1)), whatever else
  is in the batch. Each row's visible keys stand in columns 0, 1, 2, ... of its own, ancestors in path order. So a row's
  output does not depend on the batch, the tree or the number of rows, bit for bit.
"""

# mypy: disable-error-code="no-untyped-def"
# (Triton reads the annotations of a kernel: tl.constexpr or none.)

from __future__ import annotations

import triton
import triton.language as tl

from treedraft.kernels import paged_launch

LN_2: tl.constexpr = tl.constexpr(0.6931471805599453)
SEQUENCE_COST: tl.constexpr = tl.constexpr(paged_launch.SEQUENCE_COST)
FIRST_SPLIT: tl.constexpr = tl.constexpr(paged_launch.FIRST_SPLIT)
EQUAL_SPLITS: tl.constexpr = tl.constexpr(paged_launch.EQUAL_SPLITS)
OCTAVE: tl.constexpr = tl.constexpr(paged_launch.OCTAVE)
# Triton compiles anew for values of 1 and multiples of 16. Not for these: it takes seconds while serving, and another
# program might round in another way.
SIZES = (
    "batch",
    "first_tile_id",
    "group_size",
    "groups",
    "is_chain",
    "max_splits",
    "min_tiles",
    "num_heads",
    "num_kv_heads",
    "num_tokens",
    "part_rows",
    "path_width",
    "row_tiles",
    "table_stride",
    "table_width",
    "tail",
    "tree_len",
)


@triton.jit(do_not_specialize=SIZES)
def split_kernel(
    kv_lens,  # [B] int64
    starts,  # [groups + 1, 2] int32, out
    parts,  # [B, 3] int32, out
    batch,
    tail,
    groups,
    min_tiles,
    BLOCK_N: tl.constexpr,
    GROUPS: tl.constexpr,  # at least groups + 1
    SEQUENCES: tl.constexpr,  # read at once
):
    total = tl.zeros([], tl.int32)
    for first in range(0, batch, SEQUENCES):
        total += tl.sum(cost_of(kv_lens, first + tl.arange(0, SEQUENCES), batch, tail, BLOCK_N))
    share = tl.maximum((total + groups - 1) // groups, min_tiles)
    group = tl.arange(0, GROUPS)
    wanted = group * share  # where a group begins, in tiles of all sequences joined, costs included
    sequence = tl.zeros([GROUPS], tl.int32)
    begin = tl.zeros([GROUPS], tl.int32)  # of that sequence
    before = tl.zeros([], tl.int32)
    num_cut = tl.zeros([], tl.int32)
    for first in range(0, batch, SEQUENCES):
        b = first + tl.arange(0, SEQUENCES)
        cost = cost_of(kv_lens, b, batch, tail, BLOCK_N)
        end = before + tl.cumsum(cost, 0)
        is_over = (end[None, :] <= wanted[:, None]) & (b < batch)[None, :]
        sequence += tl.sum(is_over.to(tl.int32), 1)
        begin = tl.maximum(begin, tl.max(tl.where(is_over, end[None, :], 0), 1))
        # Groups that begin in a sequence, up to its second tile, take its first one; others come behind.
        at_first = tl.minimum(end - cost + SEQUENCE_COST + 2, end)
        first_group = tl.minimum((at_first + share - 1) // share, groups) - 1
        last_group = tl.minimum((end + share - 1) // share, groups) - 1
        is_cut = (last_group > first_group).to(tl.int32)
        # Groups and cut sequences only grow: their sum is a place of its own for each partial result.
        tl.store(parts + b * 3, last_group - first_group + 1, mask=b < batch)
        tl.store(parts + b * 3 + 1, first_group, mask=b < batch)
        tl.store(parts + b * 3 + 2, num_cut + tl.cumsum(is_cut, 0) - is_cut, mask=b < batch)
        num_cut += tl.sum(tl.where(b < batch, is_cut, 0))
        before += tl.sum(cost)
    tile = tl.where(sequence < batch, wanted - begin - SEQUENCE_COST, 0)
    tl.store(starts + group * 2, sequence, mask=group <= groups)
    tl.store(starts + group * 2 + 1, tl.where(tile <= 1, 0, tile), mask=group <= groups)


@triton.jit
def cost_of(kv_lens, b, batch, tail, BLOCK_N: tl.constexpr):
    """Key tiles of sequences b, and what beginning one costs; 0 beyond the batch."""
    tiles = (tl.load(kv_lens + b, mask=b < batch, other=0).to(tl.int32) + tail + BLOCK_N - 1) // BLOCK_N
    return tl.where(b < batch, tl.maximum(tiles, 1) + SEQUENCE_COST, 0)


# ------------------------------------------------------------------ one tile


@triton.jit
def slots_at(table_row, position, is_read, table_width, PAGE_SIZE: tl.constexpr, RESERVED: tl.constexpr):
    """Physical slots of logical positions; slots of page 0, all zeros, where a sequence owns no page."""
    column = position // PAGE_SIZE
    page = tl.load(table_row + column, mask=is_read & (column < table_width), other=0)
    page = tl.where(page < RESERVED, 0, page)
    return page.to(tl.int64) * PAGE_SIZE + position % PAGE_SIZE


@triton.jit
def word_of(bits_row, word, is_row, WORDS: tl.constexpr):
    """One word of the ancestor bits of each row, 0 where there is none."""
    bits = tl.load(bits_row + tl.minimum(tl.maximum(word, 0), WORDS - 1), mask=is_row, other=0)
    return tl.where((word >= 0) & (word < WORDS), bits, 0)


@triton.jit
def sees_nodes(bits_row, first_node, is_row, WORDS: tl.constexpr, BLOCK_N: tl.constexpr):
    """Whether rows [M] see tree nodes first_node + 0 .. BLOCK_N - 1: [M, BLOCK_N]. Nodes below 0 are none."""
    node = first_node + tl.arange(0, BLOCK_N)
    shift = (node & 63).to(tl.int64)[None, :]
    word = first_node >> 6
    bit = (word_of(bits_row, word, is_row, WORDS)[:, None] >> shift) & 1  # 63: the sign's copies are cut by & 1
    for i in tl.static_range(1, (BLOCK_N + 62) // 64 + 1):
        other = word_of(bits_row, word + i, is_row, WORDS)
        bit = tl.where(((node >> 6) == word + i)[None, :], (other[:, None] >> shift) & 1, bit)
    return (bit != 0) & (node >= 0)[None, :]


@triton.jit
def multiply(a, b, acc, PRECISION: tl.constexpr):
    """acc + a b, in float32. PRECISION: of float32 operands; "widen" for the interpreter, which knows no bfloat16."""
    if PRECISION == "widen":
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def score(q, q_rope, k, k_rope, scale, HAS_ROPE: tl.constexpr, PRECISION: tl.constexpr, SPREAD: tl.constexpr):
    """Scaled scores to base 2, [M, N] float32. SPREAD: see unchain."""
    zero = tl.zeros([q.shape[0], k.shape[0]], tl.float32)
    s = multiply(q, tl.trans(k), zero, PRECISION)
    if not HAS_ROPE:
        return s * scale
    if SPREAD:  # scaled one by one: a plain sum would be made a chain again
        return s * scale + multiply(q_rope, tl.trans(k_rope), zero, PRECISION) * scale
    return multiply(q_rope, tl.trans(k_rope), s, PRECISION) * scale


@triton.jit
def unchain(p, shrink, v, one, anything):
    """Return p in v's dtype, and shrink as it is. one: a kernel argument above 0; anything: float32, not read.

    Where one matrix product feeds another, the compiler gives each warp whole rows of the first. With two warpgroups
    and 64 rows both then compute all scores: 76 matrix instructions a tile instead of 40. It does not look through a
    branch, and a branch with a volatile load is not folded.
    """
    if one > 0:
        weights = p.to(v.dtype)  # in here: what is ready before a branch is chosen without one
        factor = shrink
    else:
        other = tl.load(anything, volatile=True)
        weights = (p * other).to(v.dtype)
        factor = shrink * other
    return weights, factor


@triton.jit
def add_keys(s, v, high, total, acc, one, anything, PRECISION: tl.constexpr, SPREAD: tl.constexpr):
    """One step of the online softmax. high, total [M]: maximum and sum so far; acc [M, DV]. -inf scores weigh 0.

    one, anything: see unchain.
    """
    new_high = tl.maximum(high, tl.max(s, 1))
    base = tl.where(new_high == float("-inf"), 0.0, new_high)
    p = tl.exp2(s - base[:, None])
    shrink = tl.exp2(high - base)
    total = total * shrink + tl.sum(p, 1)
    if SPREAD:
        weights, factor = unchain(p, shrink, v, one, anything)
        acc = multiply(weights, v, acc * factor[:, None], PRECISION)
    else:
        acc = multiply(p.to(v.dtype), v, acc * shrink[:, None], PRECISION)
    return new_high, total, acc


@triton.jit
def finish(high, total, acc):
    """Output [M, DV] and log-sum-exp to base 2 [M] of the keys added; 0 and -inf where there were none."""
    is_empty = total == 0.0
    out = acc / tl.where(is_empty, 1.0, total)[:, None]
    lse = tl.where(is_empty, float("-inf"), high + tl.log2(tl.where(is_empty, 1.0, total)))
    return out, lse


@triton.jit
def load_keys(base, slot, is_read, stride, WIDTH: tl.constexpr, PADDED: tl.constexpr, MASKED: tl.constexpr):
    """Rows of a pool at slots [N]: [N, PADDED], zeros beyond WIDTH and, if MASKED, where not is_read."""
    column = tl.arange(0, PADDED)
    at = base + slot[:, None] * stride + column[None, :]
    if MASKED:
        return tl.load(at, mask=is_read[:, None] & (column < WIDTH)[None, :], other=0.0)
    if WIDTH == PADDED:
        return tl.load(at)
    return tl.load(at, mask=(column < WIDTH)[None, :], other=0.0)


@triton.jit
def load_queries(q, row_at, is_row, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """Queries at offsets row_at [M]: [M, PADDED], zeros where there is none."""
    column = tl.arange(0, PADDED)
    return tl.load(q + row_at[:, None] + column[None, :], mask=is_row[:, None] & (column < WIDTH)[None, :], other=0.0)


# ------------------------------------------------------------------ equal shares


@triton.jit(do_not_specialize=SIZES)
def tree_kernel(
    q,  # [B, R, h, DK + DR], any strides but the last
    k,  # [slots, hk, DK + DR]
    v,  # [slots, hk, DV]; with SHARED_V the first DV columns of k
    page_table,  # [B, W] int32
    kv_lens,  # [B] int64
    ancestor_bits,  # [B, R, WORDS] int64
    starts,  # see Splits
    parts,
    out,  # [B, R, h, DV]
    lse,  # [B, R, h] float32
    part_out,  # [2 * groups, row tiles * BLOCK_M, DV] float32
    part_lse,  # [2 * groups, row tiles * BLOCK_M] float32, base 2
    scale,  # times log2(e)
    q_stride_b,
    q_stride_r,
    q_stride_h,
    k_stride,
    k_head_stride,
    v_stride,
    v_head_stride,
    table_stride,
    table_width,
    num_tokens,
    num_heads,
    group_size,  # heads that read one KV head
    row_tiles,  # of one KV head
    tail,  # tree slots that were planned for
    tree_len,  # tree slots that bits may name
    PAGE_SIZE: tl.constexpr,
    RESERVED: tl.constexpr,  # pages below it hold nothing of any sequence
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
    SPREAD: tl.constexpr,
):
    tile_id = tl.program_id(0)  # row tiles of one KV range run together: it is read from memory once
    group = tl.program_id(1)
    kv_head = tile_id // row_tiles
    row = (tile_id % row_tiles) * BLOCK_M + tl.arange(0, BLOCK_M)
    token = row // group_size
    head = kv_head * group_size + row % group_size
    is_row = token < num_tokens
    first_b = tl.load(starts + group * 2)
    first_tile = tl.load(starts + group * 2 + 1)
    end_b = tl.load(starts + group * 2 + 2)
    end_tile = tl.load(starts + group * 2 + 3)
    is_empty = (first_b == end_b) & (first_tile == end_tile)
    stop_b = tl.where(is_empty, first_b, end_b + (end_tile > 0).to(tl.int32))
    k += kv_head * k_head_stride
    v += kv_head * v_head_stride
    column = tl.arange(0, BLOCK_N)
    for b in range(first_b, stop_b):
        b_long = tl.full([], 0, tl.int64) + b  # in the interpreter b is a plain number
        kv_len = tl.load(kv_lens + b).to(tl.int32)
        num_tiles = tl.maximum((kv_len + tail + BLOCK_N - 1) // BLOCK_N, 1)
        begin = tl.where(b == first_b, first_tile, 0)
        end = tl.where(b == end_b, end_tile, num_tiles)
        table_row = page_table + b_long * table_stride
        q_at = b_long * q_stride_b + token * q_stride_r + head * q_stride_h
        queries = load_queries(q, q_at, is_row, DK, DK_PAD)
        query_ropes = queries
        if DR > 0:
            query_ropes = load_queries(q + DK, q_at, is_row, DR, DR_PAD)
        high = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, DV_PAD], tl.float32)

        for tile in range(begin, tl.minimum(end, kv_len // BLOCK_N)):
            position = tile * BLOCK_N + column
            if PAGE_SIZE % BLOCK_N == 0:
                page = tl.load(table_row + tile * BLOCK_N // PAGE_SIZE).to(tl.int64)
                slot = page * PAGE_SIZE + tile * BLOCK_N % PAGE_SIZE + column
            else:
                page = tl.load(table_row + position // PAGE_SIZE).to(tl.int64)
                slot = page * PAGE_SIZE + position % PAGE_SIZE
            keys = load_keys(k, slot, slot >= 0, k_stride, DK, DK_PAD, False)
            ropes = keys
            if DR > 0:
                ropes = load_keys(k + DK, slot, slot >= 0, k_stride, DR, DR_PAD, False)
            s = score(queries, query_ropes, keys, ropes, scale, DR > 0, PRECISION, SPREAD)
            if SHARED_V:
                high, total, acc = add_keys(s, keys, high, total, acc, num_tokens, part_lse, PRECISION, SPREAD)
            else:
                values = load_keys(v, slot, slot >= 0, v_stride, DV, DV_PAD, False)
                high, total, acc = add_keys(s, values, high, total, acc, num_tokens, part_lse, PRECISION, SPREAD)

        bits_row = ancestor_bits + (b_long * num_tokens + token) * WORDS
        last = tl.minimum(end, (kv_len + tree_len + BLOCK_N - 1) // BLOCK_N)
        for tile in tl.range(tl.maximum(begin, kv_len // BLOCK_N), last, num_stages=1):  # one or two turns
            position = tile * BLOCK_N + column
            sees = sees_nodes(bits_row, tile * BLOCK_N - kv_len, is_row, WORDS, BLOCK_N)
            sees = sees | (position < kv_len)[None, :]
            is_read = tl.max(sees.to(tl.int32), 0) > 0  # what no row sees may be NaN, as key and as value
            slot = slots_at(table_row, position, is_read, table_width, PAGE_SIZE, RESERVED)
            keys = load_keys(k, slot, is_read, k_stride, DK, DK_PAD, True)
            ropes = keys
            if DR > 0:
                ropes = load_keys(k + DK, slot, is_read, k_stride, DR, DR_PAD, True)
            s = score(queries, query_ropes, keys, ropes, scale, DR > 0, PRECISION, SPREAD)
            s = tl.where(sees, s, float("-inf"))
            if SHARED_V:
                high, total, acc = add_keys(s, keys, high, total, acc, num_tokens, part_lse, PRECISION, SPREAD)
            else:
                values = load_keys(v, slot, is_read, v_stride, DV, DV_PAD, True)
                high, total, acc = add_keys(s, values, high, total, acc, num_tokens, part_lse, PRECISION, SPREAD)

        result, row_lse = finish(high, total, acc)
        dim = tl.arange(0, DV_PAD)
        if (begin == 0) & (end == num_tiles):
            out_row = (b_long * num_tokens + token) * num_heads + head
            to_store = is_row[:, None] & (dim < DV)[None, :]
            tl.store(out + out_row[:, None] * DV + dim[None, :], result.to(out.dtype.element_ty), mask=to_store)
            tl.store(lse + out_row, row_lse * LN_2, mask=is_row)
        else:
            part = group + tl.load(parts + b * 3 + 2)
            part_row = part.to(tl.int64) * tl.num_programs(0) * BLOCK_M + tile_id * BLOCK_M + tl.arange(0, BLOCK_M)
            tl.store(part_out + part_row[:, None] * DV + dim[None, :], result, mask=(dim < DV)[None, :])
            tl.store(part_lse + part_row, row_lse)


# ------------------------------------------------------------------ splits by position


@triton.jit
def split_start(split):
    """First position of a fixed split: equal ones up to EQUAL_SPLITS, then OCTAVE of each size, sizes doubling."""
    octave = tl.maximum(split - EQUAL_SPLITS, 0) // OCTAVE
    within = split - EQUAL_SPLITS - octave * OCTAVE
    late = ((EQUAL_SPLITS * FIRST_SPLIT) << octave) + within * ((EQUAL_SPLITS // OCTAVE * FIRST_SPLIT) << octave)
    return tl.where(split < EQUAL_SPLITS, split * FIRST_SPLIT, late)


@triton.jit(do_not_specialize=SIZES)
def fixed_kernel(
    q,  # as of tree_kernel
    k,
    v,
    page_table,
    kv_lens,
    row_lens,  # [B, R] int64: keys that a token sees, prefix and path
    path_slots,  # [B, R, path_width] int64: slots of a token's ancestors and itself, in path order
    part_out,  # [row tiles of the launch, max_splits, BLOCK_M, DV] float32
    part_lse,  # [row tiles of the launch, max_splits, BLOCK_M] float32, base 2; -inf where a row has no key in a split
    scale,
    q_stride_b,
    q_stride_r,
    q_stride_h,
    k_stride,
    k_head_stride,
    v_stride,
    v_head_stride,
    table_stride,
    table_width,
    num_tokens,
    num_kv_heads,
    group_size,
    row_tiles,
    path_width,
    is_chain,  # 1: path slots are the positions behind kv_len, and all rows of a tile read them together
    first_tile_id,
    PAGE_SIZE: tl.constexpr,
    RESERVED: tl.constexpr,
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
    SPREAD: tl.constexpr,
):
    tile_id = first_tile_id + tl.program_id(0)
    split = tl.program_id(1)
    b = (tile_id // (row_tiles * num_kv_heads)).to(tl.int64)
    kv_head = (tile_id // row_tiles) % num_kv_heads
    first_row = (tile_id % row_tiles) * BLOCK_M
    row = first_row + tl.arange(0, BLOCK_M)
    token = row // group_size
    head = kv_head * group_size + row % group_size
    is_row = token < num_tokens
    row_len = tl.load(row_lens + b * num_tokens + token, mask=is_row, other=0).to(tl.int32)
    longest = tl.max(row_len, 0)
    begin = split_start(split)
    end = tl.minimum(split_start(split + 1), longest)
    part_row = (tl.program_id(0).to(tl.int64) * tl.num_programs(1) + split) * BLOCK_M + tl.arange(0, BLOCK_M)
    if begin >= end:
        tl.store(part_lse + part_row, tl.full([BLOCK_M], float("-inf"), tl.float32))
    else:
        kv_len = tl.load(kv_lens + b).to(tl.int32)
        table_row = page_table + b * table_stride
        q_at = b * q_stride_b + token * q_stride_r + head * q_stride_h
        queries = load_queries(q, q_at, is_row, DK, DK_PAD)
        query_ropes = queries
        if DR > 0:
            query_ropes = load_queries(q + DK, q_at, is_row, DR, DR_PAD)
        k += kv_head * k_head_stride
        v += kv_head * v_head_stride
        high = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, DV_PAD], tl.float32)
        path_begin = tl.where(is_chain != 0, longest, kv_len)
        # Shared tiles first, then the same later tiles again for each token, each time with that token's own path.
        last_tile = (end + BLOCK_N - 1) // BLOCK_N
        shared_end = tl.where(is_chain != 0, last_tile, tl.minimum(last_tile, kv_len // BLOCK_N))
        num_shared = tl.maximum(shared_end - begin // BLOCK_N, 0)
        own_begin = begin // BLOCK_N + num_shared
        num_own = last_tile - own_begin
        first_token = first_row // group_size
        last_token = tl.minimum((first_row + BLOCK_M - 1) // group_size, num_tokens - 1)
        for i in range(0, num_shared + num_own * (last_token - first_token + 1)):
            is_shared = i < num_shared
            own = tl.maximum(i - num_shared, 0)
            divisor = tl.maximum(num_own, 1)
            owner = first_token + own // divisor
            tile = tl.where(is_shared, begin // BLOCK_N + i, own_begin + own % divisor)
            column = tile * BLOCK_N + tl.arange(0, BLOCK_N)
            owner_len = tl.load(row_lens + b * num_tokens + owner).to(tl.int32)
            num_read = tl.where(is_shared, longest, owner_len)
            is_read = column < num_read
            on_path = is_read & (column >= path_begin)
            slot = slots_at(table_row, column, is_read & (column < path_begin), table_width, PAGE_SIZE, RESERVED)
            path_at = path_slots + (b * num_tokens + owner) * path_width + (column - kv_len)
            slot = tl.where(on_path, tl.load(path_at, mask=on_path, other=0), slot)
            keys = load_keys(k, slot, is_read, k_stride, DK, DK_PAD, True)
            ropes = keys
            if DR > 0:
                ropes = load_keys(k + DK, slot, is_read, k_stride, DR, DR_PAD, True)
            s = score(queries, query_ropes, keys, ropes, scale, DR > 0, PRECISION, SPREAD)
            num_seen = tl.where(is_shared, row_len, tl.where(token == owner, row_len, 0))
            s = tl.where(column[None, :] < num_seen[:, None], s, float("-inf"))
            if SHARED_V:
                high, total, acc = add_keys(s, keys, high, total, acc, num_tokens, part_lse, PRECISION, SPREAD)
            else:
                values = load_keys(v, slot, is_read, v_stride, DV, DV_PAD, True)
                high, total, acc = add_keys(s, values, high, total, acc, num_tokens, part_lse, PRECISION, SPREAD)
        result, row_lse = finish(high, total, acc)
        dim = tl.arange(0, DV_PAD)
        tl.store(part_out + part_row[:, None] * DV + dim[None, :], result, mask=(dim < DV)[None, :])
        tl.store(part_lse + part_row, row_lse)


# ------------------------------------------------------------------ combine


@triton.jit
def combine_row(
    part_out,  # at the row's first part
    part_lse,
    stride,  # rows between one part and the next
    num_parts,
    out,  # at the row
    lse,
    DV: tl.constexpr,
    DV_PAD: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Join the parts of one row, in their order. A part of log-sum-exp -inf changes no bit, wherever it stands."""
    index = tl.arange(0, PARTS)
    many = tl.arange(0, 4 * PARTS)
    dim = tl.arange(0, DV_PAD)
    high = tl.full([], float("-inf"), tl.float32)
    for first in range(0, num_parts, 4 * PARTS):
        part = first + many
        lses = tl.load(part_lse + part * stride, mask=part < num_parts, other=float("-inf"))
        high = tl.maximum(high, tl.max(lses, 0))
    base = tl.where(high == float("-inf"), 0.0, high)
    total = tl.zeros([], tl.float32)
    acc = tl.zeros([DV_PAD], tl.float32)
    for first in range(0, num_parts, PARTS):
        part = first + index
        lses = tl.load(part_lse + part * stride, mask=part < num_parts, other=float("-inf"))
        weight = tl.exp2(lses - base)
        is_read = (weight > 0)[:, None] & (dim < DV)[None, :]  # an empty part was not written
        values = tl.load(part_out + part[:, None] * stride * DV + dim[None, :], mask=is_read, other=0.0)
        acc += tl.sum(values * weight[:, None], 0)
        total += tl.sum(weight, 0)
    acc = acc / tl.where(total == 0.0, 1.0, total)
    tl.store(out + dim, acc.to(out.dtype.element_ty), mask=dim < DV)
    row_lse = (high + tl.log2(tl.where(total == 0.0, 1.0, total))) * LN_2
    tl.store(lse, tl.where(total == 0.0, float("-inf"), row_lse))


@triton.jit(do_not_specialize=SIZES)
def combine_shares_kernel(
    part_out,  # as of tree_kernel
    part_lse,
    parts,  # see Splits
    out,
    lse,
    num_tokens,
    num_heads,
    group_size,
    row_tiles,
    part_rows,  # rows of one part
    DV: tl.constexpr,
    DV_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Rows (token, head) of sequences that several groups worked on; others were written already."""
    index = tl.program_id(0)
    b = tl.program_id(1)
    num_parts = tl.load(parts + b * 3)
    if num_parts > 1:
        head = index % num_heads
        row = (head // group_size) * row_tiles * BLOCK_M + (index // num_heads) * group_size + head % group_size
        first = (tl.load(parts + b * 3 + 1) + tl.load(parts + b * 3 + 2)).to(tl.int64) * part_rows + row
        at = b.to(tl.int64) * num_tokens * num_heads + index
        combine_row(
            part_out + first * DV, part_lse + first, part_rows, num_parts, out + at * DV, lse + at, DV, DV_PAD, PARTS
        )


@triton.jit(do_not_specialize=SIZES)
def combine_fixed_kernel(
    part_out,  # as of fixed_kernel
    part_lse,
    out,
    lse,
    num_tokens,
    num_heads,
    num_kv_heads,
    group_size,
    row_tiles,
    max_splits,
    first_tile_id,
    DV: tl.constexpr,
    DV_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PARTS: tl.constexpr,
):
    """One row of the row tiles that fixed_kernel worked on."""
    local_tile = tl.program_id(0) // BLOCK_M
    within = tl.program_id(0) % BLOCK_M
    tile_id = first_tile_id + local_tile
    b = (tile_id // (row_tiles * num_kv_heads)).to(tl.int64)
    row = (tile_id % row_tiles) * BLOCK_M + within
    token = row // group_size
    if token < num_tokens:
        head = (tile_id // row_tiles) % num_kv_heads * group_size + row % group_size
        first = local_tile.to(tl.int64) * max_splits * BLOCK_M + within
        at = (b * num_tokens + token) * num_heads + head
        combine_row(
            part_out + first * DV, part_lse + first, BLOCK_M, max_splits, out + at * DV, lse + at, DV, DV_PAD, PARTS
        )
