"""The growing tree against plain Python, ties included."""

from __future__ import annotations

import math

import pytest
import torch
from tree_oracles import best_first, clean, grow_both, random_levels, to_set

from treedraft.speculative import tree

TIES = torch.tensor([0.0, 0.0, -0.0, -1.0, -2.5, -math.inf, math.nan])  # probability exactly 1 is a score of 0


@pytest.mark.parametrize(
    "num_draft_tokens, topk, num_steps, expected",
    [(2, 1, 1, 1), (64, 1, 1, 1), (65, 4, 5, 2), (60, 10, 8, 2), (16, 16, 5, 1), (16, 16, 6, 2), (129, 1, 1, 3)],
)
def test_num_words_tree_nodes_and_draft_rows_fit(num_draft_tokens, topk, num_steps, expected) -> None:
    assert tree.num_words(num_draft_tokens, topk, num_steps) == expected


@pytest.mark.parametrize("n", [1, 5, 64, 256, 257, 320, 1000, 4096])
@pytest.mark.parametrize("k", [1, 4, 10])
def test_stable_topk_ties_and_nan_equals_sorting(n: int, k: int) -> None:
    k = min(k, n)
    generator = torch.Generator().manual_seed(n * 31 + k)
    rows = torch.stack(
        [
            torch.randn(n, generator=generator),
            torch.randint(-2, 3, (n,), generator=generator).float(),
            torch.zeros(n) * torch.randint(-1, 2, (n,), generator=generator),  # 0.0 and -0.0
            torch.full((n,), -math.inf),
            torch.full((n,), math.nan),
            TIES[torch.randint(len(TIES), (n,), generator=generator)],
            torch.where(torch.rand(n, generator=generator) < 0.99, -math.inf, 1.0),
            torch.randn(n, generator=generator) * 1e30,
            torch.where(torch.arange(n) == n * 3 // 4, 2.0, 1.0),  # the best is far behind the ties for second place
        ]
    )
    values, indices = tree.stable_topk(rows, k)
    assert values.dtype == torch.float32 and indices.dtype == torch.int64
    for row, found, at in zip(rows.tolist(), values.tolist(), indices.tolist()):
        expected = best_first(row)[:k]
        assert at == expected
        assert found == [clean(row[i]) for i in expected]


@pytest.mark.parametrize("words", [1, 2])
def test_own_bits_around_the_sign_bit_set_one_bit_each(words: int) -> None:
    bits = tree.own_bits(60, 4 if words == 1 else 10, words, torch.device("cpu"))
    assert [to_set(row) for row in bits] == [{60 + j} for j in range(len(bits))]
    assert bits[3, 0] == -(2**63)


@pytest.mark.parametrize("values", [None, TIES, torch.tensor([0.0])], ids=["distinct", "ties", "all_one"])
@pytest.mark.parametrize("topk, num_steps", [(1, 1), (1, 5), (2, 3), (4, 5), (8, 3), (10, 8)])
def test_next_level_random_children_equals_oracle(topk: int, num_steps: int, values) -> None:
    words = tree.num_words(2, topk, num_steps)
    ids, logps = random_levels(3, topk, num_steps, seed=topk * 10 + num_steps, values=values)
    pool, frontiers, parent_rows, pools, indices, bits = grow_both(ids, logps, words)
    assert pool.size == topk + (num_steps - 1) * topk**2 and pool.topk == topk and pool.num_levels == num_steps
    for b in range(3):
        assert torch.cat(pool.token_ids, 1)[b].tolist() == [c.token for c in pools[b]]
        assert [clean(s) for s in torch.cat(pool.scores, 1)[b].tolist()] == [clean(c.score) for c in pools[b]]
        for level, frontier in enumerate(frontiers, 1):
            assert frontier.pool_index[b].tolist() == indices[b][level - 1]
            assert frontier.token_ids[b].tolist() == [pools[b][i].token for i in indices[b][level - 1]]
            if level < num_steps:  # the last level's rows are never forwarded
                assert [to_set(w) for w in frontier.ancestor_bits[b]] == bits[b][level - 1]
        for level, rows in enumerate(parent_rows, 2):
            parents = [indices[b][level - 2].index(pools[b][i].parent) for i in indices[b][level - 1]]
            assert rows[b].tolist() == parents


def test_next_level_child_above_its_parent_is_lowered_to_it() -> None:
    pool, frontier = tree.first_level(torch.tensor([[1]]), torch.tensor([[-1.0]]), 1)
    pool, frontier, _ = tree.next_level(pool, frontier, torch.tensor([[[2]]]), torch.tensor([[[1e-3]]]), 2)
    assert frontier.scores.tolist() == [[-1.0]]
