"""FlashMLA over the prefix, joined with the tree's part: against float64, and in a captured graph."""

import pytest
import torch

from gpu_attention import check, make_rows, oracle, poison, random_bits
from treedraft.attention import make_backend

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
pytest.importorskip("flash_mla")
LATENT, ROPE, PAGE_SIZE, SCALE = 512, 64, 64, 192**-0.5
RAGGED = [0, 1, 63, 64, 65, 1000, 4097]
# The prefix part is rounded to bfloat16 once more than in one kernel: simulated in float64 up to 8.5e-3 and 2.5e-3.
MAX_ERROR, RMS = 1e-2, 3e-3


@pytest.mark.parametrize("num_nodes", [1, 8, 64, 130])
@pytest.mark.parametrize("num_heads", [16, 128])
def test_run_mla_ragged_poisoned_random_trees_equal_float64(num_heads, num_nodes):
    rows, num_slots = make_rows(RAGGED, num_nodes, PAGE_SIZE, seed=num_heads + num_nodes)
    kv = torch.randn(num_slots, LATENT + ROPE, device="cuda").bfloat16()
    poison(kv, rows, PAGE_SIZE)
    q = torch.randn(len(RAGGED), num_nodes, num_heads, LATENT + ROPE, device="cuda").bfloat16()
    backend = make_backend("flashmla")
    out, lse = backend.run_mla_with_lse(backend.plan(rows, PAGE_SIZE), kv, q, LATENT, SCALE)
    wanted, wanted_lse = oracle(rows, PAGE_SIZE, kv[:, None], kv[:, None, :LATENT], q, SCALE)
    check(out, wanted, MAX_ERROR, RMS)
    assert float((lse.double() - wanted_lse).abs().max()) <= 1e-4


def test_run_mla_captured_follows_lengths_and_trees():
    room, num_nodes = 2000, 8
    rows, num_slots = make_rows([room] * 4, num_nodes, PAGE_SIZE, seed=2, room=room)
    kv = torch.randn(num_slots, LATENT + ROPE, device="cuda").bfloat16()
    q = torch.randn(4, num_nodes, 16, LATENT + ROPE, device="cuda").bfloat16()
    backend = make_backend("flashmla")

    def run():
        return backend.run_mla_with_lse(backend.plan(rows, PAGE_SIZE), kv, q, LATENT, SCALE)

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
        wanted, wanted_lse = oracle(rows, PAGE_SIZE, kv[:, None], kv[:, None, :LATENT], q, SCALE)
        check(out, wanted, MAX_ERROR, RMS)
        assert float((lse.double() - wanted_lse).abs().max()) <= 1e-4


def test_run_mla_captured_without_splits_waits_for_the_attention_kernel():
    """FlashMLA's second kernel then exits at once: what follows must wait for the first, which takes several waves."""
    num_nodes = 64
    rows, num_slots = make_rows([64] * 8, num_nodes, PAGE_SIZE, seed=3)
    kv = torch.randn(num_slots, LATENT + ROPE, device="cuda").bfloat16()
    q = torch.randn(8, num_nodes, 128, LATENT + ROPE, device="cuda").bfloat16()
    backend = make_backend("flashmla")

    def run():
        return backend.run_mla(backend.plan(rows, PAGE_SIZE), kv, q, LATENT, SCALE)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for _ in range(5):
        q.normal_()  # what the last replay left is of other queries
        graph.replay()
        assert torch.equal(out, run())


@pytest.mark.parametrize("topk", [1, 2, 4, 8])
def test_generate_graph_equals_eager_tree_for_tree_and_torch_up_to_near_ties(padded_demo, topk, record_property):
    # The kernel splits sequences by what the whole batch holds, so a padded row may change a last bit.
    padded_demo.check_backend("flashmla", topk, PAGE_SIZE, record_property, uncaptured="eager")
