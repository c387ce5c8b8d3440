"""Rounds on static buffers, a program for each batch bucket and tree shape: CUDA graphs to replay, or run as is.

A bucket holds a fixed number of rows. The batch fills the first of them; the others, padded, work on the dummy slot,
which owns no page, has nothing committed and whose tree is its root alone:

    bucket of 4, batch of 3:    slot 5 | slot 0 | slot 2 | dummy

Before a replay the host writes the bucket's inputs, every row of them, in one copy. All else is gathered from the
device's state by the program itself. After it, the first rows of the shared outputs hold the result, until the next
replay of any bucket.

A backend whose plan reads lengths on the host cannot be inside a graph. Its plans are seams: the round becomes a list
of graphs with host work between them, one graph a forward, and the host waits for the device at each.

    one graph:     | draft 1 | draft 2 | ... | verify, sample, walk, commit, extend |
    with seams:    | draft 1 | plan | draft 2 | plan | ... | plan | verify, ... | plan | extend |

Programs for batches with a grammar have the seams of runner.seam, two, and the host waits at the second alone.
"""

from __future__ import annotations

import gc
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from treedraft.attention.base import TreeAttention
from treedraft.errors import ConfigError, InvariantError
from treedraft.kv.buffers import Buffers
from treedraft.kv.page_table import PageTable
from treedraft.runner.batch import DecodeBatch, gather_decode
from treedraft.runner.round import RoundTensors
from treedraft.runner.seam import Seam, StaticSeam
from treedraft.runner.state import TABLE_STAGES, DeviceState, stages_of
from treedraft.speculative.sampling import GRAMMAR, STAGES, SamplingRows
from treedraft.types import DecodeRow

Replay = Literal["capture", "eager"]
RunRound = Callable[[DecodeBatch, SamplingRows, int, Seam | None], RoundTensors]  # int: the index of the tree's shape
CountByShape = Callable[[RoundTensors], Tensor | None]

# Sampling stages of each captured program; a batch runs the first that has all of its own. A stage that no row uses
# changes no token, but costs its kernels.
VARIANTS: tuple[frozenset[str], ...] = (
    frozenset(),
    frozenset({"noise"}),
    frozenset({"noise", "top_k", "top_p", "min_p"}),  # no table of the vocabulary's size
    STAGES,
    STAGES | {GRAMMAR},
)
WARM_UP_ROUNDS = 2  # compile kernels, make handles and workspaces, before a capture


def bucket_sizes(max_batch: int) -> tuple[int, ...]:
    """Batch sizes that get a program, ascending: powers of two, from 8 on also one between each two, and max_batch."""
    sizes = {1 << i for i in range(max_batch.bit_length())} | {3 << i for i in range(2, max_batch.bit_length())}
    return tuple(sorted({size for size in sizes if size < max_batch} | {max_batch}))


@dataclass(frozen=True)
class Program:
    """A round of one bucket, one set of stages and one tree shape."""

    inputs: Tensor  # [2 + len(TABLE_STAGES), bucket] int64: slots, node limits, rows that use each table stage
    stages: frozenset[str]
    steps: tuple[Callable[[], object], ...]  # graphs to replay, host work between them; without capture the round
    batch: DecodeBatch | None  # the captured round's, without its prefix plan; None: without capture
    shape: int = 0


