"""Log-probabilities of a prompt: one dense float64 forward is the oracle, whatever became of the prompt's rows."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import treedraft.runner.operators as operators
from treedraft import LLM, SamplingParams
from treedraft.attention.dense import DenseAttend
from treedraft.engine.request import Request
from treedraft.types import PromptLogprob
from witnesses.tiny_llm import GREEDY, PROMPTS, make_llm, tokens_of

TREE = (3, 2, 6)
TOLERANCE = 1e-9  # float64; other shapes of the same products differ in the last bits
SCORED = replace(GREEDY, prompt_logprobs=3)


@torch.inference_mode()
def dense(llm: LLM, prompt: Any) -> torch.Tensor:
    """[n - 1, V] float64: log-probabilities of what follows each token but the last."""
    model, ids = llm.runner.target.model, torch.tensor(list(prompt))
    return model.logits(model(ids, torch.arange(len(ids)), DenseAttend()).hidden[:-1]).log_softmax(-1)


def check(llm: LLM, prompt: Any, given: Any, num_top: int) -> None:
    """Compare with the oracle: value, rank and the best tokens of every prompt token."""
    assert given is not None and len(given) == len(prompt) and given[0] is None
    for row, token_id, one in zip(dense(llm, prompt), list(prompt)[1:], given[1:], strict=True):
        assert isinstance(one, PromptLogprob)
        assert one.logprob == pytest.approx(float(row[token_id]), abs=TOLERANCE)
        assert one.rank == 1 + int((row > row[token_id] + TOLERANCE).sum())
        best = row.topk(num_top)
        assert list(one.top_logprobs) == best.indices.tolist()
        assert list(one.top_logprobs.values()) == pytest.approx(best.values.tolist(), abs=TOLERANCE)


@pytest.mark.parametrize("max_pending", [0, 1])
@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 4096])
def test_prompt_logprobs_are_those_of_a_dense_forward_in_any_chunks(
    chunk: int, max_pending: int, tmp_path: Path
) -> None:
    llm = make_llm(tmp_path, TREE, chunked_prefill=chunk, max_pending=max_pending)
    plain = llm.generate(PROMPTS, GREEDY, progress=False)
    llm.engine.scheduler.kv.drop_cache()
    asked = [5, None, 0]
    outputs = llm.generate(PROMPTS, [replace(GREEDY, prompt_logprobs=k) for k in asked], progress=False)
    assert tokens_of(outputs) == tokens_of(plain)
    for prompt, output, num_top in zip(PROMPTS, outputs, asked, strict=True):
        if num_top is None:
            assert output.prompt_logprobs is None
        else:
            check(llm, prompt, output.prompt_logprobs, num_top)


@pytest.mark.parametrize("options", [{"capture": "auto"}, {"cuda_graph": "eager"}], ids=str)
def test_prompt_logprobs_where_rounds_are_recorded(options: dict[str, Any], tmp_path: Path) -> None:
    llm = make_llm(tmp_path, TREE, chunked_prefill=4, **options)
    for prompt, output in zip(PROMPTS, llm.generate(PROMPTS, SCORED, progress=False), strict=True):
        check(llm, prompt, output.prompt_logprobs, 3)


def test_prompt_logprobs_through_the_kernels_of_decoding(tmp_path: Path) -> None:
    llm = make_llm(tmp_path, TREE, chunked_prefill=4)
    llm.runner.target = replace(llm.runner.target, is_deterministic=True)
    for prompt, output in zip(PROMPTS, llm.generate(PROMPTS, SCORED, progress=False), strict=True):
        check(llm, prompt, output.prompt_logprobs, 3)


def test_cached_pages_are_not_read_and_are_written(tmp_path: Path) -> None:
    llm = make_llm(tmp_path, TREE)
    prompt = PROMPTS[1]
    for params, num_cached in ((SCORED, 0), (SCORED, 0), (GREEDY, 6)):
        [output] = llm.generate([prompt], params, progress=False)
        assert output.metrics.num_cached_tokens == num_cached
        if params.prompt_logprobs is not None:
            check(llm, prompt, output.prompt_logprobs, 3)


def test_temperature_penalties_and_bias_do_not_change_them(tmp_path: Path) -> None:
    llm = make_llm(tmp_path, TREE)
    params = SamplingParams(
        temperature=0.5, top_k=2, seed=1, repetition_penalty=1.7, logit_bias={3: 9.0}, max_tokens=4, prompt_logprobs=2
    )
    [output] = llm.generate([PROMPTS[1]], params, progress=False)
    check(llm, PROMPTS[1], output.prompt_logprobs, 2)


def test_a_prompt_of_one_token_has_none_and_a_short_vocabulary_no_more_than_it_has(tmp_path: Path) -> None:
    llm = make_llm(tmp_path, TREE)
    [one, two] = llm.generate([[7], [7, 8]], replace(SCORED, prompt_logprobs=20), progress=False)
    assert one.prompt_logprobs == (None,)
    assert two.prompt_logprobs is not None and two.prompt_logprobs[1] is not None
    assert len(two.prompt_logprobs[1].top_logprobs) == min(20, llm.vocab_size)


@pytest.mark.parametrize("max_pending", [0, 1])
def test_no_tokens_at_all_still_score_the_prompt_and_fill_the_cache(max_pending: int, tmp_path: Path) -> None:
    llm = make_llm(tmp_path, TREE, chunked_prefill=3, max_pending=max_pending)
    nothing = replace(SCORED, max_tokens=0, logprobs=2)
    outputs = llm.generate(PROMPTS, [nothing, GREEDY, nothing], progress=False)
    for index in (0, 2):
        check(llm, PROMPTS[index], outputs[index].prompt_logprobs, 3)
        choice = outputs[index].outputs[0]
        assert (choice.token_ids, choice.text, choice.finish_reason) == ((), "", "length")
        assert choice.logprobs == ()
    llm.engine.scheduler.check_integrity()
    longer = [*PROMPTS[0], 1]
    [again] = llm.generate([longer], GREEDY, progress=False)
    assert again.metrics.num_cached_tokens == 3
    fresh = make_llm(tmp_path / "fresh", TREE).generate([longer], GREEDY, progress=False)
    assert tokens_of([again]) == tokens_of(fresh)
    assert again.metrics.accept_length == fresh[0].metrics.accept_length  # the head's KV is right too


@pytest.mark.parametrize("max_pending", [0, 1])
def test_preemption_loses_and_doubles_none(max_pending: int, tmp_path: Path) -> None:
    """Requests of changing urgency in a pool for a third of them, so that prompts are given up half-way."""
    rng = random.Random(3 + max_pending)
    llm = make_llm(
        tmp_path, TREE, chunked_prefill=2, max_batch=3, max_pending=max_pending, kv_memory_bytes=(9 + 2) * 3 * 4 * 80
    )
    scheduler, requests = llm.engine.scheduler, []
    texts = [[rng.randrange(1, 48) for _ in range(18)] for _ in range(2)]
    in_prompt = 0

    def preempt(request: Request, undisturbed: Any = scheduler._preempt) -> None:
        nonlocal in_prompt
        in_prompt += (
            request.params.prompt_logprobs is not None and request.kv_len < request.prefill_len and request.kv_len > 0
        )
        undisturbed(request)

    scheduler._preempt = preempt  # type: ignore[method-assign]
    while len(requests) < 80 or not llm.engine.is_idle:
        if len(requests) < 80 and len(scheduler.by_id) < 6 and rng.random() < 0.5:
            params = replace(
                GREEDY, max_tokens=rng.randrange(0, 8), prompt_logprobs=2, num_draft_tokens=rng.choice([None, 1])
            )
            if rng.random() < 0.3:
                params = replace(params, max_tokens=4, prompt_logprobs=None)
            [request] = llm._requests(rng.choice(texts)[: rng.choice([1, 2, 9, 12, 15, 18])], params)
            request.priority = rng.choice([0, 1, 2])
            scheduler.add(request)
            requests.append(request)
        llm.engine.step()
        scheduler.check_integrity()
    assert in_prompt > 3 and scheduler.num_cached_tokens > 0, (in_prompt, scheduler.num_cached_tokens)
    for request in requests:
        if request.params.prompt_logprobs is None:
            assert request.prompt_logprobs == []
        else:
            check(llm, request.prompt_token_ids, request.whole_prompt_logprobs(), 2)
        assert len(request.output_token_ids) == request.params.max_tokens


def test_logits_of_a_long_prompt_are_never_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make_llm(tmp_path, TREE)
    model, seen = llm.runner.target.model, []
    monkeypatch.setattr(operators, "LOGITS_BYTES", 5 * llm.vocab_size * 8)
    logits = type(model).logits
    monkeypatch.setattr(type(model), "logits", lambda m, hidden: seen.append(hidden.shape[:-1]) or logits(m, hidden))
    prompt = [1 + i % 40 for i in range(23)]
    [output] = llm.generate([prompt], replace(SCORED, max_tokens=1), progress=False)
    assert [tuple(s) for s in seen if len(s) == 1] == [(5,), (5,), (5,), (5,), (2,)]
    check(llm, prompt, output.prompt_logprobs, 3)


def test_each_of_n_choices_has_the_prompts(tmp_path: Path) -> None:
    llm = make_llm(tmp_path, TREE)
    params = replace(SCORED, n=3, temperature=1.0, seed=1)
    requests = llm._requests(PROMPTS[1], params)
    llm._run(requests, progress=False)
    for request in requests:
        check(llm, PROMPTS[1], request.whole_prompt_logprobs(), 3)
