"""Rounds of several tree shapes over one device state: their drafters, and what each costs on this machine.

Shape 0 is the configured one, whose sizes all buffers have; the others are smaller (config.offered_shapes). Without a
tree the head still extends its KV: every committed position has its draft row, whatever the next round's shape.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from treedraft.config import SpeculativeConfig
from treedraft.kv.buffers import Buffers
from treedraft.runner.batch import DecodeBatch
from treedraft.runner.capture import CapturedRounds
from treedraft.runner.drafter import Drafter, EagleDrafter
from treedraft.runner.round import single_node
from treedraft.speculative.sampling import SamplingRows
from treedraft.types import DecodeRow, DraftTree, SamplingParams

TIMED_RUNS = 3
WARM_UP_RUNS = 2


@dataclass(frozen=True)
class RootOnlyDrafter(EagleDrafter):
    """No tree: proposes the root alone, and extends the head's KV like any other."""

    def propose(self, batch: DecodeBatch, rows: SamplingRows, noise: Tensor | None) -> DraftTree:
        return single_node(batch)


@dataclass
class ShapedRound:
    """What differs between rounds of several shapes."""

    drafter: Drafter | None
    num_steps: int  # 0 without a tree
    captured: CapturedRounds | None = None  # its record on a CPU


def shaped_round(drafter: EagleDrafter, shape: SpeculativeConfig | None) -> ShapedRound:
    """The round of another shape, with the same head, pool and state."""
    parts = {f.name: getattr(drafter, f.name) for f in fields(EagleDrafter)}
    if shape is None:
        return ShapedRound(RootOnlyDrafter(**parts), 0)
    return ShapedRound(EagleDrafter(**{**parts, "shape": shape}), shape.num_steps)


def shape_limits(shapes: Sequence[SpeculativeConfig | None], buffers: Buffers) -> Tensor:
    """Levels and nodes of each shape, [2, J] int64 on the device."""
    sizes = [(0, 1) if shape is None else (shape.num_steps, shape.num_draft_tokens) for shape in shapes]
    limits = buffers.allocate("shape limits", "index", (2, len(sizes)), torch.int64, formula="2 * shapes")
    return limits.copy_(torch.tensor(sizes).t())


def timing_rows(batch: int, shape: SpeculativeConfig | None) -> tuple[DecodeRow, ...]:
    """Rows of the first slots, greedy, with nothing committed."""
    nodes, params = 1 if shape is None else shape.num_draft_tokens, SamplingParams(temperature=0)
    return tuple(DecodeRow(slot, slot, 0, nodes, params, is_exact=True) for slot in range(batch))


def median_s(run: Callable[[], object], device: torch.device) -> float:
    """Seconds of one run, the median of some. Syncs."""
    for _ in range(WARM_UP_RUNS):
        run()
    seconds = []
    for _ in range(TIMED_RUNS):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        started = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)
