"""The Triton backends on a GPU against a float64 oracle on the same inputs, in a captured graph, and bit for bit."""

import pytest
import torch

from gpu_attention import check, make_rows, oracle, poison, random_bits
from treedraft.attention import make_backend
from treedraft.attention.reference import unpack_bits
from treedraft.kv.page_table import slots_of
from treedraft.types import TreeRows

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
LATENT, ROPE = 512, 64
SCALE = 192**-0.5
RAGGED = [0, 1, 63, 64, 65, 1000, 4097]
NAMES = ["triton", "triton-deterministic"]


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("num_nodes", [1, 4, 8, 16, 64])
@pytest.mark.parametrize("num_heads", [16, 128])
@pytest.mark.parametrize("name", NAMES)
def test_run_mla_ragged_poisoned_random_trees_equal_float64(name, num_heads, num_nodes, page_size):
    rows, num_slots = make_rows(RAGGED, num_nodes, page_size, seed=num_heads + num_nodes)
    kv = torch.randn(num_slots, LATENT + ROPE, device="cuda").bfloat16()
    poison(kv, rows, page_size)
    q = torch.randn(len(RAGGED), num_nodes, num_heads, LATENT + ROPE, device="cuda").bfloat16()
    backend = make_backend(name)
    out, lse = backend.run_mla_with_lse(backend.plan(rows, page_size), kv, q, LATENT, SCALE)
    wanted, wanted_lse = oracle(rows, page_size, kv[:, None], kv[:, None, :LATENT], q, SCALE)
    check(out, wanted)
    assert float((lse.double() - wanted_lse).abs().max()) <= 1e-4


@pytest.mark.parametrize("num_nodes", [65, 130])
@pytest.mark.parametrize("name", NAMES)
def test_run_mla_more_than_64_nodes_equal_float64(name, num_nodes):
    rows, num_slots = make_rows([0, 70, 1000], num_nodes, 16, seed=num_nodes)
    kv = torch.randn(num_slots, LATENT + ROPE, device="cuda").bfloat16()
    poison(kv, rows, 16)
    q = torch.randn(3, num_nodes, 16, LATENT + ROPE, device="cuda").bfloat16()
    backend = make_backend(name)
    out, lse = backend.run_mla_with_lse(backend.plan(rows, 16), kv, q, LATENT, SCALE)
    wanted, wanted_lse = oracle(rows, 16, kv[:, None], kv[:, None, :LATENT], q, SCALE)
    check(out, wanted)
    assert float((lse.double() - wanted_lse).abs().max()) <= 1e-4


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("latent", "rope"), [(64, 32), (512, 64), (80, 24)])
@pytest.mark.parametrize("name", NAMES)
def test_run_mla_other_widths_equal_float64(name, latent, rope, dtype):
    rows, num_slots = make_rows([0, 5, 300], 7, 16, seed=1)
    kv = torch.randn(num_slots, latent + rope, device="cuda").to(getattr(torch, dtype))
    poison(kv, rows, 16)
    q = torch.randn(3, 8, 7, latent + rope, device="cuda").to(kv.dtype).transpose(1, 2)  # heads outside rows
    backend = make_backend(name)
    out, lse = backend.run_mla_with_lse(backend.plan(rows, 16), kv, q, latent, SCALE)
    wanted, wanted_lse = oracle(rows, 16, kv[:, None], kv[:, None, :latent], q, SCALE)
    check(out, wanted, *((1e-5, 1e-5) if dtype == "float32" else ()))
    assert float((lse.double() - wanted_lse).abs().max()) <= 1e-4


@pytest.mark.parametrize(("group", "head_dim"), [(1, 64), (4, 128), (16, 128), (8, 256)])
@pytest.mark.parametrize("name", NAMES)
def test_run_gqa_ragged_poisoned_random_trees_equal_float64(name, group, head_dim):
    rows, num_slots = make_rows(RAGGED, 8, 16, seed=group)
    k, v = (torch.randn(num_slots, 2, head_dim, device="cuda").bfloat16() for _ in range(2))
    poison(k, rows, 16)
    poison(v, rows, 16)
    q = torch.randn(len(RAGGED), 8, 2 * group, head_dim, device="cuda").bfloat16()
    backend = make_backend(name)
    out = backend.run_gqa(backend.plan(rows, 16), k, v, q, head_dim**-0.5)
    check(out, oracle(rows, 16, k, v, q, head_dim**-0.5)[0])


@pytest.mark.parametrize("name", NAMES)
def test_run_mla_captured_follows_lengths_and_trees(name):
    room, num_nodes, page_size = 2000, 8, 64
    rows, num_slots = make_rows([room] * 4, num_nodes, page_size, seed=2, room=room)
    kv = torch.randn(num_slots, LATENT + ROPE, device="cuda").bfloat16()
    q = torch.randn(4, num_nodes, 16, LATENT + ROPE, device="cuda").bfloat16()
    backend = make_backend(name)

    def run():
        return backend.run_mla_with_lse(backend.plan(rows, page_size), kv, q, LATENT, SCALE)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = run()
    for seed, lens in enumerate([[0, 1, 63, 64], [65, 1999, 0, 2000], [0, 0, 0, 0], [2000, 7, 640, 129]]):
        rows.kv_lens.copy_(torch.tensor(lens))
        rows.ancestor_bits.copy_(random_bits(4, num_nodes, torch.Generator().manual_seed(seed)))
        out.fill_(torch.nan)
        graph.replay()
        wanted, wanted_lse = oracle(rows, page_size, kv[:, None], kv[:, None, :LATENT], q, SCALE)
        check(out, wanted)
        assert float((lse.double() - wanted_lse).abs().max()) <= 1e-4


