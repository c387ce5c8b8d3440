"""Where a round's time goes: functions are wrapped while it is measured, and device work is put down to the innermost.

On a GPU the profiler's trace tells which kernels a function launched, and how long each ran; on a CPU the wrappers
themselves take the time. A function that is not there any more is left out: its work counts for the one around it.
"""

from __future__ import annotations

import functools
import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

REST = "rest"
MARK = "part:"  # begins the name of every range in the trace
DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
MOST_FOREIGN = 0.1
LAUNCHES = ("cuda_runtime", "cuda_driver")

# (module, class or "", function, step of the round or "", kind of work or "")
WRAPPED: tuple[tuple[str, str, str, str, str], ...] = (
    ("treedraft.runner.drafter", "EagleDrafter", "propose", "draft", ""),
    ("treedraft.runner.operators", "TorchOperators", "select", "select", ""),
    ("treedraft.runner.operators", "TritonOperators", "select", "select", ""),
    ("treedraft.runner.drafter", "EagleDrafter", "_best_children", "", "children"),
    ("treedraft.runner.round", "Target", "verify", "verify", ""),
    ("treedraft.runner.round", "", "round_noise", "sample", ""),
    ("treedraft.runner.round", "", "sample_nodes", "sample", ""),
    ("treedraft.runner.round", "", "process", "sample", ""),
    ("treedraft.runner.round", "", "sample", "sample", ""),
    ("treedraft.runner.round", "", "walk", "sample", ""),
    ("treedraft.runner.round", "", "path_has_nan", "sample", ""),
    ("treedraft.runner.round", "Target", "commit", "commit", ""),
    ("treedraft.runner.drafter", "EagleDrafter", "extend", "extend", ""),
    ("treedraft.models.deepseek", "DeepseekModel", "logits", "verify", "lm_head"),
    ("treedraft.models.draft.eagle3", "Eagle3MlaHead", "logits", "", "lm_head"),
    ("treedraft.models.moe", "MoE", "forward", "", "moe"),
    ("treedraft.models.layers", "MLP", "forward", "", "linears"),
    ("treedraft.models.mla", "MLA", "forward", "", "linears"),
)
ATTENTION = ("plan_prefix", "plan_tree", "plan", "run_mla", "run_mla_with_lse", "run_gqa")  # of each backend


@dataclass(frozen=True)
class DeviceEvent:
    """A kernel, copy or fill."""

    name: str
    part: tuple[str, str]  # step of the round, kind of work
    start_us: float
    duration_us: float


class HostClock:
    """Exclusive wall time by part: time in a wrapped function that no wrapped function inside it took."""

    def __init__(self) -> None:
        self.seconds: dict[tuple[str, str], float] = defaultdict(float)
        self._stack: list[tuple[str, str]] = [(REST, REST)]
        self._since = time.perf_counter()

    def enter(self, part: tuple[str, str]) -> None:
        """Begin a part inside the current one."""
        self._charge()
        self._stack.append(part)

    def leave(self) -> None:
        """Go back to the part around."""
        self._charge()
        self._stack.pop()

    @property
    def part(self) -> tuple[str, str]:
        return self._stack[-1]

    def _charge(self) -> None:
        now = time.perf_counter()
        self.seconds[self._stack[-1]] += now - self._since
        self._since = now


@contextmanager
def wrapped(backends: Iterable[object]) -> Iterator[HostClock]:
    """Wrap every function of WRAPPED, and the methods of these attention backends, while the block runs."""
    clock = HostClock()
    undo: list[tuple[Any, str, Any]] = []
    targets: list[tuple[Any, str, str, str]] = []
    for module_name, class_name, function, step, kind in WRAPPED:
        module = import_module(module_name)
        targets.append((getattr(module, class_name, None) if class_name else module, function, step, kind))
    for owner in {type(backend) for backend in backends}:
        targets += [(owner, name, "", "plan" if name.startswith("plan") else "attention") for name in ATTENTION]
    try:
        for owner, function, step, kind in targets:
            original = getattr(owner, function, None)
            if original is not None:
                undo.append((owner, function, vars(owner).get(function)))
                setattr(owner, function, _wrap(original, step, kind, clock))
        yield clock
    finally:
        for owner, function, own in reversed(undo):
            if own is None:
                delattr(owner, function)  # inherited
            else:
                setattr(owner, function, own)


def _wrap(function: Callable[..., Any], step: str, kind: str, clock: HostClock) -> Callable[..., Any]:
    @functools.wraps(function)
    def measured(*arguments: Any, **named: Any) -> Any:
        outer_step, outer_kind = clock.part
        part = (step or outer_step, kind or (REST if step else outer_kind))
        clock.enter(part)
        try:
            with torch.profiler.record_function(MARK + "/".join(part)):
                return function(*arguments, **named)
        finally:
            clock.leave()

    return measured


