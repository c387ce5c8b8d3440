"""From the pool of draft candidates to the tree that the target verifies."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from treedraft.speculative.tree import CandidatePool, own_bits, stable_topk
from treedraft.types import DraftTree


def select(pool: CandidatePool, root_ids: Tensor, num_draft_tokens: int, words: int, node_limits: Tensor) -> DraftTree:
    """Return the tree of the N - 1 best candidates by (score descending, pool index ascending) below the root.

    root_ids int64 [B]; node_limits int64 [B]: nodes the sequence may use, root included; the best are kept.
    Nodes are ordered by pool index, root first, so parents precede children. Candidates at -inf (or NaN) and those
    beyond the limit become inert nodes at the end: token -1, parent 0, depth 1, score -inf, bits of root and self.
    """
    topk, size, device = pool.topk, pool.size, root_ids.device
    scores, best = stable_topk(torch.cat(pool.scores, 1), num_draft_tokens - 1)
    rank = torch.arange(1, num_draft_tokens, device=device)
    is_inert = (scores == -torch.inf) | (rank >= node_limits[:, None])
    # Sorted by pool index, inert candidates behind all others; from then on they stand at pool index 0, below the root.
    kept, order = torch.where(is_inert, size, best).sort(dim=1)
    is_inert = kept == size
    index = torch.where(is_inert, 0, kept)

    token_ids = torch.where(is_inert, -1, torch.cat(pool.token_ids, 1).gather(1, index))
    scores = torch.where(is_inert, -torch.inf, scores.gather(1, order))
    # Pool index 0 .. K-1 is level 1, then a level every K * K.
    depths = (index + (topk * topk - topk)) // (topk * topk) + 1
    if pool.frontiers:
        parent_index = torch.cat(pool.frontiers, 1).gather(1, (index - topk).clamp_(min=0) // topk)
        # Column of a parent = 1 + its rank among the kept, which is how many kept pool indices are <= its own.
        parents = torch.searchsorted(kept, parent_index, right=True) * (index >= topk)
    else:
        parents = torch.zeros_like(index)

    bits = own_bits(0, num_draft_tokens, words, device).expand(index.shape[0], num_draft_tokens, words)
    jump = pad(parents, (1, 0))  # here the root's parent is the root; each pass doubles the generations gathered
    for _ in range(pool.num_levels.bit_length()):
        bits = bits | bits.gather(1, jump[..., None].expand(-1, -1, words))
        jump = jump.gather(1, jump)
    return DraftTree(
        token_ids=torch.cat((root_ids[:, None], token_ids), 1),
        parents=pad(parents, (1, 0), value=-1),
        depths=pad(depths, (1, 0)),
        ancestor_bits=bits,
        scores=pad(scores, (1, 0)),
    )
