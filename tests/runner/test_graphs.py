"""Rounds on static buffers, by batch bucket: run eagerly here, over the same buffers that a GPU's graphs replay over.

What a graph adds, the capture itself, is tests/gpu/test_graphs_gpu.py.
"""

from contextlib import nullcontext

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from graph_cases import PARAMS, SHAPE, poison, run
from treedraft import LLM, SamplingParams
from treedraft.config import EngineConfig
from treedraft.errors import ConfigError, InvariantError
from treedraft.kv.allocator import NUM_RESERVED_PAGES
from treedraft.kv.buffers import Buffers
from treedraft.models.deepseek import DeepseekModel
from treedraft.models.draft.eagle3 import Eagle3MlaHead, read_head_config, target_tables
from treedraft.runner import build
from treedraft.runner.graphs import VARIANTS, GraphState, bucket_sizes, init_graph_state
from treedraft.runner.state import DeviceState


def make_llm(cuda_graph, **options):
    options = {"page_size": 3, "max_batch": 4, "max_context": 96, "speculative": SHAPE} | options
    return LLM("demo", dtype="float64", device="cpu", cuda_graph=cuda_graph, **options)


@pytest.fixture(scope="module")
def prompts(demo_prompts, plain64):
    return [plain64.encode(p)[: 5 + 4 * i] for i, p in enumerate(demo_prompts[: len(PARAMS)])]


@pytest.fixture(scope="module")
def expected(prompts):
    return run(make_llm("off"), prompts, PARAMS)


@pytest.mark.parametrize("max_batch", [1, 2, 3, 8, 9, 160])
def test_bucket_sizes_hold_every_batch_and_pad_less_than_twice(max_batch):
    sizes = bucket_sizes(max_batch)
    assert sizes[0] == 1 and sizes[-1] == max_batch and list(sizes) == sorted(set(sizes))
    assert all(b <= max(2 * a, a + 1) for a, b in zip(sizes, sizes[1:]))
    assert len(sizes) <= 2 * max_batch.bit_length()


@pytest.mark.parametrize("options", [{}, {"page_size": 1, "max_pending": 1}, {"speculative": None}], ids=str)
def test_generate_on_static_buffers_equals_eager_tree_for_tree(prompts, expected, options):
    """Batches of 4 down to 1, with changing slots and every sampling stage."""
    if options:
        expected = run(make_llm("off", **options), prompts, PARAMS)
    tokens, rounds = run(make_llm("eager", **options), prompts, PARAMS)
    assert tokens == expected[0]
    assert rounds == expected[1]


# ------------------------------------------------------------------ failure class 10: padded rows keep stale values


def keep_stale_inputs(monkeypatch):
    def write(self, program, rows):
        values = [[r.slot for r in rows], [r.node_limit for r in rows]]
        program.inputs[:2, : len(rows)] = torch.tensor(values).view(2, len(rows))
        program.inputs[2:, : len(rows)] = 1

    monkeypatch.setattr(GraphState, "write_inputs", write)


def keep_stale_dummy(monkeypatch):
    monkeypatch.setattr(DeviceState, "reset_dummy", lambda self: None)


def pad_with_a_slot_in_use(monkeypatch):
    original = GraphState.write_inputs

    def write(self, program, rows):
        original(self, program, rows)
        program.inputs[0, len(rows) :] = rows[0].slot if rows else self.state.dummy_slot

    monkeypatch.setattr(GraphState, "write_inputs", write)


FAULTS = [None, keep_stale_inputs, keep_stale_dummy, pad_with_a_slot_in_use]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.__name__ if f else "none")
def test_class_10_a_full_batch_then_one_row_in_the_same_bucket_is_right(prompts, expected, monkeypatch, fault):
    llm = make_llm("eager")
    graphs = llm.runner.graphs
    graphs.programs = {key: p for key, p in graphs.programs.items() if key[0] == 4}  # one bucket for all batches
    write, sizes = graphs.write_inputs, []

    def poisoned(program, rows):
        poison(llm, program)
        sizes.append(len(rows))
        write(program, rows)

    if fault is not None:
        fault(monkeypatch)
        write = graphs.write_inputs  # the faulty one
    monkeypatch.setattr(graphs, "write_inputs", poisoned)
    with nullcontext() if fault is None else pytest.raises((AssertionError, IndexError, RuntimeError)):
        tokens, rounds = run(llm, prompts, PARAMS)
        assert (tokens, rounds) == expected
    if fault is None:
        assert {1, 4} <= set(sizes)


def test_replay_after_a_smaller_and_a_larger_bucket_is_right(prompts):
    """Batches 1, 4, 1, 3 of one engine, one after another."""
    off, eager = make_llm("off"), make_llm("eager")
    for size in (1, 4, 1, 3):
        params = [SamplingParams(temperature=0.7, seed=i, max_tokens=6, ignore_eos=True) for i in range(size)]
        assert run(eager, prompts[:size], params) == run(off, prompts[:size], params)


def test_generate_a_prompt_alone_equals_it_duplicated_across_the_batch(prompts):
    llm = make_llm("eager")
    params = SamplingParams(temperature=0.8, seed=4, max_tokens=18, ignore_eos=True)
    alone_tokens, alone = run(llm, prompts[:1], [params])
    tokens, rounds = run(llm, [prompts[0]] * 3, [params] * 3)
    assert tokens == alone_tokens * 3
    assert [rounds[i] for i in range(3)] == [alone[0]] * 3


# ------------------------------------------------------------------ capture and buffers


