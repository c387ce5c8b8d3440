"""Pages that outlive their sequences: a radix tree over pages, for target and draft KV alike. Host integers only."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from treedraft.errors import ConfigError, InvariantError

LOOKAHEAD = 1  # tokens after a row that its draft KV depends on: one for EAGLE and for a single MTP layer


@dataclass(eq=False, slots=True)
class CachedPage:
    """A page whose KV is known, behind that of its parents."""

    page: int
    key: tuple[int, ...]
    parent: CachedPage | None = field(repr=False)
    children: dict[tuple[int, ...], CachedPage] = field(default_factory=dict, repr=False)
    num_users: int = 0  # sequences whose page table names this page


class PrefixCache:
    """A tree whose edges are whole pages, and the order in which unused ones are given up.

    A draft row i is made of token i + 1 too, so a page is found by its own tokens and the LOOKAHEAD behind them:

        page_size 2:   root ── (3 1 4) page 7 ── (4 1 5) page 2          the text 3 1 4 1 5 ...
                                              └─ (4 1 9) page 9          the text 3 1 4 1 9 ...: another last draft row

    A user of a page uses all its parents, so a page that nobody uses has no used page behind it.
    """

    def __init__(self, page_size: int, lookahead: int = LOOKAHEAD) -> None:
        if page_size < 1 or lookahead < 0:
            raise ConfigError(f"page_size must be at least 1 and lookahead 0; got {page_size} and {lookahead}")
        self.page_size, self.lookahead = page_size, lookahead
        self.clear()

    def clear(self) -> None:
        """Forget every page, used ones too."""
        self._root = CachedPage(-1, (), None)
        self._unused: OrderedDict[CachedPage, None] = OrderedDict()  # longest unused first; a page before its parent
        self._detached: set[CachedPage] = set()  # first pages of texts that are no longer found
        self._num_pages = 0

    def __len__(self) -> int:
        return self._num_pages

    @property
    def num_unused(self) -> int:
        """Pages that `evict` can give back."""
        return len(self._unused)

    def find(self, token_ids: Sequence[int], max_pages: int) -> list[CachedPage]:
        """Return the longest cached beginning of a text, at most `max_pages` pages; uses none of them."""
        return self._behind([], token_ids, max_pages)

    def use(self, path: Iterable[CachedPage]) -> None:
        """Count one more user of each page."""
        for node in path:
            if node.num_users == 0:
                self._unused.pop(node, None)
            node.num_users += 1

    def leave(self, path: Sequence[CachedPage]) -> None:
        """Count one user less of each page, given in the order of the text. What nobody uses is now the youngest."""
        for node in reversed(path):
            if node.num_users < 1:
                raise InvariantError(f"page {node.page} of the prefix cache was left more often than used")
            node.num_users -= 1
            if node.num_users == 0:
                self._unused[node] = None

    def extend(self, path: list[CachedPage], token_ids: Sequence[int], pages: Sequence[int]) -> list[CachedPage]:
        """Put pages of a text behind `path`, which its sequence uses; return those that were taken, used as well.

        pages: of the whole text, path's included. Ends where the text does, or where another page has the same key.
        """
        node = path[-1] if path else self._root
        taken: list[CachedPage] = []
        for number, key in enumerate(self._keys(token_ids, len(path), len(pages)), len(path)):
            if key in node.children:
                break
            child = CachedPage(pages[number], key, node, num_users=1)
            node.children[key] = child
            taken.append(child)
            node = child
        self._num_pages += len(taken)
        return taken

    def keep(self, path: list[CachedPage], token_ids: Sequence[int], pages: Sequence[int]) -> set[int]:
        """End a sequence's use of `path` and keep the rest of its pages as well; return the pages that the cache has.

        Where another page has the same key, that one stays, and the rest goes behind it.
        """
        others = self._behind(path, token_ids, len(pages))
        self.use(others)
        whole = path + others
        whole += self.extend(whole, token_ids, pages)
        self.leave(whole)
        return {node.page for node in whole}

    def distrust(self, path: Sequence[CachedPage]) -> None:
        """Never find these pages again, nor any behind the first of them; users keep theirs until they leave."""
        if path and self._root.children.get(path[0].key) is path[0]:
            del self._root.children[path[0].key]
            self._detached.add(path[0])

    def evict(self) -> int:
        """Give up the page that was unused for longest, and return its number."""
        node, _ = self._unused.popitem(last=False)
        if node.children or node.parent is None:
            raise InvariantError(f"page {node.page} of the prefix cache was evicted before the pages behind it")
        if node in self._detached:
            self._detached.remove(node)
        else:
            del node.parent.children[node.key]
        self._num_pages -= 1
        return node.page

    def pages(self) -> list[int]:
        """Every cached page."""
        return [node.page for node in self._walk()]

    def check_integrity(self) -> None:
        """Raise InvariantError unless counts agree with the tree, and users of a page use its parents."""
        nodes = list(self._walk())
        unused = {node for node in nodes if node.num_users == 0}
        if len(nodes) != self._num_pages or unused != set(self._unused):
            raise InvariantError(
                f"the prefix cache counts {self._num_pages} pages, {len(self._unused)} of them unused; "
                f"its tree has {len(nodes)}, {len(unused)} unused"
            )
        for node in nodes:
            if node.num_users < sum(child.num_users for child in node.children.values()):
                raise InvariantError(f"page {node.page} of the prefix cache has fewer users than the pages behind it")

    def _behind(self, path: list[CachedPage], token_ids: Sequence[int], max_pages: int) -> list[CachedPage]:
        """The cached pages of a text behind `path`, its first ones; `max_pages` in all at most."""
        node = path[-1] if path else self._root
        found: list[CachedPage] = []
        for key in self._keys(token_ids, len(path), max_pages):
            child = node.children.get(key)
            if child is None:
                break
            found.append(child)
            node = child
        return found

    def _keys(self, token_ids: Sequence[int], first: int, max_pages: int) -> Iterator[tuple[int, ...]]:
        """Keys of a text's full pages from number `first` on; `max_pages` with those before them at most."""
        size, width = self.page_size, self.page_size + self.lookahead
        last = min(max_pages, (len(token_ids) - self.lookahead) // size)
        for start in range(first * size, last * size, size):
            yield tuple(token_ids[start : start + width])

    def _walk(self) -> Iterator[CachedPage]:
        stack = [*self._root.children.values(), *self._detached]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())
