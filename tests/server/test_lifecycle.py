"""What a server does beside answering: limits, disconnects, a dead engine, and its own end."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any

import httpx
import openai
import pytest

from live_server import Live, live_server
from treedraft import LLM
from treedraft.server.async_engine import AsyncEngine
from treedraft.server.metrics import Metrics

LONG: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": 400, "ignore_eos": True}


@pytest.fixture(scope="module")
def small(served_llm: LLM) -> Iterator[Live]:
    """Little room for waiting, small bodies, a key."""
    with live_server(served_llm, max_waiting=2, api_key="secret", max_body_bytes=1000) as server:
        yield server


KEY = {"authorization": "Bearer secret"}


def start_streams(live: Live, pool: ThreadPoolExecutor, count: int, headers: Any = None) -> list[Any]:
    """Start `count` streams that stay open until their connection is closed; returns their (client, response)."""

    def start() -> Any:
        client = httpx.Client(base_url=live.url, timeout=30)
        request = client.build_request("POST", "/v1/completions", json={**LONG, "stream": True}, headers=headers)
        return client, client.send(request, stream=True)

    return [f.result() for f in [pool.submit(start) for _ in range(count)]]


# ------------------------------------------------------------------ limits


def test_key_is_needed_but_for_probes(small: Live) -> None:
    for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "secret"}, {"authorization": "Bearer é"}):
        answer = small.http.get("/v1/models", headers={k: v.encode() for k, v in headers.items()})
        assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"
    assert small.http.get("/health").status_code == small.http.get("/ready").status_code == 200
    assert small.openai.models.list().data[0].id == "demo"


def test_large_body_gets_413_announced_or_not(small: Live) -> None:
    body = json.dumps({"prompt": "a" * 2000}).encode()
    headers = {**KEY, "content-type": "application/json"}
    assert small.http.post("/v1/completions", content=body, headers=headers).status_code == 413
    parts = iter([body[:600], body[600:]])  # chunked: no length is announced
    assert small.http.post("/v1/completions", content=parts, headers=headers).status_code == 413


def test_full_queue_gets_429_with_retry_after_and_empties(small: Live) -> None:
    with ThreadPoolExecutor(6) as pool:
        streams = start_streams(small, pool, 6, KEY)
        answer = small.http.post("/v1/completions", json={"prompt": "a"}, headers=KEY)
        assert answer.status_code == 429 and answer.headers["retry-after"] == "1"
        assert answer.json()["error"]["type"] == "rate_limit_error"
        with pytest.raises(openai.RateLimitError):
            small.openai.completions.create(model="demo", prompt="a")
        for client, response in streams:
            response.close()
            client.close()
    small.wait_until_idle()
    assert small.openai.completions.create(model="demo", prompt="a", max_tokens=1).choices


def test_more_choices_than_may_ever_wait_get_400(small: Live) -> None:
    answer = small.http.post("/v1/completions", json={"prompt": "a", "n": 7}, headers=KEY)
    assert answer.status_code == 400 and "6 choices at most" in answer.json()["error"]["message"]
    small.wait_until_idle()


def test_timeout_aborts(served_llm: LLM) -> None:
    with live_server(served_llm, request_timeout_s=0.2) as live:
        answer = live.http.post("/v1/completions", json=LONG)
        assert answer.status_code == 504 and answer.json()["error"]["type"] == "timeout_error"
        streamed = live.http.post("/v1/completions", json={**LONG, "stream": True})
        assert "timeout_error" in streamed.text and streamed.text.endswith("data: [DONE]\n\n")
        live.wait_until_idle()


# ------------------------------------------------------------------ aborts


def test_abort_ends_a_stream_with_its_reason(live: Live) -> None:
    chunks = live.openai.completions.create(model="demo", **_openai(LONG), stream=True)
    first = next(iter(chunks))
    assert live.http.post("/abort", json={"request_id": first.id}).json() == {"aborted": first.id}
    assert [c.choices[0].finish_reason for c in chunks][-1] == "abort"


def test_abort_by_the_clients_own_id_ends_one_that_waits(live: Live) -> None:
    with ThreadPoolExecutor(9) as pool:
        streams = start_streams(live, pool, 8)  # of which 4 run
        late = pool.submit(live.http.post, "/v1/completions", json=LONG, headers={"x-request-id": "mine"})
        while "mine" not in live.service.generations:
            time.sleep(0.01)
        assert live.http.post("/abort_request", json={"rid": "mine"}).status_code == 200
        answer = late.result().json()
        assert answer["id"] == "mine" and answer["choices"][0]["finish_reason"] == "abort"
        for client, response in streams:
            response.close()
            client.close()


def test_disconnect_of_fifty_streams_leaves_nothing(live: Live) -> None:
    check_storm(live, [0.05 + 0.02 * number for number in range(50)])


@pytest.mark.slow
def test_disconnect_of_five_hundred_streams_leaves_nothing(served_llm: LLM) -> None:
    rng = random.Random(0)
    with live_server(served_llm, max_waiting=2000) as live:
        check_storm(live, [rng.uniform(0.01, 30) for _ in range(500)])


def check_storm(live: Live, cut_after_s: list[float]) -> None:
    """Cut before, between and after chunks; half of them are no streams at all."""

    async def cut(number: int, after_s: float) -> None:
        # verify: reading certificates for each of them takes longer than the storm
        async with httpx.AsyncClient(base_url=live.url, timeout=30, verify=False) as client:
            body = {**LONG, "stream": number % 2 == 0, "n": 1 + number % 3}
            try:
                async with (
                    asyncio.timeout(after_s),
                    client.stream("POST", "/v1/completions", json=body) as r,
                ):
                    async for _ in r.aiter_lines():
                        pass
            except TimeoutError:
                pass

    async def storm() -> None:
        await asyncio.gather(*(cut(number, after_s) for number, after_s in enumerate(cut_after_s)))

    tasks = _num_tasks(live)
    asyncio.run(storm())
    live.wait_until_idle(20)
    end_s = time.monotonic() + 10
    while _num_tasks(live) > tasks + 1 and time.monotonic() < end_s:
        time.sleep(0.05)
    assert _num_tasks(live) <= tasks + 1
    assert live.openai.completions.create(model="demo", prompt="a", max_tokens=2).choices[0].finish_reason == "length"


def _num_tasks(live: Live) -> int:
    return len(asyncio.all_tasks(live.engine._loop))


def _openai(body: dict[str, Any]) -> dict[str, Any]:
    """Fields that the openai client does not know go into extra_body."""
    return {"prompt": body["prompt"], "max_tokens": body["max_tokens"], "extra_body": {"ignore_eos": True}}


# ------------------------------------------------------------------ the engine's death


def test_dead_engine_ends_requests_with_an_error_and_fails_health(served_llm: LLM) -> None:
    with live_server(served_llm) as live, ThreadPoolExecutor(8) as pool:
        streams = start_streams(live, pool, 6)
        waiting = pool.submit(live.http.post, "/v1/completions", json=LONG)
        while len(live.service.generations) < 7:
            time.sleep(0.01)

        def die(plan: Any) -> Any:
            raise RuntimeError("the device is gone")

        live.llm.engine.runner.launch = die  # type: ignore[method-assign]
        for client, response in streams:
            text = response.read().decode()
            assert "RuntimeError: the device is gone" in text and text.endswith("data: [DONE]\n\n")
            client.close()
        assert waiting.result().status_code == 500
        assert "the device is gone" in waiting.result().json()["error"]["message"]
        assert live.http.get("/health").status_code == live.http.get("/ready").status_code == 503
        late = live.http.post("/v1/completions", json=LONG)
        assert late.status_code == 503 and "the device is gone" in late.json()["error"]["message"]
        assert "engine_alive 0.0" in live.http.get("/metrics").text
        assert live.engine.num_unfinished == 0


def test_hanging_step_ends_requests_with_an_error_and_fails_health(served_llm: LLM, caplog: Any) -> None:
    """A step that blocks; once it goes on after all, nothing comes of it, and the thread ends."""
    release, launch = Event(), served_llm.engine.runner.launch

    def hang(plan: Any) -> Any:
        if len(plan.decodes) == 4:
            assert release.wait(60)
        return launch(plan)

    served_llm.engine.runner.launch = hang  # type: ignore[method-assign]
    try:
        with live_server(served_llm, step_timeout_s=2) as live, ThreadPoolExecutor(8) as pool:
            streams = start_streams(live, pool, 6)
            waiting = pool.submit(live.http.post, "/v1/completions", json=LONG)
            for client, response in streams:
                text = response.read().decode()
                assert "a step did not end within 2 s" in text and text.endswith("data: [DONE]\n\n")
                client.close()
            assert waiting.result().status_code in (500, 503)  # it may have come too late
            assert live.http.get("/health").status_code == live.http.get("/ready").status_code == 503
            late = live.http.post("/v1/completions", json=LONG)
            assert late.status_code == 503 and "a step did not end" in late.json()["error"]["message"]
            assert "engine_alive 0.0" in live.http.get("/metrics").text and "in hang" in caplog.text
            assert not live.engine.num_unfinished and live.engine._thread is not None
            release.set()
            live.engine._thread.join(10)
            assert not live.engine._thread.is_alive() and "a step did not end" in str(live.engine.error)
    finally:
        release.set()
        served_llm.engine.runner.launch = launch  # type: ignore[method-assign]


def test_many_steps_and_an_idle_engine_do_not_count_as_hanging(served_llm: LLM) -> None:
    """Without a thread, and on one event loop: what slows the steps slows the watchdog."""

    async def check(engine: AsyncEngine) -> None:
        engine._loop = asyncio.get_running_loop()
        watchdog = asyncio.create_task(engine._watch())
        for _ in range(12):  # three times the limit in all
            engine._take_up_work()
            await asyncio.sleep(0.05)
        assert engine.error is None
        engine._is_busy = False
        await asyncio.sleep(0.6)
        assert engine.error is None
        engine._take_up_work()
        await asyncio.wait_for(watchdog, 30)
        assert "a step did not end within 0.2 s" in str(engine.error)

    runner = served_llm.engine.runner
    try:
        asyncio.run(check(AsyncEngine(served_llm, Metrics(None), step_timeout_s=0.2)))
    finally:
        served_llm.engine.runner = runner


# ------------------------------------------------------------------ the server's end


def test_sigterm_under_load_finishes_what_runs_and_refuses_what_is_new() -> None:
    command = [sys.executable, "-m", "treedraft", "serve", "--port", "0", "--max-batch", "2", "--max-context", "512"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stderr is not None
        try:
            url = next(m[1] for line in process.stderr if (m := re.search(r"running on (http://\S+)", line)))
            body = {"prompt": "Once", "max_tokens": 150, "ignore_eos": True}

            def ask(number: int) -> httpx.Response:
                return httpx.post(f"{url}/v1/completions", json={**body, "stream": number % 2 == 0}, timeout=60)

            with ThreadPoolExecutor(6) as pool:
                answers = [pool.submit(ask, number) for number in range(6)]
                _wait_for_arrival(url, 6)
                process.send_signal(signal.SIGTERM)
                time.sleep(0.3)
                with pytest.raises(httpx.TransportError):
                    httpx.post(f"{url}/v1/completions", json=body, timeout=10)
                for number, answer in enumerate(answers):
                    assert answer.result().status_code == 200
                    text = answer.result().text
                    assert '"length"' in text and (number % 2 or text.endswith("data: [DONE]\n\n"))
            assert process.wait(20) == 0
        finally:
            process.kill()


HANGING_SERVER = """
import threading
from treedraft import LLM
from treedraft.server.async_engine import AsyncEngine
from treedraft.server.metrics import Metrics
from treedraft.server.serve import make_server, run
from treedraft.server.service import ServerSettings

