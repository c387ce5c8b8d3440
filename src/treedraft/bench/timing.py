"""Times on a device: replayed CUDA graphs with a cold L2 on a GPU, wall time elsewhere; and the device's ceilings."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

FLUSH_BYTES = 256 << 20  # written between two timed runs: several times the L2 of an H200 (60 MB)
WARM_UP_RUNS = 3  # compile kernels, make handles and workspaces
MATRIX_SIZE = 8192
COPY_BYTES = 2 << 30


@dataclass(frozen=True)
class Timed:
    """Seconds of repeated runs."""

    median_s: float
    best_s: float
    worst_s: float
    repetitions: int


@dataclass(frozen=True)
class Ceilings:
    """What the device gives at best, measured: a large copy (bytes read and written), a bf16 product of 8192^3."""

    copy_bytes_per_s: float
    matmul_flop_per_s: float | None  # None where it was not measured: on a CPU it says little

    def floor_s(self, num_bytes: float, flop: float) -> float:
        """The larger of the two times that moving the bytes and doing the operations take at best."""
        by_flop = 0.0 if self.matmul_flop_per_s is None else flop / self.matmul_flop_per_s
        return max(num_bytes / self.copy_bytes_per_s, by_flop)


def measure_ceilings(device: torch.device) -> Ceilings:
    """Measure the ceilings of a device. Random data: a product of zeros can run faster. Syncs."""
    is_gpu = device.type == "cuda"
    return Ceilings(_copy_rate(device, COPY_BYTES if is_gpu else 1 << 26), _matmul_rate(device) if is_gpu else None)


def _copy_rate(device: torch.device, num_bytes: int) -> float:
    """Bytes a second, read and written ones both counted."""
    source = torch.randint(0, 255, (num_bytes // 2,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return num_bytes / time_runs(lambda: target.copy_(source), device, repetitions=10).median_s


def _matmul_rate(device: torch.device) -> float:
    """Operations a second of a bfloat16 product."""
    a, b = (torch.randn(MATRIX_SIZE, MATRIX_SIZE, dtype=torch.bfloat16, device=device) for _ in range(2))
    product = torch.empty_like(a)
    run = captured(lambda: torch.mm(a, b, out=product), device)
    return 2 * MATRIX_SIZE**3 / time_runs(run, device, repetitions=10).median_s


def time_runs(
    run: Callable[[], object],
    device: torch.device,
    repetitions: int,
    before: Callable[[], object] | None = None,
    flush_bytes: int = FLUSH_BYTES,
) -> Timed:
    """Time `run` alone, `before` and the flush of the L2 outside the clock. Syncs. Run it first to warm it up.

    before: puts back what a run changes. On a GPU each run begins when the device is idle, but for `before`.
    """
    if device.type != "cuda":
        return _summary([_wall_s(run, before) for _ in range(repetitions)])
    flushed = torch.empty(flush_bytes, dtype=torch.uint8, device=device)
    pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repetitions)]
    for start, end in pairs:
        if before is not None:
            before()
        flushed.zero_()
        start.record()
        run()
        end.record()
    torch.cuda.synchronize(device)
    return _summary([start.elapsed_time(end) / 1e3 for start, end in pairs])


def captured(run: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """Warm `run` up and return the replay of its CUDA graph, or on a CPU `run` itself. Syncs."""
    if device.type != "cuda":
        run()
        return run
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP_RUNS):
            run()
    torch.cuda.current_stream(device).wait_stream(stream)
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return _Replay(graph)


class _Replay:
    """Keeps the graph alive; dropping the object frees the graph's memory."""

    def __init__(self, graph: Any) -> None:
        self.graph = graph

    def __call__(self) -> None:
        self.graph.replay()


def _wall_s(run: Callable[[], object], before: Callable[[], object] | None) -> float:
    if before is not None:
        before()
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def _summary(seconds: list[float]) -> Timed:
    return Timed(statistics.median(seconds), min(seconds), max(seconds), len(seconds))