def host_parts(run: Callable[[], object], backends: Iterable[object]) -> dict[tuple[str, str], float]:
    """Microseconds of one run by part, by the host's clock: right where work is done when a function returns."""
    with wrapped(backends) as clock:
        run()
        clock.enter((REST, REST))  # charges what came after the last part
    return {part: 1e6 * seconds for part, seconds in clock.seconds.items() if seconds > 0}


def device_events(run: Callable[[], object], backends: Iterable[object] = ()) -> list[DeviceEvent]:
    """Profile one run on a GPU; every kernel, copy and fill, in order of start. Syncs.

    backends: wrap the round's functions and these backends' methods; () leaves every part "rest", as for a replay.
    """
    from torch.profiler import ProfilerActivity, profile

    backends = tuple(backends)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        if backends:
            with wrapped(backends):
                run()
        else:
            run()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        return events_of_trace(json.loads(file.read_text())["traceEvents"])


def events_of_trace(trace: list[dict[str, Any]]) -> list[DeviceEvent]:
    """Device work of a Chrome trace, each with the innermost marked range in which the host launched it."""
    ranges = sorted(
        (e["ts"], e["ts"] + e["dur"], e["name"].removeprefix(MARK))
        for e in trace
        if e.get("cat") == "user_annotation" and e.get("name", "").startswith(MARK)
    )
    launched = {e["args"]["correlation"]: e["ts"] for e in trace if e.get("cat") in LAUNCHES and _correlation(e)}
    work = sorted((e for e in trace if e.get("cat") in DEVICE_WORK), key=lambda e: e["ts"])
    return [DeviceEvent(e["name"], _innermost(ranges, launched.get(_correlation(e))), e["ts"], e["dur"]) for e in work]


def _correlation(event: dict[str, Any]) -> int | None:
    return event.get("args", {}).get("correlation")


def _innermost(ranges: list[tuple[float, float, str]], at: float | None) -> tuple[str, str]:
    """Ranges nest and are sorted by their start: the last one that holds a moment is the innermost."""
    if at is not None:
        for start, end, name in reversed(ranges):
            if start <= at <= end:
                step, _, kind = name.partition("/")
                return step, kind
    return REST, REST


def without_overlap(events: Iterable[DeviceEvent]) -> list[DeviceEvent]:
    """The same work in order of start, each without the time in which what began before it still ran.

    A kernel launched while the one before runs (programmatic dependent launch) waits inside its own time.
    """
    cut: list[DeviceEvent] = []
    end_us = -float("inf")
    for event in sorted(events, key=lambda e: e.start_us):
        start_us, own_end_us = max(event.start_us, end_us), event.start_us + event.duration_us
        cut.append(replace(event, start_us=start_us, duration_us=max(0.0, own_end_us - start_us)))
        end_us = max(end_us, own_end_us)
    return cut


def sum_parts(events: Iterable[DeviceEvent]) -> dict[tuple[str, str], float]:
    """Microseconds of device work by part."""
    total: dict[tuple[str, str], float] = defaultdict(float)
    for event in events:
        total[event.part] += event.duration_us
    return dict(total)


def label_by_order(replayed: list[DeviceEvent], eager: list[DeviceEvent]) -> list[DeviceEvent] | None:
    """Give a replayed round's work the parts of the same round run eagerly: the same kernels in the same order.

    Where the two differ a little (a library may pick another kernel while it is captured), the replay's own work takes
    the part of what ran before it. None where they differ in more than MOST_FOREIGN of the replay.
    """
    blocks = SequenceMatcher(
        None, [e.name for e in eager], [e.name for e in replayed], autojunk=False
    ).get_matching_blocks()
    parts = {block.b + i: eager[block.a + i].part for block in blocks for i in range(block.size)}
    if len(parts) < (1 - MOST_FOREIGN) * len(replayed):
        return None
    labelled: list[DeviceEvent] = []
    for i, event in enumerate(replayed):
        before = labelled[-1].part if labelled else (REST, REST)
        labelled.append(replace(event, part=parts.get(i, before)))
    return labelled


def idle_share(events: list[DeviceEvent]) -> float:
    """Share of the time from the first start to the last end in which no work ran."""
    if not events:
        return 0.0
    end_us = max(e.start_us + e.duration_us for e in events)
    busy_us = sum(e.duration_us for e in without_overlap(events))
    return 1 - busy_us / (end_us - min(e.start_us for e in events))
