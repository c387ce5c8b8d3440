"""Red zones: poisoned guards around every named buffer and poison on freed pages, verified after each step.

    buffer:           | guard | words ........................ | guard |
    table of steps:   | guard | row of step 0 | guard | row of step 1 | guard |
    KV pool:          | guard | pages in use, and free pages holding poison | guard |

A guard that changed was written by someone who missed his buffer; a free page that changed, by someone who kept a page
too long. Who reads poison gets NaN, or an index far outside everything.

`unguarded` lets a packed list that is too small overflow into its guard instead of being refused: the raw symptom,
without harm, since the guard holds the largest list that any formula could have meant.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from treedraft.config import EngineConfig, speculative_tail
from treedraft.errors import ConfigError, InvariantError
from treedraft.kv.allocator import NUM_RESERVED_PAGES, ZERO_PAGE
from treedraft.kv.buffers import Buffers
from treedraft.kv.pool import LatentPool
from treedraft.runner.build import Built, lay_out
from treedraft.runner.runner import Runner, Ticket
from treedraft.types import StepPlan, StepResult

POISON = 0x7FFD  # 16 bits; repeated it is NaN in every float format and a number beyond any index in int32 and int64
ALIGNMENT = 256  # bytes; guards keep every row as aligned as plain memory
GUARD_BYTES = 512
SHOWN = 8  # trespasses that an error message lists
MODES = ("redzone", "redzone,unguarded")


@dataclass(frozen=True)
class Trespass:
    """A run of changed bytes in a guard, or on a free page."""

    name: str  # of the buffer
    place: str  # "before row 0", "behind row 0", "free page 7"
    first: int  # words from the buffer's edge (behind: 0 is the first past the end), or from the page's first slot
    last: int
    count: int  # words that changed among first .. last
    step: int

    def __str__(self) -> str:
        return f"step {self.step}: {self.name!r}, {self.place}: {self.count} words at offset {self.first}..{self.last}"


class RedZoneError(InvariantError):
    """Memory outside its buffer, or on a freed page, was written. `trespasses` says where."""

    def __init__(self, trespasses: list[Trespass]) -> None:
        more = f"\nand {len(trespasses) - SHOWN} more" if len(trespasses) > SHOWN else ""
        super().__init__("red zones were written:\n" + "\n".join(map(str, trespasses[:SHOWN])) + more)
        self.trespasses = trespasses


@dataclass(frozen=True)
class Zone:
    """One buffer's memory with its guards, in bytes: row r is raw[starts[r] : starts[r] + length]."""

    name: str
    raw: Tensor  # [n] uint8
    starts: tuple[int, ...]
    length: int
    item_size: int

    def guards(self) -> Iterable[tuple[str, int, int, int]]:
        """Yield (place, start, end, edge): a guard's bytes in raw, and the byte that its offsets count from."""
        yield "before row 0", 0, self.starts[0], self.starts[0]
        for row, start in enumerate(self.starts):
            end = self.starts[row + 1] if row + 1 < len(self.starts) else len(self.raw)
            yield f"behind row {row}", start + self.length, end, start + self.length


