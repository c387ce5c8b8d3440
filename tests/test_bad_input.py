"""Bad input gets an error that says what was expected and given, and loses nothing: the same LLM goes on exactly."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from small_models import change_config, write_head, write_pair, write_target
from treedraft import LLM, SamplingParams, SpeculativeConfig
from treedraft.debug.trace import recording
from treedraft.engine import scheduler as scheduler_module
from treedraft.errors import CheckpointError, ConfigError, RequestError
from treedraft.kv import allocator, manager
from treedraft.runner import drafter as drafter_module
from treedraft.runner import round as round_module
from treedraft.runner import runner as runner_module
from treedraft.runner.round import Target

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
SMALL_TREE = SpeculativeConfig(3, 2, 6)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of a small target and its head, without tokenizer files."""
    path = tmp_path_factory.mktemp("small")
    write_pair(path)
    return path


@pytest.fixture(scope="module")
def small(folder: Path) -> LLM:
    return small_llm(folder)


def small_llm(folder: Path, **options: Any) -> LLM:
    settings = {
        "dtype": "float64",
        "device": "cpu",
        "max_batch": 3,
        "page_size": 2,
        "speculative": SMALL_TREE,
        **options,
    }
    return LLM(str(folder / "model"), draft=str(folder / "draft"), capture="off", **settings)


SMALL_PROMPTS = [[5, 6, 7], [9, 8, 7, 6, 5, 4, 3], [1, 2]]


@pytest.fixture(scope="module")
def small_texts(folder: Path) -> list[tuple[int, ...]]:
    """What the small model says to SMALL_PROMPTS without speculation."""
    return texts_of(small_llm(folder, speculative=None), SMALL_PROMPTS)


def texts_of(llm: LLM, prompts: Any, params: Any = GREEDY) -> list[tuple[int, ...]]:
    return [c.token_ids for o in llm.generate(prompts, params, progress=False) for c in o.outputs]


def test_small_model_says_more_than_one_word(small_texts):
    assert len({t for text in small_texts for t in text}) > 8, "a test of equal texts would show nothing"


# ------------------------------------------------------------------ requests

BAD_PARAMS = [
    ({"max_tokens": 0}, "max_tokens must be at least 1; got 0"),
    ({"max_tokens": 2.5}, "max_tokens.*2.5"),
    ({"temperature": -1}, "temperature.*-1"),
    ({"temperature": math.nan}, "temperature.*nan"),
    ({"top_p": 0}, r"top_p must be in \(0, 1\]; got 0"),
    ({"top_k": -2}, "top_k.*-2"),
    ({"min_p": 1.5}, r"min_p must be in \[0, 1\]; got 1.5"),
    ({"n": 0}, "n must be at least 1; got 0"),
    ({"seed": 2**64}, "64 bits"),
    ({"repetition_penalty": 0}, "repetition_penalty must be > 0"),
    ({"presence_penalty": 3}, r"presence_penalty must be in \[-2, 2\]; got 3"),
    ({"logit_bias": {1: math.inf}}, "logit_bias of token 1"),
    ({"logit_bias": {"x": 1}}, "logit_bias numbers by token id"),
    ({"logit_bias": [1]}, "logit_bias numbers by token id"),
    ({"stop": [""]}, "stop must be non-empty strings"),
    ({"stop": 3}, "stop must be strings"),
    ({"stop_token_ids": ["a"]}, "stop_token_ids must be integers"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"logprobs": 21}, r"logprobs must be in 0\.\.20; got 21"),
]


@pytest.mark.parametrize(("fields", "message"), BAD_PARAMS, ids=lambda x: str(x)[:30])
def test_sampling_params_out_of_range_say_the_range(fields, message):
    with pytest.raises(RequestError, match=message):
        SamplingParams(**fields)


def test_sampling_params_accept_none_and_text_keys_where_others_do():
    params = SamplingParams(stop=None, stop_token_ids=None, logit_bias={"7": 1})  # type: ignore[arg-type,dict-item]
    assert (params.stop, params.stop_token_ids, params.logit_bias) == ((), (), {7: 1.0})


