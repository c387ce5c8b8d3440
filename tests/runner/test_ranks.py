"""Ranks of accepted children, as results carry them: counted from the recorded trees, however rounds run."""

from __future__ import annotations

from typing import Any

import pytest

from treedraft import LLM, SamplingParams, SpeculativeConfig
from treedraft.debug.trace import RoundTrace, recording


def ranks_of(trace: RoundTrace) -> tuple[int, ...]:
    def rank(column: int) -> int:
        return [c for c, parent in enumerate(trace.parents) if parent == trace.parents[column]].index(column)

    return tuple(rank(column) for column in trace.accepted_columns[1:])


@pytest.mark.parametrize("options", [{"capture": "off"}, {"capture": "on"}, {"cuda_graph": "eager"}], ids=str)
def test_results_carry_the_rank_of_every_accepted_child(options: Any, demo_prompts: list[str]) -> None:
    llm = LLM("demo", device="cpu", speculative=SpeculativeConfig(4, 3, 10), max_batch=3, max_context=128, **options)
    results, collect = [], llm.engine.runner.collect

    def collected(ticket: Any) -> Any:
        result = collect(ticket)
        results.extend((row.request_id, row.ranks) for row in result.rows if row.is_round)
        assert all(row.ranks == () for row in result.rows if not row.is_round)
        return result

    llm.engine.runner.collect = collected  # type: ignore[method-assign]
    params = SamplingParams(temperature=0.8, seed=1, max_tokens=30, ignore_eos=True)
    rounds: list[RoundTrace] = []
    with recording(llm, rounds):
        llm.generate(demo_prompts[:3], params, progress=False)
    assert results == [(each.request_id, ranks_of(each)) for each in rounds]
    assert {rank for _, ranks in results for rank in ranks} == {0, 1, 2}
