"""The attend objects of serving against attention in expanded form, written as loops."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from treedraft.attention.paged import PagedPrefillAttend, PagedTreeAttend
from treedraft.attention.reference import TorchTreeAttention
from treedraft.kv.page_table import slots_of
from treedraft.kv.pool import LatentPool
from treedraft.types import TreeRows

HEADS, KEY, ROPE, LATENT = 3, 4, 2, 8
SCALE = (KEY + ROPE) ** -0.5
INPUTS = ("q_nope", "q_rope", "latent", "k_rope")
EXACT = {"rtol": 0, "atol": 1e-12}  # float64: rounding alone


@dataclass(frozen=True)
class Rows:
    """One layer's inputs of T tokens, and its kv_b."""

    q_nope: Tensor
    q_rope: Tensor
    latent: Tensor
    k_rope: Tensor
    kv_b: Tensor

    def take(self, index) -> "Rows":
        return Rows(self.q_nope[index], self.q_rope[index], self.latent[index], self.k_rope[index], self.kv_b)

    def with_weight(self, kv_b: Tensor) -> "Rows":
        return replace(self, kv_b=kv_b)

    def run(self, attend, layer=0) -> Tensor:
        return attend.mla(layer, self.q_nope, self.q_rope, self.latent, self.k_rope, self.kv_b, SCALE)

    def stored(self) -> Tensor:
        return torch.cat((self.latent, self.k_rope), -1)


def random_rows(num_tokens: int, seed: int, value_dim: int = 5, dtype: torch.dtype = torch.float64) -> Rows:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    return Rows(
        normal(num_tokens, HEADS, KEY),
        normal(num_tokens, HEADS, ROPE),
        normal(num_tokens, LATENT),
        normal(num_tokens, ROPE),
        normal(HEADS, KEY + value_dim, LATENT),
    )


def attend_in_loops(rows: Rows, visible: list[list[int]]) -> Tensor:
    """visible: for each token the tokens that it sees, itself included. Returns [T, h, dv]."""
    out = []
    for t, seen in enumerate(visible):
        for head in range(HEADS):
            keys, values = rows.kv_b[head, :KEY], rows.kv_b[head, KEY:]
            scores = torch.stack(
                [rows.q_nope[t, head] @ (keys @ rows.latent[s]) + rows.q_rope[t, head] @ rows.k_rope[s] for s in seen]
            )
            weights = (scores * SCALE).softmax(0)
            out.append(sum(w * (values @ rows.latent[s]) for w, s in zip(weights, seen, strict=True)))
    return torch.stack(out).view(len(visible), HEADS, -1)


def causal(num_tokens: int) -> list[list[int]]:
    return [list(range(t + 1)) for t in range(num_tokens)]


def poisoned_pool(page_size: int, num_pages: int = 40, layers: int = 1, dtype=torch.float64) -> LatentPool:
    """NaN everywhere but in the zero page."""
    pool = LatentPool(layers, num_pages, page_size, LATENT + ROPE, dtype, "cpu")
    pool.data[:, page_size:] = torch.nan
    return pool


def page_rows(batch: int, width: int, seed: int) -> Tensor:
    pages = torch.randperm(batch * width, generator=torch.Generator().manual_seed(seed)) + 2
    return pages.view(batch, width).to(torch.int32)


def prefill(pool: LatentPool, table: Tensor, sequences: list[tuple[int, int]], page_size: int) -> PagedPrefillAttend:
    write_slots = torch.cat(
        [
            slots_of(table[b : b + 1], torch.arange(start, start + length)[None], page_size)[0]
            for b, (start, length) in enumerate(sequences)
        ]
    )
    return PagedPrefillAttend(pool, sequences, write_slots, table, page_size)


def tree_attend(
    pool: LatentPool, table: Tensor, kv_lens: list[int], visible: list[list[int]], page_size: int
) -> PagedTreeAttend:
    """The same tree for every sequence. visible: for each node the nodes that it sees."""
    num_nodes = len(visible)
    lens = torch.tensor(kv_lens)
    bits = torch.tensor([sum(1 << n for n in seen) for seen in visible])[None, :, None].expand(len(kv_lens), -1, -1)
    rows = TreeRows(table, lens, bits, num_nodes, max(kv_lens))
    backend = TorchTreeAttention()
    write_slots = slots_of(table, lens[:, None] + torch.arange(num_nodes), page_size)
    return PagedTreeAttend(backend, backend.plan(rows, page_size), pool, write_slots)


def joined(*rows: Rows) -> Rows:
    """Sequences one after another: leading shape [T]. The first one's kv_b serves all."""
    return Rows(*(torch.cat([getattr(r, n) for r in rows]) for n in INPUTS), rows[0].kv_b)


def batch_of(*rows: Rows) -> Rows:
    """Stack sequences: leading shape [B, R]. The first one's kv_b serves all."""
    return Rows(*(torch.stack([getattr(r, n) for r in rows]) for n in INPUTS), rows[0].kv_b)