llm = LLM("demo", device="cpu", max_batch=2, max_context=256)
launch = llm.engine.runner.launch
llm.engine.runner.launch = lambda plan: threading.Event().wait() if plan.decodes else launch(plan)
run(make_server(llm, ServerSettings(), port=0, step_timeout_s=2))
"""


def test_sigterm_while_a_step_hangs_ends_requests_and_the_process() -> None:
    command, environment = [sys.executable, "-c", HANGING_SERVER], {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stderr is not None
        try:
            url = next(m[1] for line in process.stderr if (m := re.search(r"running on (http://\S+)", line)))
            with ThreadPoolExecutor(1) as pool:
                answer = pool.submit(httpx.post, f"{url}/v1/completions", json={"prompt": "Once"}, timeout=30)
                _wait_for_arrival(url, 1)
                process.send_signal(signal.SIGTERM)
                assert answer.result().status_code == 500 and "a step did not end" in answer.result().text
            assert process.wait(20) == 0
        finally:
            process.kill()


def _wait_for_arrival(url: str, count: int) -> None:
    """Until so many requests run or wait: one that arrives after the signal is refused, rightly."""
    end_s = time.monotonic() + 30
    while True:
        text = httpx.get(f"{url}/metrics").text
        if (
            sum(float(x) for x in re.findall(r"^treedraft:num_requests_(?:running|waiting) (\S+)$", text, re.M))
            >= count
        ):
            return
        assert time.monotonic() < end_s
        time.sleep(0.02)


def test_draining_server_refuses_on_open_connections(served_llm: LLM) -> None:
    with live_server(served_llm) as live:
        assert live.http.get("/ready").status_code == 200
        live.engine.is_draining = True
        assert live.http.get("/ready").status_code == 503
        assert live.http.post("/v1/completions", json={"prompt": "a"}).status_code == 503
        assert live.http.get("/health").status_code == 200
