"""Device work put down to parts: synthetic traces, and the wrappers' clock."""

from __future__ import annotations

import pytest
import torch

from small_models import write_pair
from treedraft import LLM, SpeculativeConfig
from treedraft.bench.parts import (
    DeviceEvent,
    events_of_trace,
    host_parts,
    idle_share,
    label_by_order,
    sum_parts,
    without_overlap,
    wrapped,
)
from treedraft.bench.rounds import round_of, standing
from treedraft.runner.round import Target


def mark(name: str, start: float, duration: float) -> dict:
    return {"cat": "user_annotation", "name": f"part:{name}", "ts": start, "dur": duration}


def launch(correlation: int, at: float, kind: str = "cuda_runtime") -> dict:
    return {"cat": kind, "name": "launch", "ts": at, "dur": 1.0, "args": {"correlation": correlation}}


def kernel(correlation: int, start: float, duration: float, kind: str = "kernel") -> dict:
    args = {"correlation": correlation}
    return {"cat": kind, "name": f"k{correlation}", "ts": start, "dur": duration, "args": args}


def test_events_of_trace_gives_each_kernel_the_innermost_range_of_its_launch() -> None:
    trace = [
        mark("verify/rest", 0, 100), mark("verify/moe", 10, 20), mark("verify/attention", 40, 10),
        mark("extend/rest", 200, 50),
        launch(1, 5), launch(2, 15, "cuda_driver"), launch(3, 45), launch(4, 60), launch(5, 150), launch(6, 210),
        kernel(2, 1002, 3), kernel(1, 1000, 2), kernel(3, 1010, 4), kernel(4, 1020, 5, "gpu_memcpy"),
        kernel(5, 1030, 6), kernel(6, 1040, 7, "gpu_memset"), kernel(99, 1050, 8),
        {"cat": "user_annotation", "name": "another", "ts": 0, "dur": 999}, {"ph": "M", "name": "no category"},
    ]  # fmt: skip
    events = events_of_trace(trace)
    assert [e.name for e in events] == ["k1", "k2", "k3", "k4", "k5", "k6", "k99"]
    assert sum_parts(events) == {
        ("verify", "rest"): 2 + 5,
        ("verify", "moe"): 3,
        ("verify", "attention"): 4,
        ("rest", "rest"): 6 + 8,  # launched outside, or by nobody the trace knows
        ("extend", "rest"): 7,
    }


def test_idle_share_counts_gaps_once_where_work_overlaps() -> None:
    def event(start: float, duration: float) -> DeviceEvent:
        return DeviceEvent("k", ("rest", "rest"), start, duration)

    assert idle_share([]) == 0
    assert idle_share([event(0, 10)]) == 0
    assert idle_share([event(0, 10), event(5, 2), event(8, 4), event(16, 4)]) == pytest.approx(4 / 20)


def test_without_overlap_counts_every_moment_once() -> None:
    part = ("rest", "rest")
    spans = [(0, 10), (4, 8), (5, 3), (20, 5)]  # start, duration: the second waits for the first, the third ends inside
    cut = without_overlap([DeviceEvent(str(i), part, *span) for i, span in enumerate(reversed(spans))])
    assert [(e.start_us, e.duration_us) for e in cut] == [(0, 10), (10, 2), (12, 0), (20, 5)]
    assert idle_share([DeviceEvent("", part, *span) for span in spans]) == pytest.approx(8 / 25)


def test_label_by_order_takes_the_parts_of_the_same_sequence() -> None:
    eager = [DeviceEvent(f"k{i % 7}", ("verify", f"kind {i // 5}"), 9.0 * i, 5) for i in range(30)]
    replayed = [DeviceEvent(e.name, ("rest", "rest"), i, 1) for i, e in enumerate(eager)]
    labelled = label_by_order(replayed, eager)
    assert labelled is not None and [e.part for e in labelled] == [e.part for e in eager]
    assert all(e.duration_us == 1 for e in labelled)


def test_label_by_order_bridges_a_foreign_kernel_and_refuses_many() -> None:
    eager = [DeviceEvent(f"k{i}", ("verify", f"kind {i // 5}"), 9.0 * i, 5) for i in range(30)]
    replayed = [DeviceEvent(e.name, ("rest", "rest"), i, 1) for i, e in enumerate(eager)]
    replayed[7] = DeviceEvent("another", ("rest", "rest"), 7, 2)
    labelled = label_by_order(replayed, eager)
    assert labelled is not None and labelled[7].part == ("verify", "kind 1")
    assert label_by_order([DeviceEvent(f"x{i}", ("rest", "rest"), i, 1) for i in range(30)], eager) is None


def test_wrapped_restores_every_function() -> None:
    before = Target.verify, torch.nn.Module.forward
    with wrapped(()):
        assert Target.verify is not before[0]
    assert (Target.verify, torch.nn.Module.forward) == before


def test_host_parts_of_a_round_names_its_steps(tmp_path) -> None:
    llm = LLM(**write_pair(tmp_path), device="cpu", max_batch=2, speculative=SpeculativeConfig(2, 2, 4))
    with standing(llm, 2, 20) as stand:
        _, eager = round_of(llm.runner, stand.rows)
        with torch.inference_mode():
            parts = host_parts(eager, llm.runner.backends)
    steps = {step for step, _ in parts}
    assert steps == {"draft", "select", "verify", "sample", "commit", "extend", "rest"}
    assert {kind for step, kind in parts if step == "verify"} >= {"attention", "moe", "linears", "lm_head", "plan"}
