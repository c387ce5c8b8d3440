"""The gaps that say whether a difference is explained, against plain recomputation."""

import math

import pytest
import torch

from treedraft import SamplingParams
from treedraft.attention.dense import DenseAttend
from treedraft.debug.differences import NEAR, Gaps, filter_edge, gaps_at
from treedraft.speculative.noise import gumbel, noise_key


def last_logits(llm, ids):
    model = llm.runner.target.model
    tokens = torch.tensor([ids])
    with torch.inference_mode():
        return model.logits(model(tokens, torch.arange(len(ids))[None], DenseAttend()).hidden[:, -1])[0]


def test_gaps_at_greedy_gap_is_best_minus_second(plain64, demo_prompts):
    prompt = plain64.encode(demo_prompts[0])
    gaps = gaps_at(plain64, prompt, [5, 6], SamplingParams(temperature=0), choice=0)
    best = last_logits(plain64, [*prompt, 5, 6]).topk(2).values
    assert gaps.top_two == pytest.approx(float(best[0] - best[1]))
    assert gaps.filter_edge == math.inf and 0 < gaps.router < math.inf


def test_gaps_at_sampled_gap_uses_the_requests_own_noise(plain64, demo_prompts):
    prompt = plain64.encode(demo_prompts[1])
    params = SamplingParams(temperature=0.7, seed=9)
    gaps = gaps_at(plain64, prompt, [], params, choice=2)
    z = last_logits(plain64, prompt) / torch.tensor(0.7)
    z = z + gumbel(torch.tensor([noise_key(9, 2)]), torch.tensor([[len(prompt)]]), len(z))[0, 0]
    best = z.topk(2).values
    assert gaps.top_two == pytest.approx(float(best[0] - best[1]))


def test_gaps_at_names_the_token_that_the_engine_said(plain64, demo_prompts):
    """The recomputed choice is the engine's own, at every position: else the gaps would be of another choice."""
    params = SamplingParams(temperature=0.8, repetition_penalty=1.3, top_p=0.9, seed=4, max_tokens=6, ignore_eos=True)
    prompt = plain64.encode(demo_prompts[2])
    [output] = plain64.generate([prompt], params, progress=False)
    said = output.outputs[0].token_ids
    for position in range(6):
        gaps = gaps_at(plain64, prompt, said[:position], params, choice=0)
        assert gaps.top_two > 0 and gaps.filter_edge < math.inf


@pytest.mark.parametrize("field, expected", [("top_k", 0.5), ("min_p", 0.0), ("top_p", 0.0)])
def test_filter_edge_planted_near_edge_is_found(field, expected):
    z = torch.tensor([3.0, 2.0, 1.5, -1.0], dtype=torch.float64)
    probs = z.softmax(-1)
    value = {"top_k": 2, "min_p": float(probs[2] / probs[0]), "top_p": float(probs[:2].sum())}[field]
    edge = filter_edge(z, SamplingParams(temperature=1.0, **{field: value}))
    assert edge == pytest.approx(expected, abs=1e-6)


def test_gaps_explained_when_any_is_near():
    assert Gaps(1.0, math.inf, NEAR / 2).is_explained and not Gaps(1.0, 0.5, 2 * NEAR).is_explained
