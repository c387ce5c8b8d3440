"""Rounds of several tree shapes over one device state: their drafters, and what each costs on this machine.

Shape 0 is the configured one, whose sizes all buffers have; the others are smaller (config.offered_shapes). Without a
tree the head still extends its KV: every committed position has its draft row, whatever the next round's shape.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

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

if TYPE_CHECKING:
    from treedraft.runner.runner import Runner

TIMED_COLUMNS = 256  # prefix columns of rounds that are timed without graphs
TIMED_RUNS = 5
WARM_UP_RUNS = 2


@dataclass(frozen=True)
class RootOnlyDrafter(EagleDrafter):
    """No tree: proposes the root alone, and extends the head's KV like any other."""

    def propose(
        self, batch: DecodeBatch, rows: SamplingRows, noise: Tensor | None, root_masks: Tensor | None
    ) -> DraftTree:
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


@torch.inference_mode()
def time_shapes(
    runner: Runner, shapes: Sequence[SpeculativeConfig | None], max_batch: int, max_context: int
) -> dict[int, tuple[float, ...]]:
    """Measure a round of every shape by batch size: seconds by shape. Syncs. The engine must be idle.

    Of captured graphs, every bucket. Elsewhere of one sequence and of a full batch, as a round runs there (on a CPU its
    record), and what lies between by a straight line.

    The sequences have random roots and recycled states, hence random trees: a mixture of experts then reads about as
    many experts as for text. They have nothing committed and own no page: what attention takes for a long context,
    about the same for every shape, is left out.
    """
    graphs, state = runner.graphs, runner.state
    generator = torch.Generator(runner.device).manual_seed(0)
    vocab_size, hidden = runner.target.model.config.vocab_size, torch.empty_like(state.draft_hidden)
    roots = torch.randint(0, vocab_size, state.roots.shape, generator=generator, device=runner.device)
    hidden.normal_(generator=generator)
    sizes = graphs.buckets if graphs is not None else tuple(sorted({1, max_batch}))

    def run(rows: tuple[DecodeRow, ...], index: int) -> float:
        state.kv_lens.zero_()
        state.roots.copy_(roots)
        state.draft_hidden.copy_(hidden)
        return seconds_of(lambda: runner.run_rows(rows, index), runner.device)

    times: dict[int, tuple[float, ...]] = {}
    for size in sizes:
        rows = [timing_rows(size, shape, min(TIMED_COLUMNS, max_context)) for shape in shapes]
        for index in range(len(shapes)):
            with recorded_at_once(runner.at_shape(index)):
                for _ in range(WARM_UP_RUNS):
                    run(rows[index], index)
        # In turn, and the best of each: what else the machine does must not look like a shape's cost.
        every = [[run(rows[index], index) for index in range(len(shapes))] for _ in range(TIMED_RUNS)]
        times[size] = tuple(min(of_shape) for of_shape in zip(*every, strict=True))
    for tensor in (state.kv_lens, state.roots, state.draft_hidden):
        tensor.zero_()
    return times if graphs is not None else between(times)


def between(times: dict[int, tuple[float, ...]]) -> dict[int, tuple[float, ...]]:
    """Fill in every batch size from the smallest measured one to the largest, by a straight line."""
    low, high = min(times), max(times)

    def at(size: int) -> tuple[float, ...]:
        share = (size - low) / max(high - low, 1)
        return tuple(a + (b - a) * share for a, b in zip(times[low], times[high], strict=True))

    return {size: at(size) for size in range(low, high + 1)}


@contextmanager
def recorded_at_once(at: ShapedRound) -> Iterator[None]:
    """Let rounds be recorded on a CPU after the first one, not only once they have paid for it."""
    if at.captured is None:
        yield
        return
    usual, at.captured.record_after = at.captured.record_after, 1
    try:
        yield
    finally:
        at.captured.record_after = usual


def timing_rows(batch: int, shape: SpeculativeConfig | None, max_kv_len: int) -> tuple[DecodeRow, ...]:
    """Rows of the first slots, greedy, with nothing committed. max_kv_len: prefix columns, where they can be chosen."""
    nodes, params = 1 if shape is None else shape.num_draft_tokens, SamplingParams(temperature=0)
    return tuple(DecodeRow(slot, slot, max_kv_len, nodes, params, is_exact=True) for slot in range(batch))


def seconds_of(run: Callable[[], object], device: torch.device) -> float:
    """Seconds of one run. Syncs."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    started = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started
