"""Rounds recorded once and replayed without Python: on a CPU half the time of a small model's round is the interpreter.

A round has static shapes but for the number of prefix columns, and reads no host value, so `torch.jit.trace` can record
it whole. A record is made for each (batch size, sampling stages), in 0.1 to 0.3 s, once that has occurred often enough.
On the demo model, 2 cores: plain decoding 218 to 392 tokens/s, a round of tree (5, 4, 16) 13.2 to 9.4 ms (2026-12-01).

A record is some 3,000 nodes, each with the stack that made it, in three stages of compilation: 25 MiB for the demo. A
server that sees every batch size with every kind of sampling would fill gigabytes with them. So there are so many at
most; then a new one takes the place of one that fell out of use, and where there is none, rounds go on unrecorded.
"""

from __future__ import annotations

import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.jit._trace import _create_interpreter_name_lookup_fn

from treedraft.attention.reference import TorchTreeAttention
from treedraft.models.layers import Matrix
from treedraft.models.moe import MoE
from treedraft.runner.batch import DecodeBatch
from treedraft.runner.drafter import Drafter, EagleDrafter
from treedraft.runner.round import RoundTensors, Target, run_round
from treedraft.runner.state import DeviceState
from treedraft.speculative.sampling import SamplingRows
from treedraft.types import Accepted, DraftTree

Record = Callable[..., tuple[Tensor, ...]]

RECORD_AFTER = 16  # a record saves 1.5 to 4 ms a round: it has paid after some 60 rounds more
MAX_RECORDS = 32
UNUSED_ROUNDS = 1000  # a record costs as much as some 30 rounds: it is not dropped for others that come as often
STATE = (
    "kv_lens",
    "roots",
    "draft_hidden",
    "output_counts",
    "overflow",
)  # what a round reads or writes of DeviceState by itself


@dataclass(frozen=True)
class Binding:
    """A tensor that a round reaches through an object: while it is recorded, the attribute holds the record's input."""

    owner: Any
    name: str

    def get(self) -> Tensor:
        return getattr(self.owner, self.name)

    def set(self, value: Tensor) -> None:
        setattr(self.owner, self.name, value)


class CapturedRounds:
    """Runs rounds, from a record where there is one. The results are those of `run_round`."""

    def __init__(
        self, target: Target, drafter: Drafter | None, state: DeviceState, num_steps: int, record_after: int
    ) -> None:
        """record_after: eager rounds of a kind before it is recorded, at least 1: what is made once is made there."""
        self.target, self.drafter, self.state, self.num_steps = target, drafter, state, num_steps
        self.record_after = record_after
        self.bindings = [Binding(state, name) for name in STATE] + [Binding(target.pool, "data")]
        modules: list[nn.Module] = [target.model]
        if isinstance(drafter, EagleDrafter):  # see can_capture
            self.bindings.append(Binding(drafter.pool, "data"))
            modules.append(drafter.head)
        self.bindings += packed_weights(modules)
        self._num_rounds = 0
        self._used_at: dict[tuple[int, frozenset[str]], int] = {}  # when a record was used last, in rounds
        self._num_eager: Counter[tuple[int, frozenset[str]]] = Counter()
        self._records: OrderedDict[tuple[int, frozenset[str]], Record] = OrderedDict()  # longest unused first

    def run(self, batch: DecodeBatch, rows: SamplingRows) -> RoundTensors:
        """Run one round and advance the device state."""
        key = (len(batch.slots), rows.stages)
        record = self._records.get(key)
        self._num_rounds += 1
        if record is None and (self._num_eager[key] < self.record_after or not self._make_room()):
            self._num_eager[key] += 1
            return run_round(batch, rows, self.target, self.drafter, self.state, self.num_steps)
        inputs = tensors_of(batch) + tensors_of(batch.prefix) + tensors_of(rows)
        if record is None:
            record = self._records[key] = self._record(batch, rows, inputs)
        self._records.move_to_end(key)
        self._used_at[key] = self._num_rounds
        outputs = record(*inputs, *(b.get() for b in self.bindings))
        return RoundTensors(DraftTree(*outputs[:5]), outputs[5], Accepted(*outputs[6:10]), *outputs[10:])

    def _make_room(self) -> bool:
        """Whether one more record may be kept, if need be in place of one that fell out of use."""
        if len(self._records) < MAX_RECORDS:
            return True
        oldest = next(iter(self._records))
        if self._num_rounds - self._used_at[oldest] < UNUSED_ROUNDS:
            return False
        del self._records[oldest], self._used_at[oldest], self._num_eager[oldest]  # it has to occur often again
        return True

    def _record(self, batch: DecodeBatch, rows: SamplingRows, inputs: list[Tensor]) -> Record:
        """Trace one round on copies of everything that it changes."""

        def function(*tensors: Tensor) -> tuple[Tensor, ...]:
            given = list(tensors)
            traced_batch = with_tensors(batch, given, prefix=with_tensors(batch.prefix, given[_count(batch) :]))
            traced_rows = with_tensors(rows, given[_count(batch) + _count(batch.prefix) :])
            for binding, tensor in zip(self.bindings, given[len(inputs) :], strict=True):
                binding.set(tensor)
            result = run_round(traced_batch, traced_rows, self.target, self.drafter, self.state, self.num_steps)
            return (
                *tensors_of(result.tree),
                result.sampled,
                *tensors_of(result.accepted),
                result.has_nan,
                result.hidden,
                result.overflow,
            )

        originals = [binding.get() for binding in self.bindings]
        # Opaque packed weights cannot be cloned, and are not written.
        copies = [t if t.is_mkldnn else t.clone() for t in originals]
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # sizes that a record fixes: those that its key names
                return record_of(function, (*(t.clone() for t in inputs), *copies))
        finally:
            for binding, tensor in zip(self.bindings, originals, strict=True):
                binding.set(tensor)


