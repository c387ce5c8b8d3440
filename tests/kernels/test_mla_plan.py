"""The planner of the MLA kernel: its kernel, interpreted or compiled, against plain loops, and what any plan must hold.

TRITON_INTERPRET=1 python tests/kernels/test_mla_plan.py    compares by itself
"""

from __future__ import annotations

import os
import random
import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton")

from treedraft.kernels.mla_plan import TILE, Grid, Schedule, lay_grid, plan_items, plan_items_torch

CASES = [
    ([1], 0),
    ([0], 0),
    ([0, 0, 0], 8),
    ([4096], 8),
    ([64], 70),
    ([8192] * 16, 8),
    ([4096] * 20, 16),
    ([1, 63, 64, 65, 4097, 130, 0], 4),
    ([100_000, 1, 1, 1], 64),
    ([1] * 80, 1),
]
ROWS = [16, 64, 65, 128, 320, 1024, 4096, 128 * 64, 140 * 64]


def random_case(rng: random.Random) -> tuple[list[int], int]:
    top = rng.choice((3, 70, 700, 40_000))
    return [rng.randrange(top) for _ in range(rng.choice((1, 2, 7, 20)))], rng.choice((0, 1, 16, 64, 130))


def make(lens: list[int], tree_len: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    gen = torch.Generator().manual_seed(seed)
    width = max(lens) // TILE + 1
    return torch.randint(0, 1 << 20, (len(lens), width), generator=gen, dtype=torch.int32), torch.tensor(lens)


def check(schedule: Schedule, lens: list[int], tree_len: int, table: torch.Tensor) -> int:
    """Every key tile is in exactly one item; parts are in order; slots are distinct. Longest group in tiles."""
    grid, heads, items = schedule.grid, schedule.heads, schedule.items
    seen = 0
    slots: list[int] = []
    covered: dict[int, list[list[int]]] = {}
    longest = 0
    for group in range(grid.num_groups):
        begin, end = heads[group, 9:11].tolist()
        if begin == end:
            continue
        assert begin == seen
        seen = end
        assert heads[group, :9].tolist() == items[begin, :9].tolist()
        turns = 1 if group < grid.full_groups else grid.rest_turns
        longest = max(longest, turns * int((items[begin:end, 2] - items[begin:end, 1]).sum()))
        for b, lo, hi, kv_len, parts, part, slot, page0, page1 in items[begin:end, :9].tolist():
            assert lo < hi and kv_len == lens[b] and part == len(covered.setdefault(b, []))
            assert page0 == table[b, min(lo, table.shape[1] - 1)]
            assert page1 == table[b, min(lo + 1, table.shape[1] - 1)]
            covered[b].append([lo, hi, parts])
            if parts > 1:
                slots.append(slot)
    assert slots == list(range(len(slots))) and len(slots) <= schedule.num_partials
    assert sorted(covered) == list(range(len(lens)))
    for b, ranges in covered.items():
        assert ranges[0][0] == 0 and ranges[-1][1] == max(-(-(lens[b] + tree_len) // TILE), 1)
        assert all(left[1] == right[0] for left, right in zip(ranges, ranges[1:]))
        assert all(parts == len(ranges) for _, _, parts in ranges)
    return longest


def used(schedule: Schedule) -> tuple[list, list]:
    num_items = int(schedule.heads[:, 10].max())
    is_used = schedule.heads[:, 10] > schedule.heads[:, 9]
    return schedule.items[:num_items, :9].tolist(), schedule.heads[is_used, :11].tolist()


@pytest.mark.parametrize("part_tiles", [None, 4, 32])
@pytest.mark.parametrize("rows", ROWS)
def test_plan_items_torch_covers_every_tile_once(rows, part_tiles):
    rng = random.Random(rows)
    for lens, tree_len in [*CASES, *(random_case(rng) for _ in range(5))]:
        table, kv_lens = make(lens, tree_len)
        grid = lay_grid(rows, 132)
        check(plan_items_torch(table, kv_lens, tree_len, max(lens), grid, part_tiles), lens, tree_len, table)


def test_plan_items_torch_shares_are_near_equal():
    for lens, rows, most in [
        ([8192] * 16, 128, 32),
        ([4096] * 64, 1024, 516),
        ([8192] * 16, 1024, 260),
        ([4096], 128, 2),
    ]:
        table, kv_lens = make(lens, 0)
        assert check(plan_items_torch(table, kv_lens, 0, max(lens), lay_grid(rows, 132)), lens, 0, table) <= most


@pytest.mark.parametrize(("rows", "grid"), [
    (16, Grid(1, 1, 132, 0)),
    (128, Grid(2, 2, 66, 0)),
    (1024, Grid(16, 16, 8, 4)),
    (100 * 64, Grid(100, 100, 1, 32)),
    (140 * 64, Grid(140, 70, 1, 0)),
])  # fmt: skip
def test_lay_grid_uses_every_multiprocessor_that_it_can(rows, grid):
    assert lay_grid(rows, 132) == grid


def compare(device: str) -> int:
    """Compare the kernel with the loops. Returns how many plans were compared."""
    rng, count = random.Random(7), 0
    for lens, tree_len in [*CASES, *(random_case(rng) for _ in range(4))]:
        for part_tiles in (None, 4):
            rows = rng.choice(ROWS)
            table, kv_lens = make(lens, tree_len)
            grid = lay_grid(rows, 132)
            wanted = plan_items_torch(table, kv_lens, tree_len, max(lens), grid, part_tiles)
            given = plan_items(table.to(device), kv_lens.to(device), tree_len, max(lens), grid, part_tiles)
            given = Schedule(grid, given.table.cpu(), given.num_partials)
            assert used(given) == used(wanted), (lens, tree_len, rows, part_tiles)
            count += 1
    return count


def test_plan_items_interpreted_equals_loops():
    command = [sys.executable, __file__]
    result = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "equal" in result.stdout


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_plan_items_compiled_equals_loops():
    assert compare("cuda") > 20


if __name__ == "__main__":
    print(f"{compare('cpu')} plans equal")