def shared_buffers(llm):
    """Copies of all that sequences own: state but for the dummy slot, pools but for the trash page, page table."""
    state, page_size = llm.runner.state, llm.config.page_size
    tables = ("numbers", "integers")  # their rows are fields of the state by themselves
    fields = {n: v for n, v in vars(state).items() if isinstance(v, torch.Tensor) and n not in tables}
    own = {n: v[: state.dummy_slot].clone() for n, v in fields.items()}
    for name, pool in (("target", llm.runner.target.pool), ("draft", llm.runner.drafter.pool)):
        own[f"{name} zero page"] = pool.data[:, :page_size].clone()
        own[name] = pool.data[:, NUM_RESERVED_PAGES * page_size :].clone()
    return own | {"pages": llm.runner.pages.table.clone()}


def remake_graphs(llm):
    runner = llm.runner
    return init_graph_state(
        llm.config.max_batch,
        runner.graphs.max_kv_len,
        runner.run_round,
        runner.state,
        runner.pages,
        runner.page_size,
        runner.chain,
        runner.graphs.attention,
        Buffers("cpu"),
        "eager",
    )


def test_init_graph_state_leaves_shared_buffers_unchanged(prompts):
    llm = make_llm("eager")
    llm.generate(prompts[:3], SamplingParams(temperature=0, max_tokens=8), progress=False)
    before = shared_buffers(llm)
    graphs = remake_graphs(llm)
    with torch.inference_mode():  # what a capture's warm-up does
        for program in graphs.programs.values():
            graphs.round(program.inputs, program.stages)
    after = shared_buffers(llm)
    assert all(torch.equal(before[name], after[name]) for name in before)


class HostTensors(TorchDispatchMode):
    """Collects every operator that touches or makes a tensor on the host."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if any(isinstance(x, torch.Tensor) and x.device.type == "cpu" for x in tree_leaves((args, kwargs, out))):
            self.found.append(str(func))
        return out


@pytest.fixture(scope="module")
def meta_graphs():
    """The static rounds of a GPU's configuration, on the meta device: any read of a value raises there."""
    config = EngineConfig(device="cuda", max_context=96, max_batch=4, speculative=SHAPE).resolve(has_cuda=True)
    layout, meta = build.lay_out(config), torch.device("meta")
    with meta:
        model = DeepseekModel(layout.model, layout.logical_len, torch.bfloat16, meta)
        head_config = read_head_config(layout.draft_folder, layout.model)
        head = Eagle3MlaHead(head_config, target_tables(model), layout.logical_len, torch.bfloat16, meta)
    buffers = Buffers(meta)
    runner = build.assemble(layout, model.requires_grad_(False), head, 50, buffers)
    build.init_graphs(runner, layout.config, buffers)
    return runner.graphs


@pytest.mark.parametrize("stages", VARIANTS, ids=len)
@pytest.mark.parametrize("has_fault", [False, True])
def test_round_moves_nothing_between_host_and_device(meta_graphs, monkeypatch, stages, has_fault):
    """What a capture forbids: a copy from or to the host inside the round."""
    if has_fault:
        original = DeviceState.reset_dummy

        def faulty(self):
            original(self)
            self.kv_lens[self.dummy_slot : self.dummy_slot + 1] = torch.tensor([0])

        monkeypatch.setattr(DeviceState, "reset_dummy", faulty)
    with torch.inference_mode(), HostTensors() as host:
        meta_graphs.round(meta_graphs.programs[2, stages].inputs, stages)
    assert bool(host.found) == has_fault


def test_run_leaves_its_result_in_the_same_buffers(prompts):
    llm = make_llm("eager")
    seen = []
    llm.runner.observer = lambda rows, batch, result: seen.append((len(rows), result))
    llm.generate(prompts[:4], PARAMS[:4], progress=False)
    places = {result.sampled.data_ptr() for _, result in seen}
    assert places == {llm.runner.graphs.outputs.sampled.data_ptr()}
    assert all(len(result.hidden) == size for size, result in seen)
    names = {record.name: record for record in llm.runner.graphs.buffers.records}
    assert names["graph.output.hidden"].bytes == llm.runner.graphs.outputs.hidden.nbytes


def test_generate_logprobs_one_round_late_are_each_round_s_own(prompts):
    params = [SamplingParams(temperature=0, max_tokens=8 + i, logprobs=2, ignore_eos=True) for i in range(3)]
    off, late = (make_llm(how, max_pending=1).generate(prompts[:3], params, progress=False) for how in ("off", "eager"))
    for given, expected in zip(late, off, strict=True):
        # A bucket has more rows than the batch, and a float64 product's last bits depend on their number.
        assert given.outputs[0].logprobs == pytest.approx(expected.outputs[0].logprobs, abs=1e-12)


def test_pick_takes_the_smallest_bucket_and_the_fewest_stages():
    graphs = make_llm("eager").runner.graphs
    assert graphs.buckets == (1, 2, 4)
    assert graphs.pick(3, frozenset()).inputs.shape[1] == 4
    assert graphs.pick(1, frozenset({"noise"})).stages == {"noise"}
    assert graphs.pick(2, frozenset({"bias"})).stages > {"bias"}
    with pytest.raises(InvariantError, match="batch of 5"):
        graphs.pick(5, frozenset())


def test_cuda_graph_refuses_what_cannot_work():
    with pytest.raises(ConfigError, match="needs a GPU"):
        make_llm("on")
    with pytest.raises(ConfigError, match="auto, on, off, eager"):
        make_llm("maybe")
    llm = make_llm("eager")
    llm.runner.graphs.max_kv_len = 10**4
    with pytest.raises(ConfigError, match="pages of 3 tokens"):
        remake_graphs(llm)


def test_cuda_graph_auto_is_off_on_the_cpu():
    llm = make_llm("auto")
    assert llm.config.cuda_graph == "off" and llm.runner.graphs is None
