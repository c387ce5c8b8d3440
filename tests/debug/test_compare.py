"""The comparison finds the first difference, and says whether the model was in doubt there."""

from __future__ import annotations

import pytest

from fake_llm import FakeLLM
from treedraft.config import SpeculativeConfig
from treedraft.debug.compare import first_difference, run_check
from treedraft.types import SamplingParams


@pytest.mark.parametrize(
    ("a", "b", "position"),
    [("abc", "abc", None), ("abc", "axc", 1), ("ab", "abc", 2), ("abc", "ab", 2), ("", "", None)],
)
def test_first_difference(a: str, b: str, position: int | None) -> None:
    assert first_difference(a, b) == position


def check(params: SamplingParams, **fake):
    return run_check(
        lambda speculative: FakeLLM(speculative=speculative, **fake), ["abc", "de"], params, SpeculativeConfig()
    )


def test_run_check_equal() -> None:
    report = check(SamplingParams(max_tokens=10, temperature=0.0))
    assert (report.verdict, report.num_tokens, report.num_rounds, report.accept_length) == ("equal", 20, 6, 3.0)
    assert report.accepted_per_depth == (1.0, 0.5)


def test_run_check_lists_a_difference_of_every_choice() -> None:
    report = check(SamplingParams(max_tokens=10, temperature=0.0, n=2), wrong_at=4)
    assert [(d.prompt_index, d.choice_index, d.position) for d in report.differences] == [
        *[(0, 0, 4), (0, 1, 4), (1, 0, 4), (1, 1, 4)]
    ]
    assert report.verdict == "different"


@pytest.mark.parametrize(("gap", "verdict"), [(9e-5, "explained"), (1.1e-4, "different")])
def test_run_check_explains_near_ties_alone(gap: float, verdict: str) -> None:
    assert check(SamplingParams(max_tokens=10, temperature=0.0), wrong_at=4, gap=gap).verdict == verdict
