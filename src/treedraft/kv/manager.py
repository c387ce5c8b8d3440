"""Pages by sequence, on the host: a slot of the running batch owns the pages that cover its logical length."""

from __future__ import annotations

from treedraft.errors import ConfigError, InvariantError
from treedraft.kv.allocator import OutOfPages, PageAllocator
from treedraft.types import PageUpdate


class KVManager:
    """Owns every allocated page, by slot. Target and draft pools share the page numbers.

    slot's row:  | page | page | page | - | - |      table_width columns
    covers:      0 ......... logical length           rounded up to whole pages
    """

    def __init__(self, allocator: PageAllocator, page_size: int, table_width: int) -> None:
        """`page_size` tokens a page; `table_width` pages that a row of the device's page table can hold."""
        if page_size < 1 or table_width < 1:
            raise ConfigError(
                f"page_size and table_width must be at least 1; got page_size={page_size}, table_width={table_width}"
            )
        self.allocator = allocator
        self.page_size = page_size
        self.table_width = table_width
        self._pages: dict[int, list[int]] = {}

    def pages_for(self, num_tokens: int) -> int:
        """Pages that cover `num_tokens` logical positions."""
        return -(-num_tokens // self.page_size)

    def num_missing(self, slot: int, num_tokens: int) -> int:
        """Pages that `reserve(slot, num_tokens)` would allocate."""
        return max(self.pages_for(num_tokens) - len(self._pages.get(slot, ())), 0)

    def can_reserve(self, slot: int, num_tokens: int) -> bool:
        """Whether `reserve(slot, num_tokens)` would find enough free pages."""
        return self.num_missing(slot, num_tokens) <= self.allocator.num_free

    def reserve(self, slot: int, num_tokens: int) -> PageUpdate | None:
        """Grow the slot's pages to cover logical positions [0, num_tokens); None when they do already.

        Raise OutOfPages, and change nothing, when too few pages are free; InvariantError when the row is too narrow.
        """
        if self.pages_for(num_tokens) > self.table_width:
            raise InvariantError(
                f"slot {slot} needs {self.pages_for(num_tokens)} pages for {num_tokens} tokens of page_size "
                f"{self.page_size}, but a page-table row holds {self.table_width}"
            )
        missing = self.num_missing(slot, num_tokens)
        if missing == 0:
            return None
        pages = self.allocator.alloc(missing)
        owned = self._pages.setdefault(slot, [])
        update = PageUpdate(slot=slot, column=len(owned), pages=pages)
        owned.extend(pages)
        return update

    def release(self, slot: int) -> int:
        """Free every page of the slot and return how many there were; its table row must be cleared as well."""
        pages = self._pages.pop(slot, [])
        self.allocator.free(pages)
        return len(pages)

    def reset(self) -> None:
        """Free every page of every slot, whatever state an interrupt left them in."""
        self._pages.clear()
        self.allocator.reset()

    def owned(self, slot: int) -> tuple[int, ...]:
        """The slot's pages in logical order."""
        return tuple(self._pages.get(slot, ()))

    @property
    def num_owned(self) -> int:
        """Pages owned by all slots together."""
        return sum(len(pages) for pages in self._pages.values())

    def check_integrity(self) -> None:
        """Raise InvariantError unless free + owned = all pages, each page once."""
        self.allocator.check_integrity([page for pages in self._pages.values() for page in pages])


__all__ = ["KVManager", "OutOfPages"]