# ------------------------------------------------------------------------------------------------ prefill


@pytest.mark.parametrize("value_dim", [2, KEY + ROPE, 9])
def test_prefill_ragged_batch_equals_loops_and_stores_its_rows(value_dim):
    pool, table, sequences = poisoned_pool(4), page_rows(3, 3, seed=1), [(0, 7), (0, 1), (0, 11)]
    rows = random_rows(19, seed=2, value_dim=value_dim)
    out = rows.run(prefill(pool, table, sequences, 4))
    first = 0
    for b, (_, length) in enumerate(sequences):
        own = rows.take(slice(first, first + length))
        torch.testing.assert_close(out[first : first + length], attend_in_loops(own, causal(length)), **EXACT)
        slots = slots_of(table[b : b + 1], torch.arange(length)[None], 4)[0]
        assert torch.equal(pool.data[0, slots], own.stored())
        first += length
    assert int(pool.data.isnan().any(-1).sum()) == 40 * 4 - 4 - 19  # nothing else was written


@pytest.mark.parametrize("page_size", [1, 2, 3, 16])
def test_prefill_in_two_chunks_equals_one_for_every_split(page_size):
    table, rows = page_rows(2, 13, seed=3), random_rows(13, seed=4)
    expected = attend_in_loops(rows, causal(13))
    for split in range(1, 13):
        pool = poisoned_pool(page_size)
        both = [(0, split), (0, 13)]  # beside a whole one
        first = joined(rows.take(slice(0, split)), rows)
        head = first.run(prefill(pool, table, both, page_size))
        tail = rows.take(slice(split, 13)).run(prefill(pool, table[:1], [(split, 13 - split)], page_size))
        torch.testing.assert_close(torch.cat((head[:split], tail)), expected, **EXACT)
        torch.testing.assert_close(head[split:], expected, **EXACT)


def test_attends_of_several_layers_and_chunks_read_their_own_layer_and_sequence():
    """Two layers with different numbers; two sequences, each with a cached prefix, in one prefill and in one tree."""
    table, pool = page_rows(2, 5, seed=23), poisoned_pool(3, layers=2)
    layers = [[random_rows(14, seed=24 + 2 * layer + b) for b in range(2)] for layer in range(2)]
    attends = [
        prefill(pool, table, [(0, 4), (0, 2)], 3),
        prefill(pool, table, [(4, 6), (2, 5)], 3),
        tree_attend(pool, table, [10, 7], causal(4), 3),
    ]
    cuts = [(0, 0), (4, 2), (10, 7), (14, 11)]
    for attend, starts, ends in zip(attends, cuts, cuts[1:]):
        for layer, rows in enumerate(layers):
            chunks = [r.take(slice(starts[b], ends[b])) for b, r in enumerate(rows)]
            out = (batch_of if attend.is_static else joined)(*chunks).run(attend, layer)
            for b, part in enumerate(out if attend.is_static else out.split([len(c.latent) for c in chunks])):
                own = rows[b].with_weight(rows[0].kv_b)
                expected = attend_in_loops(own.take(slice(0, ends[b])), causal(ends[b]))
                torch.testing.assert_close(part, expected[starts[b] :], **EXACT)


def test_prefill_bfloat16_stays_bfloat16():
    pool = poisoned_pool(4, dtype=torch.bfloat16)
    rows = random_rows(9, seed=5, dtype=torch.bfloat16)
    out = rows.run(prefill(pool, page_rows(1, 3, seed=6), [(0, 9)], 4))
    assert out.dtype == torch.bfloat16
    wide = Rows(*(x.double() for x in (rows.q_nope, rows.q_rope, rows.latent, rows.k_rope, rows.kv_b)))
    # 2^-8 of keys and values of size about 10, rounded before the products
    torch.testing.assert_close(out.double(), attend_in_loops(wide, causal(9)), rtol=0, atol=0.2)


# ------------------------------------------------------------------------------------------------ trees


@pytest.mark.parametrize("page_size", [1, 2, 3, 16, 64])
def test_tree_attend_chain_behind_a_prefix_equals_prefill(page_size):
    """Absorbed equals expanded, for every length mod page_size up to 17."""
    length, num_rows = 17, 5
    rows = [random_rows(length + num_rows, seed) for seed in (7, 8)]
    rows[1] = rows[1].with_weight(rows[0].kv_b)
    expected = [attend_in_loops(r, causal(length + num_rows)) for r in rows]
    table = page_rows(2, 24, seed=9)
    for prefix in range(length + 1):
        pool, lens = poisoned_pool(page_size, num_pages=60), [prefix, length - prefix]
        for b, kv_len in enumerate(lens):
            if kv_len:
                rows[b].take(slice(0, kv_len)).run(prefill(pool, table[b : b + 1], [(0, kv_len)], page_size))
        chunks = [r.take(slice(n, n + num_rows)) for r, n in zip(rows, lens, strict=True)]
        out = batch_of(*chunks).run(tree_attend(pool, table, lens, causal(num_rows), page_size))
        for b, kv_len in enumerate(lens):
            torch.testing.assert_close(out[b], expected[b][kv_len : kv_len + num_rows], **EXACT)
            alone = batch_of(chunks[b]).run(tree_attend(pool, table[b : b + 1], [kv_len], causal(num_rows), page_size))
            torch.testing.assert_close(alone[0], out[b], **EXACT)


