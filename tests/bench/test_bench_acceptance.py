"""Counting rounds: tokens a round, and rounds whose root ends an 8-gram already seen."""

from __future__ import annotations

import math

import pytest

from fake_llm import make_round
from treedraft.bench.acceptance import mean_of, measure_prompt
from treedraft.errors import InvariantError
from treedraft.types import Choice, RequestMetrics, RequestOutput

METRICS = RequestMetrics(0, 0, 0, math.nan, (), 0.0, 0.0)


def output_of(prompt: str, text: str) -> RequestOutput:
    choice = Choice(0, text, tuple(map(ord, text)), "length")
    return RequestOutput(prompt, tuple(map(ord, prompt)), (choice,), METRICS)


def rounds_of(prompt: str, text: str) -> list:
    return [
        make_round(0, len(prompt) + i - 1, ord(text[i - 1]), [ord(c) for c in text[i : i + 3]])
        for i in range(1, len(text), 3)
    ]


def test_measure_prompt_without_repetition_counts_every_round_as_fresh() -> None:
    prompt, text = "the quick brown fox", "jumped over it"[:13]
    found = measure_prompt("kid", output_of(prompt, text), rounds_of(prompt, text))
    assert (found.num_tokens, found.num_rounds, found.num_fresh_rounds) == (12, 4, 4)
    assert found.accepted_at_depth == (4, 4)


def test_measure_prompt_root_ending_a_seen_8gram_is_not_fresh() -> None:
    prompt, text = "abcdefghij|", "abcdefghij"
    # Roots are text[0], [3], [6], and the 8-gram "abcdefgh" is complete at text[7]: none ends a seen one yet.
    assert measure_prompt("kid", output_of(prompt, text), rounds_of(prompt, text)).num_fresh_rounds == 3
    # One token earlier roots are text[1], [4], [7]: the last one ends it.
    shifted = [make_round(0, 11 + i - 1, ord(text[i - 1]), [1, 2, 3]) for i in (2, 5, 8)]
    found = measure_prompt("kid", output_of(prompt, text), shifted)
    assert (found.num_rounds, found.num_fresh_rounds, found.num_fresh_tokens) == (3, 2, 6)


def test_measure_prompt_short_prefix_is_fresh() -> None:
    assert measure_prompt("kid", output_of("aa", "aaaa"), rounds_of("aa", "aaaa")).num_fresh_rounds == 1


def test_measure_prompt_of_another_request_raises() -> None:
    with pytest.raises(InvariantError, match="root at position"):
        measure_prompt("kid", output_of("abc", "defg"), rounds_of("abc", "xyzw"))


def test_mean_of() -> None:
    found = mean_of([1.0, 2.0, 3.0, 4.0])
    assert found.mean == 2.5
    assert found.standard_error == pytest.approx(math.sqrt(5 / 3) / 2)  # stdev / sqrt(n)
    assert math.isnan(mean_of([]).mean)
    assert math.isnan(mean_of([1.0]).standard_error)
