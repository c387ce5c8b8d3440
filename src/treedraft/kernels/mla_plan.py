"""How sequences of unequal lengths are cut into equal shares for a fixed grid: planned on the device, in one launch.

The query rows of a sequence (token * heads + head) form row tiles of 64, its keys form tiles of 64. A thread block
("lane") works on one row tile at a time; the lanes of a group walk the same keys together, so that each key tile is
read from memory once. Row tiles that do not fill the card's multiprocessors leave some over: they form the rest group,
whose few lanes take the row tiles in several turns.

    group 0: lanes = row tiles 0 .. T-1     group 1: same     ...     rest group: lanes take tiles in rest_turns turns
             |- items: (sequence, key tiles lo .. hi) -|

The key tiles of all sequences, in order, are cut among the groups. A part of a sequence is an item. A sequence of more
than one part has its parts merged in order, at the end of the same launch (kernels.gluon_mla).

Columns of an item, int32:

    0 sequence | 1 lo | 2 hi (key tiles) | 3 kv_len | 4 parts of the sequence | 5 which part | 6 partial slot
    7, 8 table entries lo, lo + 1: with pages of 64 slots, the first tiles' own
    9 begin | 10 end of the group's items: in `heads` alone

`heads` holds, for each group, a copy of its first item with begin and end: one read instead of two in turn.
"""

# mypy: disable-error-code="no-untyped-def"
# (Triton reads the annotations of a kernel: tl.constexpr or none.)

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 64  # query rows, and keys, of a tile
COLUMNS = 16  # of an item
ITEM_COST = 4  # what an item costs beside its key tiles, in key tiles: measured 5 to 8 us, at 1.64 us a tile
MIN_PART = 2  # key tiles of a part: a smaller one costs more to merge than it saves
CANDIDATES = 256  # shares that are tried at once


