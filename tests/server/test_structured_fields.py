"""Structured output by every field that asks for it: valid, the offline text, and 400 for what is no grammar."""

from __future__ import annotations

import json
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import httpx
import jsonschema
import pytest
from openai import BadRequestError
from pydantic import BaseModel

from live_server import Live, live_server
from treedraft import LLM, SamplingParams, StructuredOutput
from treedraft.grammar import compiler
from treedraft.grammar.state import GrammarState

MESSAGES: list[Any] = [{"role": "user", "content": "Who is it?"}]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 10},
        "kind": {"type": "string", "enum": ["cat", "dog"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 30},
    },
    "required": ["name", "kind", "age"],
    "additionalProperties": False,
}
RESPONSE_FORMAT: Any = {
    "type": "json_schema",
    "json_schema": {"name": "animal", "description": "An animal.", "schema": SCHEMA, "strict": True},
}


@pytest.mark.parametrize("temperature", [0, 1])
def test_chat_response_format_json_schema(live: Live, plain64: LLM, temperature: int) -> None:
    options: Any = {"model": "demo", "messages": MESSAGES, "max_tokens": 120, "temperature": temperature, "seed": 2}
    answer = live.openai.chat.completions.create(**options, response_format=RESPONSE_FORMAT)
    text = answer.choices[0].message.content
    jsonschema.validate(json.loads(text or ""), SCHEMA)
    params = SamplingParams(
        max_tokens=120, temperature=temperature, seed=2, structured=StructuredOutput(json_schema=SCHEMA)
    )
    [expected] = plain64.chat(MESSAGES, params, progress=False)
    assert text == expected.outputs[0].text and answer.choices[0].finish_reason == "stop"
    chunks = list(live.openai.chat.completions.create(**options, response_format=RESPONSE_FORMAT, stream=True))
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == text
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_chat_parse_gives_the_clients_own_type(live: Live) -> None:
    class Weather(BaseModel):
        sky: Literal["clear", "grey"]
        windy: bool

    answer = live.openai.chat.completions.parse(
        model="demo", messages=MESSAGES, max_tokens=120, seed=3, response_format=Weather
    )
    assert isinstance(answer.choices[0].message.parsed, Weather)


def test_chat_response_format_json_object_and_text(live: Live) -> None:
    formats: list[Any] = [
        {"type": "json_object"},
        {"type": "text"},
        {"type": "json_schema", "json_schema": {"name": "x"}},
    ]
    texts = [
        live.openai.chat.completions.create(
            model="demo", messages=MESSAGES, max_tokens=30, temperature=0, response_format=each
        )
        .choices[0]
        .message.content
        for each in formats
    ]
    assert texts[0] is not None and texts[0].startswith("{") and texts[2] == texts[0]
    free = live.openai.chat.completions.create(model="demo", messages=MESSAGES, max_tokens=30, temperature=0)
    assert texts[1] == free.choices[0].message.content != texts[0]


FORMS: list[tuple[dict[str, Any], str]] = [
    ({"structured_outputs": {"json": {"enum": ["left", "right"]}}}, '"(left|right)"'),
    ({"structured_outputs": {"json": '{"type": "boolean"}'}}, "true|false"),
    ({"structured_outputs": {"regex": "[a-d]{2,4}!"}}, "[a-d]{2,4}!"),
    ({"structured_outputs": {"choice": ["yes", "no, never"]}}, "yes|no, never"),
    ({"structured_outputs": {"grammar": 'root ::= "a" | "b" root'}}, "b*a"),
    ({"structured_outputs": {"json_object": True, "regex": None}}, r"(?s)\{.*"),
    ({"regex": "x{3}"}, "xxx"),
    ({"ebnf": 'start: "a" "b"?'}, "ab?"),
    ({"json_schema": '{"const": 7}'}, "7"),
    ({"json_schema": {"const": 7}}, "7"),
]


@pytest.mark.parametrize(("fields", "pattern"), FORMS, ids=lambda x: str(x)[:40])
def test_completions_and_generate_take_the_other_names(live: Live, fields: dict[str, Any], pattern: str) -> None:
    answer = live.openai.completions.create(
        model="demo", prompt="Say", max_tokens=24, seed=1, extra_body=fields, logprobs=1
    )
    assert re.fullmatch(pattern, answer.choices[0].text)
    assert answer.usage is not None and len(answer.choices[0].logprobs.tokens) == answer.usage.completion_tokens
    if "structured_outputs" not in fields:
        body = {"text": "Say", "sampling_params": {"max_new_tokens": 24, **fields}}
        given = live.http.post("/generate", json=body).json()
        assert re.fullmatch(pattern, given["text"]) and given["meta_info"]["finish_reason"]["type"] == "stop"


def test_mixed_streams_are_each_what_they_are_alone(live: Live, plain64: LLM) -> None:
    def ask(i: int) -> str:
        own = {"response_format": RESPONSE_FORMAT} if i % 2 else {}
        answer = live.http.post(
            "/v1/completions", json={"prompt": f"Number {i}", "max_tokens": 40, "seed": i, **own}
        ).json()
        return answer["choices"][0]["text"]

    with ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(ask, range(6)))
    for i, text in enumerate(texts):
        structured = StructuredOutput(json_schema=SCHEMA) if i % 2 else None
        params = SamplingParams(max_tokens=40, seed=i, structured=structured)
        assert text == plain64.generate([f"Number {i}"], params, progress=False)[0].outputs[0].text


