"""Real rounds under chunked prefill, preemption and the prefix cache: the text and the draft KV of a solo run."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kv_oracle import KvLog, dense_kv, generate_checked
from treedraft import LLM, SamplingParams
from treedraft.engine.request import Request
from witnesses.tiny_llm import GREEDY, PROMPTS, make_llm, tokens_of

TREE = (3, 2, 6)


def kv_memory(num_pages: int, page_size: int) -> int:
    return (num_pages + 2) * page_size * 4 * 10 * 8


def set_requests(llm: LLM, prompt: list[int], params: SamplingParams, **fields: Any) -> Request:
    [request] = llm._requests(prompt, params)
    for name, value in fields.items():
        setattr(request, name, value)
    llm.engine.scheduler.add(request)
    return request


def finish(llm: LLM) -> None:
    while not llm.engine.is_idle:
        llm.engine.step()
        llm.engine.scheduler.check_integrity()


def draft_problems(llm: LLM, log: KvLog, requests: list[Request]) -> list[str]:
    """Requests whose target or draft KV, after their last round, is not that of one dense forward over their text."""
    problems = []
    for request in requests:
        if request.request_id not in log.draft:
            continue  # no round was needed
        text = [*request.prompt_token_ids, *request.output_token_ids]
        for kind, given, want in zip(("target", "draft"), (log.target, log.draft), dense_kv(llm, text), strict=True):
            kept = given[request.request_id]
            length = min(kept.shape[1], want.shape[1])
            if not torch.allclose(kept[:, :length], want[:, :length], atol=1e-9):
                problems.append(f"{kind} KV of request {request.request_id}")
    return problems


SAMPLINGS = [
    SamplingParams(temperature=0, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=1.0, max_tokens=9, seed=5),
    SamplingParams(temperature=0.8, top_p=0.9, max_tokens=12, seed=6, repetition_penalty=1.3, frequency_penalty=0.4),
    SamplingParams(temperature=0.7, top_k=5, max_tokens=7, seed=7, min_tokens=6, logit_bias={3: 1.5}),
]


def random_prompt(rng: random.Random, texts: list[list[int]]) -> list[int]:
    if rng.random() < 0.2:
        return [rng.randrange(1, 48) for _ in range(rng.randrange(1, 18))]
    text = rng.choice(texts)
    return text[: rng.randrange(1, 18)] + [rng.randrange(1, 48) for _ in range(rng.randrange(3))]


@pytest.fixture(scope="module")
def solo(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    """One request at a time, without speculation, chunks, cache or want of pages."""
    return make_llm(tmp_path_factory.mktemp("solo"), None, prefix_cache=False, max_batch=1)


@pytest.mark.parametrize("max_pending", [0, 1])
@pytest.mark.parametrize(("page_size", "chunk", "num_pages"), [(1, 3, 38), (3, 4, 13), (4, 4096, 10)])
def test_random_trace_every_text_and_draft_row_equals_a_solo_run(
    page_size: int, chunk: int, num_pages: int, max_pending: int, solo: LLM, tmp_path: Path
) -> None:
    rng = random.Random(page_size * 7 + max_pending)
    llm = make_llm(
        tmp_path,
        TREE,
        page_size=page_size,
        chunked_prefill=chunk,
        kv_memory_bytes=kv_memory(num_pages, page_size),
        max_pending=max_pending,
        max_batch=3,
    )
    scheduler = llm.engine.scheduler
    assert scheduler.num_pages == num_pages
    log = llm.runner.observer = KvLog(llm.runner)
    requests: list[Request] = []
    texts = [[rng.randrange(1, 48) for _ in range(18)] for _ in range(2)]
    for _ in range(90):
        if len(scheduler.by_id) < 6 and len(requests) < 24 and rng.random() < 0.5:
            prompt = random_prompt(rng, texts)
            params = replace(rng.choice(SAMPLINGS), num_draft_tokens=rng.choice([None, None, 1, 3]))
            requests.append(set_requests(llm, prompt, params, priority=rng.choice([0, 0, 1])))
        if rng.random() < 0.04 and scheduler.by_id:
            scheduler.abort(rng.choice(list(scheduler.by_id)))
        for request in llm.engine.step():
            if request.is_finished:
                texts.append([*request.prompt_token_ids, *request.output_token_ids])
        scheduler.check_integrity()
    finish(llm)
    assert scheduler.num_preemptions > 0 and scheduler.num_cached_tokens > 0
    for request in requests:
        params = request.params if request.params.seed is not None else replace(request.params, seed=0)
        [alone] = tokens_of(solo.generate([list(request.prompt_token_ids)], params, progress=False))
        length = len(request.output_token_ids) if request.finish_reason == "abort" else len(alone)
        assert tuple(request.output_token_ids) == alone[:length], f"request {request.request_id}"
    assert draft_problems(llm, log, [r for r in requests if r.finish_reason != "abort"]) == []


@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 7])
def test_chunks_leave_the_pools_of_whole_prompts(chunk: int, tmp_path: Path) -> None:
    """Failure class 2: the last draft row of a chunk pairs with the next prompt token."""
    llm = make_llm(tmp_path, TREE, chunked_prefill=chunk)
    outputs, problems = generate_checked(llm, PROMPTS, GREEDY)
    assert problems == []
    whole = make_llm(tmp_path / "whole", TREE).generate(PROMPTS, GREEDY, progress=False)
    assert tokens_of(outputs) == tokens_of(whole)
    assert [o.metrics.accept_length for o in outputs] == [o.metrics.accept_length for o in whole]


def test_acceptance_after_hits_and_preemption_is_that_of_a_fresh_engine(tmp_path: Path) -> None:
    """Failure classes 11, 13 and 19: the same rounds, not only the same text."""
    prompts = [[*PROMPTS[1], i, i + 1] for i in range(1, 7)]
    fresh = make_llm(tmp_path / "fresh", TREE, prefix_cache=False, max_batch=1).generate(
        prompts, GREEDY, progress=False
    )
    tight = make_llm(tmp_path / "tight", TREE, chunked_prefill=3, kv_memory_bytes=kv_memory(10, 3))
    given = [*tight.generate(prompts, GREEDY, progress=False), *tight.generate(prompts, GREEDY, progress=False)]
    assert tokens_of(given) == tokens_of(fresh) * 2
    assert tight.engine.scheduler.num_preemptions > 0
    assert sum(o.metrics.num_cached_tokens for o in given) > 0


def test_red_zones_find_no_trespass_under_chunks_preemption_and_hits(tmp_path: Path) -> None:
    prompts = [[*PROMPTS[1], i, i + 1] for i in range(1, 7)]
    options = {"chunked_prefill": 3, "kv_memory_bytes": kv_memory(10, 3)}
    clean = make_llm(tmp_path / "clean", TREE, **options).generate(prompts, GREEDY, progress=False)
    llm = make_llm(tmp_path / "watched", TREE, debug="redzone", **options)
    assert tokens_of(llm.generate(prompts, GREEDY, progress=False)) == tokens_of(clean)
    assert llm.engine.scheduler.num_preemptions > 0


def test_chunks_through_the_kernels_of_decoding_give_the_same_text(tmp_path: Path) -> None:
    """As `--deterministic` prefills: each token a sequence of its own."""
    llm = make_llm(tmp_path, TREE, chunked_prefill=4)
    expected = tokens_of(llm.generate(PROMPTS, GREEDY, progress=False))
    llm.engine.scheduler.kv.drop_cache()
    llm.runner.target = replace(llm.runner.target, is_deterministic=True)
    for _ in range(2):  # the second time from the cache
        outputs, problems = generate_checked(llm, PROMPTS, GREEDY)
        assert tokens_of(outputs) == expected and problems == []
    assert [o.metrics.num_cached_tokens for o in outputs] == [3, 6, 0]
