import random

import pytest

from treedraft.errors import ConfigError, InvariantError
from treedraft.kv.allocator import OutOfPages, PageAllocator
from treedraft.kv.manager import KVManager
from treedraft.kv.prefix import PrefixCache


def make_manager(num_pages=12, page_size=2, table_width=20, lookahead=1):
    return KVManager(PageAllocator(num_pages + 2), page_size, table_width, PrefixCache(page_size, lookahead))


def put(kv, slot, token_ids):
    """A sequence that commits all of a text but its last token, and ends."""
    path = kv.find_prefix(token_ids, len(token_ids))
    kv.attach(slot, path)
    kv.reserve(slot, len(token_ids))
    pages = kv.owned(slot)
    kv.release(slot, token_ids)
    return pages


def found(kv, token_ids):
    return [node.page for node in kv.find_prefix(token_ids, 99)]


def test_find_prefix_needs_the_token_behind_a_page():
    kv = make_manager()
    pages = put(kv, 0, (3, 1, 4, 1, 5))
    assert found(kv, (3, 1, 4, 1, 5)) == list(pages[:2])
    assert found(kv, (3, 1, 4, 1, 9)) == list(pages[:1]), "the last draft row of page 2 was made of 5, not 9"
    assert found(kv, (3, 1, 9)) == []
    assert found(kv, (3, 1, 4, 1)) == list(pages[:1]), "nobody knows what follows the last 1"
    assert kv.num_available == 12 and kv.allocator.num_free == 10
    kv.check_integrity()


