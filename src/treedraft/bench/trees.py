"""Random draft trees, for measurements."""

from __future__ import annotations

import torch

from treedraft.speculative.tree import num_words, own_bits
from treedraft.types import DraftTree

CHAIN, TREE = "chain", "tree"


def random_draft_tree(
    batch: int, num_nodes: int, vocab_size: int, device: torch.device | str, kind: str = TREE, seed: int = 0
) -> DraftTree:
    """Return trees of random tokens. kind "tree": a node's parent is any node before it; "chain": the one before it."""
    generator = torch.Generator().manual_seed(seed)
    words = num_words(num_nodes, 1, 1)
    parents = torch.full((batch, num_nodes), -1)
    depths = torch.zeros(batch, num_nodes, dtype=torch.int64)
    bits = own_bits(0, num_nodes, words, torch.device("cpu")).expand(batch, -1, -1).clone()
    every = torch.arange(batch)
    for node in range(1, num_nodes):
        first = node - 1 if kind == CHAIN else 0
        parents[:, node] = torch.randint(first, node, (batch,), generator=generator)
        depths[:, node] = depths[every, parents[:, node]] + 1
        bits[:, node] |= bits[every, parents[:, node]]
    token_ids = torch.randint(0, vocab_size, (batch, num_nodes), generator=generator)
    scores = -torch.arange(num_nodes, dtype=torch.float32).expand(batch, -1)
    return DraftTree(*(x.to(device) for x in (token_ids, parents, depths, bits, scores)))
