"""Witnesses of fixes in chunks, preemption and the prefix cache: each passes with its fix and fails without it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from kv_oracle import generate_checked
from treedraft.config import EngineConfig, SpeculativeConfig
from treedraft.engine.request import Request
from treedraft.engine.scheduler import Scheduler
from treedraft.engine.text import TextStream
from treedraft.kv.allocator import PageAllocator
from treedraft.kv.manager import KVManager
from treedraft.kv.prefix import PrefixCache
from treedraft.runner import capture
from treedraft.types import SamplingParams
from witnesses.tiny_llm import GREEDY, PROMPTS, make_llm, tokens_of


def test_chunk_tails_pair_with_the_next_prompt_token(tmp_path) -> None:
    _, problems = generate_checked(make_llm(tmp_path, (3, 2, 6), chunked_prefill=3), PROMPTS, GREEDY)
    assert problems == []


def test_preempted_request_goes_on_where_it_was(tmp_path) -> None:
    """The second request gives its pages to a more urgent one in the middle of its text."""
    plain = tokens_of(make_llm(tmp_path / "plain", None).generate(PROMPTS, GREEDY, progress=False))
    llm = make_llm(tmp_path / "tight", (3, 2, 6), max_batch=1)
    requests = [r for prompt in PROMPTS[:2] for r in llm._requests(prompt, GREEDY)]
    requests[0].priority = 1
    run(llm, requests[0], num_steps=2)
    run(llm, requests[1], num_steps=99)
    assert requests[0].num_preemptions == 1
    assert [tuple(r.output_token_ids) for r in requests] == plain[:2]


def run(llm: Any, request: Request, num_steps: int) -> None:
    llm.engine.scheduler.add(request)
    for _ in range(num_steps):
        llm.engine.step()


def test_a_cached_page_is_known_by_the_token_behind_it() -> None:
    """Page size 2: the draft row of position 1 was made of token 2, which is 4 here and 9 there."""
    kv = KVManager(PageAllocator(12), page_size=2, table_width=5, cache=PrefixCache(2))
    kv.reserve(0, 5)
    kv.release(0, (3, 1, 4, 1, 5))
    assert len(kv.find_prefix((3, 1, 4, 9), 9)) == 1
    assert len(kv.find_prefix((3, 1, 9, 9), 9)) == 0


def test_draft_kv_is_kept_while_nobody_speculates(tmp_path) -> None:
    """A request without trees leaves its pages to one with trees, whose draft KV is right from the first row on."""
    llm = make_llm(tmp_path, (3, 2, 6))
    [plain] = llm._requests(PROMPTS[1], GREEDY)
    plain.params = replace(plain.params, num_draft_tokens=1)
    run(llm, plain, num_steps=40)
    longer = [*PROMPTS[1], *plain.output_token_ids[:8]]
    [output], problems = generate_checked(llm, [longer], GREEDY)
    assert problems == []
    assert output.metrics.num_cached_tokens == 15


def test_freed_tail_of_a_preempted_request() -> None:
    """What a preempted request owned beyond its text is free again."""
    config = EngineConfig(max_context=64, max_batch=2, page_size=2, speculative=SpeculativeConfig(3, 4, 9))
    scheduler = Scheduler(config, KVManager(PageAllocator(40), 2, 40, PrefixCache(2)))
    request = Request(0, (1, 2, 3), SamplingParams(), 0, 0, frozenset(), 60, TextStream(None, ()))
    scheduler.add(request)
    scheduler.schedule()
    request.pending, request.output_token_ids = 0, [1]
    scheduler.schedule()
    scheduler._preempt(request)
    assert scheduler.kv.num_owned == 0 and scheduler.kv.num_available == 38
    scheduler.check_integrity()


def test_recorded_rounds_are_few_and_freed(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(capture, "MAX_RECORDS", 1)
    kept_by_torch = len(torch.jit._state._python_cu.get_functions())
    llm = make_llm(tmp_path, (1, 2, 3), capture="on")
    for count in (1, 2):
        llm.generate(PROMPTS[:count], GREEDY, progress=False)
    assert len(llm.runner.captured._records) == 1
    assert len(torch.jit._state._python_cu.get_functions()) == kept_by_torch
