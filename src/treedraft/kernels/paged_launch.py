"""Launching the paged tree attention kernels: tiles, splits and memory. Imports Triton when a kernel is launched.

So a dry run on the meta device, which budgets memory, needs no Triton.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LOG2_E = 1.4426950408889634
SEQUENCE_COST = 3  # tiles that beginning a sequence costs a program, about
FIRST_SPLIT = 512  # positions of a fixed split near the beginning
EQUAL_SPLITS = 16  # so many of that size; after them sizes double every OCTAVE splits
OCTAVE = 8  # splits
PART_BYTES = 256 << 20  # of fixed splits' partial results; more row tiles than fit are worked on in turn
COMBINE_PARTS = 32  # parts that the combine reads at once: a round of loads takes as long for one


@dataclass(frozen=True)
class Tiles:
    """How a kernel is compiled. It must not depend on the number of rows where bits are to be reproduced."""

    block_m: int  # query rows of a tile
    block_n: int  # keys of a tile
    num_warps: int
    num_stages: int
    per_sm: int = 1  # programs that a multiprocessor holds at once

    @property
    def has_two_warpgroups(self) -> bool:
        """Whether two groups of four warps share 64 rows, see kernels.paged_tree.unchain."""
        return self.block_m == 64 and self.num_warps == 8


@dataclass(frozen=True)
class Splits:
    """Equal shares of all key tiles, as split_kernel cuts them. All on the device."""

    starts: Tensor  # [groups + 1, 2] int32: sequence and key tile where a group begins
    parts: Tensor  # [B, 3] int32: groups that work on a sequence; the first of them; cut sequences before it
    tail: int  # tree slots that were planned for
    block_n: int

    @property
    def groups(self) -> int:
        return len(self.starts) - 1


def num_groups(row_tiles: int, num_programs: int, most: int) -> int:
    """Into how many shares to cut the keys, so that row_tiles * groups programs fill num_programs places evenly.

    most: useful shares, at least 1. The fewest that keep the last wave nearly full.
    """
    if row_tiles <= num_programs:
        return max(1, min(most, num_programs // row_tiles))
    best, best_share = 1, 0.0
    for groups in range(1, min(most, 16) + 1):
        waves = -(-row_tiles * groups // num_programs)
        share = row_tiles * groups / (waves * num_programs)
        if share > best_share + 0.03:
            best, best_share = groups, share
    return best


def plan_splits_triton(kv_lens: Tensor, tail: int, block_n: int, groups: int, min_tiles: int) -> Splits:
    """Cut the keys of all sequences into equal shares. kv_lens [B] int64; tail: tree slots behind each prefix.

    min_tiles: the least that a share holds, as long as any is left. Twin: attention.splits.plan_splits.
    """
    device = kv_lens.device
    starts = torch.empty((groups + 1, 2), dtype=torch.int32, device=device)
    parts = torch.empty((len(kv_lens), 3), dtype=torch.int32, device=device)
    if not kv_lens.is_meta:
        from treedraft.kernels.paged_tree import split_kernel

        split_kernel[(1,)](
            kv_lens,
            starts,
            parts,
            len(kv_lens),
            tail,
            groups,
            min_tiles,
            BLOCK_N=block_n,
            GROUPS=next_power_of_2(groups + 1),
            SEQUENCES=16,
            num_warps=8,
        )
    return Splits(starts, parts, tail, block_n)


def num_fixed_splits(length: int) -> int:
    """Fixed splits that positions below `length` touch, at least 1. Twin of kernels.paged_tree.split_start."""
    splits, end, size = 1, FIRST_SPLIT, FIRST_SPLIT
    while end < length:
        if splits >= EQUAL_SPLITS and (splits - EQUAL_SPLITS) % OCTAVE == 0:
            size *= 2
        splits, end = splits + 1, end + size
    return splits


@dataclass(frozen=True)
class Shape:
    """Widths of queries, keys and values: keys have `key` columns, then `rope` more that are scored with them."""

    key: int
    rope: int  # 0: none
    value: int
    shared_value: bool  # the values are the first columns of the keys

    @property
    def constants(self) -> dict[str, int]:
        return {
            "DK": self.key,
            "DK_PAD": _padded(self.key),
            "DR": self.rope,
            "DR_PAD": _padded(self.rope),
            "DV": self.value,
            "DV_PAD": _padded(self.value),
            "SHARED_V": self.shared_value,
        }


def _padded(width: int) -> int:
    return max(16, next_power_of_2(width))  # a matrix product wants at least 16


@dataclass(frozen=True)
class Pages:
    """Where sequences lie in the pool."""

    page_table: Tensor  # [B, W] int32
    kv_lens: Tensor  # [B] int64
    page_size: int
    num_reserved: int  # pages below it are of no sequence; page 0 is all zeros


def attend_shares(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pages: Pages,
    ancestor_bits: Tensor,
    tree_len: int,
    splits: Splits,
    shape: Shape,
    scale: float,
    tiles: Tiles,
) -> tuple[Tensor, Tensor]:
    """Tree attention over equal shares: out [B, R, h, dv] of q's dtype, lse [B, R, h] float32, base e.

    q [B, R, h, d], k [slots, hk, d], v [slots, hk, dv], last strides 1; ancestor_bits [B, R, words] int64.
    """
    batch, num_tokens, num_heads, _ = q.shape
    num_kv_heads = k.shape[1]
    group_size = num_heads // num_kv_heads
    row_tiles = -(-num_tokens * group_size // tiles.block_m)
    part_rows = row_tiles * num_kv_heads * tiles.block_m
    out, lse = _results(q, shape)
    num_parts = 2 * splits.groups if splits.groups > 1 else 0
    part_out = q.new_empty((num_parts, part_rows, shape.value), dtype=torch.float32)
    part_lse = q.new_empty((num_parts, part_rows), dtype=torch.float32)
    if q.is_meta or out.numel() == 0:
        return out, lse
    from treedraft.kernels.paged_tree import combine_shares_kernel, tree_kernel

    tree_kernel[(row_tiles * num_kv_heads, splits.groups)](
        q,
        k,
        v,
        pages.page_table,
        pages.kv_lens,
        ancestor_bits,
        splits.starts,
        splits.parts,
        out,
        lse,
        part_out,
        part_lse,
        scale * LOG2_E,
        *q.stride()[:3],
        *k.stride()[:2],
        *v.stride()[:2],
        pages.page_table.stride(0),
        pages.page_table.shape[1],
        num_tokens,
        num_heads,
        group_size,
        row_tiles,
        splits.tail,
        tree_len,
        PAGE_SIZE=pages.page_size,
        RESERVED=pages.num_reserved,
        WORDS=ancestor_bits.shape[-1],
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        PRECISION=precision(q),
        SPREAD=tiles.has_two_warpgroups,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        **shape.constants,
    )
    if num_parts:
        combine_shares_kernel[(num_tokens * num_heads, batch)](
            part_out,
            part_lse,
            splits.parts,
            out,
            lse,
            num_tokens,
            num_heads,
            group_size,
            row_tiles,
            part_rows,
            DV=shape.value,
            DV_PAD=_padded(shape.value),
            BLOCK_M=tiles.block_m,
            PARTS=COMBINE_PARTS,
            num_warps=8,
        )
    return out, lse


def attend_fixed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pages: Pages,
    row_lens: Tensor,
    path_slots: Tensor | None,
    max_len: int,
    shape: Shape,
    scale: float,
    tiles: Tiles,
) -> tuple[Tensor, Tensor]:
    """As attend_shares, each row's bits independent of batch, tree and number of rows.

    row_lens [B, R] int64: keys that a token sees, at most max_len; path_slots [B, R, P] int64: where those behind its
    prefix are, in path order. None: a chain, whose row r sees the positions below row_lens[b, r].
    """
    batch, num_tokens, num_heads, _ = q.shape
    num_kv_heads = k.shape[1]
    group_size = num_heads // num_kv_heads
    row_tiles = -(-num_tokens * group_size // tiles.block_m)
    num_tiles = batch * row_tiles * num_kv_heads
    max_splits = num_fixed_splits(max_len)
    at_once = max(1, min(num_tiles, PART_BYTES // (max_splits * tiles.block_m * shape.value * 4)))
    out, lse = _results(q, shape)
    part_out = q.new_empty((at_once, max_splits, tiles.block_m, shape.value), dtype=torch.float32)
    part_lse = q.new_empty((at_once, max_splits, tiles.block_m), dtype=torch.float32)
    if q.is_meta or out.numel() == 0:
        return out, lse
    from treedraft.kernels.paged_tree import combine_fixed_kernel, fixed_kernel

    for first in range(0, num_tiles, at_once):
        count = min(at_once, num_tiles - first)
        fixed_kernel[(count, max_splits)](
            q,
            k,
            v,
            pages.page_table,
            pages.kv_lens,
            row_lens,
            row_lens if path_slots is None else path_slots,
            part_out,
            part_lse,
            scale * LOG2_E,
            *q.stride()[:3],
            *k.stride()[:2],
            *v.stride()[:2],
            pages.page_table.stride(0),
            pages.page_table.shape[1],
            num_tokens,
            num_kv_heads,
            group_size,
            row_tiles,
            0 if path_slots is None else path_slots.shape[-1],
            int(path_slots is None),
            first,
            PAGE_SIZE=pages.page_size,
            RESERVED=pages.num_reserved,
            BLOCK_M=tiles.block_m,
            BLOCK_N=tiles.block_n,
            PRECISION=precision(q),
            SPREAD=tiles.has_two_warpgroups,
            num_warps=tiles.num_warps,
            num_stages=tiles.num_stages,
            **shape.constants,
        )
        combine_fixed_kernel[(count * tiles.block_m,)](
            part_out,
            part_lse,
            out,
            lse,
            num_tokens,
            num_heads,
            num_kv_heads,
            group_size,
            row_tiles,
            max_splits,
            first,
            DV=shape.value,
            DV_PAD=_padded(shape.value),
            BLOCK_M=tiles.block_m,
            PARTS=COMBINE_PARTS,
            num_warps=8,
        )
    return out, lse


def _results(q: Tensor, shape: Shape) -> tuple[Tensor, Tensor]:
    return q.new_empty((*q.shape[:3], shape.value)), q.new_empty(q.shape[:3], dtype=torch.float32)


def precision(q: Tensor) -> str:
    """How kernels multiply: see multiply."""
    return "widen" if q.device.type == "cpu" else "ieee"


def next_power_of_2(number: int) -> int:
    """The smallest power of two that is not smaller."""
    return 1 << (number - 1).bit_length()
