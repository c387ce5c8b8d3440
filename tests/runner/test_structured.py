"""Structured output end to end, in float64: the text of any tree, on any kind of rounds, is a naive oracle's."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from drafters import use_perfect_drafter
from llguidance import LLMatcher, hf

from small_models import write_pair
from tiny_tokenizer import write_tokenizer
from treedraft import LLM, RequestError, RequestOutput, SamplingParams, SpeculativeConfig, StructuredOutput
from treedraft.debug.trace import recording
from treedraft.grammar.compiler import grammar_text
from treedraft.grammar.state import GrammarState
from treedraft.runner.round import Target

SMALL = StructuredOutput(
    json_schema={
        "type": "object",
        "properties": {
            "a": {"type": "string", "maxLength": 5},
            "de": {"type": "integer", "minimum": 0, "maximum": 120},
            "no": {"enum": ["abc", "def", 12]},
        },
        "required": ["a", "de", "no"],
        "additionalProperties": False,
    }
)
WORDS = StructuredOutput(regex="[a-f]{3,8}( [a-d]{1,6}){2,4}\\.")
FORBIDDEN = -1e30
SHAPE = SpeculativeConfig(4, 3, 12)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A small random target with a tokenizer, and a head."""
    made = write_pair(tmp_path_factory.mktemp("pair"))
    write_tokenizer(Path(made["model"]))
    return made


def make_llm(pair: dict[str, str], **options: Any) -> LLM:
    settings = {"max_context": 64, "max_batch": 4, "page_size": 3, "speculative": SHAPE, "capture": "off"}
    return LLM(**pair, dtype="float64", device="cpu", **{**settings, **options})


@pytest.fixture(scope="module")
def plain(pair: dict[str, str]) -> LLM:
    return make_llm(pair, speculative=None)


@pytest.fixture(scope="module")
def tree(pair: dict[str, str]) -> LLM:
    return make_llm(pair)


@pytest.fixture(scope="module")
def perfect(pair: dict[str, str]) -> LLM:
    """Its drafts are what the target would say without a grammar, so long runs are accepted."""
    return use_perfect_drafter(make_llm(pair))


