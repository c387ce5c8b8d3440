"""What --deterministic does on the way to a GPU: prompts forwarded as rows that decode."""

from dataclasses import replace

import pytest
import torch

from treedraft import LLM, SamplingParams, SpeculativeConfig
from treedraft.runner.round import Target


class Watched(Target):
    """Keeps what prefills returned."""

    seen: list = []

    def prefill(self, batch):
        self.seen.append(super().prefill(batch))
        return self.seen[-1]


@pytest.mark.parametrize("rows_at_once", [512, 7], ids=lambda n: f"{n} rows")
def test_prefill_as_decode_gives_the_states_and_tokens_of_prefill(rows_at_once, demo_prompts, monkeypatch):
    monkeypatch.setattr("treedraft.runner.round.DETERMINISTIC_ROWS", rows_at_once)
    llm = LLM(
        "demo", device="cpu", dtype="float64", page_size=3, max_batch=3, max_context=96, capture="off",
        prefix_cache=False, speculative=SpeculativeConfig(3, 2, 6),
    )  # fmt: skip
    params = SamplingParams(temperature=0.8, seed=1, max_tokens=12, ignore_eos=True)
    outputs, states = [], []
    for is_deterministic in (False, True):
        target = replace(llm.runner.target, is_deterministic=is_deterministic)
        llm.runner.target = Watched(**vars(target))
        outputs.append([o.outputs[0].token_ids for o in llm.generate(demo_prompts[:4], params, progress=False)])
        states.append(Watched.seen[-1])
        Watched.seen.clear()
    assert outputs[0] == outputs[1]
    for name in ("hidden", "features"):
        torch.testing.assert_close(getattr(states[0], name), getattr(states[1], name), rtol=0, atol=1e-9)
