"""What smaller trees would have accepted, against building each of them and walking it."""

from __future__ import annotations

import pytest
import torch

from treedraft.speculative.select import select
from treedraft.speculative.shapes import accepted_by_shape
from treedraft.speculative.tree import first_level, last_level, next_level, num_words
from treedraft.speculative.verify import walk

BATCH, VOCAB = 6, 5  # a small vocabulary: drafts are often right


def grow(num_steps, topk, generator):
    """A pool of `num_steps` levels, and the candidates that each level began with."""
    words = num_words(64, topk, num_steps)
    scores = -torch.rand(BATCH, topk, generator=generator).sort(-1).values
    ids = torch.stack([torch.randperm(VOCAB, generator=generator)[:topk] for _ in range(BATCH)])
    pool, frontier = first_level(ids, scores, words)
    pools = [pool]
    for level in range(2, num_steps + 1):
        child_scores = -torch.rand(BATCH, topk, topk, generator=generator).sort(-1).values
        child_ids = torch.stack(
            [
                torch.stack([torch.randperm(VOCAB, generator=generator)[:topk] for _ in range(topk)])
                for _ in range(BATCH)
            ]
        )
        if level == num_steps:
            pool = last_level(pool, frontier, child_ids, child_scores)
        else:
            # The pool of fewer steps ends with all candidates of its last level, as next_level's does.
            pool, frontier, _ = next_level(pool, frontier, child_ids, child_scores, level)
        pools.append(pool)
    return pools


def target_tokens(tree):
    """The target's token at a node: a function of its path alone, hence the same in every tree."""
    tokens = torch.zeros_like(tree.token_ids)
    for b in range(BATCH):
        for node in range(tree.token_ids.shape[1]):
            path, at = [], node
            while at >= 0:
                path.append(int(tree.token_ids[b, at]))
                at = int(tree.parents[b, at])
            tokens[b, node] = hash((b, *path)) % VOCAB
    return tokens


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(
    ("num_steps", "topk", "nodes"), [(4, 3, 20), (5, 2, 12), (3, 4, 30), (4, 1, 5), (1, 4, 4), (4, 3, 6)]
)
def test_accepted_by_shape_equals_building_and_walking_each_tree(num_steps, topk, nodes, seed):
    generator = torch.Generator().manual_seed(seed)
    pools = grow(num_steps, topk, generator)
    roots = torch.arange(BATCH)
    limits = torch.full((BATCH,), nodes)
    words = num_words(64, topk, num_steps)

    def accept(steps, count):
        pool = pools[steps - 1]
        tree = select(pool, roots, count, words, limits)
        return tree, walk(tree, target_tokens(tree), min(steps, count - 1) + 1)

    tree, accepted = accept(num_steps, nodes)
    shapes = [(s, n) for s in range(1, num_steps + 1) for n in range(2, nodes + 1)]
    shapes = [(s, n) for s, n in shapes if n <= 1 + topk + (s - 1) * topk**2 and is_held(tree, s, n)]
    given = accepted_by_shape(tree, accepted, torch.tensor([*shapes, (0, 1)]).t())
    expected = [accept(s, n)[1].num_accepted for s, n in shapes] + [torch.zeros(BATCH, dtype=torch.int64)]
    assert given.dtype == torch.int64
    assert torch.equal(given, torch.stack(expected, 1))


def is_held(tree, steps, nodes):
    """Whether every sequence's tree has all nodes of the smaller one: enough of them among its levels."""
    return bool(((tree.depths <= steps).sum(1) >= nodes).all())


def test_drafts_are_accepted_at_several_depths():
    """Else the test above shows nothing."""
    counts = set()
    for seed in range(8):
        pools = grow(4, 3, torch.Generator().manual_seed(seed))
        tree = select(pools[-1], torch.arange(BATCH), 20, 1, torch.full((BATCH,), 20))
        counts |= set(walk(tree, target_tokens(tree), 5).num_accepted.tolist())
    assert counts >= {0, 1, 2}


def test_tree_of_its_root_alone_accepts_nothing_for_every_shape():
    from treedraft.types import Accepted, DraftTree

    zeros = torch.zeros(2, 1, dtype=torch.int64)
    tree = DraftTree(zeros, zeros - 1, zeros, zeros[..., None] + 1, zeros.float())
    accepted = Accepted(zeros[:, 0], zeros, zeros, zeros)
    limits = torch.tensor([(3, 8), (1, 2), (0, 1)]).t()
    assert accepted_by_shape(tree, accepted, limits).tolist() == [[0, 0, 0]] * 2