class GuardedSource:
    """A `kv.buffers.Source` with a guard before and behind every row."""

    def __init__(self, guard_bytes: int = GUARD_BYTES) -> None:
        self.guard_bytes = _aligned(guard_bytes)
        self.zones: list[Zone] = []

    def allocate(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory between two guards."""
        return self._guarded(name, (1, *shape), dtype, device, GUARD_BYTES)[0]

    def allocate_rows(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory with a guard before the first row and one behind each."""
        return self._guarded(name, shape, dtype, device, self.guard_bytes)

    def room(self, rows: Tensor) -> Tensor:
        """Return the table itself: its guards belong to nobody."""
        return rows

    def trespasses(self, step: int) -> list[Trespass]:
        """Return the guards that changed. Syncs."""
        return [trespass for zone in self.zones for trespass in _changed(zone, step)]

    def _guarded(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, guard_bytes: int
    ) -> Tensor:
        length = math.prod(shape[1:]) * dtype.itemsize
        stride = _aligned(length) + _aligned(guard_bytes)
        before = _aligned(GUARD_BYTES)
        raw = poisoned(before + shape[0] * stride, device)
        starts = tuple(before + row * stride for row in range(shape[0]))
        self.zones.append(Zone(name, raw, starts, length, dtype.itemsize))
        strides = torch.empty(shape[1:], device="meta").stride()
        return raw.view(dtype).as_strided(shape, (stride // dtype.itemsize, *strides), before // dtype.itemsize)


class UnguardedSource(GuardedSource):
    """Lets the writer of a table use the guard behind its row: nothing stops a list that is too long."""

    def room(self, rows: Tensor) -> Tensor:
        """Return each row with the guard behind it."""
        return rows.as_strided((rows.shape[0], rows.stride(0)), (rows.stride(0), 1), rows.storage_offset())


class FreePages:
    """Which pages are neither owned nor cached, as the plans of the steps say; their KV holds poison."""

    def __init__(self, pools: dict[str, LatentPool]) -> None:
        self.pools = pools
        num_pages = next(iter(pools.values())).num_pages
        self._free = set(range(NUM_RESERVED_PAGES, num_pages))
        self.poison([page for page in range(num_pages) if page != ZERO_PAGE])  # the trash page too: nobody reads it

    def follow(self, plan: StepPlan) -> None:
        """Poison what became free, in stream order before the plan itself, and give up what it hands out."""
        self._free.update(plan.freed_pages)
        self.poison(list(plan.freed_pages))
        for update in plan.page_updates:
            self._free.difference_update(update.pages)

    def poison(self, pages: list[int]) -> None:
        """Overwrite the KV of pages in every pool."""
        for pool in self.pools.values():
            _by_page(pool)[:, torch.tensor(pages, dtype=torch.int64, device=pool.data.device)] = POISON

    def trespasses(self, step: int) -> list[Trespass]:
        """Return the free pages that were written. Syncs."""
        found = []
        pages = sorted(self._free)
        for name, pool in self.pools.items():
            by_page = _by_page(pool)
            index = torch.tensor(pages, dtype=torch.int64, device=by_page.device)
            is_changed = (by_page[:, index] != POISON).flatten(2)
            for i in is_changed.any(-1).any(0).nonzero()[:, 0].tolist():
                halves = is_changed[:, i].any(0).nonzero()[:, 0]
                words = (halves // max(pool.data.itemsize // 2, 1)).unique().tolist()
                place = f"free page {pages[i]}"
                found.append(Trespass(name, place, words[0], words[-1], len(words), step))
        return found


@dataclass
class RedZones:
    """Red zones of one engine: the buffers to build it with, and a runner that verifies after each step."""

    source: GuardedSource
    buffers: Buffers
    step: int = 0
    pages: FreePages | None = None
    runner: Runner | None = field(default=None, repr=False)

    def watch(self, built: Built) -> RedZones:
        """Watch what was built from `buffers`; return the runner that the engine is to use."""
        self.runner = built.runner
        pools = {"target KV": built.runner.target.pool}
        draft_pool = getattr(built.runner.drafter, "pool", None)
        if draft_pool is not None:
            pools["draft KV"] = draft_pool
        self.pages = FreePages(pools)
        return self

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Ticket:
        """As Runner.launch; pages that the plan frees are poisoned first."""
        assert self.runner is not None and self.pages is not None
        self.pages.follow(plan)
        return self.runner.launch(plan)

    def collect(self, ticket: Ticket) -> StepResult:
        """As Runner.collect, then verify. Raise RedZoneError when a guard or a free page was written. Syncs."""
        assert self.runner is not None
        result = self.runner.collect(ticket)
        self.step += 1
        self.verify()
        return result

    @torch.inference_mode()
    def verify(self) -> None:
        """Raise RedZoneError when a guard or a free page was written. Syncs."""
        found = self.source.trespasses(self.step)
        if self.pages is not None:
            found += self.pages.trespasses(self.step)
        if found:
            raise RedZoneError(found)


def red_zones(mode: str, config: EngineConfig) -> RedZones:
    """Return red zones for an engine of that resolved configuration. mode: one of MODES. Raise ConfigError."""
    if mode not in MODES:
        raise ConfigError(f"debug must be one of {' or '.join(map(repr, MODES))}; got {mode!r}")
    source = GuardedSource() if mode == "redzone" else UnguardedSource(_longest_list_bytes(config))
    return RedZones(source, Buffers(config.device, source))


def _longest_list_bytes(config: EngineConfig) -> int:
    """Bytes of a list in which every tree row of a full batch names every logical position: no packed list is longer.

    On purpose not from attention.packed: a formula that is wrong there must not shrink the guard.
    """
    layout = lay_out(config)
    rows = speculative_tail(layout.config.speculative)
    return config.max_batch * rows * layout.table_width * config.page_size * 4


def poisoned(num_bytes: int, device: torch.device) -> Tensor:
    """Return bytes of poison, [num_bytes] uint8."""
    return torch.full((num_bytes // 2,), POISON, dtype=torch.int16, device=device).view(torch.uint8)


def _by_page(pool: LatentPool) -> Tensor:
    """A pool's numbers as 16-bit words, [layers, pages, page_size, words of a slot]."""
    return pool.data.view(torch.int16).unflatten(1, (pool.num_pages, pool.page_size))


def _changed(zone: Zone, step: int) -> list[Trespass]:
    found = []
    for place, start, end, edge in zone.guards():
        even = start - start % 2  # poison has a phase, and rows of bools an odd end
        expected = poisoned(_aligned(end - even), zone.raw.device)[start - even : end - even]
        offsets = (zone.raw[start:end] != expected).nonzero()[:, 0] + (start - edge)
        if len(offsets):
            words = torch.div(offsets, zone.item_size, rounding_mode="floor").unique().tolist()
            found.append(Trespass(zone.name, place, words[0], words[-1], len(words), step))
    return found


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
