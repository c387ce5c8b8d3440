"""`bench serving` against a fake endpoint: what it sends and when, what it measures, how it fails."""

from __future__ import annotations

import asyncio
import json
import math
import random
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from typer.testing import CliRunner, Result

from explorer_server import serving
from treedraft.bench.serving import (
    Lengths,
    RequestRecord,
    ServingResult,
    ServingSettings,
    parse_lengths,
    percentile,
    plan_requests,
    prompt_of_words,
    run_serving,
)
from treedraft.cli.app import app
from treedraft.cli.prompts import PromptLine
from treedraft.errors import ConfigError, RequestError

FIRST_S, GAP_S, TOKENS_PER_CHUNK = 0.1, 0.03, 3
PROMPTS = [PromptLine(text, "") for text in ("one two three", "four five", "six")]


class FakeEndpoint:
    """Streams the first token after FIRST_S, then TOKENS_PER_CHUNK tokens every GAP_S."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.running = self.most_running = 0
        self.url = ""

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/v1/models", lambda request: JSONResponse({"data": [{"id": "fake"}]})),
                Route("/v1/completions", self.complete, methods=["POST"]),
                Route("/v1/chat/completions", self.complete, methods=["POST"]),
            ]
        )

    async def complete(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        if body.get("prompt") == "refuse":
            return JSONResponse({"error": {"message": "queue [full]"}}, status_code=429)
        return StreamingResponse(self.stream(body), media_type="text/event-stream")

    async def stream(self, body: dict[str, Any]) -> AsyncIterator[str]:
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        is_chat, prompt = "messages" in body, body.get("prompt")
        try:
            if is_chat:
                yield event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
            await asyncio.sleep(FIRST_S)
            left, size = body["max_tokens"], 1
            while left > 0:
                text = "x" * min(size, left)
                left -= size
                yield event({"choices": [{"index": 0, "delta": {"content": text}} if is_chat else {"text": text}]})
                if prompt in ("cut", "broken", "error"):
                    break
                if left > 0:
                    await asyncio.sleep(GAP_S)
                size = TOKENS_PER_CHUNK
            if prompt == "broken":
                yield "data: {\n\n"
            if prompt == "error":
                yield event({"error": {"message": "the engine ended"}})
            if prompt in ("cut", "broken", "error"):
                return
            usage = {"prompt_tokens": 5, "completion_tokens": body["max_tokens"]}
            metrics = {"rounds": 4, "accept_length": 3.0, "accepted_per_depth": [0.75, 0.5]}
            yield event({"choices": [], "usage": usage} | ({} if is_chat else {"metrics": metrics}))
            yield "data: [DONE]\n\n"
        finally:
            self.running -= 1


def event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data)}\n\n"


@pytest.fixture
def endpoint() -> Iterator[FakeEndpoint]:
    fake = FakeEndpoint()
    with serving(fake.app()) as url:
        fake.url = url
        yield fake


def call(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["bench", "serving", *arguments], catch_exceptions=False)


# ---------------------------------------------------------------- the plan


@pytest.mark.parametrize(
    ("text", "low", "high", "mean"), [("7", 7, 7, 7), ("10-20", 10, 20, 15), ("exp:40", 1, 10**6, 40.5)]
)
def test_parse_lengths_draws_within_bounds_around_the_mean(text: str, low: int, high: int, mean: float) -> None:
    lengths, rng = parse_lengths(text), random.Random(0)
    drawn = [lengths.draw(rng) for _ in range(20_000)]
    assert low <= min(drawn) and max(drawn) <= high
    assert sum(drawn) / len(drawn) == pytest.approx(mean, rel=0.03)  # standard error 0.7% for the exponential


@pytest.mark.parametrize("text", ["", "0", "-3", "20-10", "exp:", "exp:0", "many", "1.5", "0-4"])
def test_parse_lengths_refuses(text: str) -> None:
    with pytest.raises(ConfigError, match="lengths are given as"):
        parse_lengths(text)


def test_plan_requests_arrivals_are_poisson_and_depend_on_the_seed_alone() -> None:
    settings = ServingSettings("http://x", rate=50.0, num_prompts=5000)
    planned = plan_requests(PROMPTS, settings)
    gaps = [b.arrival_s - a.arrival_s for a, b in zip(planned, planned[1:])]
    mean = sum(gaps) / len(gaps)
    variance = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)
    assert planned[0].arrival_s == 0 and min(gaps) >= 0
    assert mean == pytest.approx(1 / 50, rel=0.05)
    assert math.sqrt(variance) == pytest.approx(mean, rel=0.1)  # exponential: deviation = mean
    assert plan_requests(PROMPTS, settings) == planned
    other_lengths = ServingSettings("http://x", rate=50.0, num_prompts=5000, output_tokens=Lengths("uniform", 1, 9))
    assert [r.arrival_s for r in plan_requests(PROMPTS, other_lengths)] == [r.arrival_s for r in planned]
    assert {r.max_tokens for r in plan_requests(PROMPTS, other_lengths)} == set(range(1, 10))


def test_plan_requests_without_a_rate_arrive_at_once_and_prompts_repeat() -> None:
    planned = plan_requests(PROMPTS, ServingSettings("http://x", num_prompts=4, seed=10))
    assert [(r.arrival_s, r.prompt, r.seed) for r in planned] == [
        *[(0.0, "one two three", 10), (0.0, "four five", 11), (0.0, "six", 12), (0.0, "one two three", 13)]
    ]


def test_prompt_of_words_cuts_and_lengthens() -> None:
    texts = ["one two three", "four five", "", "six"]
    assert prompt_of_words(texts, 0, 2) == "one two"
    assert prompt_of_words(texts, 1, 7) == "four five six one two three four"
    with pytest.raises(RequestError, match="no words"):
        prompt_of_words(["", " "], 0, 1)


def test_plan_requests_token_ids_have_no_words() -> None:
    with pytest.raises(RequestError, match="token ids"):
        plan_requests([PromptLine([1, 2], "")], ServingSettings("http://x", prompt_words=Lengths("fixed", 3, 3)))
    assert plan_requests([PromptLine([1, 2], "")], ServingSettings("http://x", num_prompts=1))[0].prompt == [1, 2]


@pytest.mark.parametrize(
    ("values", "percent", "expected"),
    [([3.0], 99, 3.0), ([1.0, 2.0, 3.0], 50, 2.0), ([4.0, 1.0], 50, 2.5), (list(map(float, range(101))), 90, 90.0)],
)
def test_percentile_interpolates(values: list[float], percent: float, expected: float) -> None:
    assert percentile(values, percent) == expected
    assert math.isnan(percentile([], 50))


# ---------------------------------------------------------------- against the endpoint


def test_run_serving_measures_what_the_endpoint_does(endpoint: FakeEndpoint) -> None:
    settings = ServingSettings(endpoint.url, num_prompts=6, output_tokens=Lengths("fixed", 13, 13))
    result = run_serving(PROMPTS, settings)
    assert (result.model, len(result.done)) == ("fake", 6)
    assert endpoint.most_running == 6  # open loop: none waits for another
    for record in result.records:
        assert len(record.gaps_s) == 4  # 1 + 4 * 3 tokens
        assert FIRST_S <= record.ttft_s < FIRST_S + 1  # a busy machine may add much
        assert sum(record.gaps_s) >= 4 * GAP_S * 0.9
        assert record.tokens_per_chunk == 3.0
        assert record.tpot_s == pytest.approx((record.e2e_s - record.ttft_s) / 12)
        assert (record.num_prompt_tokens, record.num_output_tokens, record.accept_length) == (5, 13, 3.0)
    summary = result.summary()
    assert summary["output_tokens_per_s"] == pytest.approx(78 / result.elapsed_s)
    assert summary["accept_length"] == {"mean": 3.0, "p50": 3.0, "p90": 3.0, "p99": 3.0}
    assert summary["accepted_per_depth"] == [0.75, 0.5]
    assert summary["prompt_tokens"] == 30


def test_run_serving_concurrency_cap_holds_and_waiting_is_not_the_servers_time(endpoint: FakeEndpoint) -> None:
    settings = ServingSettings(endpoint.url, num_prompts=4, concurrency=2, output_tokens=Lengths("fixed", 1, 1))
    result = run_serving(PROMPTS, settings)
    assert endpoint.most_running == 2
    waits = sorted(r.wait_s for r in result.records)
    assert waits[1] < waits[2] and waits[2] >= FIRST_S
    assert all(r.wait_s + r.e2e_s <= result.elapsed_s for r in result.records)  # what is waited is not counted twice
    assert all(r.ttft_s <= r.e2e_s for r in result.records)


def test_run_serving_sends_at_the_planned_times_though_nothing_is_done(endpoint: FakeEndpoint) -> None:
    settings = ServingSettings(endpoint.url, rate=100.0, num_prompts=8, output_tokens=Lengths("fixed", 1, 1))
    result = run_serving(PROMPTS, settings)
    assert max(r.arrival_s for r in result.records) > 0.02
    assert all(-0.005 < r.wait_s < 1 for r in result.records)  # not early but for the clock's steps; late if busy
    assert endpoint.most_running >= 4


def test_run_serving_body_has_the_settings_and_the_key_is_not_in_the_result(endpoint: FakeEndpoint) -> None:
    settings = ServingSettings(
        endpoint.url + "/v1/",
        model="mine",
        endpoint="chat",
        num_prompts=1,
        seed=7,
        temperature=0.5,
        ignore_eos=False,
        speculation=False,
        api_key="secret",
        output_tokens=Lengths("fixed", 2, 2),
    )
    result = run_serving(PROMPTS, settings)
    assert endpoint.bodies == [
        {
            "model": "mine",
            "messages": [{"role": "user", "content": "one two three"}],
            "max_tokens": 2,
            "temperature": 0.5,
            "seed": 7,
            "stream": True,
            "stream_options": {"include_usage": True},
            "speculative": {"enabled": False},
        }
    ]
    assert endpoint.headers[0]["authorization"] == "Bearer secret"
    assert "secret" not in json.dumps(result.as_json())
    assert result.records[0].ttft_s >= FIRST_S  # the role's chunk is no token
    assert result.records[0].accept_length is None


def test_run_serving_failures_are_counted_and_the_others_go_on(endpoint: FakeEndpoint) -> None:
    prompts = [PromptLine(text, "") for text in ("fine", "refuse", "cut", "broken", "error")]
    settings = ServingSettings(endpoint.url, num_prompts=5, output_tokens=Lengths("fixed", 4, 4))
    result = run_serving(prompts, settings)
    errors = [record.error for record in result.records]
    assert errors[0] is None
    assert errors[1:3] == ["HTTP 429: queue [full]", "the stream ended before [DONE]"]
    assert errors[3].startswith("an answer that cannot be read: JSONDecodeError")
    assert errors[4] == "in the stream: the engine ended"
    assert result.summary()["num_failed"] == 4
    assert result.summary()["output_tokens"] == 4  # those of answered requests alone


def test_run_serving_silent_server_ends_by_the_timeout(endpoint: FakeEndpoint) -> None:
    settings = ServingSettings(endpoint.url, num_prompts=2, timeout_s=0.05)
    result = run_serving(PROMPTS, settings)
    assert [r.error for r in result.records] == ["no complete answer within 0.05 s"] * 2


def test_run_serving_no_server_says_where_it_looked() -> None:
    with pytest.raises(ConfigError, match=r"cannot ask http://127\.0\.0\.1:9/v1/models"):
        run_serving(PROMPTS, ServingSettings("http://127.0.0.1:9"))


@pytest.mark.parametrize(
    ("field", "value"),
    [("num_prompts", 0), ("rate", 0.0), ("rate", math.nan), ("timeout_s", -1.0), ("concurrency", 0), ("endpoint", "x")],
)
def test_settings_check_refuses(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=field):
        run_serving(PROMPTS, ServingSettings(**{"base_url": "http://x", field: value}))


def test_summary_of_nothing_answered_has_no_figures() -> None:
    record = RequestRecord(0.0, 0.0, None, 1.0, (), None, 0, None, (), "gone")
    result = ServingResult(ServingSettings("http://x"), "m", 1.0, (record,))
    assert result.summary()["num_failed"] == 1
    assert math.isnan(result.summary()["ttft_ms"]["p50"])
    result.render()


# ---------------------------------------------------------------- the command


def test_command_prints_a_table_and_writes_json(endpoint: FakeEndpoint, tmp_path) -> None:
    file = tmp_path / "load.json"
    result = call(
        *("--base-url", endpoint.url, "--num-prompts", "4", "--rate", "200", "--prompt-words", "2-5"),
        *("--output-tokens", "7", "--json", str(file)),
    )
    assert result.exit_code == 0, result.output
    for expected in ("4 answered, 0 failed", "200 requests/s, Poisson", "time to first token", "p99", "75%, 50%"):
        assert expected in result.output
    assert all(2 <= len(body["prompt"].split()) <= 5 for body in endpoint.bodies)
    data = json.loads(file.read_text())
    assert data["benchmark"] == "serving" and data["summary"]["output_tokens"] == 28
    assert {"machine", "commit", "versions", "settings", "records"} <= set(data)


def test_command_exits_with_1_when_nothing_was_answered(endpoint: FakeEndpoint, tmp_path) -> None:
    prompts = tmp_path / "p.txt"
    prompts.write_text("refuse\n")
    result = call("--base-url", endpoint.url, "--num-prompts", "2", "--prompts", str(prompts))
    assert result.exit_code == 1
    assert "failed, 2 times: HTTP 429: queue [full]" in result.output


def test_command_bad_setting_exits_with_2() -> None:
    result = call("--output-tokens", "none")
    assert result.exit_code == 2
    assert "lengths are given as" in result.stderr