class GraphState:
    """The programs of all buckets. Made by `init_graph_state`."""

    def __init__(
        self,
        run_round: RunRound,
        state: DeviceState,
        pages: PageTable,
        page_size: int,
        chain: Tensor,
        attention: TreeAttention,
        buffers: Buffers,
        max_kv_len: int,
        replay: Replay,
        count_by_shape: CountByShape = lambda result: None,
    ) -> None:
        self.count_by_shape = count_by_shape
        self.run_round, self.state, self.pages, self.page_size = run_round, state, pages, page_size
        self.chain, self.attention, self.buffers = chain, attention, buffers
        self.max_kv_len, self.replay = max_kv_len, replay
        self.seam: StaticSeam | None = None  # of programs with the stage GRAMMAR
        self.programs: dict[tuple[int, frozenset[str], int], Program] = {}
        self.outputs: RoundTensors | None = (
            None  # of shape 0, the largest: those of other shapes begin at the same words
        )
        self.by_shape: Tensor | None = None  # [max_batch, J] int64, see Runner.count_by_shape
        self._outputs_of: dict[int, RoundTensors] = {}
        self._eager_batch: DecodeBatch | None = None

    @property
    def buckets(self) -> tuple[int, ...]:
        """Batch sizes that have a program, ascending."""
        return tuple(sorted({bucket for bucket, *_ in self.programs}))

    def run(self, rows: tuple[DecodeRow, ...], shape: int = 0) -> tuple[DecodeBatch, RoundTensors, Tensor | None]:
        """Run a round for these rows, and count by shape. All holds until the next call. Syncs only with seams."""
        program = self.pick(len(rows), stages_of(tuple(r.sampling for r in rows)), shape)
        self.write_inputs(program, rows)
        if self.seam is not None and GRAMMAR in program.stages:
            self.seam.begin(tuple(r.grammar for r in rows))
        for step in program.steps:
            step()
        batch = self._eager_batch if program.batch is None else program.batch
        assert batch is not None
        outputs, by_shape = self._outputs_of[shape], self.by_shape
        counts = None if by_shape is None else by_shape[: len(rows)]
        return first_rows(batch, len(rows)), first_rows(outputs, len(rows)), counts

    def pick(self, batch_size: int, stages: frozenset[str], shape: int = 0) -> Program:
        """Return the smallest program that holds the batch and has its stages. Raise InvariantError if none does."""
        fitting = [
            (bucket, len(has), has)
            for bucket, has, of_shape in self.programs
            if bucket >= batch_size and has >= stages and of_shape == shape
        ]
        if not fitting:
            raise InvariantError(
                f"no program holds a batch of {batch_size} with the stages {sorted(stages)}; buckets {self.buckets}"
            )
        bucket, _, has = min(fitting, key=lambda entry: entry[:2])
        return self.programs[bucket, has, shape]

    def write_inputs(self, program: Program, rows: tuple[DecodeRow, ...]) -> None:
        """Copy the host's integers of every row of the bucket, padded ones included: nothing of a past batch stays."""
        num_padded = program.inputs.shape[1] - len(rows)
        of_stage = [stages_of((r.sampling,)) for r in rows]
        values = [
            [r.slot for r in rows] + [self.state.dummy_slot] * num_padded,
            [r.node_limit for r in rows] + [1] * num_padded,
            *([int(stage in own) for own in of_stage] + [0] * num_padded for stage in TABLE_STAGES),
        ]
        staged = torch.tensor(values, dtype=torch.int64)
        if program.inputs.is_cuda:
            staged = staged.pin_memory()
        program.inputs.copy_(staged, non_blocking=True)

    def round(self, inputs: Tensor, stages: frozenset[str], shape: int = 0) -> DecodeBatch:
        """Run one round on a bucket's inputs and leave its result in the outputs. Device work only, but for seams."""
        self.state.reset_dummy()
        slots, node_limits, *uses = inputs.unbind()
        batch = gather_decode(
            slots, node_limits, self.max_kv_len, self.state, self.pages, self.page_size, self.attention, self.chain
        )
        of_stage = {stage: used.bool() for stage, used in zip(TABLE_STAGES, uses, strict=True) if stage in stages}
        rows = self.state.gather_sampling(slots, stages, of_stage)
        result = self.run_round(batch, rows, shape, self.seam if GRAMMAR in stages else None)
        copy_rows(result, self._outputs_for(result, shape))
        counts = self.count_by_shape(result)
        if counts is not None:
            if self.by_shape is None:
                formula = "max_batch * shapes"
                self.by_shape = self.buffers.allocate(
                    "graph.by_shape", "graph", counts.shape, counts.dtype, formula=formula
                )
            self.by_shape[: len(counts)].copy_(counts)
        return replace(batch, prefix=None)

    def _outputs_for(self, result: RoundTensors, shape: int) -> RoundTensors:
        """Where a shape's results go. The largest bucket comes first, and in it the largest shape."""
        if self.outputs is None:
            self.outputs = allocate_like(result, "graph.output", self.buffers)
            self._outputs_of[shape] = self.outputs
        if shape not in self._outputs_of:
            num_rows = len(self.outputs.sampled)
            self._outputs_of[shape] = views_like(result, self.outputs, num_rows)
        return self._outputs_of[shape]

    def run_eagerly(self, inputs: Tensor, stages: frozenset[str], shape: int) -> None:
        """The one step of a program that is not captured."""
        self._eager_batch = self.round(inputs, stages, shape)


