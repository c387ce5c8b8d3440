import pytest
import torch

from treedraft.errors import ConfigError
from treedraft.kv.pool import LatentPool


def make_pool(num_layers=3, num_pages=9, page_size=4, width=5, seed=4):
    pool = LatentPool(num_layers, num_pages, page_size, width, torch.float64, "cpu")
    pool.data.copy_(torch.rand(pool.data.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64))
    return pool


def move_one_by_one(data, src, dst):
    """The design's order: a sequence's rows ascending, each read just before it is written."""
    data = data.clone()
    for b in range(src.shape[0]):
        for p in range(src.shape[1]):
            data[:, dst[b, p]] = data[:, src[b, p]]
    return data


def test_pool_starts_as_zeros():
    assert (LatentPool(2, 3, 4, 5, torch.bfloat16, "cpu").data == 0).all()


def test_layer_is_a_view():
    pool = make_pool()
    pool.layer(1)[7] = 3.0
    assert (pool.data[1, 7] == 3.0).all()
    assert pool.layer(1).is_contiguous()


@pytest.mark.parametrize("columns", [[0, 2, 5], [0, 1, 2], [0, 3, 4, 5], [0, 1, 7], [0, 2, 2], [0]])
def test_move_path_to_the_front_equals_ascending_single_moves(columns):
    pool = make_pool()
    tree = torch.stack([torch.arange(12, 20), torch.tensor([35, 8, 30, 9, 31, 10, 11, 33])])  # [2, 8] scattered slots
    src = tree[:, columns]
    dst = tree[:, : len(columns)]
    expected = move_one_by_one(pool.data, src, dst)
    pool.move(src, dst)
    assert torch.equal(pool.data, expected)


def test_move_columns_beyond_the_path_to_themselves_changes_nothing_there():
    pool = make_pool()
    slots = torch.arange(12, 20)[None]
    before = pool.data.clone()
    pool.move(slots[:, [0, 2, 2, 3]], slots[:, [0, 1, 2, 3]])  # a path of two nodes, then the columns themselves
    assert torch.equal(pool.data[:, 13], before[:, 14])
    keep = [s for s in range(36) if s != 13]
    assert torch.equal(pool.data[:, keep], before[:, keep])


def test_move_random_paths_equals_ascending_single_moves():
    generator = torch.Generator().manual_seed(5)
    for _ in range(50):
        pool = make_pool(num_pages=40)
        tree = (torch.randperm(150, generator=generator)[:64] + 8).view(2, 32)
        columns = torch.stack([torch.randperm(31, generator=generator)[:6].sort().values + 1 for _ in range(2)])
        columns = torch.cat([torch.zeros(2, 1, dtype=torch.int64), columns], 1)
        src, dst = tree.gather(1, columns), tree[:, :7]
        expected = move_one_by_one(pool.data, src, dst)
        pool.move(src, dst)
        assert torch.equal(pool.data, expected)


def test_write_stores_latent_then_rope_in_one_layer_alone():
    pool = make_pool(width=5)
    before = pool.data.clone()
    latent, k_rope = torch.full((2, 2, 3), 1.0).double(), torch.full((2, 2, 2), 2.0).double()
    pool.write(1, torch.tensor([[9, 30], [10, 11]]), latent, k_rope)
    assert pool.data[1, 30].tolist() == [1, 1, 1, 2, 2]
    written = torch.zeros(pool.data.shape[:2], dtype=torch.bool)
    written[1, [9, 30, 10, 11]] = True
    assert torch.equal(pool.data[~written], before[~written])
    assert (pool.data[written] == pool.data[1, 9]).all()


def test_bytes_per_page_is_what_a_pool_takes():
    pool = LatentPool(3, 7, 4, 5, torch.bfloat16, "cpu")
    assert LatentPool.bytes_per_page(3, 4, 5, torch.bfloat16) * 7 == pool.data.nbytes


@pytest.mark.parametrize("shape", [(0, 5, 4, 5), (1, 2, 4, 5), (1, 5, 0, 5), (1, 5, 4, 0)])
def test_pool_of_impossible_sizes_raises(shape):
    with pytest.raises(ConfigError):
        LatentPool(*shape, torch.float32, "cpu")


def test_pool_of_more_slots_than_31_bits_raises_with_numbers():
    with pytest.raises(ConfigError, match="2147483648 slots"):
        LatentPool(1, 2**27, 16, 1, torch.float32, "meta")
    LatentPool(1, 2**27 - 1, 16, 1, torch.float32, "meta")
