import pytest
import torch

from treedraft.attention.reference import TorchTreeAttention, unpack_bits
from treedraft.types import TreeRows


def test_unpack_bits_of_every_single_bit_gives_it_alone():
    for num_bits in (64, 70, 192):
        words = -(-num_bits // 64)
        for bit in range(num_bits):
            value = torch.zeros(1, words, dtype=torch.int64)
            value[0, bit // 64] = 1 << bit % 64 if bit % 64 < 63 else -(2**63)
            assert unpack_bits(value, num_bits)[0].nonzero()[:, 0].tolist() == [bit]


def test_unpack_bits_of_all_ones_are_ones_not_minus_ones():
    assert unpack_bits(torch.full((2, 2), -1), 128).tolist() == [[1] * 128] * 2


@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_plan_columns_read_prefix_then_named_tree_slots_else_the_zero_slot(page_size):
    table = torch.arange(2, 2 + 2 * 12, dtype=torch.int32).view(2, 12)
    rows = TreeRows(table, torch.tensor([4, 6]), torch.tensor([[[0b001], [0b101]], [[0b100], [0b100]]]), 3, 7)
    plan = TorchTreeAttention().plan(rows, page_size)
    num_prefix = plan.slots.shape[1] - 3
    assert num_prefix > 7  # at least one column that reads the zero slot for every sequence
    for b, kv_len in enumerate((4, 6)):
        logical = [int(table[b, p // page_size]) * page_size + p % page_size for p in range(kv_len + 3)]
        named = [0, 2] if b == 0 else [2]
        tree = [logical[kv_len + j] if j in named else 0 for j in range(3)]
        assert plan.slots[b].tolist() == logical[:kv_len] + [0] * (num_prefix - kv_len) + tree
    assert (plan.mask[0, :, :4] == 0).all() and (plan.mask[0, :, 4:num_prefix] < -1e29).all()
    assert plan.mask[:, :, num_prefix:].tolist() == [
        [[0, -torch.inf, -torch.inf], [0, -torch.inf, 0]],
        [[-torch.inf, -torch.inf, 0]] * 2,
    ]


def test_plan_tree_slots_in_the_trash_page_read_zeros():
    """A sequence short of pages may name slots that it does not own: what others wrote there must not matter."""
    table = torch.tensor([[5, 1]], dtype=torch.int32)
    rows = TreeRows(table, torch.tensor([3]), torch.tensor([[[0b11]]]), tree_len=2, max_kv_len=3)
    assert TorchTreeAttention().plan(rows, 4).slots.tolist() == [[20, 21, 22, 0, 23, 0]]