@torch.inference_mode()
def init_graph_state(
    max_batch: int,
    max_kv_len: int,
    run_round: RunRound,
    state: DeviceState,
    pages: PageTable,
    page_size: int,
    chain: Tensor,
    attention: TreeAttention,
    buffers: Buffers,
    replay: Replay,
    host_planned: Iterable[Any] = (),
    variants: tuple[frozenset[str], ...] = VARIANTS,
    num_shapes: int = 1,
    count_by_shape: CountByShape = lambda result: None,
) -> GraphState:
    """Make the programs of every bucket up to max_batch, the largest first, all graphs in one memory pool.

    num_shapes: tree shapes that run_round knows, shape 0 the largest. A capture shows its progress on a terminal.

    max_kv_len: the width of every program, in committed positions: no sequence may be longer. host_planned: backends
    whose plan reads lengths on the host; each has an attribute `at_host` that this module sets while it captures.
    Works on the dummy slot and the trash page alone: whatever sequences own is unchanged. Syncs.
    """
    if max_kv_len // page_size >= pages.width:
        raise ConfigError(
            f"a graph over max_kv_len {max_kv_len} needs {max_kv_len // page_size + 1} pages of {page_size} tokens in "
            f"a page-table row, which has {pages.width}; lower max_context or widen the row"
        )
    graphs = GraphState(
        run_round, state, pages, page_size, chain, attention, buffers, max_kv_len, replay, count_by_shape
    )
    seams = tuple(host_planned)
    if any(GRAMMAR in stages for stages in variants):
        graphs.seam = StaticSeam(max_batch, state.output_counts.shape[1], buffers)
        seams += (graphs.seam,)
    where = None
    if replay == "capture":
        where = _Where(torch.cuda.Stream(state.device), torch.cuda.graph_pool_handle(), seams)
    buckets = bucket_sizes(max_batch)
    number = len(buckets) * len(variants) * num_shapes
    with _no_collection(), _progress(number, is_shown=where is not None) as advance:
        for bucket in reversed(buckets):
            inputs = buffers.allocate(
                f"graph.inputs.{bucket}",
                "graph",
                (2 + len(TABLE_STAGES), bucket),
                torch.int64,
                formula="(2 + table_stages) * bucket",
            )
            for shape in range(num_shapes):
                for stages in reversed(variants):
                    program = _program(graphs, inputs, stages, shape, where)
                    graphs.programs[bucket, stages, shape] = program
                    advance()
    return graphs


@dataclass(frozen=True)
class _Where:
    """What all captures share. The allocator uses freed memory again on the stream that freed it alone: one stream."""

    stream: torch.cuda.Stream
    pool: Any
    seams: tuple[Any, ...]  # backends that plan on the host, and the grammars' seam


@contextmanager
def _no_collection() -> Iterator[None]:
    """Collect garbage now and none inside: a graph that is freed while another is captured spoils the capture."""
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _program(graphs: GraphState, inputs: Tensor, stages: frozenset[str], shape: int, where: _Where | None) -> Program:
    """Make one program, captured or not. The first of each shape also makes the shape's outputs."""
    program = Program(inputs, stages, (lambda: graphs.run_eagerly(inputs, stages, shape),), None, shape)
    graphs.write_inputs(program, ())
    if where is not None:
        return _capture(graphs, program, where)
    if shape not in graphs._outputs_of:
        graphs.round(inputs, stages, shape)
    return program


@contextmanager
def _progress(total: int, is_shown: bool) -> Iterator[Callable[[], None]]:
    """Yield a function that advances a bar over the captures; the bar is drawn on a terminal alone."""
    if not is_shown or not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(transient=True, console=Console(stderr=True)) as bar:
        task = bar.add_task("capturing CUDA graphs", total=total)
        yield lambda: bar.advance(task)


