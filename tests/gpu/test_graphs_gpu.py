"""Captured rounds on a GPU: equal to the same round run eagerly over the same buffers, tree for tree."""

from dataclasses import replace

import pytest
import torch

from graph_cases import PARAMS, SHAPE, poison, run
from treedraft import LLM, SamplingParams, StructuredOutput
from treedraft.attention.packed_torch import PackedTorchAttention
from treedraft.kv.allocator import NUM_RESERVED_PAGES
from treedraft.runner.build import init_graphs
from treedraft.speculative.sampling import GRAMMAR

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def make_llm(cuda_graph, **options):
    options = {"dtype": "float64", "page_size": 3, "max_batch": 4, "max_context": 96, "speculative": SHAPE} | options
    return LLM("demo", device="cuda", cuda_graph=cuda_graph, **options)


@pytest.fixture(scope="module")
def captured():
    return make_llm("on")


@pytest.fixture(scope="module")
def prompts(demo_prompts, captured):
    return [captured.encode(p)[: 5 + 4 * i] for i, p in enumerate(demo_prompts[: len(PARAMS)])]


@pytest.fixture(scope="module")
def expected(prompts):
    """Rounds made anew each time, without static buffers."""
    return run(make_llm("off"), prompts, PARAMS)


def test_generate_captured_float64_equals_eager_tree_for_tree(captured, prompts, expected):
    assert run(captured, prompts, PARAMS) == expected


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_generate_captured_equals_the_static_buffers_run_eagerly(prompts, dtype):
    """The same shapes, so the same last bits."""
    given, wanted = (run(make_llm(how, dtype=dtype), prompts, PARAMS) for how in ("on", "eager"))
    assert given == wanted


def test_class_10_a_full_batch_then_one_row_in_the_same_graph_is_right(captured, prompts, expected, monkeypatch):
    graphs = captured.runner.graphs
    monkeypatch.setattr(graphs, "programs", {key: p for key, p in graphs.programs.items() if key[0] == 4})
    write, sizes = graphs.write_inputs, []

    def poisoned(program, rows):
        poison(captured, program)
        sizes.append(len(rows))
        write(program, rows)

    monkeypatch.setattr(graphs, "write_inputs", poisoned)
    assert run(captured, prompts, PARAMS) == expected
    assert {1, 4} <= set(sizes)


def test_capture_leaves_shared_buffers_unchanged(captured, prompts):
    captured.generate(prompts[:3], SamplingParams(temperature=0, max_tokens=8), progress=False)
    runner, page_size = captured.runner, captured.config.page_size

    def owned():
        state = runner.state
        tables = ("numbers", "integers")  # their rows are fields of the state by themselves
        fields = {n: v for n, v in vars(state).items() if isinstance(v, torch.Tensor) and n not in tables}
        parts = {n: v[: state.dummy_slot] for n, v in fields.items()}
        for name, pool in (("target", runner.target.pool), ("draft", runner.drafter.pool)):
            parts[name] = pool.data[:, NUM_RESERVED_PAGES * page_size :]
            parts[f"{name} zero page"] = pool.data[:, :page_size]
        return {n: v.clone() for n, v in (parts | {"pages": runner.pages.table}).items()}

    before = owned()
    from treedraft.kv.buffers import Buffers

    graphs = runner.graphs
    try:
        init_graphs(runner, captured.config, Buffers("cuda"))
        after = owned()
    finally:
        runner.graphs = graphs
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("params", PARAMS[:3], ids=["greedy", "top_p", "penalties"])
def test_launch_of_a_replayed_round_does_not_wait_for_the_device(captured, prompts, params):
    launch, num_rounds = captured.runner._launch_round, 0

    def watched(rows, shape):
        nonlocal num_rounds
        num_rounds += 1
        torch.cuda.set_sync_debug_mode("error" if num_rounds > 2 else "default")
        try:
            return launch(rows, shape)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    captured.runner._launch_round = watched
    try:
        captured.generate(prompts[:3], params, progress=False)
    finally:
        del captured.runner._launch_round
    assert num_rounds > 3


GRAMMARS = [
    replace(params, structured=structured, max_tokens=40)
    for params, structured in zip(
        PARAMS,
        (
            StructuredOutput(json_schema={"type": "array", "items": {"enum": ["red", "reddish", 7]}, "maxItems": 4}),
            None,
            StructuredOutput(regex="[a-z]{2,9}( [a-z]{1,5}){0,3}[.!]"),
            StructuredOutput(choice=("stay here", "stand")),
            None,
            StructuredOutput(json_object=True),
        ),
        strict=True,
    )
]


@pytest.mark.parametrize("max_pending", [0, 1])
def test_generate_with_grammars_in_captured_rounds_equals_eager_tree_for_tree(prompts, max_pending):
    llm = make_llm("on", max_pending=max_pending)
    with_grammar = [p for p in llm.runner.graphs.programs.values() if GRAMMAR in p.stages]
    assert {len(p.steps) for p in with_grammar} == {5}  # draft, the tree out, verify, the masks in, the rest
    assert run(llm, prompts, GRAMMARS) == run(make_llm("off", max_pending=max_pending), prompts, GRAMMARS)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_generate_with_grammars_captured_equals_the_static_buffers_run_eagerly(prompts, dtype):
    given, wanted = (run(make_llm(how, dtype=dtype), prompts, GRAMMARS) for how in ("on", "eager"))
    assert given == wanted


class HostPlanned(PackedTorchAttention):
    """Lists whose end is decided on the host, as FlashInfer's plan does: the lengths pass through it."""

    plans_on_host = True

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.at_host = lambda step: step()
        self.num_plans = 0

    def plan_tree(self, prefix, ancestor_bits, tree_len):
        lists = self._build("all", prefix, prefix.kv_lens, ancestor_bits, tree_len, prefix.max_kv_len)
        on_host = torch.zeros_like(lists.kv_indptr)

        def through_the_host():
            self.num_plans += 1
            if on_host.device.type != "meta":  # a budget's dry run
                on_host.copy_(lists.kv_indptr.cpu())

        self.at_host(through_the_host)
        from dataclasses import replace

        from treedraft.attention.packed_torch import PackedPlan, _columns

        return PackedPlan((_columns(replace(lists, kv_indptr=on_host)),))


def test_generate_with_a_plan_on_the_host_runs_one_graph_a_forward(prompts, monkeypatch):
    expected = run(make_llm("off", max_pending=0), prompts, PARAMS)  # without overlap there are no dead rounds
    monkeypatch.setattr("treedraft.attention.packed_torch.PackedTorchAttention", HostPlanned)
    llm = make_llm("on", attention_backend="packed-torch", draft_attention_backend="packed-torch")
    assert any("one CUDA graph a forward" in note for note in llm.notes)
    assert llm.config.max_pending == 0
    # S - 1 = 2 draft levels, verification, extension: four plans, five graphs.
    programs = llm.runner.graphs.programs.values()
    assert {len(p.steps) for p in programs if GRAMMAR not in p.stages} == {9}
    assert {len(p.steps) for p in programs if GRAMMAR in p.stages} == {13}  # and the tree out, the masks in
    assert run(llm, prompts, PARAMS) == expected
    auto = make_llm("auto", attention_backend="packed-torch", draft_attention_backend="packed-torch")
    assert auto.runner.graphs is None
