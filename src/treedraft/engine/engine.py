"""The engine: schedule, launch, collect, outputs."""

from __future__ import annotations

from collections import deque
from typing import Any, Protocol

from treedraft.engine.request import Request
from treedraft.engine.scheduler import Scheduler
from treedraft.types import StepPlan, StepResult


class Runner(Protocol):
    """What the engine needs of a runner; tests give it a fake one."""

    def launch(self, plan: StepPlan) -> Any:
        """Enqueue a step on the device; returns a ticket at once."""

    def collect(self, ticket: Any) -> StepResult:
        """Read a launched step's results. Syncs."""


class Engine:
    """Runs requests to their end. `max_pending` steps are launched before the first is read."""

    def __init__(self, scheduler: Scheduler, runner: Runner, max_pending: int = 0):
        self.scheduler = scheduler
        self.runner = runner
        self.max_pending = max_pending
        self._in_flight: deque[Any] = deque()

    def step(self) -> list[Request]:
        """Run one step; returns the requests that the collected step changed."""
        plan = self.scheduler.schedule()
        self._launch(plan)
        results = self._collect(is_last=plan.is_empty)
        return list(dict.fromkeys(request for result in results for request in self.scheduler.commit(result)))

    @property
    def is_idle(self) -> bool:
        return self.scheduler.is_idle and not self._in_flight

    def reset(self) -> None:
        """Drop every request and all that is in flight, after an interrupt or an error at any point of a step."""
        self._in_flight.clear()  # what the device still does is over, in its order, before the next step begins
        self.scheduler.reset()

    def _launch(self, plan: StepPlan) -> None:
        if not plan.is_empty:
            self._in_flight.append(self.runner.launch(plan))

    def _collect(self, is_last: bool) -> list[StepResult]:
        """Read what is due. A grammar's masks need the tokens so far: with one, every step is read at once."""
        max_pending = 0 if self.scheduler.num_constrained else self.max_pending
        num_due = max(len(self._in_flight) - max_pending, int(is_last and bool(self._in_flight)))
        return [self.runner.collect(self._in_flight.popleft()) for _ in range(num_due)] or [StepResult(rows=())]
