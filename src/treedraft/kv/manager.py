"""Pages by sequence, on the host: a slot of the running batch owns the pages that cover its logical length."""

from __future__ import annotations

from collections.abc import Sequence

from treedraft.errors import ConfigError, InvariantError
from treedraft.kv.allocator import OutOfPages, PageAllocator
from treedraft.kv.prefix import CachedPage, PrefixCache
from treedraft.types import PageUpdate


class KVManager:
    """Owns every allocated page, by slot or in the prefix cache. Target and draft pools share the page numbers.

    slot's row:  | shared | shared | own | own | - | - |      table_width columns
    covers:      0 ............... logical length              rounded up to whole pages

    Shared pages belong to the prefix cache. They are full and never written again; every write is behind them.
    """

    def __init__(
        self, allocator: PageAllocator, page_size: int, table_width: int, cache: PrefixCache | None = None
    ) -> None:
        """`page_size` tokens a page; `table_width` pages that a row of the device's page table can hold.

        cache: keeps full pages of past sequences until others need the room; None: nothing is kept.
        """
        if page_size < 1 or table_width < 1:
            raise ConfigError(
                f"page_size and table_width must be at least 1; got page_size={page_size}, table_width={table_width}"
            )
        self.allocator = allocator
        self.page_size = page_size
        self.table_width = table_width
        self.cache = cache
        self._pages: dict[int, list[int]] = {}
        self._shared: dict[int, list[CachedPage]] = {}  # the slot's first pages, where the cache has them

    def pages_for(self, num_tokens: int) -> int:
        """Pages that cover `num_tokens` logical positions."""
        return -(-num_tokens // self.page_size)

    def num_missing(self, slot: int, num_tokens: int) -> int:
        """Pages that `reserve(slot, num_tokens)` would allocate."""
        return max(self.pages_for(num_tokens) - len(self._pages.get(slot, ())), 0)

    def can_reserve(self, slot: int, num_tokens: int) -> bool:
        """Whether `reserve(slot, num_tokens)` would find enough free pages."""
        return self.num_missing(slot, num_tokens) <= self.num_available

    @property
    def num_available(self) -> int:
        """Pages that can be had: free ones, and cached ones that nobody uses."""
        return self.allocator.num_free + (0 if self.cache is None else self.cache.num_unused)

    def find_prefix(self, token_ids: Sequence[int], max_pages: int) -> list[CachedPage]:
        """The cached pages that begin a text, at most `max_pages`. Valid until the next call that takes pages."""
        return [] if self.cache is None else self.cache.find(token_ids, max_pages)

    def attach(self, slot: int, path: list[CachedPage]) -> PageUpdate | None:
        """Begin a slot's row with cached pages; None when there are none."""
        if self._pages.get(slot):
            raise InvariantError(f"slot {slot} owns pages already; cached ones can only begin a row")
        if self.cache is None or not path:
            return None
        self.cache.use(path)
        self._shared[slot] = list(path)
        pages = tuple(node.page for node in path)
        self._pages[slot] = list(pages)
        return PageUpdate(slot=slot, column=0, pages=pages)

    def publish(self, slot: int, token_ids: Sequence[int]) -> None:
        """Let others find the slot's full pages from now on. token_ids: of its committed positions, and the next one.

        A page whose last draft row would need a further token is not yet full.
        """
        if self.cache is None or slot not in self._pages:
            return
        path = self._shared.setdefault(slot, [])
        path += self.cache.extend(path, token_ids, self._pages[slot])

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
        self._evict_for(missing)
        pages = self.allocator.alloc(missing)
        owned = self._pages.setdefault(slot, [])
        update = PageUpdate(slot=slot, column=len(owned), pages=pages)
        owned.extend(pages)
        return update

    def release(self, slot: int, token_ids: Sequence[int] = ()) -> int:
        """Give up every page of the slot and return how many there were; its table row must be cleared as well.

        token_ids: as for `publish`, of pages that the cache shall keep; the others are free.
        """
        pages, path = self._pages.pop(slot, []), self._shared.pop(slot, [])
        own = pages[len(path) :]
        if self.cache is not None:
            kept = self.cache.keep(path, token_ids, pages)
            own = [page for page in own if page not in kept]
        self.allocator.free(own)
        return len(pages)

    def distrust(self, slot: int) -> None:
        """Let nobody find the pages that the slot shares: its KV turned out to be bad."""
        if self.cache is not None:
            self.cache.distrust(self._shared.get(slot, ()))

    def drop_cache(self) -> int:
        """Free every cached page that nobody uses, and return how many there were."""
        count = 0 if self.cache is None else self.cache.num_unused
        self._evict_for(self.allocator.num_free + count)
        return count

    def reset(self) -> None:
        """Free every page of every slot and of the cache, whatever state an interrupt left them in."""
        self._pages.clear()
        self._shared.clear()
        if self.cache is not None:
            self.cache.clear()
        self.allocator.reset()

    def owned(self, slot: int) -> tuple[int, ...]:
        """The slot's pages in logical order, shared ones included."""
        return tuple(self._pages.get(slot, ()))

    def num_pages(self, slot: int) -> int:
        """How many pages the slot owns, shared ones included."""
        return len(self._pages.get(slot, ()))

    @property
    def num_owned(self) -> int:
        """Pages in use by all slots together, shared ones counted once."""
        used = 0 if self.cache is None else len(self.cache) - self.cache.num_unused
        return used + sum(len(pages) - len(self._shared.get(slot, ())) for slot, pages in self._pages.items())

    def check_integrity(self) -> None:
        """Raise InvariantError unless free + cached + owned = all pages, each page once."""
        own = [page for slot, pages in self._pages.items() for page in pages[len(self._shared.get(slot, ())) :]]
        if self.cache is None:
            return self.allocator.check_integrity(own)
        self.cache.check_integrity()
        for slot, path in self._shared.items():
            if [node.page for node in path] != self._pages[slot][: len(path)]:
                raise InvariantError(f"slot {slot} names other pages than those of the cache that it uses")
        self.allocator.check_integrity(own + self.cache.pages())

    def _evict_for(self, num_pages: int) -> None:
        """Evict until `num_pages` are free; none when that many cannot be had."""
        if self.cache is None or num_pages > self.num_available:
            return
        while self.allocator.num_free < num_pages:
            self.allocator.free([self.cache.evict()])


__all__ = ["KVManager", "OutOfPages"]
