"""The comparison finds the first difference, and says whether the model was in doubt there."""

from __future__ import annotations

import pytest

from fake_llm import FakeLLM
from treedraft.config import SpeculativeConfig
from treedraft.debug.compare import first_difference, run_check
from treedraft.debug.differences import Gaps
from treedraft.speculative.noise import noise_key
from treedraft.types import SamplingParams


@pytest.mark.parametrize(
    ("a", "b", "position"),
    [("abc", "abc", None), ("abc", "axc", 1), ("ab", "abc", 2), ("abc", "ab", 2), ("", "", None)],
)
def test_first_difference(a: str, b: str, position: int | None) -> None:
    assert first_difference(a, b) == position


@pytest.fixture(autouse=True)
def gaps(monkeypatch: pytest.MonkeyPatch) -> dict:
    """The gaps that a recomputation finds, and what it was asked."""
    found = {"gaps": Gaps(1.0, 1.0, 1.0), "asked": []}

    def gaps_at(llm, prompt, output, params, choice):
        found["asked"].append((prompt, len(output), params.seed, choice))
        return found["gaps"]

    monkeypatch.setattr("treedraft.debug.compare.gaps_at", gaps_at)
    return found


def check(params: SamplingParams, **fake):
    return run_check(
        lambda speculative: FakeLLM(speculative=speculative, **fake), ["abc", "de"], params, SpeculativeConfig()
    )


def test_run_check_equal() -> None:
    report = check(SamplingParams(max_tokens=10, temperature=0.0))
    assert (report.verdict, report.num_tokens, report.num_rounds, report.accept_length) == ("equal", 20, 6, 3.0)
    assert report.accepted_per_depth == (1.0, 0.25)  # half of the rounds of one text, none of the other's


def test_run_check_lists_a_difference_of_every_choice() -> None:
    report = check(SamplingParams(max_tokens=10, temperature=0.0, n=2), wrong_at=4)
    assert [(d.prompt_index, d.choice_index, d.position) for d in report.differences] == [
        *[(0, 0, 4), (0, 1, 4), (1, 0, 4), (1, 1, 4)]
    ]
    assert report.verdict == "different"


@pytest.mark.parametrize("found", [Gaps(9e-5, 1.0, 1.0), Gaps(1.0, 9e-5, 1.0), Gaps(1.0, 1.0, 9e-5)])
def test_run_check_explains_near_ties(gaps: dict, found: Gaps) -> None:
    gaps["gaps"] = found
    assert check(SamplingParams(max_tokens=10, temperature=0.0), wrong_at=4).verdict == "explained"


def test_run_check_recomputes_with_the_tokens_before_the_difference_and_the_request_seed(gaps: dict) -> None:
    check(SamplingParams(max_tokens=10, n=2), wrong_at=4)
    asked = [(prompt, count, choice) for prompt, count, _, choice in gaps["asked"]]
    abc, de = tuple(map(ord, "abc")), tuple(map(ord, "de"))
    assert asked == [(abc, 4, 0), (abc, 4, 1), (de, 4, 0), (de, 4, 1)]
    seeds = [seed for _, _, seed, _ in gaps["asked"]]
    assert seeds == [noise_key(0, 1)] * 2 + [noise_key(0, 3)] * 2  # as a fresh LLM(seed=0) derives them
