"""A runner whose rounds are real and whose tokens are told: for texts that a small model would never say."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from treedraft import LLM
from treedraft.types import RowResult, StepPlan, StepResult

MOST_TOKENS = 8  # of a round


class ScriptedRunner:
    """Replaces what every request says by `script`, a random number of tokens in each round.

    The KV is then that of another text, so its engine should keep no prefix cache.
    """

    def __init__(self, runner: Any):
        self.runner = runner
        self.script: list[int] | None = None  # None: the model's own tokens
        self._num_said: dict[int, int] = {}
        self._rng = random.Random(1)

    def launch(self, plan: StepPlan) -> Any:
        return self.runner.launch(plan)

    def collect(self, ticket: Any) -> StepResult:
        result = self.runner.collect(ticket)
        return result if self.script is None else replace(result, rows=tuple(map(self._said, result.rows)))

    def _said(self, row: RowResult) -> RowResult:
        assert self.script is not None
        if not row.token_ids:
            return row
        start = self._num_said.get(row.request_id, 0)
        num_tokens = self._rng.randrange(1, MOST_TOKENS + 1) if row.is_round else 1
        token_ids = tuple(self.script[start : start + num_tokens]) or (self.script[-1],)
        self._num_said[row.request_id] = start + num_tokens
        if row.logprobs is None or row.top_logprobs is None:
            return replace(row, token_ids=token_ids)
        logprobs, top = row.logprobs[:1] * len(token_ids), row.top_logprobs[:1] * len(token_ids)
        return replace(row, token_ids=token_ids, logprobs=logprobs, top_logprobs=top)


@contextmanager
def scripted(llm: LLM) -> Iterator[ScriptedRunner]:
    runner = llm.engine.runner
    llm.engine.runner = ScriptedRunner(runner)
    try:
        yield llm.engine.runner
    finally:
        llm.engine.runner = runner
