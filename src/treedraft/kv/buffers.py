"""The one place where lasting buffers come from, so that each has a name, a formula and, under debugging, guards."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from treedraft.errors import InvariantError

Kind = Literal["weights", "kv", "index", "mask", "logits", "workspace", "graph"]
KINDS: tuple[Kind, ...] = ("weights", "kv", "index", "mask", "logits", "workspace", "graph")
ALL_BACKENDS = "all"  # a buffer that every attention backend has


@dataclass(frozen=True)
class BufferRecord:
    """One buffer: what it is called, what it is for, and how its size comes about."""

    name: str
    kind: Kind
    backend: str  # an attention backend's name, or ALL_BACKENDS
    formula: str  # names, then the numbers: "max_batch * width * 4 B = 160 * 2049 * 4"
    bytes: int


class Source(Protocol):
    """Where `Buffers` gets memory. The plain one is torch; red zones put guards around it."""

    def allocate(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory of that shape, contiguous, of any content."""
        ...

    def allocate_rows(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory of that shape, whose rows along the first dimension may lie apart."""
        ...

    def room(self, rows: Tensor) -> Tensor:
        """Return the memory that the writer of a table from `allocate_rows` may touch."""
        ...


class PlainSource:
    """Memory as torch gives it."""

    def allocate(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return uninitialised memory."""
        return torch.empty(shape, dtype=dtype, device=device)

    allocate_rows = allocate

    def room(self, rows: Tensor) -> Tensor:
        """Return the table itself."""
        return rows


class Buffers:
    """Allocates lasting buffers by name and keeps a record of each. On the meta device it allocates nothing."""

    def __init__(self, device: torch.device | str, redzone: Source | None = None) -> None:
        self.device = torch.device(device)
        self.records: list[BufferRecord] = []
        self._source: Source = PlainSource() if redzone is None else redzone

    def allocate(
        self,
        name: str,
        kind: Kind,
        shape: Sequence[int],
        dtype: torch.dtype,
        backend: str = ALL_BACKENDS,
        formula: str = "",
        fill: float = 0,
    ) -> Tensor:
        """Return a contiguous tensor filled with `fill`, and record it.

        formula: the shape in names, "max_batch * topk * (max_context + num_steps)"; the numbers are added here.
        Raise InvariantError if the name is taken.
        """
        self._record(name, kind, shape, dtype, backend, formula)
        return self._source.allocate(name, tuple(shape), dtype, self.device).fill_(fill)

    def allocate_rows(
        self,
        name: str,
        kind: Kind,
        shape: Sequence[int],
        dtype: torch.dtype,
        backend: str = ALL_BACKENDS,
        formula: str = "",
        fill: float = 0,
    ) -> Tensor:
        """As `allocate`, for a table [rows, ...] with a row for each step: rows may lie apart, each contiguous."""
        self._record(name, kind, shape, dtype, backend, formula)
        return self._source.allocate_rows(name, tuple(shape), dtype, self.device).fill_(fill)

    @classmethod
    def on(cls, memory: Buffers | torch.device | str) -> Buffers:
        """Return `memory` itself when it is buffers, else plain ones on that device."""
        return memory if isinstance(memory, Buffers) else cls(memory)

    def room(self, rows: Tensor) -> Tensor:
        """Return the memory [rows, n] that the writer of a table [rows, width] from `allocate_rows` may touch.

        Writers check their need against n and mask their writes with it. It is the table itself (n = width), unless
        red zones were told to let a too small row overflow into its guard.
        """
        return self._source.room(rows)

    def record(self, name: str, kind: Kind, backend: str, formula: str, num_bytes: int) -> None:
        """Record memory that something else allocates (weights, activations). Raise InvariantError if named before."""
        if any(record.name == name and record.backend == backend for record in self.records):
            raise InvariantError(f"two buffers are called {name!r}; give each its own name")
        self.records.append(BufferRecord(name, kind, backend, formula, num_bytes))

    def _record(
        self, name: str, kind: Kind, shape: Sequence[int], dtype: torch.dtype, backend: str, formula: str
    ) -> None:
        names = formula or " * ".join(f"d{i}" for i in range(len(shape)))
        numbers = " * ".join(str(size) for size in (*shape, dtype.itemsize))
        self.record(name, kind, backend, f"{names} * {dtype.itemsize} B = {numbers}", math.prod(shape) * dtype.itemsize)

    def total_bytes(self, *kinds: Kind) -> int:
        """Sum of the recorded bytes, of these kinds or of all."""
        return sum(record.bytes for record in self.records if not kinds or record.kind in kinds)