BAD_REQUESTS: list[tuple[Any, dict, str]] = [
    ([], {}, "the prompt is empty"),
    ([48], {}, r"token ids must be integers in 0\.\.47; got 48 at index 0"),
    ([3, -1], {}, "got -1 at index 1"),
    ([3, 1.5], {}, "got 1.5 at index 1"),
    (7, {}, "a prompt is a text or a list of token ids; got 7"),
    ("words", {}, "no tokenizer files; give prompts as token ids"),
    ([1] * 64, {}, "the prompt has 64 tokens; the context of 64"),
    ([1] * 65, {}, "the prompt has 65 tokens"),
    ([1], {"stop": ["a"]}, "stop strings need a tokenizer"),
    ([1], {"logit_bias": {48: 1}}, r"logit_bias names token 48; the vocabulary is 0\.\.47"),
    ([1], {"stop_token_ids": [-1]}, "stop_token_ids names token -1"),
    ([1], {"stop_token_ids": range(1, 17), "ignore_eos": False, "min_tokens": 2}, "at most 16 stop ids.*got 17"),
]


@pytest.mark.parametrize(("prompt", "fields", "message"), BAD_REQUESTS, ids=lambda x: str(x)[:30])
def test_generate_bad_request_names_it_and_loses_nothing(prompt, fields, message, small, small_texts):
    number = small._next_id
    with pytest.raises(RequestError, match=f"prompt 1: .*{message}"):
        small.generate([SMALL_PROMPTS[0], prompt], [GREEDY, replace(GREEDY, **fields)], progress=False)
    assert small.engine.is_idle and small._next_id == number
    assert texts_of(small, SMALL_PROMPTS) == small_texts
    small.engine.scheduler.check_integrity()


def test_generate_bad_call_says_what_is_wanted(small, small_texts):
    with pytest.raises(RequestError, match="as many SamplingParams as prompts are needed: 3; got 1"):
        small.generate(SMALL_PROMPTS, [GREEDY], progress=False)
    with pytest.raises(RequestError, match="texts or lists of token ids; got 5"):
        small.generate(5, GREEDY, progress=False)
    with pytest.raises(RequestError, match="no chat template"):
        small.chat([{"role": "user", "content": "hello"}])
    with pytest.raises(RequestError, match="no tokenizer"):
        small.decode([1])
    assert small.generate([], GREEDY, progress=False) == []
    assert texts_of(small, SMALL_PROMPTS) == small_texts


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "at least one message"),
        ([[]], "a conversation is a list"),
        (["hello"], "a conversation is a list"),
        ([{"role": "user"}], "a conversation is a list of .*'role'.*'content'"),
        ([{"role": "user", "content": None}], "the chat template refuses"),
    ],
    ids=str,
)
def test_chat_bad_messages_say_what_is_wanted(messages, message, tree64):
    with pytest.raises(RequestError, match=message):
        tree64.chat(messages, GREEDY, progress=False)


def test_generate_text_prompts_on_the_demo_are_checked_too(tree64, plain64):
    for prompt, message in (("", "empty"), ("word " * 600, "the context of 512")):
        with pytest.raises(RequestError, match=message):
            tree64.generate([prompt], GREEDY, progress=False)
    assert texts_of(tree64, ["Once upon"]) == texts_of(plain64, ["Once upon"])


def test_generate_more_than_the_pool_can_ever_hold_is_refused(folder, small_texts):
    token_bytes = (3 * 10 + 10) * 8
    llm = small_llm(folder, kv_memory_bytes=2 * token_bytes * (2 + 11))  # 11 pages of 2 tokens
    with pytest.raises(RequestError, match="23 tokens need 12 pages of 2 tokens, the whole pool has 11"):
        llm.generate([[1] * 11], GREEDY, progress=False)
    assert texts_of(llm, SMALL_PROMPTS) == small_texts, "22 tokens fit, without room for a whole tree"


def test_generate_ids_without_tokenizer_gives_ids_and_no_text(small, small_texts):
    outputs = small.generate(SMALL_PROMPTS[1], GREEDY, progress=False)
    assert [o.outputs[0].token_ids for o in outputs] == small_texts[1:2]
    assert outputs[0].prompt is None and outputs[0].outputs[0].text == ""


def test_generate_logprobs_of_more_tokens_than_the_vocabulary_gives_all(tmp_path):
    write_target(tmp_path, vocab_size=12)
    llm = LLM(str(tmp_path), dtype="float64", device="cpu", speculative=None)
    asked = [replace(GREEDY, logprobs=20), replace(GREEDY, logprobs=3)]
    outputs = llm.generate([[1, 2], [3]], asked, progress=False)
    for output, size in zip(outputs, (12, 3), strict=True):
        top = output.outputs[0].top_logprobs
        assert top is not None and [len(t) for t in top] == [size] * 12
    assert all(sum(map(math.exp, t.values())) == pytest.approx(1) for t in outputs[0].outputs[0].top_logprobs)