def record_of(function: Record, inputs: tuple[Tensor, ...]) -> Record:
    """Trace a function of tensors alone. As `torch.jit.trace`, which keeps what it makes until the process ends."""
    names = _create_interpreter_name_lookup_fn(0)
    graph, _ = torch._C._create_graph_by_tracing(function, inputs, names, True, False, None, [])
    # Half of the nodes are the same few numbers. (Not among torch's stubs.)
    torch._C._jit_pass_constant_pooling(graph)  # type: ignore[attr-defined]
    return torch._C._create_function_from_graph("round", graph)


def can_capture(target: Target, drafter: Drafter | None, device: torch.device) -> bool:
    """Whether rounds can be recorded here: on a CPU, with the torch backend and a drafter whose tensors are known."""
    if device.type != "cpu" or not isinstance(target.attention, TorchTreeAttention):
        return False
    if drafter is None:
        return True
    return isinstance(drafter, EagleDrafter) and isinstance(drafter.attention, TorchTreeAttention)


def packed_weights(modules: Sequence[nn.Module]) -> list[Binding]:
    """The packed matrices of the modules, each once: a record cannot hold such a tensor as a constant."""
    matrices: dict[int, Matrix] = {}
    for module in (m for top in modules for m in top.modules()):
        values = [*vars(module).values(), *((module.packed or ()) if isinstance(module, MoE) else ())]
        for value in values:
            if isinstance(value, Matrix) and value.packed is not None:
                matrices[id(value)] = value
    return [Binding(matrix, "packed") for matrix in matrices.values()]


def _tensor_fields(value: Any) -> list[str]:
    return [f.name for f in fields(value) if isinstance(getattr(value, f.name), Tensor)]


def _count(value: Any) -> int:
    return len(_tensor_fields(value))


def tensors_of(value: Any) -> list[Tensor]:
    """The tensors among a dataclass's fields, in order."""
    return [getattr(value, name) for name in _tensor_fields(value)]


def with_tensors(value: Any, tensors: Sequence[Tensor], **others: Any) -> Any:
    """The dataclass with its tensor fields replaced, in order."""
    return replace(value, **dict(zip(_tensor_fields(value), tensors)), **others)
