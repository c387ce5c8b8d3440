"""Malformed and hostile bodies get 400 in OpenAI's form, never 500, and leave the engine right."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from live_server import Live

COMPLETION: dict[str, Any] = {"prompt": "Once", "max_tokens": 1}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
GENERATE: dict[str, Any] = {"text": "Once", "sampling_params": {"max_new_tokens": 1}}


def refusal(live: Live, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = live.http.post(path, json=body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["type"] == "invalid_request_error"
    return error


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", "5"),
        ("max_tokens", True),
        ("max_tokens", 10**30),
        ("temperature", -0.1),
        ("temperature", 1e-9),
        ("top_p", 0),
        ("top_p", 1.5),
        ("top_k", -2),
        ("min_p", 2),
        ("n", 0),
        ("n", 10**6),
        ("seed", 2**64),
        ("seed", "one"),
        ("presence_penalty", 3),
        ("repetition_penalty", 0),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {"4096": 1}),
        ("logit_bias", {"5": 101}),
        ("stop", ["a"] * 65),
        ("stop", ""),
        ("stop", 5),
        ("stop_token_ids", [-1]),
        ("min_tokens", 2),
        ("stream", "yes"),
        ("stream_options", {"include_usage": True}),  # without stream
        ("speculative", {"num_draft_tokens": 0}),
        ("skip_special_tokens", False),
        ("max_new_tokens", 5),
    ],
)
def test_value_out_of_range_is_refused_and_named(live: Live, field: str, value: Any) -> None:
    for path, body in (("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)):
        assert field.split("_")[0] in refusal(live, path, {**body, field: value})["message"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("guided_json", {}),
        ("reasoning_effort", "low"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(live: Live, field: str, value: Any) -> None:
    message = refusal(live, "/v1/chat/completions", {**CHAT, field: value})["message"]
    assert message.startswith(f"{field} is not supported by this server; ")


def test_what_asks_for_nothing_is_taken(live: Live) -> None:
    harmless = {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "user": "me", "top_p": None}
    answer = live.http.post("/v1/chat/completions", json={**CHAT, **harmless, "metadata": {"a": "b"}})
    assert answer.status_code == 200


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"prompt": ""},
        {"prompt": []},
        {"prompt": [[]]},
        {"prompt": ["a", 1]},
        {"prompt": [1, "a"]},
        {"prompt": [4096]},
        {"prompt": [-1]},
        {"prompt": [1] * 512},
        {"prompt": "word " * 5000},
        {"prompt": "a", "logprobs": 21},
        {"prompt": ["a"] * 100, "n": 2},
        {"prompt": "\ud800"},
        {"prompt": "a", "\ud800": 1},
        {"prompt": "a", "stop": "\udfff"},
    ],
)
def test_bad_completion_is_refused(live: Live, body: dict[str, Any]) -> None:
    answer = live.http.post("/v1/completions", content=json.dumps(body), headers={"content-type": "application/json"})
    assert answer.status_code == 400 and answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "messages",
    [
        [],
        ["hi"],
        [{"role": "user"}],
        [{"content": "hi"}],
        [{"role": "wizard", "content": "hi"}],
        [{"role": "tool", "content": "hi"}],
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        [{"role": "assistant", "content": "", "tool_calls": [{}]}],
        [{"role": "user", "content": "x"}] * 5000,
    ],
)
def test_bad_messages_are_refused(live: Live, messages: Any) -> None:
    refusal(live, "/v1/chat/completions", {**CHAT, "messages": messages})


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"text"',
        b"\xff\xfe",
        b'{"prompt": "\xff"}',
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "temperature": Infinity}',
        b'{"prompt": "a", "temperature": 1e999}',
        b'{"prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}",
        b'{"prompt": "a", "temperature": ' + b"9" * 400 + b"}",
        b"[" * 100_000,
        b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
    ],
)
def test_content_that_is_no_body_is_refused(live: Live, content: bytes) -> None:
    for path in ("/v1/completions", "/v1/chat/completions", "/generate", "/tokenize", "/detokenize", "/abort"):
        answer = live.http.post(path, content=content, headers={"content-type": "application/json"})
        assert answer.status_code == 400 and "error" in answer.json()


def test_unknown_paths_methods_and_models_have_openai_errors(live: Live) -> None:
    assert live.http.get("/v1/nothing").status_code == 404
    assert live.http.get("/v1/completions").status_code == 405
    answer = live.http.post("/v1/completions", json={**COMPLETION, "model": "gpt-9"})
    assert answer.status_code == 404 and answer.json()["error"]["code"] == "model_not_found"
    assert live.http.post("/abort", json={"request_id": "none"}).status_code == 404


# ------------------------------------------------------------------ random bodies

SCALARS: list[Any] = [None, True, False, 0, 1, -1, 2, 7, 0.5, 1e-300, 1e300, -1e-9, 2**31, 2**63, 2**64, 10**400]
SCALARS += ["", "a", "\ud800", "\0", "é🌍", "x" * 3000, "<|endoftext|>", "auto", "none"]
FIELDS: list[str] = (
    "prompt messages text input_ids sampling_params model max_tokens max_completion_tokens temperature "
    "top_p top_k min_p n stop stop_token_ids seed presence_penalty frequency_penalty repetition_penalty "
    "logit_bias ignore_eos min_tokens stream stream_options speculative logprobs top_logprobs echo tools "
    "tool_choice parallel_tool_calls chat_template_kwargs response_format user skip_special_tokens tokens "
    "prompt_logprobs logprob_start_len return_logprob top_logprobs_num request_id rid "
    "structured_outputs json_schema regex ebnf"
).split()
EXTREMES: dict[str, list[Any]] = {  # what is just about taken
    "temperature": [0, 0.001, 1, 100],
    "top_p": [1e-300, 1e-9, 0.5, 1],
    "top_k": [-1, 0, 1, 4096, 2**31 - 1],
    "min_p": [0, 1e-300, 0.5, 1],
    "n": [1, 3],
    "stop": ["a", ["b", "\0"], []],
    "stop_token_ids": [[0], [4095] * 100, []],
    "seed": [0, -1, -(2**63), 2**64 - 1],
    "presence_penalty": [-2, 2],
    "frequency_penalty": [-2, 2],
    "repetition_penalty": [0.01, 100],
    "logit_bias": [{"5": 100}, {"0": -100, "4095": 1e-300}, {str(t): -100 for t in range(1000)}],
    "ignore_eos": [True, False],
    "min_tokens": [0, 1],
    "max_tokens": [1, 5],
    "stream": [True, False],
    "logprobs": [0, 20, True],
    "echo": [True, False],
    "prompt_logprobs": [0, 20],
    "logprob_start_len": [-1, 0, 2**31 - 1],
    "tools": [[], [{"type": "function", "function": {"name": "now"}}]],
    "tool_choice": ["none", "auto"],
    "chat_template_kwargs": [{}, {"enable_thinking": False}],
    "speculative": [{"enabled": False}, {"num_draft_tokens": 1}, {"num_draft_tokens": 2**31 - 1}, {}],
}


def random_value(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.random()
    if depth > 3 or kind < 0.6:
        return rng.choice(SCALARS)
    if kind < 0.8:
        return [random_value(rng, depth + 1) for _ in range(rng.randrange(4))]
    keys = [*FIELDS, "role", "content", "type", "5", "4096", "-1"]
    return {rng.choice(keys): random_value(rng, depth + 1) for _ in range(rng.randrange(4))}


def random_body(rng: random.Random, base: dict[str, Any]) -> dict[str, Any]:
    """A valid body with one to four fields at an extreme; of half the bodies one or two fields are anything."""
    body = {k: dict(v) if isinstance(v, dict) else v for k, v in base.items()}
    settings = body.get("sampling_params", body)
    for name in rng.sample(list(EXTREMES), rng.randrange(1, 5)):
        settings[name] = rng.choice(EXTREMES[name])
    for _ in range(rng.choice((0, 0, 1, 2))):
        rng.choice([body, settings])[rng.choice(FIELDS)] = random_value(rng)
    return body


def send_random_bodies(live: Live, num_bodies: int, seed: int) -> dict[int, int]:
    rng = random.Random(seed)
    counts: dict[int, int] = {}
    for number in range(num_bodies):
        path, base = rng.choice(
            [("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT), ("/generate", GENERATE)]
            + [("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]}), ("/abort", {"request_id": "a"})]
        )
        body = random_body(rng, base)
        content = json.dumps(body)
        answer = live.http.post(path, content=content, headers={"content-type": "application/json"})
        assert answer.status_code in (200, 400, 404), (number, path, content[:500], answer.text[:500])
        assert '"error"' not in answer.text or answer.status_code != 200, (number, path, content[:500], answer.text)
        counts[answer.status_code] = counts.get(answer.status_code, 0) + 1
    return counts


def check_random_bodies(live: Live, num_bodies: int, seed: int) -> None:
    def greedy() -> str:
        return live.openai.completions.create(model="demo", prompt="Once", temperature=0).choices[0].text

    before = greedy()
    counts = send_random_bodies(live, num_bodies, seed)
    assert counts[200] > num_bodies // 20 and counts[400] > num_bodies // 4, counts
    assert greedy() == before
    assert live.http.get("/health").status_code == 200


def test_random_bodies_never_give_500_and_leave_the_engine_right(live: Live) -> None:
    check_random_bodies(live, 300, seed=1)


@pytest.mark.slow
def test_ten_thousand_random_bodies(live: Live) -> None:
    check_random_bodies(live, 10_000, seed=2)
