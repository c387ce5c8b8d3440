import pytest
import torch

from treedraft.errors import ConfigError, InvariantError
from treedraft.kv.allocator import TRASH_PAGE
from treedraft.kv.page_table import PageTable, slots_of
from treedraft.types import PageUpdate


def test_table_unowned_entries_name_the_trash_page():
    table = PageTable(2, 3, "cpu")
    assert table.table.dtype == torch.int32
    assert table.table.tolist() == [[TRASH_PAGE] * 3] * 2


def test_apply_writes_the_named_cells_alone_and_the_last_update_wins():
    table = PageTable(3, 4, "cpu")
    table.apply([])
    table.apply([PageUpdate(2, 0, (7, 8)), PageUpdate(0, 3, (9,)), PageUpdate(2, 1, (5, 6))])
    assert table.table.tolist() == [[1, 1, 1, 9], [1, 1, 1, 1], [7, 5, 6, 1]]


@pytest.mark.parametrize(
    "update", [PageUpdate(0, 3, (2, 3)), PageUpdate(3, 0, (2,)), PageUpdate(-1, 0, (2,)), PageUpdate(1, -1, (2,))]
)
def test_apply_outside_the_table_raises_and_leaves_neighbours_alone(update):
    table = PageTable(3, 4, "cpu")
    with pytest.raises(InvariantError, match="3 rows x 4 columns"):
        table.apply([update])
    assert (table.table == TRASH_PAGE).all()


def test_clear_forgets_one_row():
    table = PageTable(2, 2, "cpu")
    table.apply([PageUpdate(0, 0, (4, 5)), PageUpdate(1, 0, (6, 7))])
    table.clear(0)
    assert table.table.tolist() == [[1, 1], [6, 7]]


def test_rows_is_a_copy_in_the_asked_order():
    table = PageTable(3, 1, "cpu")
    table.apply([PageUpdate(0, 0, (4,)), PageUpdate(2, 0, (6,))])
    rows = table.rows(torch.tensor([2, 0, 2]))
    assert rows.tolist() == [[6], [4], [6]]
    table.clear(2)
    assert rows.tolist() == [[6], [4], [6]]


def test_table_of_no_rows_raises():
    with pytest.raises(ConfigError):
        PageTable(0, 4, "cpu")


@pytest.mark.parametrize("page_size", [1, 2, 3, 16, 64])
def test_slots_of_every_position_equals_plain_arithmetic(page_size):
    generator = torch.Generator().manual_seed(3)
    width = 4
    page_rows = torch.randint(2, 50, (3, width), generator=generator, dtype=torch.int32)
    positions = torch.stack([torch.randperm(width * page_size, generator=generator) for _ in range(3)])
    slots = slots_of(page_rows, positions, page_size)
    assert slots.dtype == torch.int64
    for b in range(3):
        for r, position in enumerate(positions[b].tolist()):
            assert slots[b, r] == int(page_rows[b, position // page_size]) * page_size + position % page_size


@pytest.mark.parametrize("page_size", [1, 2, 3, 16, 64])
def test_slots_of_positions_beyond_the_row_are_trash(page_size):
    page_rows = torch.tensor([[5, 9]], dtype=torch.int32)
    positions = torch.tensor([[2 * page_size - 1, 2 * page_size, 2 * page_size + 1, 100 * page_size]])
    last = 9 * page_size + page_size - 1
    assert slots_of(page_rows, positions, page_size).tolist() == [[last] + [TRASH_PAGE * page_size] * 3]
