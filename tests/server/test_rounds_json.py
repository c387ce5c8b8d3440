"""A recorded round as JSON: inert nodes gone, indices still right, every number one that JSON has."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from fake_llm import make_round
from treedraft.debug.trace import Recorder
from treedraft.server.pages.rounds import chunk_as_json, round_as_json

# Columns: r, "-", "<", "&" under "-", "b" under "<", and an inert node.
ROUND = make_round(0, 10, ord("r"), [ord("<"), ord("b"), ord("c")])


def test_round_as_json_describes_every_live_node() -> None:
    got = round_as_json(ROUND, chr)
    assert got["kv_len"] == 10
    assert got["texts"] == ["r", "-", "<", "&", "b"]
    assert got["tokens"] == [ord(c) for c in got["texts"]]
    assert (got["parents"], got["depths"]) == ([-1, 0, 0, 1, 2], [0, 1, 1, 2, 2])
    assert [round(math.exp(x), 6) for x in got["draft_logps"]] == [1.0, 0.67, 0.33, 0.45, 0.46]
    assert got["target_texts"] == ["<", "\x01", "b", "\x02", "c"]
    assert got["target_probs"] == [None] * 5
    assert (got["accepted"], got["emitted_texts"], got["emitted_depths"]) == ([0, 2, 4], ["<", "b", "c"], [1, 2, 0])


def test_round_as_json_inert_node_before_live_ones_renumbers_them() -> None:
    # root, inert, a (under the root), b (under a): nodes 0, 1, 2.
    trace = replace(
        ROUND,
        token_ids=(1, -1, 2, 3),
        parents=(-1, 0, 0, 2),
        depths=(0, 1, 1, 2),
        draft_probs=(1.0, 0.0, 0.5, 0.0),
        sampled=(2, 9, 3, 4),
        accepted_columns=(0, 2, 3),
        target_probs=(1.0, 0.0, 0.25, 0.75),
    )
    got = round_as_json(trace, str)
    assert (got["tokens"], got["parents"], got["accepted"]) == ([1, 2, 3], [-1, 0, 1], [0, 1, 2])
    assert (got["target_ids"], got["target_probs"]) == ([2, 3, 4], [None, 0.25, 0.75])
    assert json.loads(json.dumps(got, allow_nan=False)) == got  # a probability of 0 has no logarithm


def test_round_as_json_text_cut_inside_the_round_keeps_the_depths_of_what_is_left() -> None:
    got = round_as_json(replace(ROUND, emitted_token_ids=ROUND.emitted_token_ids[:2]), chr)
    assert got["emitted_depths"] == [1, 2]


def test_chunk_as_json_counts_the_first_token_and_every_round() -> None:
    got = chunk_as_json([ROUND, ROUND], chr, first_token_ids=[ord("r")])
    assert got["depths"] == [0, 1, 2, 0, 1, 2, 0]
    assert got["rounds"] == [round_as_json(ROUND, chr)] * 2
    assert chunk_as_json([], chr) == {"rounds": [], "depths": []}


def test_recorder_with_logits_records_the_targets_probability_of_each_node(tree64) -> None:
    from treedraft import SamplingParams

    runner, traced = tree64.runner, []
    runner.observer = Recorder(traced, runner.target.model.logits)
    try:
        params = SamplingParams(max_tokens=12, temperature=0, logprobs=20)
        [output] = tree64.generate(["Once upon a time"], params, progress=False)
    finally:
        runner.observer = None
    choice, start = output.outputs[0], len(output.prompt_token_ids)
    checked = 0
    for trace in traced:
        for column in trace.accepted_columns[1:]:
            index = trace.kv_len + trace.depths[column] - start
            if index < len(choice.token_ids):
                assert trace.target_probs[column] == pytest.approx(math.exp(choice.logprobs[index]), rel=1e-6)
                checked += 1
    assert checked >= 3