# ------------------------------------------------------------------ NaN in logits


def spoil_forward(monkeypatch: pytest.MonkeyPatch, method: str, slot: int) -> None:
    """The target's hidden states of one sequence become NaN."""
    original = getattr(Target, method)

    def forward(self: Target, batch: Any, *rest: Any) -> Any:
        output = original(self, batch, *rest)
        row = batch.slots.tolist().index(slot) if slot in batch.slots.tolist() else None
        if row is None:
            return output
        hidden = output.hidden.clone()
        hidden[batch.last_rows[row] if method == "prefill" else row] = torch.nan
        return replace(output, hidden=hidden)

    monkeypatch.setattr(Target, method, forward)


@pytest.mark.parametrize(("method", "where"), [("prefill", "the prefill"), ("verify", "a round")])
def test_nan_in_the_logits_of_one_request_names_it_and_the_others_go_on(method, where, small, small_texts, monkeypatch):
    assert texts_of(small, SMALL_PROMPTS) == small_texts
    number = small._next_id
    with monkeypatch.context() as patch:
        spoil_forward(patch, method, slot=small.engine.scheduler._free_slots[-2])
        outputs = small.generate(SMALL_PROMPTS, GREEDY, progress=False)
    choices = [o.outputs[0] for o in outputs]
    assert [c.finish_reason for c in choices] == ["length", "error", "length"]
    assert choices[1].error == f"request {number + 1}: the model's logits held a NaN in {where}"
    assert choices[1].token_ids == small_texts[1][: 0 if method == "prefill" else 1]
    assert [choices[0].token_ids, choices[2].token_ids] == [small_texts[0], small_texts[2]]
    small.engine.scheduler.check_integrity()
    assert texts_of(small, SMALL_PROMPTS) == small_texts


def test_nan_in_the_kv_of_one_request_ends_it_alone_and_its_pages_can_be_used_again(small, small_texts, monkeypatch):
    """The way it happens: a NaN in a sequence's own cache, which the pages keep after they are freed."""
    steps = 0
    launch = small.runner.launch

    def spoiling(plan: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps == 4:
            request = next(r for r in small.engine.scheduler.running if r.prompt_token_ids == tuple(SMALL_PROMPTS[1]))
            page = small.engine.scheduler.kv.owned(request.slot)[1]
            small.runner.target.pool.data[1, 2 * page] = torch.nan
        return launch(plan)

    monkeypatch.setattr(small.runner, "launch", spoiling)
    choices = [o.outputs[0] for o in small.generate(SMALL_PROMPTS, GREEDY, progress=False)]
    assert [c.finish_reason for c in choices] == ["length", "error", "length"]
    said = choices[1].token_ids
    assert 0 < len(said) < 12 and said == small_texts[1][: len(said)]
    assert [choices[0].token_ids, choices[2].token_ids] == [small_texts[0], small_texts[2]]
    assert texts_of(small, SMALL_PROMPTS) == small_texts


def test_nan_of_a_rejected_node_does_not_reach_its_siblings(folder, small_texts):
    """The embedding of tokens that the target never says is NaN, and drafts propose them: nothing may change."""
    llm = small_llm(folder, speculative=SpeculativeConfig(3, 8, 24))
    said = {t for prompt in SMALL_PROMPTS for t in prompt} | {t for text in small_texts for t in text}
    unsaid = [t for t in range(48) if t not in said]
    with torch.no_grad():
        llm.runner.target.model.embedding[unsaid] = torch.nan
    rounds: list[Any] = []
    with recording(llm, rounds):
        assert texts_of(llm, SMALL_PROMPTS) == small_texts
    assert sum(t in unsaid for r in rounds for t in r.token_ids) > 20, "else the drafts never met the NaN"


def test_nan_in_the_draft_head_costs_acceptance_alone(folder, small_texts):
    llm = small_llm(folder)
    with torch.no_grad():
        llm.runner.drafter.head.fc.fill_(torch.nan)  # type: ignore[union-attr]
    outputs = llm.generate(SMALL_PROMPTS, GREEDY, progress=False)
    assert [o.outputs[0].token_ids for o in outputs] == small_texts
    assert all(o.metrics.accept_length == 1 for o in outputs)


# ------------------------------------------------------------------ configurations


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((5, 4, 70), r"num_draft_tokens must be in 2\.\.69 for num_steps=5, topk=4.*got 70"),
        ((1, 4, 6), r"2\.\.5 for num_steps=1"),
        ((3, 1, 5), r"2\.\.4 for num_steps=3, topk=1"),
        ((3, 2, 1), r"2\.\.11.*got 1"),
        ((0, 2, 2), "num_steps must be an integer of at least 1; got 0"),
        ((3, 0, 2), "topk must be an integer of at least 1; got 0"),
        ((3, 2, 4.0), "num_draft_tokens must be an integer"),
    ],
    ids=str,
)
def test_llm_impossible_tree_gives_the_bound(shape, message):
    with pytest.raises(ConfigError, match=message):
        LLM("demo", device="cpu", speculative=SpeculativeConfig(*shape))


