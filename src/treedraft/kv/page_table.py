"""The device's page table: which page holds each stretch of a sequence's logical positions."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from treedraft.errors import ConfigError, InvariantError
from treedraft.kv.allocator import TRASH_PAGE
from treedraft.kv.buffers import Buffers
from treedraft.types import PageUpdate


class PageTable:
    """Rows of page numbers by slot; columns that a slot does not own name the trash page, so stray writes do no harm.

    row of a slot:  | 7 | 3 | 12 | 1 | 1 |     pages 7, 3, 12 owned, then trash
    """

    def __init__(self, max_slots: int, width: int, memory: Buffers | torch.device | str) -> None:
        """memory: the buffers to allocate from, or a device."""
        if max_slots < 1 or width < 1:
            raise ConfigError(f"a page table needs at least one row and column; got {max_slots} x {width}")
        self.width = width
        self.table = Buffers.on(memory).allocate(
            "page table", "index", (max_slots, width), torch.int32, formula="max_batch * pages", fill=TRASH_PAGE
        )

    def apply(self, updates: Iterable[PageUpdate]) -> None:
        """Write appended pages. One host-to-device copy for all of them; later updates win.

        Raise InvariantError for a row or column that the table does not have.
        """
        cells: dict[int, int] = {}
        max_slots = self.table.shape[0]
        for update in updates:
            end = update.column + len(update.pages)
            if not 0 <= update.slot < max_slots or not 0 <= update.column <= end <= self.width:
                raise InvariantError(
                    f"page update of slot {update.slot}, columns {update.column}..{end - 1}, "
                    f"is outside the table of {max_slots} rows x {self.width} columns"
                )
            start = update.slot * self.width + update.column
            cells.update(zip(range(start, start + len(update.pages)), update.pages, strict=True))
        if not cells:
            return
        staged = torch.tensor([list(cells.keys()), list(cells.values())], dtype=torch.int64)
        index, pages = staged.to(self.table.device, non_blocking=True).unbind(0)
        self.table.view(-1).index_copy_(0, index, pages.to(torch.int32))

    def clear(self, slot: int) -> None:
        """Forget the slot's pages: its row names the trash page from now on, in stream order."""
        self.table[slot].fill_(TRASH_PAGE)

    def rows(self, slots: Tensor) -> Tensor:
        """Copy the rows of `slots` [B] int64: [B, W] int32."""
        return self.table.index_select(0, slots)


def slots_of(page_rows: Tensor, positions: Tensor, page_size: int) -> Tensor:
    """Return the physical slot of each logical position: [B, R] int64.

    page_rows: [B, W] int32; positions: [B, R] int64, not negative. A position beyond the row maps to the trash
    page's first slot, so that writing it does no harm. Does not sync.
    """
    width = page_rows.shape[1]
    columns = torch.div(positions, page_size, rounding_mode="floor")
    pages = page_rows.gather(1, columns.clamp(max=width - 1))
    slots = torch.add(positions - columns * page_size, pages, alpha=page_size)
    return torch.where(positions < width * page_size, slots, TRASH_PAGE * page_size)
