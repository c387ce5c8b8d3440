"""--deterministic: bfloat16 text that is equal, token for token, in any batch, with any tree and without."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from treedraft import LLM, SamplingParams, SpeculativeConfig

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
TREES = [SpeculativeConfig(5, 4, 16), SpeculativeConfig(3, 1, 4), SpeculativeConfig(7, 8, 48)]


def texts_of(prompts: list[str], params: list[SamplingParams], **options: Any) -> list[tuple[int, ...]]:
    llm = LLM("demo", device="cuda", dtype="bfloat16", max_context=512, deterministic=True, **options)
    return [o.outputs[0].token_ids for o in llm.generate(prompts, params, progress=False)]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_generate_deterministic_gives_the_same_tokens_with_any_tree_and_batch(
    demo_prompts: list[str], temperature: float
) -> None:
    prompts = demo_prompts[:24]
    params = [
        SamplingParams(temperature=temperature, seed=i, top_p=0.9, max_tokens=48, ignore_eos=True)
        for i in range(len(prompts))
    ]
    alone = texts_of(prompts, params, speculative=None, max_batch=1)
    for tree, max_batch in ((None, 24), (TREES[0], 1), (TREES[0], 24), (TREES[1], 7), (TREES[2], 16)):
        assert texts_of(prompts, params, speculative=tree, max_batch=max_batch) == alone, (tree, max_batch)


def test_generate_deterministic_gives_the_same_raw_logprobs(demo_prompts: list[str]) -> None:
    """Bit for bit, not only the choice: what a near-tie would hide."""
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=3)

    def logprobs(**options: Any) -> Any:
        llm = LLM("demo", device="cuda", dtype="bfloat16", max_context=512, deterministic=True, **options)
        return [o.outputs[0].logprobs for o in llm.generate(demo_prompts[:8], params, progress=False)]

    assert logprobs(speculative=None, max_batch=1) == logprobs(speculative=TREES[0], max_batch=8)