def test_llm_topk_beyond_the_draft_vocabulary_gives_it(folder, tmp_path, small_texts):
    write_head(tmp_path / "draft", draft_vocab_size=8)
    options = {"model": str(folder / "model"), "draft": str(tmp_path / "draft"), "device": "cpu", "dtype": "float64"}
    with pytest.raises(ConfigError, match="topk must be at most the draft head's vocabulary, 8; got 9"):
        LLM(**options, speculative=SpeculativeConfig(2, 9, 16))
    assert texts_of(LLM(**options, speculative=SpeculativeConfig(2, 8, 16)), SMALL_PROMPTS) == small_texts


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "float8"}, "dtype must be one of auto, float64.*got 'float8'"),
        ({"device": "tpu"}, "device must be auto, cpu or cuda; got 'tpu'"),
        ({"page_size": 0}, "page_size must be an integer of at least 1; got 0"),
        ({"max_batch": 0}, "max_batch"),
        ({"max_context": 1}, "max_context must be at least 2"),
        ({"max_context": 65}, "max_context must be at most 64, the model's max_position_embeddings; got 65"),
        ({"mem_fraction_static": 1.0}, "mem_fraction_static"),
        ({"kv_memory_bytes": 100}, "raise kv_memory_bytes"),
    ],
    ids=str,
)
def test_llm_options_out_of_range_say_the_range(options, message, folder):
    with pytest.raises(ConfigError, match=message):
        small_llm(folder, **options)


def test_llm_cuda_without_a_gpu_says_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="device 'cuda' was asked for, but torch sees no GPU; use --device cpu"):
        LLM("demo", device="cuda")


# ------------------------------------------------------------------ checkpoints


def test_llm_unknown_model_says_what_it_is_not(monkeypatch, tmp_path):
    import huggingface_hub

    def offline(name: str, **_: Any) -> str:
        raise huggingface_hub.errors.LocalEntryNotFoundError("no connection")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(CheckpointError, match="unknown model 'no/such': it is neither 'demo' nor a folder"):
        LLM("no/such")
    with pytest.raises(CheckpointError, match="unknown draft 'no/such'"):
        LLM("demo", draft="no/such", device="cpu")
    with pytest.raises(CheckpointError, match="no such folder"):
        LLM(str(tmp_path / "nowhere"))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"sliding_window": 16}, "sliding_window"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}, "LlamaForCausalLM"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
    ],
    ids=str,
)
def test_llm_config_field_that_would_be_ignored_is_named(fields, message, tmp_path):
    change_config(write_target(tmp_path), **fields)
    with pytest.raises(ConfigError, match=message):
        LLM(str(tmp_path), device="cpu", speculative=None)


@pytest.mark.parametrize("part", ["model", "draft"])
def test_llm_damaged_checkpoint_names_the_file(part, tmp_path):
    names = write_pair(tmp_path)
    options: dict[str, Any] = {**names, "device": "cpu", "speculative": SMALL_TREE}
    weights = tmp_path / part / "model.safetensors"
    whole = weights.read_bytes()
    for cut in (0, 100, len(whole) - 64):
        weights.write_bytes(whole[:cut])
        with pytest.raises(CheckpointError, match=rf"{part}.model\.safetensors is truncated"):
            LLM(**options)
    weights.unlink()
    with pytest.raises(CheckpointError, match="neither"):
        LLM(**options)
    weights.write_bytes(whole)
    change_config(tmp_path / part, intermediate_size=32)
    with pytest.raises(CheckpointError, match=r"gate_proj.weight must have shape \[32, 16\]; got \[24, 16\]"):
        LLM(**options)
    (tmp_path / part / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="config.json is no readable JSON"):
        LLM(**options)


