"""Log-probabilities: one for each token, of the raw target distribution, the same with and without speculation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from treedraft import LLM, SamplingParams
from treedraft.attention.dense import DenseAttend
from treedraft.speculative.noise import noise_key
from treedraft.types import Choice

TOLERANCE = 1e-9  # float64; other shapes of the same products differ in the last bits
SETTINGS = {
    "greedy": SamplingParams(temperature=0, logprobs=5),
    "sampled": SamplingParams(temperature=0.8, top_p=0.9, min_p=0.01, seed=4, logprobs=3),
    "penalties": SamplingParams(
        temperature=1.0, seed=5, repetition_penalty=1.3, frequency_penalty=0.3, logit_bias={15: -3.0}, logprobs=0
    ),
}


@pytest.fixture(scope="module")
def prompts(plain64: LLM, demo_prompts: list[str]) -> list[list[int]]:
    return [plain64.encode(p)[:n] for p, n in zip(demo_prompts, (7, 13, 19), strict=False)]


def choices_of(llm: LLM, prompts: Any, params: SamplingParams) -> list[Choice]:
    return [c for o in llm.generate(prompts, params, progress=False) for c in o.outputs]


@torch.inference_mode()
def dense_logprobs(llm: LLM, prompt: list[int], token_ids: tuple[int, ...]) -> torch.Tensor:
    """log_softmax of one dense forward, [tokens, V], from which each output token was drawn."""
    model = llm.runner.target.model
    ids = torch.tensor([*prompt, *token_ids])
    hidden = model(ids, torch.arange(len(ids)), DenseAttend()).hidden[len(prompt) - 1 : -1]
    return model.logits(hidden).log_softmax(-1)


def close(a: Any, b: Any) -> bool:
    a, b = (torch.as_tensor(x, dtype=torch.float64) for x in (a, b))
    return a.shape == b.shape and bool((a - b).abs().max() < TOLERANCE)


@pytest.mark.parametrize("name", SETTINGS)
def test_logprobs_are_those_of_a_dense_forward_with_and_without_speculation(name, tree64, plain64, prompts):
    params = replace(SETTINGS[name], max_tokens=24, ignore_eos=True)
    with_tree, without = choices_of(tree64, prompts, params), choices_of(plain64, prompts, params)
    assert max(o.metrics.accept_length for o in tree64.generate(prompts[:1], params, progress=False)) > 1.2
    for prompt, a, b in zip(prompts, with_tree, without, strict=True):
        assert a.token_ids == b.token_ids
        assert a.logprobs is not None and a.top_logprobs is not None and b.top_logprobs is not None
        assert len(a.logprobs) == len(a.top_logprobs) == len(a.token_ids) == 24
        assert close(a.logprobs, b.logprobs)
        dense = dense_logprobs(plain64, prompt, a.token_ids)
        assert close(a.logprobs, dense.gather(1, torch.tensor(a.token_ids)[:, None])[:, 0])
        best = dense.topk(params.logprobs or 0, dim=-1)
        for i, (top, other) in enumerate(zip(a.top_logprobs, b.top_logprobs, strict=True)):
            assert list(top) == list(other) == best.indices[i].tolist()
            assert params.logprobs == 0 or close(list(top.values()), best.values[i])


def test_logprobs_of_a_mixed_batch_are_as_each_request_asked(tree64, prompts):
    asked = [None, 0, 4]
    params = [SamplingParams(temperature=0, max_tokens=10 + n, logprobs=k) for n, k in enumerate(asked)]
    mixed = [o.outputs[0] for o in tree64.generate(prompts, params, progress=False)]
    assert mixed[0].logprobs is None and mixed[0].top_logprobs is None
    for choice, prompt, one, k in list(zip(mixed, prompts, params, asked, strict=True))[1:]:
        alone = choices_of(tree64, [prompt], one)[0]
        assert choice.top_logprobs is not None and alone.logprobs is not None
        assert choice.token_ids == alone.token_ids and close(choice.logprobs, alone.logprobs)
        assert [len(top) for top in choice.top_logprobs] == [k] * len(choice.token_ids)


def test_logprobs_of_a_text_that_stops_inside_a_run_end_with_it(tree64, prompts):
    params = SamplingParams(temperature=0, max_tokens=16, logprobs=1, ignore_eos=True)
    whole = choices_of(tree64, prompts[:1], params)[0]
    assert whole.logprobs is not None
    cuts = [replace(params, max_tokens=end) for end in range(1, 13)]
    for end, output in enumerate(tree64.generate(prompts[:1] * 12, cuts, progress=False), start=1):
        cut = output.outputs[0]
        assert cut.token_ids == whole.token_ids[:end] and close(cut.logprobs, whole.logprobs[:end])
        assert cut.top_logprobs is not None and len(cut.top_logprobs) == end


def test_n_choices_differ_and_each_equals_its_own_run_under_its_key(tree64, plain64, prompts):
    params = SamplingParams(temperature=1.0, max_tokens=16, n=3, seed=21, logprobs=0, ignore_eos=True)
    choices = choices_of(tree64, prompts[:2], params)
    assert [c.index for c in choices] == [0, 1, 2] * 2
    assert len({c.token_ids for c in choices}) == 6
    for llm in (tree64, plain64):
        for number, choice in enumerate(choices[:3]):
            solo = under_key(llm, prompts[0], replace(params, n=1), noise_key(21, number))
            assert solo.token_ids == choice.token_ids and close(solo.logprobs, choice.logprobs)


def under_key(llm: LLM, prompt: list[int], params: SamplingParams, key: int) -> Choice:
    """Run one prompt alone under a noise key given directly."""
    [request] = llm._requests(prompt, params)
    request.noise_key = key
    llm._run([request], progress=False)
    return request.choice()
