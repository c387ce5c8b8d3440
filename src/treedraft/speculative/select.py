"""From the pool of draft candidates to the tree that the target verifies."""

from __future__ import annotations

import torch
from torch import Tensor

from treedraft.speculative.tree import CandidatePool, own_bits, stable_topk
from treedraft.types import DraftTree


def select(pool: CandidatePool, root_ids: Tensor, num_draft_tokens: int, words: int, node_limits: Tensor) -> DraftTree:
    """Return the tree of the N - 1 best candidates by (score descending, pool index ascending) below the root.

    root_ids int64 [B]; node_limits int64 [B]: nodes the sequence may use, root included; the best are kept.
    Nodes are ordered by pool index, root first, so parents precede children. Candidates at -inf (or NaN) and those
    beyond the limit become inert nodes at the end: token -1, parent 0, depth 1, score -inf, bits of root and self.
    """
    topk, size, device = pool.topk, pool.size, root_ids.device
    token_ids = torch.cat(pool.token_ids, 1)
    scores, best = stable_topk(torch.cat(pool.scores, 1), num_draft_tokens - 1)
    rank = torch.arange(1, num_draft_tokens, device=device)
    is_inert = (scores == -torch.inf) | (rank >= node_limits[:, None])
    # Sorted by pool index, with inert candidates moved behind all others: 0 .. size-1, then size .. 2*size-1.
    index, order = torch.where(is_inert, best + size, best).sort(dim=1)
    is_inert = index >= size

    def with_root(root: float, rest: Tensor, inert: float) -> Tensor:
        return torch.nn.functional.pad(torch.where(is_inert, inert, rest), (1, 0), value=root)

    # Column of a parent = 1 + its rank among the kept, which is how many kept pool indices are <= its own.
    within = index.remainder(size)
    if pool.frontiers:
        frontiers = torch.cat(pool.frontiers, 1)
        parent_index = frontiers.gather(1, (within - topk).clamp_(min=0) // topk)
        column = torch.searchsorted(index, parent_index, right=True)
        parents = with_root(0, column, 0) * with_root(0, within >= topk, 0)
    else:
        parents = torch.zeros((index.shape[0], num_draft_tokens), dtype=torch.int64, device=device)
    # Pool index 0 .. K-1 is level 1, then a level every K * K.
    depths = with_root(0, (within + (topk * topk - topk)) // (topk * topk) + 1, 1)

    bits = own_bits(0, num_draft_tokens, words, device).expand(index.shape[0], num_draft_tokens, words)
    jump = parents  # the root's parent is the root; each pass doubles the generations gathered
    for _ in range(pool.num_levels.bit_length()):
        bits = bits | bits.gather(1, jump[..., None].expand(-1, -1, words))
        jump = jump.gather(1, jump)
    tokens = with_root(0, token_ids.gather(1, within), -1)
    tokens[:, 0] = root_ids
    parents = parents.clone()
    parents[:, 0] = -1
    return DraftTree(tokens, parents, depths, bits, with_root(0.0, scores.gather(1, order), -torch.inf))
