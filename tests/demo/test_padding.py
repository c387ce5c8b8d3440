"""The demo model padded to latent 512 + rope 64 computes what it computed."""

from pathlib import Path

import pytest
import torch

import treedraft
from treedraft import LLM, SamplingParams, SpeculativeConfig
from treedraft.demo.padding import pad_checkpoint

DEMO = Path(treedraft.__file__).parent / "demo"


@pytest.fixture(scope="module")
def padded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("padded")
    return [str(pad_checkpoint(DEMO / part, folder / part)) for part in ("model", "draft")]


def make_llm(model="demo", draft=None):
    shape = SpeculativeConfig(3, 2, 6)
    return LLM(model, draft, dtype="float64", device="cpu", max_context=64, max_batch=2, speculative=shape)


def test_pad_checkpoint_demo_has_the_fixed_sizes_and_keeps_the_scale(padded):
    llm = make_llm(*padded)
    for mla in (llm.runner.target.model.config.mla, llm.runner.drafter.head.config.mla):
        assert (mla.kv_lora_rank, mla.qk_rope_head_dim) == (512, 64)
        assert mla.scale == pytest.approx(64**-0.5 / 2)  # and the queries are doubled


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_pad_checkpoint_demo_gives_the_same_text_and_trees(padded, demo_prompts, temperature):
    params = SamplingParams(temperature=temperature, max_tokens=16, seed=3, ignore_eos=True)
    traces = []
    for llm in (make_llm(), make_llm(*padded)):
        seen = []

        def observe(rows, batch, result, seen=seen, model=llm.runner.target.model):
            hidden = result.hidden.gather(1, result.accepted.columns[..., None].expand(-1, -1, result.hidden.shape[-1]))
            seen.append((result.tree.token_ids.clone(), model.logits(hidden)))

        llm.runner.observer = observe
        outputs = llm.generate(demo_prompts[:2], params, progress=False)
        traces.append(([o.outputs[0].token_ids for o in outputs], seen))
    (tokens, rounds), (padded_tokens, padded_rounds) = traces
    assert tokens == padded_tokens
    for (tree, logits), (padded_tree, padded_logits) in zip(rounds, padded_rounds, strict=True):
        assert torch.equal(tree, padded_tree)
        # Weights are float32 and sqrt(8) is rounded to it: 6e-8 relative, over six layers.
        assert torch.allclose(logits, padded_logits, atol=1e-4)