class Oracle:
    """Asks an engine without grammars for one token after another; a bias forbids what a fresh matcher forbids."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.vocabulary = hf.from_tokenizer(llm.tokenizer, n_vocab=llm.vocab_size, eos_token=list(llm.eos_token_ids))

    def tokens(self, prompt: str, params: SamplingParams) -> tuple[int, ...]:
        assert params.structured is not None
        text, prompt_ids, said = grammar_text(params.structured), self.llm.encode(prompt), []
        while len(said) < params.max_tokens:
            matcher = LLMatcher(self.vocabulary, text, log_level=0)
            assert all(matcher.consume_token(t) for t in said)
            if matcher.is_stopped():
                break
            forbidden = np.flatnonzero(np.frombuffer(matcher.compute_logit_bias(), dtype=np.uint8) == 0)
            bias = {int(t): FORBIDDEN for t in forbidden}
            one = replace(params, structured=None, max_tokens=1, logit_bias=bias, num_draft_tokens=1)
            [output] = self.llm.generate([[*prompt_ids, *said]], one, progress=False)
            said += output.outputs[0].token_ids
            if said[-1] in self.llm.eos_token_ids:
                break
        return tuple(said)


def facts(outputs: Sequence[RequestOutput]) -> list[tuple[Any, ...]]:
    return [(c.text, c.token_ids, c.finish_reason, c.error) for o in outputs for c in o.outputs]


SAMPLINGS = [
    SamplingParams(temperature=0, max_tokens=50),
    SamplingParams(temperature=1.0, seed=1, max_tokens=50),
    SamplingParams(temperature=1.0, seed=2, max_tokens=50, repetition_penalty=1.3, top_p=0.9),
    SamplingParams(temperature=0.8, seed=3, max_tokens=50, top_k=3, min_p=0.02),
]


@pytest.mark.parametrize("structured", [SMALL, WORDS], ids=["schema", "regex"])
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled", "penalties top_p", "top_k min_p"])
def test_text_is_that_of_naive_masking(
    sampling: SamplingParams, structured: StructuredOutput, plain: LLM, tree: LLM, perfect: LLM
) -> None:
    params = replace(sampling, structured=structured)
    expected = Oracle(plain).tokens("abc", params)
    for llm in (plain, tree, perfect):
        [output] = llm.generate(["abc"], params, progress=False)
        assert output.outputs[0].token_ids == expected
        assert output.outputs[0].finish_reason == ("stop" if len(expected) < 50 else "length")


def test_text_of_the_demo_is_that_of_naive_masking(plain64: LLM, tree64: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=40, structured=BOUNDED[0])
    expected = Oracle(plain64).tokens("Tell me about the cat.", params)
    [output] = tree64.generate(["Tell me about the cat."], params, progress=False)
    assert output.outputs[0].token_ids == expected and output.outputs[0].finish_reason == "stop"
    assert output.metrics.accept_length > 1.2, "the drafts must be of use, or the test shows nothing"


MIXED = [
    SamplingParams(temperature=0, max_tokens=50, structured=SMALL, logprobs=2),
    SamplingParams(temperature=0, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=4, max_tokens=50, structured=SMALL, frequency_penalty=0.6, n=2),
    SamplingParams(temperature=0.9, seed=5, max_tokens=20, presence_penalty=0.5, logprobs=1),
    SamplingParams(temperature=1.0, seed=6, max_tokens=50, structured=WORDS, min_tokens=8, num_draft_tokens=5),
    SamplingParams(temperature=1.0, seed=7, max_tokens=6, structured=StructuredOutput(json_object=True)),
    SamplingParams(temperature=0, max_tokens=30, structured=StructuredOutput(choice=("abc", "abcdef no"))),
    SamplingParams(
        temperature=1, seed=8, max_tokens=30, structured=StructuredOutput(grammar='start: /[ab]{3,9}/ "c"+')
    ),
]
PROMPTS = ["abc", "de no 12", "[1, 2]", "a", "no no", "def", "ab ab", '{"a": 3}']


@pytest.fixture(scope="module")
def expected(plain: LLM) -> list[tuple[Any, ...]]:
    """Every request alone, without speculation."""
    return [each for p, one in zip(PROMPTS, MIXED, strict=True) for each in facts(plain.generate([p], one, False))]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"cuda_graph": "eager", "speculative": SpeculativeConfig(3, 2, 6)},
        {"capture": "on", "max_pending": 1, "speculative": SpeculativeConfig(7, 8, 40)},
        {"max_pending": 2, "page_size": 1, "chunked_prefill": 3, "max_batch": 8},
        {"speculative": SpeculativeConfig(4, 1, 5)},
        {"speculative": SpeculativeConfig(5, 4, 16, auto=True)},
        {"speculative": SpeculativeConfig(5, 4, 16, auto=True), "cuda_graph": "eager", "max_pending": 1},
    ],
    ids=["eager", "static", "late, captured", "later, chunks", "chain", "auto", "auto, static"],
)
def test_mixed_batch_gives_every_text_as_alone_without_speculation(
    options: dict[str, Any], expected: list[tuple[Any, ...]], pair: dict[str, str]
) -> None:
    llm = make_llm(pair, **options)
    outputs = llm.generate(PROMPTS, MIXED, progress=False)
    assert facts(outputs) == expected
    llm.engine.scheduler.check_integrity()
    assert llm.engine.scheduler.num_constrained == 0
    for output, params in zip(outputs, MIXED, strict=True):
        for choice in output.outputs:
            wants = params.logprobs is not None
            assert (len(choice.logprobs or ()) == len(choice.token_ids)) == wants
    reasons = [c.finish_reason for o in outputs for c in o.outputs]
    assert reasons.count("length") >= 2 and reasons.count("stop") >= 4


def test_preempted_requests_go_on_in_their_grammar(expected: list[tuple[Any, ...]], pair: dict[str, str]) -> None:
    llm = make_llm(pair, kv_memory_bytes=36 * 3 * 4 * 10 * 8, max_pending=1)
    assert facts(llm.generate(PROMPTS, MIXED, progress=False)) == expected
    assert llm.engine.scheduler.num_preemptions > 0


def test_static_seam_copies_out_before_the_target_runs_and_in_before_sampling(pair: dict[str, str]) -> None:
    """On a GPU both are between graphs; the host waits for the tree alone while the target runs."""
    llm, order, usual = make_llm(pair, cuda_graph="eager"), [], Target.verify
    graphs, target = llm.runner.graphs, llm.runner.target
    assert graphs is not None and graphs.seam is not None

    def at_host(step: Callable[[], None]) -> None:
        order.append("host")
        step()

    def verify(self: Target, *arguments: Any) -> Any:
        order.append("target")
        return usual(self, *arguments)

    graphs.seam.at_host = at_host
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(target), "verify", verify)
        llm.generate(["abc"], SamplingParams(temperature=0, max_tokens=4, structured=SMALL), progress=False)
        assert len(order) >= 3 and order == ["host", "target", "host"] * (len(order) // 3)
        order.clear()
        llm.generate(["abc"], SamplingParams(temperature=0, max_tokens=4), progress=False)
        assert set(order) == {"target"}


@pytest.mark.parametrize("draft_vocab_size", [48, 20])
@pytest.mark.parametrize("cuda_graph", ["off", "eager"])
def test_no_draft_of_the_first_level_is_forbidden(
    draft_vocab_size: int, cuda_graph: str, plain: LLM, tmp_path: Path
) -> None:
    """What may follow the root is known before the round; a draft's vocabulary may be a part of the target's."""
    pair = write_pair(tmp_path / "pair", draft_vocab_size=draft_vocab_size)
    write_tokenizer(Path(pair["model"]))
    llm, rounds = make_llm(pair, cuda_graph=cuda_graph), []
    params = SamplingParams(temperature=1, seed=5, max_tokens=50, structured=SMALL)
    prompt = llm.encode("abc")
    with recording(llm, rounds):
        [output] = llm.generate([prompt], params, progress=False)
    assert facts([output]) == facts(plain.generate([prompt], params, progress=False))
    oracle, num_drafts = Oracle(llm), 0
    for each in rounds:
        said = output.outputs[0].token_ids[: each.kv_len - len(prompt) + 1]
        matcher = LLMatcher(oracle.vocabulary, grammar_text(SMALL), log_level=0)
        assert all(matcher.consume_token(t) for t in said)
        allowed = set(np.flatnonzero(np.frombuffer(matcher.compute_logit_bias(), dtype=np.uint8)).tolist())
        drafts = {t for t, depth in zip(each.token_ids, each.depths, strict=True) if depth == 1 and t >= 0}
        assert drafts <= allowed
        num_drafts += len(drafts)
    assert num_drafts > len(rounds) / 2


def test_max_tokens_ends_an_unfinished_document_with_length(tree: LLM) -> None:
    [output] = tree.generate(["abc"], SamplingParams(temperature=0, max_tokens=5, structured=SMALL), progress=False)
    assert output.outputs[0].finish_reason == "length" and len(output.outputs[0].token_ids) == 5


@pytest.mark.parametrize("llm_name", ["plain", "tree"])
def test_a_complete_text_ends_whatever_min_tokens_and_ignore_eos_say(
    llm_name: str, request: pytest.FixtureRequest
) -> None:
    llm = request.getfixturevalue(llm_name)
    fixed = StructuredOutput(regex="no def\\.")
    for own in ({}, {"ignore_eos": True}, {"min_tokens": 40}, {"min_tokens": 40, "stop_token_ids": (5, 6)}):
        params = SamplingParams(temperature=1, seed=1, max_tokens=50, structured=fixed, **own)
        [choice] = llm.generate(["abc"], params, progress=False)[0].outputs
        assert (choice.text, choice.finish_reason) == ("no def.", "stop"), own


@pytest.mark.parametrize("llm_name", ["plain", "tree"])
def test_min_tokens_and_stops_hold_inside_a_grammar(llm_name: str, request: pytest.FixtureRequest) -> None:
    llm = request.getfixturevalue(llm_name)
    open_end = SamplingParams(
        temperature=1, seed=2, max_tokens=40, structured=StructuredOutput(regex="([a-p]+ )*[a-p]+")
    )
    [free] = llm.generate(["abc"], open_end, progress=False)[0].outputs
    at_least = len(free.token_ids) + 5 if free.finish_reason == "stop" else 12
    [longer] = llm.generate(["abc"], replace(open_end, min_tokens=at_least), progress=False)[0].outputs
    assert len(longer.token_ids) >= at_least
    [stopped] = llm.generate(["abc"], replace(open_end, stop=(free.text[2:5],)), progress=False)[0].outputs
    assert (stopped.text, stopped.finish_reason) == (free.text[: free.text.index(free.text[2:5])], "stop")
    third = free.token_ids[2]
    [by_id] = llm.generate(["abc"], replace(open_end, stop_token_ids=(third,)), progress=False)[0].outputs
    assert by_id.token_ids == free.token_ids[: free.token_ids.index(third) + 1] and by_id.finish_reason == "stop"


def test_a_grammar_that_fails_ends_its_own_request_alone(
    tree: LLM, expected: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    fill = GrammarState.fill_masks

    def failing(self: GrammarState, *arguments: Any) -> None:
        fill(self, *arguments)
        if self._num_said > 3:
            self.error = "too complex"

    monkeypatch.setattr(GrammarState, "fill_masks", failing)
    given = facts(tree.generate(PROMPTS, MIXED, progress=False))
    for (_, token_ids, reason, error), want in zip(given, expected, strict=True):
        if reason == "error":
            assert "the grammar failed: too complex" in error and want[1][: len(token_ids)] == token_ids
    assert sum(reason == "error" for _, _, reason, _ in given) >= 4
    assert given[1] == expected[1] and given[4] == expected[4], "unconstrained requests"
    monkeypatch.undo()
    assert facts(tree.generate(PROMPTS, MIXED, progress=False)) == expected
    tree.engine.scheduler.check_integrity()


def test_generate_refuses_a_bad_grammar_and_loses_nothing(tree: LLM) -> None:
    bad = SamplingParams(structured=StructuredOutput(regex="("))
    with pytest.raises(RequestError, match=r"prompt 1: structured output(.|\n)*unclosed group"):
        tree.generate(["abc", "abc"], [SamplingParams(), bad], progress=False)
    assert tree.engine.is_idle


# ------------------------------------------------------------------ documents


def an_object(required: Sequence[str], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


PERSON = an_object(
    ("name", "age", "kind"),
    name={"type": "string", "maxLength": 10},
    age={"type": "integer", "minimum": 0, "maximum": 120},
    kind={"enum": ["cat", "dog"]},
)
PAGE = an_object(
    ("title", "tags", "size"),
    title={"type": "string", "maxLength": 16},
    tags={"type": "array", "items": {"enum": ["a", "b", "c"]}, "maxItems": 3},
    size=an_object(("w",), w={"type": "integer", "minimum": 1, "maximum": 99}),
    note={"type": ["string", "null"], "maxLength": 8},
)
POINT = an_object(("x", "y"), **{name: {"type": "integer", "minimum": 0, "maximum": 9} for name in "xy"})
BOUNDED = [
    StructuredOutput(json_schema=schema)
    for schema in (
        PERSON,
        {"type": "boolean"},
        {"type": "integer", "minimum": -99, "maximum": 9999},
        {"enum": ["spring", "summer", 3, None, {"deep": [1, 2]}]},
        {"type": "string", "maxLength": 12},
        {"type": "string", "pattern": "^[A-Z][a-z]{1,8}-[0-9]{2}$"},
        {"type": "string", "format": "date"},
        {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "minItems": 2, "maxItems": 5},
        {"anyOf": [{"type": "null"}, {"type": "string", "enum": ["left", "right"]}]},
        PAGE,
        {"$defs": {"point": POINT}, "type": "array", "prefixItems": [{"$ref": "#/$defs/point"}] * 2, "minItems": 2,
         "items": False},
        {"const": {"ok": True, "list": [1, "two"]}},
    )
]  # fmt: skip


PROSE = ("Once upon a time", "A list of", "import numpy", "Dear", "The answer is")


def check_documents(llm: LLM, count: int) -> int:
    """Generate documents of all schemas in turn, half sampled, beside unconstrained requests; count the valid ones."""
    schemas = [BOUNDED[i % len(BOUNDED)] for i in range(count)]
    params = [
        SamplingParams(temperature=(i + i // len(BOUNDED)) % 2, seed=i, max_tokens=400, structured=schema)
        for i, schema in enumerate(schemas)
    ]
    prompts = [f"{PROSE[i % len(PROSE)]} ({i})" for i in range(count)]
    free = [SamplingParams(temperature=i % 2, seed=i, max_tokens=20) for i in range(max(count // 4, 2))]
    outputs = llm.generate(prompts + [PROSE[0]] * len(free), params + free, progress=False)
    alone = [llm.generate(PROSE[0], one, progress=False)[0] for one in free]
    assert facts(outputs[count:]) == facts(alone)
    assert all(o.outputs[0].finish_reason == "stop" for o in outputs[:count])
    num_valid = 0
    for schema, output in zip(schemas, outputs, strict=False):
        judge = jsonschema.Draft202012Validator(json.loads(str(schema.json_schema)))
        num_valid += judge.is_valid(json.loads(output.outputs[0].text))
    return num_valid


def test_documents_of_every_schema_are_valid(tree64: LLM) -> None:
    assert check_documents(tree64, len(BOUNDED)) == len(BOUNDED)


@pytest.mark.slow
def test_200_documents_of_200_are_valid() -> None:
    llm = LLM("demo", dtype="float64", device="cpu", max_context=512, max_batch=16)
    assert llm.config.speculative is not None and llm.config.speculative.topk == 4
    assert check_documents(llm, 200) == 200