def _capture(graphs: GraphState, program: Program, where: _Where) -> Program:
    """Record a round whose rows are all padded. Syncs."""
    inputs, stages, shape, stream = program.inputs, program.stages, program.shape, where.stream
    stream.wait_stream(torch.cuda.current_stream(inputs.device))
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP_ROUNDS):
            graphs.round(inputs, stages, shape)
        torch.cuda.synchronize(inputs.device)
        recording = _Recording(where.pool)
        try:
            for seam in where.seams:
                seam.at_host = recording.cut
            recording.begin()
            batch = graphs.round(inputs, stages, shape)
            recording.end()
        except BaseException:
            with suppress(RuntimeError):
                recording.graph.capture_end()
            raise
        finally:
            for seam in where.seams:
                seam.at_host = run_now
    torch.cuda.current_stream(inputs.device).wait_stream(stream)
    torch.cuda.synchronize(inputs.device)
    return Program(inputs, stages, tuple(recording.steps), batch, shape)


def run_now(host_step: Callable[[], None]) -> None:
    """What a backend's `at_host` is outside a capture."""
    host_step()


class _Recording:
    """A round as a list of steps, while it is captured."""

    def __init__(self, pool: Any) -> None:
        self.pool = pool
        self.steps: list[Callable[[], object]] = []
        self.graph = torch.cuda.CUDAGraph()

    def begin(self) -> None:
        self.graph = torch.cuda.CUDAGraph()
        self.graph.capture_begin(pool=self.pool)

    def end(self) -> None:
        self.graph.capture_end()
        self.steps.append(self.graph.replay)

    def cut(self, host_step: Callable[[], None]) -> None:
        """End the graph, let it compute what the host step reads, take that step, and go on in a new graph."""
        self.end()
        self.graph.replay()
        host_step()
        self.steps.append(host_step)
        self.begin()


# ------------------------------------------------------------------ dataclasses of tensors, row by row

_T = TypeVar("_T")
_WHOLE = frozenset({"chain", "overflow"})  # fields whose first dimension is not the batch


def first_rows(value: _T, num_rows: int) -> _T:
    """Return views of the first rows of every tensor in a dataclass, nested ones included; what has no rows stays."""
    if isinstance(value, Tensor):
        return value[:num_rows] if value.dim() else value  # type: ignore[return-value]
    if is_dataclass(value) and not isinstance(value, type):
        parts = {f.name: getattr(value, f.name) for f in fields(value) if f.name not in _WHOLE}
        return replace(value, **{name: first_rows(part, num_rows) for name, part in parts.items()})
    return value


def allocate_like(value: _T, name: str, buffers: Buffers) -> _T:
    """Return the same dataclass with fresh named buffers in place of its tensors."""
    if isinstance(value, Tensor):
        formula = " * ".join(("max_batch", "num_draft_tokens", "columns")[: value.dim()])
        return buffers.allocate(name, "graph", value.shape, value.dtype, formula=formula)  # type: ignore[return-value]
    if is_dataclass(value) and not isinstance(value, type):
        parts = {f.name: allocate_like(getattr(value, f.name), f"{name}.{f.name}", buffers) for f in fields(value)}
        return replace(value, **parts)
    return value


def views_like(value: _T, larger: _T, num_rows: int) -> _T:
    """Return the dataclass's tensors, of `num_rows` rows, as views of the first words of `larger`'s."""
    if isinstance(value, Tensor):
        assert isinstance(larger, Tensor)
        shape = (num_rows, *value.shape[1:]) if value.dim() else ()
        return larger.view(-1)[: math.prod(shape)].view(shape)  # type: ignore[return-value]
    if is_dataclass(value) and not isinstance(value, type):
        parts = {
            f.name: getattr(larger, f.name)
            if f.name in _WHOLE
            else views_like(getattr(value, f.name), getattr(larger, f.name), num_rows)
            for f in fields(value)
        }
        return replace(value, **parts)
    return value


def copy_rows(source: Any, target: Any) -> None:
    """Copy every tensor of a dataclass over the first rows of the same one in `target`: one launch for each dtype."""
    pairs: dict[torch.dtype, list[tuple[Tensor, Tensor]]] = {}
    for given, kept in zip(tensors_of(source), tensors_of(target), strict=True):
        pairs.setdefault(given.dtype, []).append((kept[: len(given)] if given.dim() else kept, given))
    for of_dtype in pairs.values():
        rows, given_rows = zip(*of_dtype, strict=True)
        torch._foreach_copy_(rows, given_rows)


def tensors_of(value: Any) -> list[Tensor]:
    """Return every tensor of a dataclass, nested ones included, in order."""
    if isinstance(value, Tensor):
        return [value]
    if is_dataclass(value):
        return [tensor for f in fields(value) for tensor in tensors_of(getattr(value, f.name))]
    return []
