"""Selection against plain Python: ties, limits, 64 nodes and more."""

from __future__ import annotations

import math

import pytest
import torch
from tree_oracles import assert_equals_oracle, grow_both, random_levels, selected

from treedraft.config import max_tree_nodes
from treedraft.speculative import tree
from treedraft.speculative.select import select

TIES = torch.tensor([0.0, 0.0, -1.0, -2.5, -math.inf, math.nan])
SHAPES = [(1, 1, 2), (5, 1, 6), (3, 2, 7), (5, 4, 16), (1, 4, 3), (5, 4, 69), (8, 10, 64), (8, 10, 70), (3, 8, 130)]


@pytest.mark.parametrize("values", [None, TIES, torch.tensor([0.0])], ids=["distinct", "ties", "all_one"])
@pytest.mark.parametrize("num_steps, topk, num_draft_tokens", SHAPES)
def test_select_random_pools_equals_oracle(num_steps: int, topk: int, num_draft_tokens: int, values) -> None:
    assert num_draft_tokens <= max_tree_nodes(num_steps, topk)
    words = tree.num_words(num_draft_tokens, topk, num_steps)
    for seed in range(5):
        ids, logps = random_levels(4, topk, num_steps, seed, values)
        pool, _, _, pools, _, _ = grow_both(ids, logps, words)
        limits = torch.tensor([num_draft_tokens, num_draft_tokens + 5, 1, num_draft_tokens // 2 + 1])
        roots = torch.tensor([3, 1, 4, 1])
        result = select(pool, roots, num_draft_tokens, words, limits)
        for b in range(4):
            expected = selected(pools[b], num_draft_tokens, int(limits[b]))
            assert_equals_oracle(result, b, int(roots[b]), expected)


@pytest.mark.parametrize("num_steps, topk, num_draft_tokens", SHAPES)
def test_select_any_scores_parents_precede_children(num_steps: int, topk: int, num_draft_tokens: int) -> None:
    ids, logps = random_levels(8, topk, num_steps, 7, TIES)
    words = tree.num_words(num_draft_tokens, topk, num_steps)
    pool = grow_both(ids, logps, words)[0]
    result = select(pool, torch.zeros(8, dtype=torch.int64), num_draft_tokens, words, torch.full((8,), 1000))
    columns = torch.arange(num_draft_tokens)
    assert (result.parents < columns).all() and (result.parents[:, 1:] >= 0).all()
    assert (result.depths[:, 1:] == result.depths.gather(1, result.parents[:, 1:]) + 1).all()


def test_select_node_64_uses_the_sign_bit() -> None:
    ids, logps = random_levels(1, 1, 63, 0)
    pool = grow_both(ids, logps, 1)[0]
    result = select(pool, torch.tensor([5]), 64, 1, torch.tensor([64]))
    assert result.ancestor_bits[0, 63, 0] == -1  # a chain: node 63 sees all 64
    assert result.depths[0].tolist() == list(range(64))
