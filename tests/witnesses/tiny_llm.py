"""A whole engine over a model of a few kilobytes, in float64: what witnesses run when one function is not enough."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from small_models import write_pair
from treedraft import LLM, SamplingParams, SpeculativeConfig

PROMPTS = [[3, 14, 15, 9, 26], [5, 35, 8, 9, 7, 9, 32, 3], [38, 46, 2]]  # lengths 5, 8, 3
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def make_llm(folder: Path, shape: tuple[int, int, int] | None, **options: Any) -> LLM:
    """An engine over a random target and a random head; shape: num_steps, topk, num_draft_tokens, or None."""
    settings = {"max_batch": 4, "max_context": 32, "page_size": 3, "capture": "off", **options}
    speculative = None if shape is None else SpeculativeConfig(*shape)
    folder.mkdir(exist_ok=True)
    return LLM(**write_pair(folder / "pair"), dtype="float64", device="cpu", speculative=speculative, **settings)


def tokens_of(outputs: Any) -> list[tuple[int, ...]]:
    """The token ids of each output's one choice."""
    return [o.outputs[0].token_ids for o in outputs]