def test_llm_weights_that_the_config_does_not_know_are_named(tmp_path):
    write_target(tmp_path)
    change_config(tmp_path, num_hidden_layers=2)
    with pytest.raises(CheckpointError, match="model.layers.2"):
        LLM(str(tmp_path), device="cpu", speculative=None)
    change_config(tmp_path, num_hidden_layers=4)
    with pytest.raises(CheckpointError, match="lacks model.layers.3"):
        LLM(str(tmp_path), device="cpu", speculative=None)


def test_llm_broken_tokenizer_files_are_named(tmp_path):
    (write_target(tmp_path) / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match="tokenizer files in .* cannot be read"):
        LLM(str(tmp_path), device="cpu", speculative=None)


def test_llm_without_a_head_says_that_it_does_not_speculate(folder, small_texts):
    llm = LLM(str(folder / "model"), device="cpu", dtype="float64")
    assert any("no draft head" in note for note in llm.notes) and llm.config.speculative is None
    assert texts_of(llm, SMALL_PROMPTS) == small_texts


# ------------------------------------------------------------------ interrupts

HOST_CODE = {m.__file__ for m in (scheduler_module, allocator, manager, runner_module, round_module, drafter_module)}


class InterruptAt:
    """Raises KeyboardInterrupt when the n-th line of the engine's own code is about to run; n None: counts them."""

    def __init__(self, line: int | None):
        self.line, self.count = line, 0

    def __enter__(self) -> InterruptAt:
        self.before = sys.gettrace()
        sys.settrace(self._calls)
        return self

    def __exit__(self, *exc: object) -> None:
        sys.settrace(self.before)

    def _calls(self, frame: Any, event: str, arg: Any) -> Any:
        return self._lines if frame.f_code.co_filename in HOST_CODE else None

    def _lines(self, frame: Any, event: str, arg: Any) -> Any:
        if event == "line":
            self.count += 1
            if self.count == self.line:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self._lines


def test_reset_clears_every_row_of_the_page_table(small):
    """A stale row behind an interrupted step would let a shrunk tree write into pages that others own by then."""
    launch = small.runner.launch

    def interrupted(plan: Any) -> Any:
        launch(plan)
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(small.runner, "launch", interrupted)
        small.generate(SMALL_PROMPTS, GREEDY, progress=False)
    plan = small.engine.scheduler.schedule()
    assert plan.released_slots == tuple(range(3)) and not plan.prefills
    launch(plan)
    assert (small.runner.pages.table == allocator.TRASH_PAGE).all()


@pytest.mark.parametrize("max_pending", [0, 1])
def test_interrupt_at_any_line_leaves_the_engine_as_new(max_pending, folder, small_texts):
    llm = small_llm(folder, max_batch=2, max_pending=max_pending)
    params = replace(GREEDY, max_tokens=4)
    expected = [t[:4] for t in small_texts]
    with InterruptAt(None) as counter:
        assert texts_of(llm, SMALL_PROMPTS, params) == expected
    assert counter.count > 500
    for line in range(1, counter.count, counter.count // 40):
        with pytest.raises(KeyboardInterrupt), InterruptAt(line):
            texts_of(llm, SMALL_PROMPTS, params)
        assert llm.engine.is_idle
        llm.engine.scheduler.check_integrity()
        assert texts_of(llm, SMALL_PROMPTS, params) == expected, f"after an interrupt at line {line}"


@pytest.mark.parametrize("where", ["launch", "collect"])
def test_error_inside_a_step_leaves_the_engine_usable(where, small, small_texts, monkeypatch):
    original, calls = getattr(small.runner, where), 0

    def failing(argument: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise RuntimeError("out of memory")
        return original(argument)

    with monkeypatch.context() as patch:
        patch.setattr(small.runner, where, failing)
        with pytest.raises(RuntimeError, match="out of memory"):
            small.generate(SMALL_PROMPTS, GREEDY, progress=False)
    assert small.engine.is_idle
    assert texts_of(small, SMALL_PROMPTS) == small_texts
