"""Witnesses of fixes in captures: each passes with its fix and fails without it (debug/fixes.yaml)."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest

from treedraft.runner.graphs import GraphState
from witnesses.tiny_llm import make_llm


def test_no_garbage_is_collected_while_programs_are_made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A graph of an engine that is gone, freed while another is captured, spoils the capture."""
    seen, run_round = [], GraphState.round

    def watched(self: GraphState, *arguments: Any) -> Any:
        seen.append(gc.isenabled())
        return run_round(self, *arguments)

    monkeypatch.setattr(GraphState, "round", watched)
    make_llm(tmp_path, (2, 2, 4), cuda_graph="eager")
    assert seen and not any(seen) and gc.isenabled()