@dataclass(frozen=True)
class Grid:
    """How row tiles are spread over thread blocks. Independent of lengths: a captured launch keeps it."""

    row_tiles: int  # of one sequence
    lanes: int  # thread blocks of a full group
    full_groups: int
    rest_lanes: int  # thread blocks of the rest group; 0: there is none

    @property
    def num_groups(self) -> int:
        return self.full_groups + (self.rest_lanes > 0)

    @property
    def rest_turns(self) -> int:
        """Turns that the rest group takes for each key range; 0: there is no rest group."""
        return -(-self.row_tiles // self.rest_lanes) if self.rest_lanes else 0

    @property
    def num_blocks(self) -> int:
        return self.lanes * self.full_groups + self.rest_lanes


@dataclass(frozen=True)
class Schedule:
    """What each group does. The parts of all sequences that have several number at most num_partials."""

    grid: Grid
    table: Tensor  # [groups + items, COLUMNS] int32: heads, then items
    num_partials: int

    @property
    def heads(self) -> Tensor:
        return self.table[: self.grid.num_groups]

    @property
    def items(self) -> Tensor:
        return self.table[self.grid.num_groups :]


def lay_grid(num_rows: int, num_multiprocessors: int) -> Grid:
    """Return the grid for sequences of num_rows query rows (tokens * heads)."""
    row_tiles = -(-num_rows // TILE)
    if row_tiles > num_multiprocessors:
        turns = -(-row_tiles // num_multiprocessors)
        return Grid(row_tiles, lanes=-(-row_tiles // turns), full_groups=1, rest_lanes=0)
    full_groups, rest_lanes = divmod(num_multiprocessors, row_tiles)
    return Grid(row_tiles, row_tiles, full_groups, rest_lanes)


def plan_items(
    page_table: Tensor, kv_lens: Tensor, tree_len: int, max_kv_len: int, grid: Grid, part_tiles: int | None = None
) -> Schedule:
    """Cut sequences of kv_lens [B] int64 keys and tree_len tree slots. page_table: [B, W] int32. Does not sync.

    part_tiles: cut every sequence at multiples of so many key tiles, whatever the batch; None: into equal shares.
    """
    batch, device = len(kv_lens), kv_lens.device
    groups = grid.num_groups
    if part_tiles is None:
        max_items, num_partials = batch + groups, 2 * groups
    else:
        max_items = num_partials = batch * max(-(-(max_kv_len + tree_len) // (part_tiles * TILE)), 1)
    schedule = Schedule(grid, torch.empty(groups + max_items, COLUMNS, dtype=torch.int32, device=device), num_partials)
    _plan_kernel[(1,)](
        kv_lens,
        page_table,
        schedule.heads,
        schedule.items,
        batch,
        page_table.stride(0),
        page_table.shape[1],
        tree_len,
        grid.full_groups,
        groups,
        grid.rest_turns,
        part_tiles or 0,
        IS_FIXED=part_tiles is not None,
        ITEM_COST=ITEM_COST,
        MIN_PART=MIN_PART,
        TILE=TILE,
        COLUMNS=COLUMNS,
        CANDIDATES=CANDIDATES,
        GROUPS=triton.next_power_of_2(groups),
        num_warps=4,
    )
    return schedule


def plan_items_torch(
    page_table: Tensor, kv_lens: Tensor, tree_len: int, max_kv_len: int, grid: Grid, part_tiles: int | None = None
) -> Schedule:
    """The same in plain loops on the host. Unused entries are 0."""
    batch, groups = len(kv_lens), grid.num_groups
    if part_tiles is None:
        cuts = _equal_cuts([_tiles(n, tree_len) for n in kv_lens.tolist()], grid)
        max_items, num_partials = batch + groups, 2 * groups
    else:
        cuts = _fixed_cuts([_tiles(n, tree_len) for n in kv_lens.tolist()], grid, part_tiles)
        max_items = num_partials = batch * max(-(-(max_kv_len + tree_len) // (part_tiles * TILE)), 1)
    schedule = Schedule(grid, torch.zeros(groups + max_items, COLUMNS, dtype=torch.int32), num_partials)
    heads, items = schedule.heads, schedule.items
    num_items = num_slots = 0
    for b, parts in enumerate(cuts):
        for part, (group, lo, hi) in enumerate(parts):
            pages = [int(page_table[b, min(lo + i, page_table.shape[1] - 1)]) for i in (0, 1)]
            slot = num_slots + part if len(parts) > 1 else 0
            items[num_items, :9] = torch.tensor([b, lo, hi, int(kv_lens[b]), len(parts), part, slot, *pages])
            if heads[group, 10] == 0:
                heads[group] = items[num_items]
                heads[group, 9] = num_items
            num_items += 1
            heads[group, 10] = num_items
        num_slots += len(parts) if len(parts) > 1 else 0
    return schedule


def _tiles(kv_len: int, tree_len: int) -> int:
    return max(-(-(kv_len + tree_len) // TILE), 1)


def _equal_cuts(tiles: list[int], grid: Grid) -> list[list[tuple[int, int, int]]]:
    """For each sequence its parts (group, lo, hi), with the smallest share of those tried that every group keeps to."""
    last = grid.num_groups - 1
    turns = grid.rest_turns
    rate = grid.full_groups * max(turns, 1) + (turns > 0)  # what all groups do in the time of one turn of the rest
    least = max(-(-sum(tiles) * max(turns, 1) // rate), MIN_PART) + ITEM_COST
    step = 1 + ITEM_COST * len(tiles) // (grid.full_groups * (CANDIDATES // 2))
    shares = [least + i * step for i in range(CANDIDATES)]
    for share in shares:
        cuts, fits = _cut(tiles, grid, share, last)
        if fits or share == shares[-1]:
            return cuts
    raise AssertionError


def _cut(tiles: list[int], grid: Grid, share: int, last: int) -> tuple[list[list[tuple[int, int, int]]], bool]:
    """Fill one group after the other up to the share. False where the last group has more than its own."""

    def capacity(group: int) -> int:
        return share if group < grid.full_groups else share // grid.rest_turns

    group, room, cuts = 0, capacity(0), []
    for need in tiles:
        parts: list[tuple[int, int, int]] = []
        lo = 0
        while lo < need:
            size = room - ITEM_COST
            if size < need - lo and group < last:
                if size < MIN_PART:
                    group, room = group + 1, capacity(group + 1)
                    continue
            else:
                size = need - lo
            parts.append((group, lo, lo + size))
            room -= size + ITEM_COST
            lo += size
        cuts.append(parts)
    return cuts, room >= 0


def _fixed_cuts(tiles: list[int], grid: Grid, part_tiles: int) -> list[list[tuple[int, int, int]]]:
    """Parts at multiples of part_tiles, in order over the full groups."""
    total = sum(n + ITEM_COST * -(-n // part_tiles) for n in tiles)
    before, cuts = 0, []
    for need in tiles:
        parts = []
        for part, lo in enumerate(range(0, need, part_tiles)):
            start = before + part * (part_tiles + ITEM_COST)
            parts.append((start * grid.full_groups // total, lo, min(lo + part_tiles, need)))
        cuts.append(parts)
        before += need + ITEM_COST * -(-need // part_tiles)
    return cuts


@triton.jit
def _num_tiles(kv_len, tree_len, TILE: tl.constexpr):
    return tl.maximum((kv_len.to(tl.int32) + tree_len + TILE - 1) // TILE, 1)


@triton.jit
def _ceil_div(x, inverse, y):
    """x / y rounded up, by way of 1 / y in float32: exact for x below 2^21, and far from an integer division's wait."""
    return (((x + y - 1).to(tl.float32) + 0.5) * inverse).to(tl.int32)


@triton.jit
def _put(at, mask, b, lo, hi, kv_len, parts, part, slot):
    tl.store(at, b, mask=mask)
    tl.store(at + 1, lo, mask=mask)
    tl.store(at + 2, hi, mask=mask)
    tl.store(at + 3, kv_len, mask=mask)
    tl.store(at + 4, parts, mask=mask)
    tl.store(at + 5, part, mask=mask)
    tl.store(at + 6, slot, mask=mask)


@triton.jit
def _put_parts(
    heads,
    items,
    b,
    kv_len,
    lo,  # [P] key tiles of each part
    hi,
    group,  # [P]
    part,  # [P]
    before,  # [P] group of the item before; -1: none
    parts,
    num_items,
    num_slots,
    COLUMNS: tl.constexpr,
):
    """Write a sequence's parts, and into `heads` those that are their group's first; a group ends where one begins."""
    is_part = part < parts
    slot = tl.where(parts > 1, num_slots + part, 0)
    item = num_items + part
    _put(items + item * COLUMNS, is_part, b, lo, hi, kv_len, parts, part, slot)
    starts = is_part & (group != before)
    head = heads + group * COLUMNS
    _put(head, starts, b, lo, hi, kv_len, parts, part, slot)
    tl.store(head + 9, item, mask=starts)
    tl.store(heads + before * COLUMNS + 10, item, mask=starts & (before >= 0))


@triton.jit
def _put_pages(rows, row, mask, page_table, table_stride, table_width, COLUMNS: tl.constexpr):
    """Fill in the pages of items or heads: after all else, since each waits for the table."""
    at = rows + row * COLUMNS
    b = tl.load(at, mask=mask, other=0)
    lo = tl.load(at + 1, mask=mask, other=0)
    pages = page_table + b * table_stride
    tl.store(at + 7, tl.load(pages + tl.minimum(lo, table_width - 1), mask=mask, other=0), mask=mask)
    tl.store(at + 8, tl.load(pages + tl.minimum(lo + 1, table_width - 1), mask=mask, other=0), mask=mask)


@triton.jit(do_not_specialize=["batch", "table_stride", "table_width", "tree_len"])  # one compilation for all
def _plan_kernel(
    kv_lens,  # [B] int64
    page_table,  # [B, W] int32
    heads,  # [groups, COLUMNS] int32
    items,  # [items, COLUMNS] int32
    batch,
    table_stride,
    table_width,
    tree_len,
    full_groups,
    groups,
    rest_turns,
    part_tiles,
    IS_FIXED: tl.constexpr,
    ITEM_COST: tl.constexpr,
    MIN_PART: tl.constexpr,
    TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
    CANDIDATES: tl.constexpr,
    GROUPS: tl.constexpr,  # a power of two, at least `groups`
):
    lane = tl.arange(0, GROUPS)
    tl.store(heads + lane * COLUMNS + 9, 0, mask=lane < groups)
    tl.store(heads + lane * COLUMNS + 10, 0, mask=lane < groups)
    tl.debug_barrier()

    total = tl.zeros([], tl.int32)
    column = tl.arange(0, CANDIDATES)
    for first in range(0, batch, CANDIDATES):
        is_inside = first + column < batch
        tiles = _num_tiles(tl.load(kv_lens + first + column, mask=is_inside, other=0), tree_len, TILE)
        if IS_FIXED:
            tiles += ITEM_COST * ((tiles + part_tiles - 1) // part_tiles)
        total += tl.sum(tl.where(is_inside, tiles, 0))

    num_items = tl.zeros([], tl.int32)
    num_slots = tl.zeros([], tl.int32)
    if IS_FIXED:
        done = tl.zeros([], tl.int64)
        previous = tl.full([], -1, tl.int32)
        for b in range(0, batch):
            kv_len = tl.load(kv_lens + b)
            need = _num_tiles(kv_len, tree_len, TILE)
            parts = (need + part_tiles - 1) // part_tiles
            for first in range(0, parts, GROUPS):
                part = first + lane
                start = done + part.to(tl.int64) * (part_tiles + ITEM_COST)
                group = (start * full_groups // total).to(tl.int32)
                before = ((start - part_tiles - ITEM_COST) * full_groups // total).to(tl.int32)
                before = tl.where(part == 0, previous, before)
                lo = part * part_tiles
                hi = tl.minimum(lo + part_tiles, need)
                _put_parts(
                    heads,
                    items,
                    b,
                    kv_len.to(tl.int32),
                    lo,
                    hi,
                    group,
                    part,
                    before,
                    parts,
                    num_items,
                    num_slots,
                    COLUMNS,
                )
            previous = ((done + (parts - 1).to(tl.int64) * (part_tiles + ITEM_COST)) * full_groups // total).to(
                tl.int32
            )
            done += need + ITEM_COST * parts
            num_items += parts
            num_slots += tl.where(parts > 1, parts, 0)
        tl.store(heads + previous * COLUMNS + 10, num_items)
    else:
        # The smallest share that all groups keep to: candidates are tried side by side.
        last = groups - 1
        turns = tl.maximum(rest_turns, 1)
        rate = full_groups * turns + (rest_turns > 0).to(tl.int32)
        least = tl.maximum((total.to(tl.int64) * turns + rate - 1) // rate, MIN_PART).to(tl.int32) + ITEM_COST
        step = 1 + ITEM_COST * batch // (full_groups * (CANDIDATES // 2))
        share = least + column * step
        rest_share = share // turns
        full_share = share - ITEM_COST
        inverse_share = 1.0 / full_share.to(tl.float32)
        at = tl.zeros([CANDIDATES], tl.int32)
        room = share
        for b in range(0, batch):
            need = _num_tiles(tl.load(kv_lens + b), tree_len, TILE)
            size = room - ITEM_COST
            is_split = (size < need) & (at < last)
            rest = need - tl.where(size < MIN_PART, 0, size)
            more = tl.minimum(_ceil_div(rest, inverse_share, full_share), last - at)
            fresh = tl.where(at + more < full_groups, share, rest_share)
            last_part = rest - (more - 1) * full_share
            room = tl.where(is_split, fresh - last_part, room - need) - ITEM_COST
            at += tl.where(is_split, more, 0)
        fits = room >= 0
        best = tl.min(tl.where(fits, share, share + (1 << 28)))
        best = tl.where(best >= (1 << 28), least + (CANDIDATES - 1) * step, best)

        rest_best = best // turns
        full = best - ITEM_COST
        inverse = 1.0 / full.to(tl.float32)
        group0 = tl.zeros([], tl.int32)
        left = best
        previous = tl.full([], -1, tl.int32)
        for b in range(0, batch):
            kv_len = tl.load(kv_lens + b)
            need = _num_tiles(kv_len, tree_len, TILE)
            size = left - ITEM_COST
            is_split = (size < need) & (group0 < last)
            moves_on = is_split & (size < MIN_PART)
            group0 += moves_on.to(tl.int32)
            head_part = tl.minimum(tl.where(moves_on, full, size), need)
            head_part = tl.where(is_split & (group0 < last), head_part, need)
            parts = 1 + tl.minimum(_ceil_div(need - head_part, inverse, full), last - group0)
            lo = tl.where(lane == 0, 0, head_part + (lane - 1) * full)
            hi = tl.where(lane == parts - 1, need, head_part + lane * full)
            before = tl.where(lane == 0, previous, group0 + lane - 1)
            _put_parts(
                heads,
                items,
                b,
                kv_len.to(tl.int32),
                lo,
                hi,
                group0 + lane,
                lane,
                before,
                parts,
                num_items,
                num_slots,
                COLUMNS,
            )
            used = need - tl.where(parts == 1, 0, head_part + (parts - 2) * full) + ITEM_COST
            is_fresh = moves_on | (parts > 1)
            group0 += parts - 1
            left = tl.where(is_fresh, tl.where(group0 < full_groups, best, rest_best), left) - used
            previous = group0
            num_items += parts
            num_slots += tl.where(parts > 1, parts, 0)
        tl.store(heads + previous * COLUMNS + 10, num_items)
    tl.debug_barrier()
    for first in range(0, num_items, CANDIDATES):
        item = first + column
        _put_pages(items, item, item < num_items, page_table, table_stride, table_width, COLUMNS)
    has_items = tl.load(heads + lane * COLUMNS + 10, mask=lane < groups, other=0) > 0
    _put_pages(heads, lane, has_items, page_table, table_stride, table_width, COLUMNS)
