"""FlashInfer's kernels over packed lists, against plain torch: the attention alone, then trees and text."""

import pytest
import torch

from treedraft import LLM
from treedraft.attention import make_backend
from treedraft.attention.packed import Reserved, new_record, verify_limits
from treedraft.attention.reference import TorchTreeAttention
from treedraft.errors import ConfigError
from treedraft.kv.allocator import NUM_RESERVED_PAGES
from treedraft.kv.buffers import Buffers
from treedraft.types import TreeRows

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
pytest.importorskip("flashinfer")
NAMES = ["flashinfer", "flashinfer-merged"]
SCALE = 192**-0.5


def random_rows(page_size, lens, num_nodes, seed=0, max_kv_len=0):
    """Random trees over random pages; the page table's unowned columns name the trash page."""
    gen = torch.Generator().manual_seed(seed)
    max_kv_len = max(max_kv_len, *lens)
    batch, width = len(lens), -(-(max_kv_len + num_nodes) // page_size) + 1
    num_pages = NUM_RESERVED_PAGES + batch * width
    pages = torch.randperm(batch * width, generator=gen).view(batch, width) + NUM_RESERVED_PAGES
    owned = torch.tensor([-(-(n + num_nodes) // page_size) for n in lens])
    pages = torch.where(torch.arange(width) < owned[:, None], pages, 1).to(torch.int32)
    bits = torch.zeros(batch, num_nodes, 1, dtype=torch.int64)
    for b in range(batch):
        for n in range(num_nodes):
            parent = int(torch.randint(0, max(n, 1), (), generator=gen))
            bits[b, n] = (bits[b, parent] if n else 0) | (1 << n)
    rows = TreeRows(pages.cuda(), torch.tensor(lens).cuda(), bits.cuda(), num_nodes, max_kv_len)
    return rows, num_pages * page_size


def visible_slots(rows, page_size):
    """[slots] bool: some row sees it."""
    num_slots = int(rows.page_table.max() + 1) * page_size
    seen = torch.zeros(num_slots, dtype=torch.bool)
    for b, length in enumerate(rows.kv_lens.tolist()):
        for position in range(length + rows.tree_len):
            page = int(rows.page_table[b, position // page_size])
            seen[page * page_size + position % page_size] = True
    return seen


def error_of(given, wanted):
    return float((given.double() - wanted.double()).norm() / wanted.double().norm())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize(("lens", "nodes"), [([0, 1, 77, 300], 6), ([513], 16), ([40] * 9, 1)], ids=str)
def test_run_mla_equals_torch(name, page_size, lens, nodes):
    rows, num_slots = random_rows(page_size, lens, nodes)
    kv = torch.randn(num_slots, 576, device="cuda").bfloat16()
    seen = visible_slots(rows, page_size).cuda()
    kv[: len(seen)][~seen] = torch.nan  # freed, trash and stale slots
    kv[:page_size] = 0
    q = torch.randn(len(lens), nodes, 8, 576, device="cuda").bfloat16()
    backend, torch_backend = make_backend(name), TorchTreeAttention()
    out, lse = backend.run_mla_with_lse(backend.plan(rows, page_size), kv, q, 512, SCALE)
    wanted, wanted_lse = torch_backend.run_mla_with_lse(
        torch_backend.plan(rows, page_size), kv.float(), q.float(), 512, SCALE
    )
    assert error_of(out, wanted) < 1e-2  # bfloat16 operands
    assert (lse - wanted_lse).abs().max() < 1e-3  # float32 sums of bfloat16 products


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("topk", [1, 2, 4, 8])
def test_generate_graph_equals_eager_tree_for_tree_and_torch_up_to_near_ties(
    padded_demo, name, topk, page_size, record_property
):
    padded_demo.check_backend(name, topk, page_size, record_property)


def test_flashinfer_refuses_other_latents_at_start():
    with pytest.raises(ConfigError, match="latent 512"):
        LLM("demo", device="cuda", dtype="bfloat16", attention_backend="flashinfer")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("topk", [1, 2, 4, 8])
def test_run_gqa_equals_torch_eager_and_in_a_graph(name, topk, page_size):
    """A draft forward's rows, then a verification's, of a layer of 8 query heads on 2 of KV."""
    for nodes in (topk, 2 + 2 * topk):
        memory = Buffers("cuda")
        reserved = Reserved(verify_limits(3, nodes, nodes - 1, 400), memory, new_record(memory))
        backend, torch_backend = make_backend(name, reserved), TorchTreeAttention()
        slots = NUM_RESERVED_PAGES * page_size + 3 * (400 + nodes + 2 * page_size)
        k, v = (torch.randn(slots, 2, 128, device="cuda").bfloat16() for _ in range(2))
        q = torch.randn(3, nodes, 8, 128, device="cuda").bfloat16()
        graph, static = None, None
        for seed, lens in enumerate(([3, 77, 300], [300, 0, 1], [64, 65, 63])):
            rows, num_slots = random_rows(page_size, lens, nodes, seed, max_kv_len=300)
            assert num_slots <= slots
            wanted = torch_backend.run_gqa(
                torch_backend.plan(rows, page_size), k.float(), v.float(), q.float(), 128**-0.5
            )
            out = backend.run_gqa(backend.plan(rows, page_size), k, v, q, 128**-0.5)  # plans on the host, too
            assert error_of(out, wanted) < 1e-2
            if graph is None:
                planned = backend.plan(rows, page_size)
                backend.run_gqa(planned, k, v, q, 128**-0.5)
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    static = backend.run_gqa(planned, k, v, q, 128**-0.5)
                for launch in backend._launches.values():
                    launch.is_captured = True  # a plan that no longer fits the graph is an error from here on
            static.fill_(torch.nan)
            graph.replay()  # over the lists and plans that the eager call just made
            assert error_of(static, wanted) < 1e-2
