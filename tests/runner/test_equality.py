"""The text is the same with and without speculation, strictly, in float64: a handful of points of the covering array.

The whole array is `benchmarks/equality.py`; the slow test runs it here.
"""

from dataclasses import replace

import pytest
import torch
from drafters import use_perfect_drafter

from treedraft import LLM, SamplingParams, SpeculativeConfig
from treedraft.bench.equality import (
    PARAMETERS,
    Equality,
    Point,
    array_points,
    covering_array,
    differences,
    is_valid,
    params_for,
    run_resumable,
)
from treedraft.models.layers import init_weights


def make_llm(**options):
    return LLM("demo", dtype="float64", device="cpu", max_context=512, **options)


@pytest.fixture(scope="module")
def equality(demo_prompts):
    llm = make_llm(speculative=None)
    return Equality(make_llm, [llm.encode(p)[: 6 + 5 * i] for i, p in enumerate(demo_prompts[:6])], explain=None)


HANDFUL = [
    Point(5, 4, 16, page_size=16, batch=2, sampling="greedy", num_tokens=40),
    Point(3, 2, 5, page_size=3, batch=5, sampling="t0.7 top_p min_p", num_tokens=36),
    Point(7, 8, 70, page_size=2, batch=2, sampling="t1.0 penalties", num_tokens=32),
    Point(2, 10, 64, page_size=1, batch=1, sampling="t1.0 n=3", num_tokens=32),
    Point(1, 4, 2, page_size=64, batch=2, sampling="t1.0 penalties", num_tokens=24),
    Point(7, 1, 2, page_size=16, batch=1, sampling="t0.7 top_p min_p", num_tokens=24),
]


@pytest.mark.parametrize("point", HANDFUL, ids=lambda p: f"{p.num_steps},{p.topk},{p.num_draft_tokens}-{p.sampling}")
def test_generate_with_a_tree_gives_the_same_tokens(equality, point):
    result = equality.run(point)
    assert result["differences"] == []
    assert result["accept_length"] > 1.2, "the head must be of use, or the test shows nothing"


def test_generate_with_an_untrained_head_gives_the_same_tokens_at_acceptance_near_one(equality):
    llm = make_llm(speculative=SpeculativeConfig(3, 4, 9), page_size=3, max_batch=2)
    head = llm.runner.drafter.head
    init_weights(head, seed=1, std=0.5)
    point = HANDFUL[0]
    expected = equality.expected(replace(point, num_tokens=40))
    given = llm.generate(equality.prompts[:3], [params_for(point, i) for i in range(3)], progress=False)
    assert differences(expected, given) == []
    assert all(o.metrics.accept_length < 1.3 for o in given)


@pytest.mark.parametrize("shape", [(5, 4, 16), (3, 1, 4), (1, 2, 3), (6, 1, 3)], ids=str)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_generate_with_the_target_as_its_own_head_accepts_every_level(equality, shape, temperature):
    speculative = SpeculativeConfig(*shape)
    llm = use_perfect_drafter(make_llm(speculative=speculative, page_size=3, max_batch=2))
    params = SamplingParams(temperature=temperature, max_tokens=1 + 3 * speculative.max_path, seed=3, ignore_eos=True)
    expected = equality.plain.generate(equality.prompts[:3], params, progress=False)
    given = llm.generate(equality.prompts[:3], params, progress=False)
    assert differences(expected, given) == []
    for output in given:
        assert output.metrics.accept_length == speculative.max_path
        assert output.metrics.accepted_per_depth == (1.0,) * (speculative.max_path - 1)


def test_generate_one_round_late_gives_the_same_tokens(equality):
    """Two rounds in flight, as on a GPU: the host's interval, dead rounds and slot reuse must not show."""
    for max_pending in (1, 2):
        llm = make_llm(speculative=SpeculativeConfig(4, 3, 12), page_size=2, max_batch=2, max_pending=max_pending)
        point = HANDFUL[0]
        given = llm.generate(equality.prompts[:5], [params_for(point, i) for i in range(5)], progress=False)
        assert differences(equality.expected(replace(point, batch=4)), given) == []
        llm.engine.scheduler.check_integrity()


def test_covering_array_every_possible_pair_of_values_occurs():
    points = covering_array(seed=0)
    assert len(points) <= 80 and all(is_valid(p) for p in points)
    names = list(PARAMETERS)
    every = covering_pairs = 0
    for i, a in enumerate(names):
        for b in names[i + 1 :]:
            for x in PARAMETERS[a]:
                for y in PARAMETERS[b]:
                    possible = _is_possible({a: x, b: y})
                    every += possible
                    covering_pairs += possible and any(p[a] == x and p[b] == y for p in points)
    assert covering_pairs == every


def _is_possible(pair):
    """Whether the largest tree that the pair allows holds its number of nodes."""
    largest = {"num_steps": 7, "topk": 10, "num_draft_tokens": 2} | pair
    return is_valid(largest)


@pytest.mark.slow
def test_generate_over_the_whole_covering_array_gives_the_same_tokens(demo_prompts, tmp_path):
    torch.set_num_threads(2)
    llm = make_llm(speculative=None)
    whole = Equality(make_llm, [llm.encode(p) for p in demo_prompts[:6]], explain=None)
    results = run_resumable(whole, array_points(), tmp_path / "points.jsonl", print)
    assert [r for r in results if r["differences"]] == []
