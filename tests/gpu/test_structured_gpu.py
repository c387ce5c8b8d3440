"""Structured output on a GPU: captured rounds with seams give the text of rounds made anew, and of no speculation."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from treedraft import LLM, SamplingParams, SpeculativeConfig, StructuredOutput

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
pytest.importorskip("llguidance")
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "kind": {"enum": ["cat", "dog", "bird"]},
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}
PROMPTS = ["Once upon a time", "def main():", "A cat: ", "The end"]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=80, structured=StructuredOutput(json_schema=SCHEMA)),
    SamplingParams(temperature=0.9, seed=3, max_tokens=30, ignore_eos=True),  # its text is its own
    SamplingParams(temperature=1, seed=4, max_tokens=80, structured=StructuredOutput(json_schema=SCHEMA)),
    SamplingParams(
        temperature=1, seed=5, max_tokens=40, structured=StructuredOutput(regex="[a-z]{3,8}( [a-z]{1,6}){2}")
    ),
]


def texts(cuda_graph: str, speculative: SpeculativeConfig | None, dtype: str) -> list[str]:
    llm = LLM(
        "demo", device="cuda", dtype=dtype, max_batch=4, max_context=256, speculative=speculative, cuda_graph=cuda_graph
    )
    return [o.outputs[0].text for o in llm.generate(PROMPTS, PARAMS, progress=False)]


def test_structured_texts_are_those_of_no_speculation() -> None:
    tree = SpeculativeConfig(4, 4, 16)
    plain = texts("off", None, "float64")
    assert texts("on", tree, "float64") == texts("off", tree, "float64") == plain
    for text in (plain[0], plain[2]):
        document = json.loads(text)
        assert set(document) == {"name", "age", "kind"} and 0 <= document["age"] <= 120


def test_structured_texts_in_bfloat16_are_documents() -> None:
    """Through the Triton kernels, sampling among them."""
    for text in (texts("on", SpeculativeConfig(4, 4, 16), "bfloat16")[i] for i in (0, 2)):
        assert json.loads(text)["kind"] in ("cat", "dog", "bird")
