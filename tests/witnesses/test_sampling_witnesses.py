"""Witnesses of fixes from logits to tokens: each passes with its fix and fails without it (debug/fixes.yaml)."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from treedraft.engine.request import Request
from treedraft.engine.text import TextStream
from treedraft.runner.operators import TorchOperators
from treedraft.runner.round import paths_of
from treedraft.runner.runner import path_logprobs
from treedraft.runner.state import DeviceState
from treedraft.speculative.sampling import process, sample
from treedraft.types import Accepted, DraftTree, PrefillRow, SamplingParams

V = 8
BITS = torch.tensor([[[0b0001], [0b0011], [0b0101], [0b1101]]])  # node 3 is node 2's child
TREE = DraftTree(
    torch.tensor([[4, 5, 6, 7]]), torch.tensor([[-1, 0, 0, 2]]), torch.tensor([[0, 1, 1, 2]]), BITS, torch.zeros(1, 4)
)


def make_state(*params: SamplingParams) -> DeviceState:
    state = DeviceState(len(params), V, 0, torch.float64, torch.device("cpu"))
    for slot, each in enumerate(params):
        state.install(PrefillRow(slot, slot, (1, 2), slot, each, ()))
    return state


def make_rows(*params: SamplingParams) -> Any:
    return make_state(*params).sampling_rows(torch.arange(len(params)), params)


def test_noise_of_the_own_sequence_and_depth() -> None:
    """Noise that favours token 3 * b + d for sequence b at depth d, over logits that are all the same."""
    noise = torch.zeros(2, 3, V)
    for b in range(2):
        for d in range(3):
            noise[b, d, 3 * b + d] = 1
    depths = torch.tensor([[0, 1, 1, 2], [0, 1, 2, 2]])
    tokens = sample(torch.zeros(2, 4, V), noise, depths, torch.ones(2))
    assert tokens.tolist() == [[0, 1, 1, 2], [3, 4, 5, 5]]


def test_settings_reach_every_node() -> None:
    """The rows of a tree of four nodes equal those of four trees of one node."""
    rows = make_rows(SamplingParams(temperature=0, logit_bias={3: -100.0, 5: 2.0}))
    logits = torch.randn(1, 4, V, generator=torch.Generator().manual_seed(0))
    empty = torch.empty(1, 4, 0, dtype=torch.int64)
    kv_lens, depths = torch.tensor([2]), TREE.depths
    together = process(logits, rows, empty, depths, kv_lens)
    for n in range(4):
        alone = process(logits[:, n : n + 1], rows, empty[:, :1], depths[:, n : n + 1], kv_lens)
        assert torch.equal(together[:, n : n + 1], alone)


def test_penalties_count_the_path() -> None:
    """Tokens on a node's path, the root left out: none, 5, 6, 6 and 7."""
    rows = make_rows(SamplingParams(temperature=0, frequency_penalty=1.0))
    logits = torch.zeros(1, 4, V)
    z = process(logits, rows, paths_of(TREE, rows, 2, TorchOperators()), TREE.depths, torch.tensor([2]))
    assert [(row < 0).nonzero().flatten().tolist() for row in z[0]] == [[], [5], [6], [6, 7]]


def test_logprobs_are_those_of_the_path() -> None:
    """The path is columns 0, 2, 3."""
    logits = torch.randn(1, 4, V, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    accepted = Accepted(torch.tensor([2]), torch.tensor([[0, 2, 3]]), torch.tensor([[6, 7, 1]]), torch.zeros(1, 3))
    result: Any = SimpleNamespace(accepted=accepted, hidden=logits)
    model: Any = SimpleNamespace(logits=lambda hidden: hidden, config=SimpleNamespace(vocab_size=V))
    own = path_logprobs(result, 1, model)[0, :, 0]
    expected = torch.stack([logits[0, c].log_softmax(-1)[t] for c, t in ((0, 6), (2, 7), (3, 1))])
    assert torch.equal(own, expected)


def test_stop_inside_a_run() -> None:
    """A stop id at any place of a run of four ends the text there."""
    for place in range(4):
        run = tuple(9 if i == place else i + 1 for i in range(4))
        params = SamplingParams(temperature=0, max_tokens=20)
        request = Request(0, (1,), params, 0, 0, frozenset({9}), 30, TextStream(None, ()))
        request.append((5,))
        request.append(run)
        assert (request.output_token_ids, request.finish_reason) == ([5, *run[: place + 1]], "stop")


def test_tables_of_a_past_request_are_not_read() -> None:
    """Slot 0's last owner had a bias and penalties; its present one has none, and runs beside one that has."""
    used = SamplingParams(temperature=0, logit_bias={3: 5.0}, presence_penalty=1.0)
    unused = SamplingParams(temperature=0)
    state = make_state(used, replace(used, logit_bias={1: 2.0}))
    state.install(PrefillRow(2, 0, (1, 2), 0, unused, ()))
    rows = state.sampling_rows(torch.arange(2), (unused, used))
    assert not rows.logit_bias[0].any() and not rows.prompt_seen[0].any()
    assert rows.logit_bias[1].tolist() == [0, 2, 0, 0, 0, 0, 0, 0]
