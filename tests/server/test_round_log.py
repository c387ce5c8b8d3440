"""Rounds of watched requests, chunk by chunk: each token once with its depth, whatever was dropped on the way."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from fake_llm import make_round
from live_server import Live
from treedraft.server.pages.log import RoundLog
from treedraft.types import SamplingParams


def fake_llm() -> Any:
    return SimpleNamespace(
        runner=SimpleNamespace(observer=None, target=SimpleNamespace(model=SimpleNamespace(logits=None)))
    )


def request(prompt_len: int, output: str) -> Any:
    ids = [ord(c) for c in output]
    return SimpleNamespace(request_id=7, prompt_token_ids=tuple(range(prompt_len)), output_token_ids=ids)


def rounds_of(output: str, prompt_len: int) -> list:
    """Rounds of three tokens that give all of `output` but its first token."""
    ids = [ord(c) for c in output]
    return [make_round(7, prompt_len + i, ids[i], ids[i + 1 : i + 4]) for i in range(0, len(ids) - 1, 3)]


def test_take_gives_each_round_with_the_chunk_that_has_its_tokens() -> None:
    log = RoundLog(fake_llm(), chr)
    log.watch(7)
    first, second = rounds_of("abcdefg", 4)
    log.append(first)  # launched before the prefill's token is collected
    assert log.take(request(4, "a"), 0) == {"rounds": [], "depths": [0]}
    log.append(second)
    got = log.take(request(4, "abcd"), 1)
    assert ([r["emitted_texts"] for r in got["rounds"]], got["depths"]) == ([["b", "c", "d"]], [1, 2, 0])
    got = log.take(request(4, "abcdef"), 4)  # ended inside the round
    assert ([r["emitted_texts"] for r in got["rounds"]], got["depths"]) == ([["e", "f"]], [1, 2])


def test_take_a_prefill_and_its_first_round_in_one_chunk() -> None:
    log = RoundLog(fake_llm(), chr)
    log.watch(7)
    log.append(rounds_of("abcd", 4)[0])
    assert log.take(request(4, "abcd"), 0)["depths"] == [0, 1, 2, 0]


def test_append_round_made_again_after_preemption_replaces_the_void_ones() -> None:
    log = RoundLog(fake_llm(), chr)
    log.watch(7)
    first, second, third = rounds_of("abcdefghij", 4)
    for each in (first, second, third):
        log.append(each)
    log.take(request(4, "abcd"), 0)
    # second and third were in flight when the request was preempted; it goes on from "d", recomputed
    log.append(make_round(7, second.kv_len, ord("d"), [ord("e"), ord("f"), ord("g")]))
    got = log.take(request(4, "abcdefg"), 4)
    assert (len(got["rounds"]), got["depths"]) == (1, [1, 2, 0])
    log.append(third)
    got = log.take(request(4, "abcdefghij"), 7)
    assert ([r["emitted_texts"] for r in got["rounds"]], got["depths"]) == ([["h", "i", "j"]], [1, 2, 0])


def test_observer_is_there_only_while_a_request_is_watched() -> None:
    llm = fake_llm()
    log = RoundLog(llm, chr)
    assert llm.runner.observer is None
    log.watch(7)
    log.watch(8)
    assert llm.runner.observer is not None
    log.forget(8)
    log.forget(9)  # never watched
    assert llm.runner.observer is not None
    log.forget(7)
    assert llm.runner.observer is None
    assert log.take(request(4, "a"), 0) is None


def test_append_other_requests_rounds_are_not_kept() -> None:
    log = RoundLog(fake_llm(), chr)
    log.watch(8)
    log.append(rounds_of("abcd", 4)[0])
    assert log.take(request(4, "abcd"), 0) is None


@pytest.mark.parametrize("max_pending", [0, 1, 2])
def test_log_of_the_demo_model_accounts_for_every_token(
    tree64, monkeypatch: pytest.MonkeyPatch, max_pending: int
) -> None:
    engine = tree64.engine
    monkeypatch.setattr(engine, "max_pending", max_pending)
    log = RoundLog(tree64, lambda token_id: tree64.decode([token_id]))
    params = [SamplingParams(max_tokens=n, temperature=0.8, seed=n) for n in (1, 17, 30)]
    requests = [tree64._requests("Once upon a time", one)[0] for one in params]
    watched = requests[:2]
    depths: dict[int, list[int]] = {r.request_id: [] for r in watched}
    for each in requests:
        engine.scheduler.add(each)
    for each in watched:
        log.watch(each.request_id)
    known = dict.fromkeys(depths, 0)
    while not engine.is_idle:
        for each in engine.step():
            if each.request_id not in depths:
                continue
            start = known[each.request_id]
            chunk, new = log.take(each, start), each.output_token_ids[start:]
            known[each.request_id] += len(new)
            assert len(chunk["depths"]) == len(new)
            in_rounds = [token_id for r in chunk["rounds"] for token_id in r["emitted"]]
            assert in_rounds == new[len(new) - len(in_rounds) :]
            assert len(new) - len(in_rounds) == (1 if start == 0 and new else 0)
            depths[each.request_id] += chunk["depths"]
    for each in watched:
        assert len(depths[each.request_id]) == len(each.output_token_ids) == each.params.max_tokens
        log.forget(each.request_id)
    assert max(depths[watched[1].request_id]) >= 2
    assert tree64.runner.observer is None


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_stream_whose_text_is_held_back_loses_no_round(live: Live, path: str) -> None:
    body: dict[str, Any] = {"regex": "(ab){14}c", "stop": ["ab" * 15], "max_tokens": 40}  # all of it may begin a stop
    body |= {"prompt": "Once"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "Once"}]}
    body |= {"stream": True, "stream_options": {"include_usage": True}, "treedraft": {"trace": True}}
    lines = live.http.post(path, json=body).text.splitlines()
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    traced = [chunk["treedraft"] for chunk in chunks if "treedraft" in chunk]
    assert sum(len(each["rounds"]) for each in traced) == chunks[-1]["metrics"]["rounds"]
    assert sum(len(each["depths"]) for each in traced) == chunks[-1]["usage"]["completion_tokens"]
