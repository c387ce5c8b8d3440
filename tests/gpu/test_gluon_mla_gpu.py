"""The Gluon MLA kernel against float64 on the same bfloat16 inputs. All that no row may see is NaN, or no page."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import treedraft
from graph_cases import run as run_rounds
from treedraft import LLM, SamplingParams, SpeculativeConfig
from treedraft.attention import make_backend
from treedraft.demo.padding import pad_checkpoint
from treedraft.errors import ConfigError, InvariantError
from treedraft.kv.allocator import NUM_RESERVED_PAGES
from treedraft.types import TreeRows

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs an sm_90 GPU"
    ),
]
PAGE, WIDTH, LATENT, SCALE = 64, 576, 512, 192**-0.5
LENS = [0, 1, 63, 64, 65, 130, 1000, 4097]
NO_PAGE = 2**31 - 1  # what unused entries of the page table name
# Largest error of a row over its largest value, and of a sequence in the root of the mean square. Rounding the exact
# result to bfloat16 alone gives up to 2^-8 = 3.9e-3 and about 1.7e-3; the rest is weights rounded to bfloat16.
WORST, RMS = 5.5e-3, 2.2e-3


class Case:
    """Sequences on shuffled pages with random trees of `nodes` slots; rows are the tree's last `tokens` nodes."""

    def __init__(self, lens, tokens, heads, nodes=None, seed=0, num_pages=None, page=PAGE):
        self.lens, self.tokens, self.heads, self.nodes, self.page = lens, tokens, heads, nodes or tokens, page
        gen = torch.Generator().manual_seed(seed)
        owned = [-(-(n + self.nodes) // page) for n in lens]
        width = max(owned) + 1
        total = num_pages or NUM_RESERVED_PAGES + sum(owned) + 3
        pages = (torch.randperm(total - NUM_RESERVED_PAGES, generator=gen) + NUM_RESERVED_PAGES).tolist()
        table = torch.full((len(lens), width), NO_PAGE, dtype=torch.int32)
        words = -(-self.nodes // 64)
        paths = []  # [B][tokens] nodes seen
        bits = torch.zeros(len(lens), tokens, words, dtype=torch.int64)
        for b, count in enumerate(owned):
            table[b, :count] = torch.tensor([pages.pop() for _ in range(count)])
            tree = [[0]]
            for node in range(1, self.nodes):
                tree.append([*tree[int(torch.randint(0, node, (), generator=gen))], node])
            paths.append(tree[self.nodes - tokens :])
            for t, path in enumerate(paths[b]):
                for node in path:
                    word = 1 << node % 64
                    bits[b, t, node // 64] |= word if word < 2**63 else word - 2**64
        self.paths, self.table = paths, table
        self.rows = TreeRows(table.cuda(), torch.tensor(lens).cuda(), bits.cuda(), self.nodes, max(lens))
        self.kv = torch.full((total * page, WIDTH), torch.nan, dtype=torch.bfloat16, device="cuda")
        device_gen = torch.Generator("cuda").manual_seed(seed)
        for b in range(len(lens)):
            slots = self.slots(b, self.seen(b))
            self.kv[slots] = torch.randn(len(slots), WIDTH, device="cuda", generator=device_gen).bfloat16()
        self.q = torch.randn(len(lens), tokens, heads, WIDTH, device="cuda", generator=device_gen).bfloat16()

    def seen(self, b):
        """Logical positions that some row sees."""
        nodes = sorted({node for path in self.paths[b] for node in path})
        return torch.tensor([*range(self.lens[b]), *(self.lens[b] + node for node in nodes)])

    def slots(self, b, positions):
        return (self.table[b, positions // self.page].long() * self.page + positions % self.page).cuda()

    def expected(self, b):
        """(out [tokens, heads, 512], lse [tokens, heads]) of one sequence in float64."""
        positions = self.seen(b)
        keys = self.kv[self.slots(b, positions)].double()
        is_seen = torch.zeros(self.tokens, self.lens[b] + self.nodes, dtype=torch.bool)
        is_seen[:, : self.lens[b]] = True
        for t, path in enumerate(self.paths[b]):
            is_seen[t, [self.lens[b] + node for node in path]] = True
        is_seen = is_seen[:, positions].cuda()
        scores = (self.q[b].double() @ keys.T) * SCALE
        scores = scores.masked_fill(~is_seen[:, None], -torch.inf)
        return scores.softmax(-1) @ keys[:, :LATENT], scores.logsumexp(-1)

    def check(self, out, lse):
        assert out.isfinite().all()
        for b in range(len(self.lens)):
            wanted, wanted_lse = self.expected(b)
            difference = out[b].double() - wanted
            worst = (difference.abs().amax(-1) / wanted.abs().amax(-1)).max()
            assert worst <= WORST, (b, self.lens[b], float(worst))
            rms = float(difference.norm() / wanted.norm())
            assert rms <= RMS, (b, self.lens[b], rms)
            assert (lse[b].double() - wanted_lse).abs().max() <= 1e-4, (b, self.lens[b])


@pytest.fixture(scope="module")
def backend():
    return make_backend("gluon")


def run(backend, case):
    return backend.run_mla_with_lse(backend.plan(case.rows, case.page), case.kv, case.q, LATENT, SCALE)


@pytest.mark.parametrize("tokens", [1, 4, 8, 16, 64])
@pytest.mark.parametrize("heads", [16, 128])
def test_run_mla_ragged_lengths_equal_float64(backend, heads, tokens):
    case = Case(LENS, tokens, heads, seed=tokens)
    case.check(*run(backend, case))
    for length in (0, 65, 1000, 4097):
        alone = Case([length], tokens, heads, seed=length)
        alone.check(*run(backend, alone))


@pytest.mark.parametrize("lens", [[4097, 2, 700, 64, 1] * 8, [8192] * 16, [31 * 64 + 5, 33 * 64] * 40], ids=len)
def test_run_mla_many_sequences_equal_float64(backend, lens):
    case = Case(lens, 8, 16, seed=1)
    case.check(*run(backend, case))


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("page", [16, 32, 128, 256])
def test_run_mla_other_page_sizes_equal_float64(backend, page, heads):
    case = Case([*LENS, 2000], 8, heads, seed=page, page=page)
    case.check(*run(backend, case))


def test_run_mla_ten_branches_of_70_nodes_equal_float64(backend):
    """EAGLE's default: two words, rows that are not a multiple of 64, slots that no row sees."""
    case = Case([0, 1, 60, 63, 64, 700, 2049], 10, 20, nodes=70, seed=2)
    case.check(*run(backend, case))


@pytest.mark.parametrize(("tokens", "nodes"), [(130, 130), (64, 64), (1, 64), (3, 129)])
def test_run_mla_every_word_count_equals_float64(backend, tokens, nodes):
    case = Case([0, 62, 1000], tokens, 5, nodes=nodes, seed=3)
    case.check(*run(backend, case))


def test_run_mla_row_that_sees_nothing_gives_zero_and_minus_infinity(backend):
    case = Case([0, 70, 0], 8, 16, seed=4)
    case.rows.ancestor_bits[0] = 0
    case.rows.ancestor_bits[1, 3] = 0
    case.rows.page_table[0] = NO_PAGE
    out, lse = run(backend, case)
    assert (out[0] == 0).all() and (lse[0] == -torch.inf).all()
    assert out.isfinite().all() and lse[1:].isfinite().all()
    empty = TreeRows(case.rows.page_table, case.rows.kv_lens * 0, case.rows.ancestor_bits * 0, 0, 0)
    out, lse = backend.run_mla_with_lse(backend.plan(empty, PAGE), case.kv, case.q, LATENT, SCALE)
    assert (out == 0).all() and (lse == -torch.inf).all()


@pytest.mark.parametrize(
    ("tokens", "heads", "lens"), [(8, 16, [8191]), (8, 16, LENS * 2), (8, 128, LENS), (3, 20, LENS)]
)
def test_run_mla_repeated_is_bitwise_equal(backend, tokens, heads, lens):
    """A moving error is a race."""
    case = Case(lens, tokens, heads, seed=5)
    plan = backend.plan(case.rows, PAGE)
    first, first_lse = backend.run_mla_with_lse(plan, case.kv, case.q, LATENT, SCALE)
    for _ in range(200):
        out, lse = backend.run_mla_with_lse(plan, case.kv, case.q, LATENT, SCALE)
        assert torch.equal(out, first) and torch.equal(lse, first_lse)


def test_captured_graph_with_changed_lengths_and_pages_equals_float64(backend):
    cases = [Case(lens, 8, 16, seed=6 + i, num_pages=300) for i, lens in enumerate((
        [0, 5000, 64, 700], [5000, 1, 2, 3], [0, 0, 0, 0], [65, 64, 63, 5000], [1200] * 4))]  # fmt: skip
    width = max(case.rows.page_table.shape[1] for case in cases)
    for case in cases:
        pad = width - case.table.shape[1]
        case.table = torch.nn.functional.pad(case.table, (0, pad), value=NO_PAGE)
    table, lens, bits = cases[0].table.cuda(), cases[0].rows.kv_lens.clone(), cases[0].rows.ancestor_bits.clone()
    kv, q = cases[0].kv.clone(), cases[0].q.clone()

    def both_layers():
        plan = backend.plan(TreeRows(table, lens, bits, 8, 5000), PAGE)
        return [backend.run_mla_with_lse(plan, kv, q, LATENT, SCALE) for _ in range(2)]

    both_layers()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = both_layers()
    for case in [*cases, *cases[::-1]]:
        table.copy_(case.table)
        lens.copy_(case.rows.kv_lens)
        bits.copy_(case.rows.ancestor_bits)
        kv.copy_(case.kv)
        q.copy_(case.q)
        for out, lse in results:
            out.fill_(torch.nan)
            lse.fill_(torch.nan)
        graph.replay()
        for result in results:
            case.check(*result)


def test_run_mla_pool_beyond_2_31_numbers_equals_float64(backend):
    num_pages = 2**32 // (PAGE * WIDTH) + 1
    case = Case([1000, 65], 8, 16, seed=12, num_pages=num_pages)
    assert case.kv.numel() > 2**32 and int(case.table[case.table != NO_PAGE].max()) * PAGE * WIDTH > 2**31
    case.check(*run(backend, case))


def test_run_mla_fixed_parts_are_the_same_alone_and_in_a_batch():
    from treedraft.attention.gluon import GluonTreeAttention

    backend = GluonTreeAttention(part_tiles=8)
    case = Case([3000, 513, 64, 4097, 5, 0], 8, 16, seed=13)
    out, lse = run(backend, case)
    case.check(out, lse)
    for b in range(len(case.lens)):
        rows = case.rows
        own = TreeRows(
            rows.page_table[b : b + 1], rows.kv_lens[b : b + 1], rows.ancestor_bits[b : b + 1], 8, rows.max_kv_len
        )
        alone, alone_lse = backend.run_mla_with_lse(backend.plan(own, PAGE), case.kv, case.q[b : b + 1], LATENT, SCALE)
        assert torch.equal(alone[0], out[b]) and torch.equal(alone_lse[0], lse[b])


def test_plan_other_page_size_raises(backend):
    case = Case([5], 1, 16)
    with pytest.raises(InvariantError, match="page_size 8"):
        backend.plan(case.rows, 8)


@pytest.fixture(scope="module")
def padded(tmp_path_factory):
    folder, demo = tmp_path_factory.mktemp("padded"), Path(treedraft.__file__).parent / "demo"
    return [str(pad_checkpoint(demo / part, folder / part)) for part in ("model", "draft")]


@pytest.mark.parametrize("topk", [1, 4])
def test_generate_graph_equals_eager_tree_for_tree_and_torch_in_bfloat16(padded, demo_prompts, topk):
    params = [SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)] * 4

    def rounds(backend, cuda_graph):
        llm = LLM(
            *padded,
            device="cuda",
            dtype="bfloat16",
            page_size=PAGE,
            max_batch=4,
            max_context=128,
            speculative=SpeculativeConfig(3, topk, 2 + 2 * topk),
            attention_backend=backend,
            cuda_graph=cuda_graph,
        )
        return run_rounds(llm, demo_prompts[:4], params)

    eager, graph, wanted = rounds("gluon", "off"), rounds("gluon", "on"), rounds("torch", "off")
    assert graph == eager
    # bfloat16 rounds a near-tie another way now and then; from there a greedy text goes its own way.
    assert sum(given == text for given, text in zip(eager[0], wanted[0])) >= 2


def test_gluon_refuses_other_latents_and_pages_at_start(padded):
    with pytest.raises(ConfigError, match="latent 512"):
        LLM("demo", device="cuda", dtype="bfloat16", page_size=PAGE, attention_backend="gluon")
    with pytest.raises(ConfigError, match="page sizes 16"):
        LLM(*padded, device="cuda", dtype="bfloat16", page_size=8, attention_backend="gluon")
