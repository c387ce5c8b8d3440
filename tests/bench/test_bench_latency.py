"""Choosing prompts and measuring contestants in turn."""

from __future__ import annotations

import pytest

from small_models import write_pair
from treedraft.bench.latency import (
    AUTO,
    PLAIN,
    SPECULATIVE,
    LatencySettings,
    choose_prompts,
    measure,
    run_latency,
)
from treedraft.cli.options import EngineOptions
from treedraft.cli.prompts import random_prompts
from treedraft.config import SpeculativeConfig
from treedraft.errors import RequestError


class Contestant:
    """Writes down when it ran; text = counting up from the prompt's length."""

    def __init__(self, name: str, log: list[tuple[str, int]], shift: int = 0):
        self.name, self.log, self.shift = name, log, shift

    def run(self, prompts: list[list[int]], max_tokens: int, temperature: float) -> list[list[int]]:
        self.log.append((self.name, len(prompts)))
        return [[*range(max_tokens - 1), max_tokens + self.shift] for _ in prompts]


def test_measure_runs_contestants_in_turn_after_a_warm_up() -> None:
    log: list[tuple[str, int]] = []
    contestants = [Contestant(PLAIN, log), Contestant("other", log, shift=1)]
    settings = LatencySettings(batches=(1, 2), max_tokens=4, num_prompts=2, repetitions=2)
    rows = measure(contestants, {1: [[1], [2]], 2: [[1], [2]]}, settings, lambda text: None)
    once = [(PLAIN, 1), (PLAIN, 1), ("other", 1), ("other", 1), (PLAIN, 2), ("other", 2)]
    assert log == [(PLAIN, 1), ("other", 1), (PLAIN, 2), ("other", 2), *once, *once]
    assert [(r.engine, r.batch, len(r.all_tokens_per_s)) for r in rows] == [
        *[(PLAIN, 1, 2), ("other", 1, 2), (PLAIN, 2, 2), ("other", 2, 2)]
    ]
    assert [r.same_tokens for r in rows] == [1.0, 0.75, 1.0, 0.75]


def test_measure_leaves_transformers_out_where_tokens_are_sampled() -> None:
    contestants = [Contestant(PLAIN, []), Contestant("transformers", [])]
    settings = LatencySettings(batches=(1,), max_tokens=4, num_prompts=1, repetitions=1, temperatures=(0.0, 1.0))
    rows = measure(contestants, {1: [[1]]}, settings, lambda text: None)
    assert [(r.engine, r.temperature) for r in rows] == [(PLAIN, 0), ("transformers", 0), (PLAIN, 1)]


def test_run_latency_fills_every_batch_and_compares_auto(tmp_path) -> None:
    settings = LatencySettings((1, 3), max_tokens=6, prompt_tokens=4, num_prompts=2, repetitions=1, with_auto=True)
    engine = EngineOptions(**write_pair(tmp_path), device="cpu", max_batch=1)
    result = run_latency(engine, SpeculativeConfig(2, 2, 4), random_prompts(engine.model, 3, 4), settings)
    assert [(r.engine, r.batch) for r in result.rows] == [
        (name, b) for b in (1, 3) for name in (PLAIN, SPECULATIVE, AUTO)
    ]
    assert all(r.same_tokens == 1 and r.tokens_per_s > 0 for r in result.rows)
    assert all((r.tokens_per_round is None) == (r.engine == PLAIN) for r in result.rows)
    result.render()


def test_choose_prompts_spreads_over_the_long_enough_ones() -> None:
    settings = LatencySettings(prompt_tokens=3, num_prompts=2)
    prompts = [[1] * 2, [2] * 3, [3] * 9, [4] * 5, [5] * 5]
    assert choose_prompts(prompts, settings) == [[2] * 3, [4] * 3]


def test_choose_prompts_too_few_raises() -> None:
    with pytest.raises(RequestError, match="2 prompts of at least 3 tokens are needed; the file has 1"):
        choose_prompts([[1] * 3, [1]], LatencySettings(prompt_tokens=3, num_prompts=2))
