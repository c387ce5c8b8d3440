import random

import pytest

from treedraft.errors import ConfigError, InvariantError
from treedraft.kv.allocator import OutOfPages, PageAllocator
from treedraft.kv.manager import KVManager
from treedraft.types import PageUpdate


def make_manager(num_pages=12, page_size=4, table_width=5):
    return KVManager(PageAllocator(num_pages), page_size, table_width)


def test_reserve_grows_to_whole_pages_and_names_the_new_columns():
    kv = make_manager()
    assert kv.reserve(3, 5) == PageUpdate(slot=3, column=0, pages=(2, 3))
    assert kv.reserve(3, 8) is None
    assert kv.reserve(3, 9) == PageUpdate(slot=3, column=2, pages=(4,))
    assert kv.reserve(3, 1) is None  # never shrinks
    assert kv.owned(3) == (2, 3, 4)


def test_reserve_nothing_returns_none_and_owns_nothing():
    kv = make_manager()
    assert kv.reserve(0, 0) is None
    assert kv.owned(0) == ()


@pytest.mark.parametrize("page_size", [1, 2, 3, 16, 64])
def test_pages_for_covers_every_length_with_the_fewest_pages(page_size):
    kv = make_manager(page_size=page_size)
    for num_tokens in range(3 * page_size + 2):
        pages = kv.pages_for(num_tokens)
        assert pages * page_size >= num_tokens > (pages - 1) * page_size


def test_reserve_beyond_the_row_raises_and_changes_nothing():
    kv = make_manager(page_size=4, table_width=5)
    kv.reserve(0, 20)
    with pytest.raises(
        InvariantError, match="needs 6 pages for 21 tokens of page_size 4, but a page-table row holds 5"
    ):
        kv.reserve(0, 21)
    assert len(kv.owned(0)) == 5
    kv.check_integrity()


def test_reserve_with_too_few_pages_raises_and_changes_nothing():
    kv = make_manager(num_pages=8, page_size=4)
    kv.reserve(0, 16)
    assert not kv.can_reserve(1, 12)
    assert kv.can_reserve(1, 8)
    with pytest.raises(OutOfPages):
        kv.reserve(1, 12)
    assert kv.owned(1) == ()
    kv.check_integrity()


def test_release_frees_the_overallocated_tail_too():
    kv = make_manager()
    kv.reserve(0, 17)  # a tail that was never written counts like the rest
    assert kv.release(0) == 5
    assert kv.release(0) == 0
    assert kv.allocator.num_free == kv.allocator.num_allocatable


@pytest.mark.parametrize("sizes", [(0, 4), (4, 0)])
def test_manager_of_impossible_sizes_raises(sizes):
    with pytest.raises(ConfigError):
        KVManager(PageAllocator(6), *sizes)


def test_check_integrity_of_a_leaked_page_raises():
    kv = make_manager()
    kv.reserve(0, 4)
    kv.allocator.alloc(1)  # behind the manager's back
    with pytest.raises(InvariantError, match="lost"):
        kv.check_integrity()


def test_random_trace_rows_match_updates_and_no_page_is_lost():
    rng = random.Random(2)
    for page_size in (1, 2, 3, 16, 64):
        kv = make_manager(num_pages=30, page_size=page_size, table_width=9)
        rows: dict[int, list[int]] = {}
        for _ in range(400):
            slot = rng.randrange(5)
            if rng.random() < 0.2:
                assert kv.release(slot) == len(rows.pop(slot, []))
            else:
                num_tokens = rng.randrange(9 * page_size + 1)
                could = kv.can_reserve(slot, num_tokens)
                try:
                    update = kv.reserve(slot, num_tokens)
                except OutOfPages:
                    assert not could
                else:
                    assert could
                    row = rows.setdefault(slot, [])
                    if update is not None:
                        assert update.column == len(row)
                        row.extend(update.pages)
                    assert len(row) * page_size >= num_tokens
                    assert kv.owned(slot) == tuple(row)
            kv.check_integrity()
            assert kv.num_owned + kv.allocator.num_free == kv.allocator.num_allocatable