@pytest.mark.parametrize("lookahead", [0, 1, 2, 3])
def test_find_prefix_of_any_lookahead_returns_pages_whose_followers_agree(lookahead):
    kv = make_manager(lookahead=lookahead)
    text = tuple(range(1, 12))
    pages = put(kv, 0, text)
    for same in range(len(text) + 1):
        asked = (*text[:same], *[99] * (len(text) - same))
        assert found(kv, asked) == list(pages[: max(0, same - lookahead) // 2])


def test_attach_shared_pages_are_no_ones_to_evict():
    kv = make_manager(num_pages=4)
    put(kv, 0, (1, 2, 3, 4, 5))
    path = kv.find_prefix((1, 2, 3, 4, 5), 99)
    for slot in (1, 2):
        update = kv.attach(slot, path)
        assert update.column == 0 and update.pages == tuple(node.page for node in path)
    assert kv.num_owned == 2 and kv.num_available == 2
    with pytest.raises(OutOfPages):
        kv.reserve(1, 10)
    kv.reserve(1, 8)
    kv.check_integrity()
    kv.release(1)
    assert kv.num_available == 2, "slot 2 still reads them"
    kv.release(2)
    assert kv.num_available == 4
    kv.check_integrity()


def test_attach_to_a_row_with_pages_raises():
    kv = make_manager()
    put(kv, 0, (1, 2, 3))
    kv.reserve(1, 2)
    with pytest.raises(InvariantError, match="can only begin a row"):
        kv.attach(1, kv.find_prefix((1, 2, 3), 99))


def test_reserve_evicts_the_longest_unused_and_leaves_before_their_parents():
    kv = make_manager(num_pages=6)
    put(kv, 0, (1, 2, 3, 4, 5))  # two pages
    put(kv, 0, (6, 7, 8, 9, 9))  # two more, and two were never filled
    put(kv, 0, (1, 2, 3))  # the first page is young again
    kv.reserve(1, 6)
    assert [len(found(kv, t)) for t in ((1, 2, 3, 4, 5), (6, 7, 8, 9, 9))] == [1, 2]
    kv.reserve(1, 8)
    assert [len(found(kv, t)) for t in ((1, 2, 3, 4, 5), (6, 7, 8, 9, 9))] == [1, 1]
    kv.check_integrity()


def test_publish_while_running_lets_others_in_and_a_duplicate_stays_its_own():
    kv = make_manager()
    text = (1, 2, 3, 4, 5, 6, 7)
    kv.reserve(0, 8)
    kv.reserve(1, 8)
    kv.publish(0, text)
    kv.publish(1, text)
    assert found(kv, text) == list(kv.owned(0)[:3])
    kv.check_integrity()
    kv.release(1, (*text, 8, 9))  # its fourth page goes behind the three of slot 0
    assert found(kv, (*text, 8, 9))[:3] == list(kv.owned(0)[:3]) and len(found(kv, (*text, 8, 9))) == 4
    kv.check_integrity()
    kv.release(0, text)
    assert kv.num_available == 12
    kv.check_integrity()


def test_drop_cache_frees_what_nobody_uses():
    kv = make_manager()
    put(kv, 0, (1, 2, 3, 4, 5))
    kv.attach(1, kv.find_prefix((1, 2, 3), 99))
    assert kv.drop_cache() == 1
    assert kv.drop_cache() == 0 and len(kv.cache) == 1
    kv.reset()
    assert kv.allocator.num_free == 12 and len(kv.cache) == 0
    kv.check_integrity()


def test_check_integrity_of_a_page_left_too_often_raises():
    kv = make_manager()
    put(kv, 0, (1, 2, 3))
    with pytest.raises(InvariantError, match="more often than used"):
        kv.cache.leave(kv.find_prefix((1, 2, 3), 99))
    kv.cache.find((1, 2, 3), 9)[0].num_users = 1
    with pytest.raises(InvariantError, match="its tree has 1, 0 unused"):
        kv.check_integrity()


@pytest.mark.parametrize("sizes", [(0, 1), (2, -1)])
def test_cache_of_impossible_sizes_raises(sizes):
    with pytest.raises(ConfigError):
        PrefixCache(*sizes)


@pytest.mark.parametrize("page_size", [1, 2, 3, 16])
def test_random_traces_find_what_a_list_of_texts_would(page_size):
    """The oracle: every page's text with its follower, by page number."""
    rng = random.Random(page_size)
    kv = make_manager(num_pages=24, page_size=page_size, table_width=30)
    bases = [[rng.randrange(2) for _ in range(7 * page_size)] for _ in range(3)]
    texts = {}  # slot -> text
    content = {}  # page -> its whole text and the token behind it
    hits = 0
    for _ in range(1500):
        slot = rng.randrange(5)
        if slot in texts:
            text = texts.pop(slot)
            if rng.random() < 0.3:
                kv.publish(slot, text[: rng.randrange(len(text) + 1)])
            kv.release(slot, text if rng.random() < 0.8 else ())
        else:
            same, tail = rng.randrange(7 * page_size), rng.randrange(1, 4)
            text = (*rng.choice(bases)[:same], *(rng.randrange(2) for _ in range(tail)))
            path = kv.find_prefix(text, 99)
            for number, node in enumerate(path):
                assert content[node.page] == text[: (number + 1) * page_size + 1]
            hits += len(path)
            kv.attach(slot, path)
            try:
                kv.reserve(slot, len(text))
            except OutOfPages:
                kv.release(slot)
                continue
            texts[slot] = text
            for number, page in enumerate(kv.owned(slot)[len(path) :], len(path)):
                content[page] = text[: (number + 1) * page_size + 1]
        kv.check_integrity()
        assert kv.num_owned + kv.num_available == 24
    assert hits > 20


def test_distrust_of_a_bad_page_hides_all_behind_it_and_loses_none():
    kv = make_manager()
    text = (1, 2, 3, 4, 5)
    put(kv, 0, text)
    for slot in (1, 2):
        kv.attach(slot, kv.find_prefix(text, 99))
    kv.distrust(1)
    kv.distrust(2)
    assert found(kv, text) == []
    kv.check_integrity()
    fresh = put(kv, 3, text)
    kv.release(1)
    kv.release(2)
    assert found(kv, text) == list(fresh[:2]) and kv.num_available == 12
    kv.check_integrity()
    assert kv.drop_cache() == 4 and kv.allocator.num_free == 12
    kv.check_integrity()
