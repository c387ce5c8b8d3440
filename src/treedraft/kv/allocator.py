"""Pages as host integers: who owns which, and which are free."""

from __future__ import annotations

from collections.abc import Iterable

from treedraft.errors import ConfigError, InvariantError, TreedraftError

ZERO_PAGE = 0  # never written, holds zeros: attention reads it in place of columns that no row may see
TRASH_PAGE = 1  # written by rows that own nothing, never read by a live row
NUM_RESERVED_PAGES = 2


class OutOfPages(TreedraftError):
    """More pages were asked for than are free; nothing was allocated. Free some, or ask for fewer."""


class PageAllocator:
    """Hands out page numbers of one pool; pages 0 (zero) and 1 (trash) are reserved and never handed out.

    0     1      2 ................ num_pages - 1
    zero  trash  free or owned, each by one owner
    """

    def __init__(self, num_pages: int) -> None:
        """Raise ConfigError unless at least one page is left beside the reserved ones."""
        if num_pages <= NUM_RESERVED_PAGES:
            raise ConfigError(
                f"a pool needs more than its {NUM_RESERVED_PAGES} reserved pages; got {num_pages} pages in all. "
                "Raise kv_memory_bytes, or lower page_size."
            )
        self.num_pages = num_pages
        self.reset()

    def reset(self) -> None:
        """Take every page back at once."""
        pages = range(self.num_pages - 1, NUM_RESERVED_PAGES - 1, -1)
        self._free = list(pages)  # a stack: lowest page on top at first
        self._freed = list(pages)
        self._is_owned = bytearray(self.num_pages)

    @property
    def num_free(self) -> int:
        """Pages that `alloc` can still give."""
        return len(self._free)

    @property
    def num_allocatable(self) -> int:
        """Pages that exist beside the reserved ones."""
        return self.num_pages - NUM_RESERVED_PAGES

    def alloc(self, num_pages: int) -> tuple[int, ...]:
        """Take `num_pages` free pages. Raise OutOfPages, and take none, when fewer are free."""
        if num_pages < 0:
            raise InvariantError(f"alloc needs a count >= 0; got {num_pages}")
        if num_pages > len(self._free):
            raise OutOfPages(
                f"{num_pages} pages asked for, {len(self._free)} of {self.num_allocatable} free: "
                "release a sequence, or give the pool more memory (kv_memory_bytes)"
            )
        pages = tuple(self._free.pop() for _ in range(num_pages))
        for page in pages:
            self._is_owned[page] = 1
        return pages

    def free(self, pages: Iterable[int]) -> None:
        """Give pages back. Raise InvariantError for a page that is not owned: free already, reserved or foreign."""
        for page in pages:
            if not NUM_RESERVED_PAGES <= page < self.num_pages:
                raise InvariantError(f"page {page} was freed; pages of this pool are 2..{self.num_pages - 1}")
            if not self._is_owned[page]:
                raise InvariantError(f"page {page} was freed twice")
            self._is_owned[page] = 0
            self._free.append(page)
            self._freed.append(page)

    def take_freed(self) -> tuple[int, ...]:
        """Pages freed since the last call: their KV means nothing from the next step on."""
        freed, self._freed = tuple(self._freed), []
        return freed

    def check_integrity(self, owned: Iterable[int]) -> None:
        """Raise InvariantError unless `owned` and the free pages together are every page, each once."""
        owned = list(owned)
        if len(set(owned)) != len(owned):
            twice = sorted({page for page in owned if owned.count(page) > 1})
            raise InvariantError(f"pages {twice} are owned twice")
        if sorted(owned + self._free) != list(range(NUM_RESERVED_PAGES, self.num_pages)):
            every = set(range(NUM_RESERVED_PAGES, self.num_pages))
            lost, both = sorted(every - set(owned) - set(self._free)), sorted(set(owned) & set(self._free))
            raise InvariantError(
                f"free + owned is not every page: {len(self._free)} free, {len(owned)} owned, "
                f"{self.num_allocatable} in all; lost {lost[:8]}, free and owned {both[:8]}"
            )
        if any(not self._is_owned[page] for page in owned) or any(self._is_owned[page] for page in self._free):
            raise InvariantError("the allocator's marks disagree with its owners")