#            0
#          / | \
#         1  2  6
#         |  |\
#         3  4 5
TREE = [[0], [0, 1], [0, 2], [0, 1, 3], [0, 2, 4], [0, 2, 5], [0, 6]]


@pytest.mark.parametrize("page_size", [1, 2, 3, 16, 64])
@pytest.mark.parametrize("path", [[0], [0, 2], [0, 2, 5], [0, 1, 3], [0, 6]])
def test_tree_verified_then_committed_equals_the_path_decoded_one_by_one(path, page_size):
    """A round of the engine: verify a tree, move the accepted path to the front, decode on."""
    kv_lens, num_layers = [10, 13], 2
    table = page_rows(2, 21, seed=10)
    prompts = [random_rows(n, seed=11 + n) for n in kv_lens]
    nodes, after = batch_of(random_rows(7, seed=20), random_rows(7, seed=21)), random_rows(2, seed=22)

    def start() -> LatentPool:
        pool = poisoned_pool(page_size, num_pages=50, layers=num_layers)
        for layer in range(num_layers):
            for b, prompt in enumerate(prompts):
                prompt.run(prefill(pool, table[b : b + 1], [(0, kv_lens[b])], page_size), layer)
        return pool

    pool = start()
    attend = tree_attend(pool, table, kv_lens, TREE, page_size)
    verified = [nodes.run(attend, layer) for layer in range(num_layers)]
    src = attend.write_slots[:, path]
    pool.move(src, attend.write_slots[:, : len(path)])

    plain = start()
    for i, node in enumerate(path):
        lens = [n + i for n in kv_lens]
        step = tree_attend(plain, table, lens, [[0]], page_size)
        for layer in range(num_layers):
            out = nodes.take((slice(None), slice(node, node + 1))).run(step, layer)
            torch.testing.assert_close(verified[layer][:, node : node + 1], out, **EXACT)

    lens = [n + len(path) for n in kv_lens]
    for b, kv_len in enumerate(lens):
        slots = slots_of(table[b : b + 1], torch.arange(kv_len)[None], page_size)[0]
        assert torch.equal(pool.data[:, slots], plain.data[:, slots])
    bonus = batch_of(after.take(slice(0, 1)), after.take(slice(1, 2)))
    for layer in range(num_layers):
        outs = [bonus.run(tree_attend(p, table, lens, [[0]], page_size), layer) for p in (pool, plain)]
        torch.testing.assert_close(*outs, **EXACT)


def test_tree_attend_row_that_owns_no_page_writes_trash_alone():
    """An inert node beyond its sequence's pages, or a padded row of a batch: the others do not notice."""
    table = page_rows(2, 4, seed=12)
    table[1] = 1
    pool = poisoned_pool(4)
    prompt, nodes = random_rows(5, seed=13), random_rows(3, seed=14)
    nodes = nodes.with_weight(prompt.kv_b)
    prompt.run(prefill(pool, table[:1], [(0, 5)], 4))
    before = pool.data.clone()
    spoiled = replace(nodes, latent=nodes.latent * torch.nan)
    attend = tree_attend(pool, table, [5, 0], causal(3), 4)
    out = batch_of(nodes, spoiled).run(attend)
    chain = joined(prompt, nodes)
    torch.testing.assert_close(out[0], attend_in_loops(chain, causal(8))[5:], **EXACT)
    changed = (before.nan_to_num(7.0) != pool.data.nan_to_num(7.0)).any(-1)[0].nonzero()[:, 0].tolist()
    assert set(changed) <= {*range(4, 8), *attend.write_slots[0].tolist()}
    assert (pool.data[0, :4] == 0).all()


def test_attend_objects_say_whether_layers_may_sync():
    assert PagedTreeAttend.is_static
    assert not PagedPrefillAttend.is_static


@pytest.mark.parametrize("batch", [1, 2])
def test_tree_attend_bfloat16_stays_bfloat16(batch):
    pool, table = poisoned_pool(4, dtype=torch.bfloat16), page_rows(batch, 4, seed=15)
    rows = random_rows(3, seed=16, dtype=torch.bfloat16)
    out = batch_of(*[rows] * batch).run(tree_attend(pool, table, [0] * batch, causal(3), 4))
    assert out.dtype == torch.bfloat16
    assert out.shape == (batch, 3, HEADS, 5)
    assert out.isfinite().all()
