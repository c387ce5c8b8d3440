"""Named buffers: memory, records, and no memory at all on the meta device."""

from __future__ import annotations

import pytest
import torch

from treedraft.errors import InvariantError
from treedraft.kv.buffers import Buffers


def test_allocate_records_name_formula_and_bytes() -> None:
    buffers = Buffers("cpu")
    table = buffers.allocate("page table", "index", (3, 5), torch.int32, "all", "max_batch * columns", fill=1)
    assert table.shape == (3, 5) and table.dtype == torch.int32 and bool((table == 1).all())
    (record,) = buffers.records
    assert (record.name, record.kind, record.backend, record.bytes) == ("page table", "index", "all", 60)
    assert record.formula == "max_batch * columns * 4 B = 3 * 5 * 4"


def test_allocate_name_taken_raises() -> None:
    buffers = Buffers("cpu")
    buffers.allocate("roots", "index", (3,), torch.int64)
    with pytest.raises(InvariantError, match="roots"):
        buffers.allocate("roots", "index", (3,), torch.int64)


def test_allocate_rows_plain_room_is_the_table() -> None:
    buffers = Buffers("cpu")
    rows = buffers.allocate_rows("kv_indices", "index", (2, 7), torch.int32, fill=-1)
    assert buffers.room(rows) is rows and bool((rows == -1).all())


def test_allocate_meta_device_records_without_memory() -> None:
    buffers = Buffers("meta")
    huge = buffers.allocate("kv", "kv", (1 << 20, 1 << 20), torch.float32, formula="slots * width")
    assert huge.is_meta and buffers.total_bytes("kv") == 1 << 42 and buffers.total_bytes("index") == 0
