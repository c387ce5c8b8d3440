"""Masks of a tree's nodes against a plain oracle: a fresh matcher that takes each node's whole path."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
from llguidance import LLMatcher, hf

from treedraft import LLM, StructuredOutput
from treedraft.grammar.compiler import GrammarCompiler, grammar_text
from treedraft.grammar.state import GrammarState

EOS = 0
GRAMMARS = [
    StructuredOutput(regex="[a-z]{2,9}( [a-z]{1,5}){0,3}[.!]"),
    StructuredOutput(json_schema={"type": "array", "items": {"enum": ["red", "reddish", 7, None]}, "maxItems": 4}),
    StructuredOutput(json_schema={"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}),
    StructuredOutput(grammar='start: "a" start "b" | "c"+'),
    StructuredOutput(choice=("stay", "stand", "go")),
]


class Oracle:
    """Tokens that may follow a text, each time from the beginning."""

    def __init__(self, llm: LLM, structured: StructuredOutput) -> None:
        self.vocabulary = hf.from_tokenizer(llm.tokenizer, n_vocab=llm.vocab_size, eos_token=list(llm.eos_token_ids))
        self.text = grammar_text(structured)

    def allowed(self, token_ids: Sequence[int]) -> set[int] | None:
        """None where the tokens break the grammar, or are its end."""
        matcher = LLMatcher(self.vocabulary, self.text, log_level=0)
        if not all(matcher.consume_token(t) for t in token_ids) or matcher.is_stopped():
            return None
        return set(np.flatnonzero(np.frombuffer(matcher.compute_logit_bias(), dtype=np.uint8)).tolist())


def tokens_in(mask: np.ndarray) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


def make(
    llm: LLM, structured: StructuredOutput, min_tokens: int = 0, stops: frozenset[int] = frozenset()
) -> GrammarState:
    return (
        GrammarCompiler(llm.tokenizer, llm.vocab_size, llm.eos_token_ids).compile(structured).start(min_tokens, stops)
    )


def masks_of(state: GrammarState, token_ids: list[int], parents: list[int]) -> list[set[int]]:
    masks = np.zeros((len(token_ids), 128), dtype=np.int32)
    state.fill_masks(token_ids, parents, masks)
    return [tokens_in(mask) for mask in masks]


def random_tree(rng: random.Random, oracle: Oracle, said: list[int], size: int) -> tuple[list[int], list[int]]:
    """Mostly children that the grammar allows, others that it does not, ends, and inert nodes."""
    token_ids, parents, paths = [said[-1] if said else 5], [-1], [list(said)]
    while len(token_ids) < size:
        parent = rng.randrange(len(token_ids))
        allowed = oracle.allowed(paths[parent]) if -1 not in paths[parent] else None
        token = rng.choice(sorted(allowed)) if allowed and rng.random() < 0.8 else rng.choice([-1, EOS, 17, 300])
        token_ids.append(token)
        parents.append(parent)
        paths.append([*paths[parent], token])
    return token_ids, parents


@pytest.mark.parametrize(
    "structured", GRAMMARS, ids=lambda s: (s.regex or s.grammar or str(s.choice or s.json_schema))[:20]
)
def test_masks_of_random_trees_along_a_text_equal_replays_of_each_path(
    structured: StructuredOutput, plain64: LLM
) -> None:
    rng, oracle, state = random.Random(3), Oracle(plain64, structured), make(plain64, structured)
    everything, said, num_reached = set(range(4096)), [], 0
    for _ in range(12):
        token_ids, parents = random_tree(rng, oracle, said, 12)
        given = masks_of(state, token_ids, parents)
        paths = [list(said)]
        for node in range(len(token_ids)):
            if node:
                paths.append([*paths[parents[node]], token_ids[node]])
            expected = oracle.allowed(paths[node]) if -1 not in paths[node] else None
            num_reached += node > 0 and expected is not None
            assert given[node] == (everything if expected is None else expected), (node, paths[node])
        token = rng.choice(sorted(given[0]))
        state.advance(token)
        said.append(token)
        assert state.error is None
        assert state.is_finished == (oracle.allowed(said) is None)
        if state.is_finished:
            break
    assert num_reached > 5, "no drafted node was reached: the test shows nothing"


def test_advance_over_a_forbidden_token_is_an_error(plain64: LLM) -> None:
    state = make(plain64, StructuredOutput(regex="ab"))
    state.advance(300)
    assert state.error and not state.is_finished


def test_a_complete_text_is_finished_without_its_end(plain64: LLM) -> None:
    a, b, c = plain64.tokenizer.convert_tokens_to_ids(["a", "b", "c"])
    state = make(plain64, StructuredOutput(regex="ab|abc"))
    state.advance(a)
    state.advance(b)
    assert not state.is_finished and masks_of(state, [b], [-1]) == [{EOS, c}]
    state.advance(c)
    assert state.is_finished
    ended = make(plain64, StructuredOutput(regex="a*"))
    ended.advance(EOS)
    assert ended.is_finished and ended.error is None


def test_min_tokens_forbids_stops_by_depth_unless_nothing_else_is_left(plain64: LLM) -> None:
    a, b, c = plain64.tokenizer.convert_tokens_to_ids(["a", "b", "c"])
    stops = frozenset({EOS, c, 31})  # bit 31 is a mask's sign
    state = make(plain64, StructuredOutput(regex="[abc]{0,3}"), 2, stops)
    root, first, second = masks_of(state, [5, a, b], [-1, 0, 1])
    assert not root & stops and not first & stops
    assert {EOS, c} <= second, "two tokens are said"
    assert {EOS, c} <= masks_of(make(plain64, StructuredOutput(regex="[abc]{0,3}"), 0, stops), [5], [-1])[0]
    only_the_end = make(plain64, StructuredOutput(regex=""), 2, stops)
    assert masks_of(only_the_end, [5], [-1]) == [{EOS}]


def test_a_tree_leaves_the_state_as_it_was(plain64: LLM) -> None:
    """Drafts that are allowed, forbidden, or end the text: the output's own state knows of none."""
    structured, rng = GRAMMARS[0], random.Random(5)
    oracle, state = Oracle(plain64, structured), make(plain64, structured)
    before = masks_of(state, [5], [-1])
    for _ in range(10):
        masks_of(state, *random_tree(rng, oracle, [], 10))
    assert masks_of(state, [5], [-1]) == before and state.error is None
