"""Witnesses of what keeps a grammar's masks with the text."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from small_models import write_pair
from tiny_tokenizer import write_tokenizer
from treedraft import LLM, SamplingParams, SpeculativeConfig, StructuredOutput
from treedraft.grammar.compiler import GrammarCompiler
from treedraft.weights.tokenizer import load_tokenizer


def test_masks_follow_the_nodes_of_a_tree(tmp_path: Path) -> None:
    """a, then b, then the end; drafted is the chain a, b beside a node that may not be."""
    tokenizer = load_tokenizer(write_tokenizer(tmp_path))
    end, a, b, c = tokenizer.convert_tokens_to_ids(["<|end|>", "a", "b", "c"])
    state = GrammarCompiler(tokenizer, 48, (end,)).compile(StructuredOutput(regex="a[b-c]c*")).start(0, frozenset())
    masks = np.zeros((4, 2), dtype=np.int32)
    state.fill_masks([5, a, b, c], [-1, 0, 1, 0], masks)
    allowed = [set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[:48])) for mask in masks]
    ab = tokenizer.convert_tokens_to_ids("ab")
    abc = tokenizer.convert_tokens_to_ids("abc")
    assert allowed == [{a, ab, abc}, {b, c}, {end, c}, set(range(48))]


def test_masks_know_the_whole_output(tmp_path: Path) -> None:
    """One round late, as on a GPU, the text is the same as read at once."""
    pair = write_pair(tmp_path / "pair")
    write_tokenizer(Path(pair["model"]))
    params = SamplingParams(temperature=0, max_tokens=30, structured=StructuredOutput(regex="(abc|de){3}no"))
    found = []
    for max_pending in (0, 1):
        llm = LLM(
            **pair,
            dtype="float64",
            device="cpu",
            max_context=64,
            speculative=SpeculativeConfig(3, 2, 6),
            max_pending=max_pending,
            capture="off",
        )
        outputs = llm.generate(["a", "de"], [params, SamplingParams(temperature=0, max_tokens=9)], progress=False)
        found.append([(o.outputs[0].text, o.outputs[0].finish_reason) for o in outputs])
    assert found[1] == found[0] and found[0][0][1] == "stop"
