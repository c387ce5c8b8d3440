"""Recorded rounds equal eager ones, tree for tree, over stages, batches and lengths; nothing of the recording stays."""

import pytest
import torch

from treedraft import LLM, ConfigError, SamplingParams, SpeculativeConfig
from treedraft.debug.trace import recording
from treedraft.runner import capture

STAGES = {
    "greedy": SamplingParams(temperature=0),
    "sampled": SamplingParams(temperature=0.9, seed=3),
    "filters": SamplingParams(temperature=0.8, top_k=50, top_p=0.9, min_p=0.01, seed=4),
    "penalties": SamplingParams(temperature=0, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2),
    "bias": SamplingParams(temperature=0, logit_bias={11: 3.0, 300: -50.0}, min_tokens=9),
}


def make(capture, shape, dtype="float64"):
    speculative = None if shape is None else SpeculativeConfig(*shape)
    options = {"page_size": 3, "max_batch": 3, "max_context": 256, "device": "cpu", "dtype": dtype}
    return LLM("demo", speculative=speculative, capture=capture, **options)


@pytest.fixture(scope="module", params=[(4, 3, 10), (1, 2, 3), None], ids=str)
def pair(request):
    return make("on", request.param), make("off", request.param)


@pytest.mark.parametrize("name", STAGES)
def test_captured_rounds_equal_eager_tree_for_tree(pair, demo_prompts, name):
    found = []
    for llm in pair:
        params = [SamplingParams(**{**STAGES[name].__dict__, "max_tokens": 40 - 9 * i}) for i in range(4)]
        rounds = []
        llm._next_id = 0
        with recording(llm, rounds):
            outputs = llm.generate(demo_prompts[:4], params, progress=False)
        slots = [(r.slot, r.kv_len, r.token_ids, r.parents, r.sampled, r.accepted_columns) for r in rounds]
        found.append(([o.outputs[0].token_ids for o in outputs], slots))
    assert found[0] == found[1]
    records = pair[0].runner.captured._records
    assert records, "nothing was recorded: the test shows nothing"


def test_capture_leaves_the_state_as_it_was(demo_prompts):
    """Recording runs a round on copies: lengths, roots, pools and weights are the same objects with the same values."""
    llm = make("on", (3, 2, 5))
    captured = llm.runner.captured
    make_record, seen = captured._record, []

    def watched(*arguments):
        before = [(b.get(), b.get() if b.get().is_mkldnn else b.get().clone()) for b in captured.bindings]
        record = make_record(*arguments)
        for binding, (tensor, value) in zip(captured.bindings, before, strict=True):
            assert binding.get() is tensor
            assert tensor.is_mkldnn or torch.equal(tensor, value), binding.name
        seen.append(len(before))
        return record

    captured._record = watched
    llm.generate(demo_prompts[:2], SamplingParams(temperature=0, max_tokens=12), progress=False)
    assert seen


def test_captured_float32_with_packed_weights_equals_eager(demo_prompts):
    params = SamplingParams(temperature=0, max_tokens=40)
    texts = [
        [o.outputs[0].token_ids for o in make(mode, (4, 2, 8), "float32").generate(demo_prompts[:3], params, False)]
        for mode in ("on", "off")
    ]
    assert texts[0] == texts[1]


def test_capture_auto_records_only_what_occurs_often(demo_prompts):
    llm = make("auto", (1, 2, 3))
    captured = llm.runner.captured
    llm.generate(demo_prompts[0], SamplingParams(temperature=0, max_tokens=10, ignore_eos=True), progress=False)
    assert not captured._records and captured.record_after > 10
    llm.generate(demo_prompts[0], SamplingParams(temperature=0, max_tokens=60, ignore_eos=True), progress=False)
    assert set(captured._records) == {(1, frozenset())}


def test_capture_keeps_a_bounded_number_of_records_the_latest_ones(demo_prompts, monkeypatch):
    monkeypatch.setattr(capture, "MAX_RECORDS", 2)
    monkeypatch.setattr(capture, "UNUSED_ROUNDS", 60)
    llm = make("on", (1, 2, 3))
    kept_by_torch = len(torch.jit._state._python_cu.get_functions())
    texts, records = [], []
    for number in (1, 2, 1, 3, 1, 3):  # batch sizes
        params = [SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)] * number
        texts.append([o.outputs[0].text for o in llm.generate(demo_prompts[:number], params, progress=False)])
        assert len(llm.runner.captured._records) <= 2
        records.append({size for size, _ in llm.runner.captured._records})
    assert records[:4] == [{1}, {1, 2}, {1, 2}, {1, 2}], "3 has no place while 2 may still be in use"
    assert records[4:] == [{1, 2}, {1, 3}]
    assert texts[0] == texts[2] == texts[4] == texts[3][:1] and texts[3] == texts[5]
    assert len(torch.jit._state._python_cu.get_functions()) == kept_by_torch, "dropped records must be freed"


def test_capture_unknown_mode_is_refused():
    with pytest.raises(ConfigError, match="capture must be auto, on or off"):
        LLM("demo", device="cpu", capture="maybe")