def test_max_tokens_gives_length(live: Live) -> None:
    answer = live.openai.chat.completions.create(
        model="demo", messages=MESSAGES, max_tokens=3, response_format=RESPONSE_FORMAT
    )
    assert answer.choices[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"response_format": {"type": "json_schema"}}, "needs json_schema"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "x"}}}},
            "type: x",
        ),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}}, "Unimplemented"),
        ({"regex": "(a"}, "unclosed group"),
        ({"regex": "a", "ebnf": 'root ::= "a"'}, "exclude each other"),
        ({"regex": "a", "response_format": {"type": "json_object"}}, "exclude each other"),
        ({"structured_outputs": {}}, "needs one of"),
        ({"structured_outputs": {"regex": "a", "json_object": True}}, "needs one of"),
        ({"structured_outputs": {"regex": "a", "structural_tag": "x"}}, "structural_tag"),
        ({"structured_outputs": {"choice": []}}, "choice"),
        ({"ebnf": "no rules"}, "GBNF"),
        ({"json_schema": "{"}, "EOF"),
        ({"regex": "a" * 70_000}, "at most 65536 characters"),
        ({"regex": "(a{1000}){1000}"}, "too complex"),
        ({"regex": 5}, "regex"),
        ({"regex": "\ud800"}, "surrogates"),
        ({"guided_json": {}}, "guided_json"),
    ],
)
def test_bad_grammars_get_400_and_say_why(live: Live, fields: dict[str, Any], expected: str) -> None:
    content = json.dumps({"prompt": "Say", "max_tokens": 4, **fields})
    answer = live.http.post("/v1/completions", content=content, headers={"content-type": "application/json"})
    assert answer.status_code == 400, answer.text
    assert expected in answer.json()["error"]["message"] and answer.json()["error"]["type"] == "invalid_request_error"


def test_a_grammar_that_compiles_slowly_holds_nobody_up(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(regex: str) -> int:
        return live.http.post("/v1/completions", json={"prompt": "Say", "max_tokens": 2, "regex": regex}).status_code

    assert ask("x") == 200
    release, usual = threading.Event(), compiler.grammar_text

    def slow(structured: StructuredOutput) -> str:
        assert structured.regex != "slow" or release.wait(9)
        return usual(structured)

    monkeypatch.setattr(compiler, "grammar_text", slow)
    with ThreadPoolExecutor(4) as pool:
        waiting = pool.submit(ask, "slow")
        assert ask("x") == 200, "a known grammar"
        assert live.openai.completions.create(model="demo", prompt="Say", max_tokens=1).choices
        assert not waiting.done()
        release.set()
        assert waiting.result() == 200


def test_waiting_for_a_grammar_ends_with_its_client_by_its_time_and_within_the_queue(
    served_llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, release, usual = [], threading.Event(), compiler.grammar_text

    def slow(structured: StructuredOutput) -> str:
        begun.append(structured.regex)
        assert structured.regex != "held" or release.wait(9)
        return usual(structured)

    monkeypatch.setattr(compiler, "grammar_text", slow)
    with live_server(served_llm, max_waiting=0, request_timeout_s=2) as live, ThreadPoolExecutor(9) as pool:

        def ask(regex: str, timeout_s: float = 9) -> httpx.Response:
            body = {"prompt": "Say", "max_tokens": 2, "regex": regex}
            return httpx.post(f"{live.url}/v1/completions", json=body, timeout=timeout_s)

        held = pool.submit(ask, "held")
        while not begun:
            time.sleep(0.01)
        with pytest.raises(httpx.ReadTimeout):
            ask("its client goes", 0.2)
        while live.service._num_compiling > 1:
            time.sleep(0.01)
        late = [pool.submit(ask, f"late {i}") for i in range(4)]  # one more than may wait beside it
        statuses = sorted(each.result().status_code for each in (held, *late))
        assert statuses == [429, 504, 504, 504, 504]
        release.set()
        assert ask("the last one").status_code == 200
        assert begun == ["held", "the last one"]
        live.wait_until_idle()


def test_a_grammar_that_fails_later_is_the_requests_fault(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    fill = GrammarState.fill_masks

    def failing(self: GrammarState, *arguments: Any) -> None:
        fill(self, *arguments)
        if self._num_said > 3:
            self.error = "too complex"

    monkeypatch.setattr(GrammarState, "fill_masks", failing)
    options: Any = {"model": "demo", "messages": MESSAGES, "max_tokens": 60, "response_format": RESPONSE_FORMAT}
    with pytest.raises(BadRequestError, match="the grammar failed: too complex"):
        live.openai.chat.completions.create(**options)
    assert live.openai.completions.create(model="demo", prompt="Once", max_tokens=9).choices[0].text


def test_abort_of_a_structured_stream_leaves_nothing(live: Live) -> None:
    stream = live.openai.completions.create(
        model="demo", prompt="Once", max_tokens=200, stream=True, extra_body={"regex": "[a-z ]{400}"}
    )
    next(iter(stream))
    stream.close()
    live.wait_until_idle()
    assert live.llm.engine.scheduler.num_constrained == 0
