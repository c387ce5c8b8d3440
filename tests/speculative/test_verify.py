"""The walk against a walk written as a loop."""

from __future__ import annotations

import pytest
import torch
from tree_oracles import grow_both, random_levels

from treedraft.speculative import tree
from treedraft.speculative.select import select
from treedraft.speculative.verify import walk
from treedraft.types import DraftTree


def walk_oracle(
    tokens: list[int], parents: list[int], sampled: list[int], max_path: int
) -> tuple[list[int], list[int]]:
    path = [0]
    while len(path) < max_path:
        wanted = sampled[path[-1]]
        children = [n for n in range(1, len(tokens)) if parents[n] == path[-1] and tokens[n] == wanted]
        if not children:
            break
        path.append(children[0])
    return path, [sampled[n] for n in path]


def ranks_oracle(parents: list[int], path: list[int]) -> list[int]:
    ranks = [0]
    for node in path[1:]:
        siblings = [n for n, parent in enumerate(parents) if parent == parents[node]]
        ranks.append(siblings.index(node))
    return ranks


def assert_walks_like_oracle(draft: DraftTree, sampled: torch.Tensor, max_path: int) -> list[int]:
    accepted = walk(draft, sampled, max_path)
    lengths = []
    for b in range(sampled.shape[0]):
        path, tokens = walk_oracle(
            draft.token_ids[b].tolist(), draft.parents[b].tolist(), sampled[b].tolist(), max_path
        )
        rest = list(range(len(path), max_path))
        assert accepted.num_accepted[b] == len(path) - 1
        assert accepted.columns[b].tolist() == path + rest
        assert accepted.token_ids[b].tolist() == tokens + [-1] * len(rest)
        assert accepted.ranks[b].tolist() == ranks_oracle(draft.parents[b].tolist(), path) + [0] * len(rest)
        lengths.append(len(path))
    return lengths


@pytest.mark.parametrize("num_steps, topk, num_draft_tokens", [(1, 1, 2), (5, 1, 6), (3, 2, 7), (5, 4, 16), (7, 8, 64)])
def test_walk_random_trees_equals_oracle(num_steps: int, topk: int, num_draft_tokens: int) -> None:
    generator = torch.Generator().manual_seed(num_draft_tokens)
    words = tree.num_words(num_draft_tokens, topk, num_steps)
    max_path = min(num_steps, num_draft_tokens - 1) + 1
    lengths = []
    for seed in range(20):
        ids, logps = random_levels(4, topk, num_steps, seed)
        limits = torch.tensor([1000, num_draft_tokens, 1, 3])
        draft = select(grow_both(ids, logps, words)[0], torch.tensor([1, 2, 3, 4]), num_draft_tokens, words, limits)
        # Mostly tokens that some child carries, so that walks are long.
        sampled = torch.randint(64, (4, num_draft_tokens), generator=generator)
        for b in range(4):
            for n in range(1, num_draft_tokens):
                if draft.token_ids[b, n] >= 0 and torch.rand((), generator=generator) < 0.6:
                    sampled[b, draft.parents[b, n]] = draft.token_ids[b, n]
        lengths += assert_walks_like_oracle(draft, sampled, max_path)
    assert max(lengths) >= min(max_path, 4) and min(lengths) == 1


def draft_of(tokens: list[int], parents: list[int]) -> DraftTree:
    depths: list[int] = []
    for p in parents:
        depths.append(0 if p < 0 else depths[p] + 1)
    row = torch.tensor([tokens])
    return DraftTree(row, torch.tensor([parents]), torch.tensor([depths]), row[..., None], row.float())


def test_walk_accepted_child_is_not_the_first_sibling_path_has_gaps() -> None:
    draft = draft_of([9, 1, 2, 3, 4, 5], [-1, 0, 0, 1, 1, 2])
    accepted = walk(draft, torch.tensor([[2, 7, 5, 7, 7, 8]]), 4)
    assert accepted.columns.tolist() == [[0, 2, 5, 3]]
    assert accepted.ranks.tolist() == [[0, 1, 0, 0]]
    assert accepted.token_ids.tolist() == [[2, 5, 8, -1]]
    assert accepted.num_accepted.tolist() == [2]


def test_walk_siblings_with_the_same_token_takes_the_lowest_column() -> None:
    draft = draft_of([9, 1, 1, 3, 4], [-1, 0, 0, 2, 1])
    assert_walks_like_oracle(draft, torch.tensor([[1, 3, 3, 0, 0]]), 3)  # 3 hangs below the second sibling: not taken
    assert_walks_like_oracle(draft, torch.tensor([[1, 4, 3, 0, 0]]), 3)


def test_walk_max_path_below_the_trees_depth_stops_there() -> None:
    draft = draft_of([9, 1, 2, 3], [-1, 0, 1, 2])
    accepted = walk(draft, torch.tensor([[1, 2, 3, 4]]), 2)
    assert accepted.token_ids.tolist() == [[1, 2]] and accepted.num_accepted.tolist() == [1]


def test_walk_single_node_gives_the_bonus_token() -> None:
    accepted = walk(draft_of([9], [-1]), torch.tensor([[4]]), 1)
    assert accepted.token_ids.tolist() == [[4]] and accepted.num_accepted.tolist() == [0]


def test_walk_token_of_another_parents_child_is_not_accepted() -> None:
    draft = draft_of([9, 1, 2, 7], [-1, 0, 0, 1])
    assert walk(draft, torch.tensor([[2, 7, 7, 0]]), 3).num_accepted.tolist() == [1]
