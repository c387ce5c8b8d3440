import random

import pytest

from treedraft.errors import ConfigError, InvariantError
from treedraft.kv.allocator import NUM_RESERVED_PAGES, OutOfPages, PageAllocator


def test_alloc_all_pages_gives_each_once_and_no_reserved_one():
    allocator = PageAllocator(10)
    pages = allocator.alloc(3) + allocator.alloc(5)
    assert sorted(pages) == list(range(NUM_RESERVED_PAGES, 10))
    assert allocator.num_free == 0


def test_alloc_more_than_free_raises_with_numbers_and_takes_none():
    allocator = PageAllocator(6)
    allocator.alloc(1)
    with pytest.raises(OutOfPages, match="4 pages asked for, 3 of 4 free"):
        allocator.alloc(4)
    assert allocator.num_free == 3


def test_alloc_negative_raises():
    with pytest.raises(InvariantError):
        PageAllocator(6).alloc(-1)


def test_free_twice_raises():
    allocator = PageAllocator(6)
    pages = allocator.alloc(2)
    allocator.free(pages)
    with pytest.raises(InvariantError, match=f"page {pages[0]} was freed twice"):
        allocator.free(pages[:1])


@pytest.mark.parametrize("page", [-1, 0, 1, 6])
def test_free_reserved_or_foreign_page_raises(page):
    allocator = PageAllocator(6)
    allocator.alloc(4)
    with pytest.raises(InvariantError, match=f"page {page} was freed"):
        allocator.free([page])


def test_allocator_with_reserved_pages_alone_raises():
    with pytest.raises(ConfigError, match="reserved"):
        PageAllocator(NUM_RESERVED_PAGES)


@pytest.mark.parametrize("owned", [[2, 3], [2, 3, 4, 5], [2, 3, 3]], ids=["lost", "free and owned", "twice"])
def test_check_integrity_of_wrong_owners_raises(owned):
    allocator = PageAllocator(6)
    assert allocator.alloc(3) == (2, 3, 4)
    allocator.check_integrity([4, 2, 3])
    with pytest.raises(InvariantError):
        allocator.check_integrity(owned)


def test_random_trace_keeps_every_page_owned_once_or_free():
    rng = random.Random(1)
    allocator, owned = PageAllocator(40), []
    for _ in range(2000):
        if rng.random() < 0.5 and owned:
            allocator.free(owned.pop(rng.randrange(len(owned))))
        else:
            count = rng.randrange(6)
            if count <= allocator.num_free:
                owned.append(allocator.alloc(count))
            else:
                with pytest.raises(OutOfPages):
                    allocator.alloc(count)
        allocator.check_integrity([page for pages in owned for page in pages])
