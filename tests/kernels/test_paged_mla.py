"""The paged MLA kernels and their planner in Triton's interpreter, against plain loops and their torch twins."""

import random

import pytest
import torch
from torch import Tensor

from conformance.attention_oracle import Case, attend, make_case, random_cache, random_tree
from interpreted import IS_INTERPRETED, interpreted, run_interpreted
from treedraft.attention import make_backend
from treedraft.attention.flashmla import attend_tail
from treedraft.attention.splits import plan_splits
from treedraft.types import TreeRows

if IS_INTERPRETED:
    import triton
    import triton.language as tl

    from treedraft.kernels.paged_tree import split_start

    @triton.jit
    def starts_kernel(out, COUNT: tl.constexpr):
        for i in range(COUNT):
            tl.store(out + i, split_start(tl.full([], 0, tl.int32) + i))


LATENT, ROPE, HEADS, SCALE = 16, 8, 4, 0.17


def test_interpreted_paged_mla():
    run_interpreted(__file__, "not interpreted")


def queries(batch: int, rows: int, dtype: torch.dtype, seed: int, heads: int = HEADS) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, rows, heads, LATENT + ROPE, generator=generator).to(dtype)


@interpreted
@pytest.mark.parametrize(("page_size", "dtype"), [(1, torch.float32), (16, torch.bfloat16), (64, torch.float32)])
def test_paged_mla_cut_sequences_equal_loops(page_size: int, dtype: torch.dtype):
    """Few programs, so that shares begin and end inside sequences; 66 nodes, so that bits take two words."""
    generator = torch.Generator().manual_seed(page_size)
    lens = [0, 1, 63, 64, 65, 400]
    trees = [random_tree(66, generator)[:2] + [[0, 65], [63, 64], [62]] for _ in lens]
    case = make_case(lens, trees, tree_len=66, page_size=page_size, seed=1, slack=5)
    kv = random_cache(case, (LATENT + ROPE,), dtype, generator)
    q = queries(len(lens), 5, dtype, seed=2)
    backend = make_backend("triton")
    out, lse = backend.run_mla_with_lse(backend.plan(case.rows, page_size), kv, q, LATENT, SCALE)
    expected, expected_lse = attend(case, kv[:, None], kv[:, None, :LATENT], q, SCALE)
    atol = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=atol)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=0, atol=1e-5)


@interpreted
def test_plan_splits_random_lengths_equal_twin():
    from treedraft.kernels.paged_launch import plan_splits_triton

    rng = random.Random(0)
    for batch in (1, 2, 7, 64, 70):
        for _ in range(4):
            lens = torch.tensor([rng.choice((0, 1, 64, rng.randrange(9000))) for _ in range(batch)])
            arguments = rng.choice((1, 8, 72)), rng.choice((32, 64)), rng.choice((1, 3, 8, 66)), rng.choice((1, 2, 4))
            splits = plan_splits_triton(lens, *arguments)
            starts, parts = plan_splits(lens, *arguments)
            assert torch.equal(splits.starts, starts), (lens, arguments)
            assert torch.equal(splits.parts, parts), (lens, arguments)


@interpreted
def test_split_start_equals_the_count_of_splits_on_the_host():
    from treedraft.kernels.paged_launch import num_fixed_splits

    starts = torch.zeros(60, dtype=torch.int32)
    starts_kernel[(1,)](starts, COUNT=60)
    bounds = starts.tolist()
    assert bounds[:2] == [0, 512] and bounds[16] == 8192 and bounds[24] == 16384
    for i in range(1, 59):
        assert bounds[i] % 64 == 0
        assert num_fixed_splits(bounds[i]) == i and num_fixed_splits(bounds[i] + 1) == i + 1
    assert num_fixed_splits(0) == 1
    assert num_fixed_splits(131072) <= 48  # partial results of a long context stay few


