"""Rounds of sequences that no prompt made, their floors, and the whole measurement on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from small_models import write_pair
from treedraft import LLM, SamplingParams, SpeculativeConfig
from treedraft.bench.results import json_safe
from treedraft.bench.rounds import PLAIN, TREE, RoundSettings, active_bytes, round_of, run_rounds, standing
from treedraft.cli.options import EngineOptions
from treedraft.errors import ConfigError
from treedraft.models.registry import load_model


def test_standing_leaves_the_engine_as_it_was(tmp_path) -> None:
    llm = LLM(**write_pair(tmp_path), device="cpu", max_batch=2, speculative=SpeculativeConfig(2, 2, 4))
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    before = llm.generate([[1, 2, 3]], params, progress=False)[0].outputs[0].token_ids
    with standing(llm, 2, 30) as stand, torch.inference_mode():
        run, _ = round_of(llm.runner, stand.rows)
        run()
        assert (llm.runner.state.kv_lens[:2] > 30).all()
        stand.put_back(llm.runner)
        assert (llm.runner.state.kv_lens[:2] == 30).all()
    assert llm.generate([[1, 2, 3]], params, progress=False)[0].outputs[0].token_ids == before
    llm.engine.scheduler.check_integrity()


def test_standing_too_many_sequences_says_what_is_needed(tmp_path) -> None:
    llm = LLM(**write_pair(tmp_path), device="cpu", max_batch=2)
    with pytest.raises(ConfigError, match="max_batch of at least 3"), standing(llm, 3, 20):
        pass


def test_active_bytes_counts_the_experts_that_rows_reach(tmp_path) -> None:
    model = load_model(Path(write_pair(tmp_path)["model"]), 64)
    everything = sum(p.numel() * 4 for p in model.parameters()) - model.embedding.numel() * 4
    expert = 3 * 16 * 8 * 4  # hidden 16, intermediate 8, float32
    assert active_bytes(model, 1) == everything - 2 * 2 * expert  # two layers, each two of four experts
    assert active_bytes(model, 2) == everything - 2 * 1 * expert
    assert active_bytes(model, 1000) == everything


def test_run_rounds_measures_plain_and_tree(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("treedraft.bench.rounds.SLACK", 40)
    settings = RoundSettings(batches=(1, 2), context=24, nodes=(1, 5), repetitions=2, loop_rounds=2)
    monkeypatch.setattr("treedraft.bench.rounds._loop", lambda *_: None)
    engine = EngineOptions(**write_pair(tmp_path), device="cpu")
    result = run_rounds(engine, SpeculativeConfig(2, 2, 4), settings)
    assert [(r.engine, r.batch) for r in result.rows] == [(PLAIN, 1), (PLAIN, 2), (TREE, 1), (TREE, 2)]
    assert all(r.round_ms > 0 and r.parts_us for r in result.rows)
    assert result.rows[0].roofline is not None and result.rows[2].roofline is None
    assert [(v.batch, v.nodes) for v in result.verifies] == [(1, 1), (1, 5), (2, 1), (2, 5)]
    assert result.verifies[0].over_one == 1
    json.dumps(json_safe(result.as_json()))
    result.render()