def test_run_mla_pool_of_more_than_2_31_elements_is_addressed():
    num_slots, page_size = 2**31 // (LATENT + ROPE) + 4096, 64
    num_slots -= num_slots % page_size
    kv = torch.empty(num_slots, LATENT + ROPE, dtype=torch.bfloat16, device="cuda").normal_()
    first = num_slots // page_size - 8
    table = torch.arange(first, first + 8, dtype=torch.int32, device="cuda")[None]
    bits = random_bits(1, 8, torch.Generator().manual_seed(3)).cuda()
    rows = TreeRows(table, torch.tensor([450], device="cuda"), bits, 8, 450)
    q = torch.randn(1, 8, 16, LATENT + ROPE, device="cuda").bfloat16()
    for name in NAMES:
        backend = make_backend(name)
        out = backend.run_mla(backend.plan(rows, page_size), kv, q, LATENT, SCALE)
        check(out, oracle(rows, page_size, kv[:, None], kv[:, None, :LATENT], q, SCALE)[0])


@pytest.mark.parametrize("num_heads", [16, 128])
def test_deterministic_mla_row_alone_in_trees_batches_and_chunks_has_the_same_bits(num_heads):
    """Every row of a tree, again as plain decode of its own path: the same keys, copied to where a decode has them."""
    page_size, num_nodes, lens = 16, 16, [0, 1, 50, 62, 63, 64, 500, 511, 1030, 9000]
    rows, num_slots = make_rows(lens, num_nodes, page_size, seed=5, room=max(lens))
    kv = torch.randn(num_slots, LATENT + ROPE, device="cuda").bfloat16()
    q = torch.randn(len(lens), num_nodes, num_heads, LATENT + ROPE, device="cuda").bfloat16()
    backend = make_backend("triton-deterministic")
    out, lse = backend.run_mla_with_lse(backend.plan(rows, page_size), kv, q, LATENT, SCALE)
    one = torch.ones(1, 1, 1, dtype=torch.int64, device="cuda")
    for b, length in enumerate(lens):
        table = rows.page_table[b : b + 1]
        for r in (0, 3, num_nodes - 1):
            path = unpack_bits(rows.ancestor_bits[b, r], num_nodes).nonzero()[:, 0]
            moved = kv.clone()
            there = slots_of(table, length + torch.arange(len(path), device="cuda")[None], page_size)[0]
            moved[there] = kv[slots_of(table, length + path[None], page_size)[0]]
            before = length + len(path) - 1
            alone = TreeRows(table, torch.tensor([before], device="cuda"), one, 1, before)
            given = backend.run_mla_with_lse(
                backend.plan(alone, page_size), moved, q[b : b + 1, r : r + 1], LATENT, SCALE
            )
            assert torch.equal(given[0][0, 0], out[b, r]) and torch.equal(given[1][0, 0], lse[b, r])
            # And as the last row of a chunk of its prompt.
            num_rows = min(before + 1, 40)
            chunk_q = torch.randn(1, num_rows, num_heads, LATENT + ROPE, device="cuda").bfloat16()
            chunk_q[0, -1] = q[b, r]
            start = torch.tensor([before + 1 - num_rows], device="cuda")
            plan = backend.plan_chain(table, start, num_rows, before + 1 - num_rows, page_size)
            given = backend.run_mla_with_lse(plan, moved, chunk_q, LATENT, SCALE)
            assert torch.equal(given[0][0, -1], out[b, r]) and torch.equal(given[1][0, -1], lse[b, r])


def test_deterministic_gqa_row_alone_and_in_a_tree_has_the_same_bits():
    page_size, num_nodes, lens = 16, 16, [0, 63, 511, 1030]
    rows, num_slots = make_rows(lens, num_nodes, page_size, seed=6, room=max(lens))
    k, v = (torch.randn(num_slots, 2, 128, device="cuda").bfloat16() for _ in range(2))
    q = torch.randn(len(lens), num_nodes, 8, 128, device="cuda").bfloat16()
    backend = make_backend("triton-deterministic")
    out = backend.run_gqa(backend.plan(rows, page_size), k, v, q, 128**-0.5)
    one = torch.ones(1, 1, 1, dtype=torch.int64, device="cuda")
    for b, length in enumerate(lens):
        table = rows.page_table[b : b + 1]
        for r in range(num_nodes):
            path = unpack_bits(rows.ancestor_bits[b, r], num_nodes).nonzero()[:, 0]
            there = slots_of(table, length + torch.arange(len(path), device="cuda")[None], page_size)[0]
            here = slots_of(table, length + path[None], page_size)[0]
            moved = [x.index_copy(0, there, x[here]) for x in (k, v)]
            before = length + len(path) - 1
            alone = TreeRows(table, torch.tensor([before], device="cuda"), one, 1, before)
            given = backend.run_gqa(backend.plan(alone, page_size), *moved, q[b : b + 1, r : r + 1], 128**-0.5)
            assert torch.equal(given[0, 0], out[b, r])