def alone(case: Case, kv: Tensor, b: int, path: list[int]) -> tuple[TreeRows, Tensor]:
    """The last node of a path as plain decode: a cache where the path's slots follow the prefix."""
    table, page_size, length = case.rows.page_table[b : b + 1], case.page_size, int(case.rows.kv_lens[b])

    def slot(position: int) -> int:
        return int(table[0, position // page_size]) * page_size + position % page_size

    moved = kv.clone()
    for i, node in enumerate(path):
        moved[slot(length + i)] = kv[slot(length + node)]
    before = length + len(path) - 1
    return TreeRows(table, torch.tensor([before]), torch.ones(1, 1, 1, dtype=torch.int64), 1, before), moved


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_deterministic_mla_row_alone_in_a_tree_and_in_a_chunk_has_the_same_bits(dtype: torch.dtype):
    generator = torch.Generator().manual_seed(3)
    lens, page_size = [0, 61, 509], 16
    trees = [random_tree(6, generator) for _ in lens]
    case = make_case(lens, trees, tree_len=6, page_size=page_size, seed=4)
    kv = random_cache(case, (LATENT + ROPE,), dtype, generator).nan_to_num(0.0)
    q = queries(len(lens), 6, dtype, seed=5)
    backend = make_backend("triton-deterministic")
    out, lse = backend.run_mla_with_lse(backend.plan(case.rows, page_size), kv, q, LATENT, SCALE)
    for b in range(len(lens)):
        for r in (0, 5):
            rows, moved = alone(case, kv, b, trees[b][r])
            own = backend.run_mla_with_lse(backend.plan(rows, page_size), moved, q[b : b + 1, r : r + 1], LATENT, SCALE)
            assert torch.equal(own[0][0, 0], out[b, r]) and torch.equal(own[1][0, 0], lse[b, r])
            num_rows = min(3, int(rows.kv_lens[0]) + 1)
            start = rows.kv_lens + 1 - num_rows
            chunk = queries(1, num_rows, dtype, seed=6)
            chunk[0, -1] = q[b, r]
            plan = backend.plan_chain(rows.page_table, start, num_rows, int(start), page_size)
            own = backend.run_mla_with_lse(plan, moved, chunk, LATENT, SCALE)
            assert torch.equal(own[0][0, -1], out[b, r]) and torch.equal(own[1][0, -1], lse[b, r])


@interpreted
def test_deterministic_chain_equals_loops():
    generator = torch.Generator().manual_seed(7)
    lens, num_rows = [0, 30], 70
    chain = [list(range(r + 1)) for r in range(num_rows)]
    case = make_case(lens, [chain, chain], tree_len=num_rows, page_size=3, seed=8)
    kv = random_cache(case, (LATENT + ROPE,), torch.float32, generator)
    q = queries(2, num_rows, torch.float32, seed=9, heads=1)
    backend = make_backend("triton-deterministic")
    plan = backend.plan_chain(case.rows.page_table, case.rows.kv_lens, num_rows, 30, 3)
    out, lse = backend.run_mla_with_lse(plan, kv, q, LATENT, SCALE)
    expected, expected_lse = attend(case, kv[:, None], kv[:, None, :LATENT], q, SCALE)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=0, atol=1e-5)


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attend_tail_joined_with_a_prefix_equals_twin_and_loops(dtype: torch.dtype):
    from treedraft.kernels.paged_launch import Pages
    from treedraft.kernels.tree_tail import attend_tail_triton

    generator = torch.Generator().manual_seed(10)
    lens = [0, 0, 9, 64]
    trees = [[[], [0]], [[], []], [[], [1, 65]], [[0, 64], [2, 63]]]
    case = make_case(lens, trees, tree_len=66, page_size=16, seed=11)
    kv = random_cache(case, (LATENT + ROPE,), dtype, generator)
    q = queries(len(lens), 2, dtype, seed=12)
    prefix = make_case(lens, [[[], []]] * 4, tree_len=66, page_size=16, seed=11)
    prefix_out, prefix_lse = attend(prefix, kv[:, None], kv[:, None, :LATENT], q, SCALE)
    prefix_lse = prefix_lse.float().transpose(1, 2)
    prefix_lse = prefix_lse.masked_fill(prefix_lse == -torch.inf, torch.inf)  # FlashMLA's way to say: nothing
    rows = case.rows
    pages = Pages(rows.page_table, rows.kv_lens, 16, 2)
    arguments = q, kv, pages, rows.ancestor_bits, 66, prefix_out.to(dtype), prefix_lse, LATENT, SCALE
    out, lse = attend_tail_triton(*arguments)
    expected, expected_lse = attend(case, kv[:, None], kv[:, None, :LATENT], q, SCALE)
    atol = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(lse.double(), expected_lse, rtol=0, atol=1e-5)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=atol)
    twin, twin_lse = attend_tail(*arguments)
    torch.testing.assert_close(lse, twin_lse, rtol=0, atol=1e-5)
    torch.testing.assert_close(out, twin, rtol=0, atol=atol)


def test_num_groups_fills_the_gpu_and_never_exceeds_what_is_useful():
    from treedraft.kernels.paged_launch import num_groups

    assert num_groups(row_tiles=1, num_programs=132, most=64) == 64
    assert num_groups(row_tiles=2, num_programs=132, most=1000) == 66
    assert num_groups(row_tiles=16, num_programs=132, most=1000) == 8
    for row_tiles in range(1, 600):
        groups = num_groups(row_tiles, 132, most=1000)
        programs = row_tiles * groups
        assert programs <= 132 or programs / (-(-programs // 132) * 132) > 0.85
    assert num_groups(row_tiles=500, num_programs=132, most=1) == 1
