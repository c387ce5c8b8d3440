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
    batch, size = pool.token_ids.shape
    topk, count = pool.topk, num_draft_tokens - 1
    device = pool.token_ids.device
    scores, best = stable_topk(pool.scores, count)
    alive = (scores > -torch.inf) & (torch.arange(1, num_draft_tokens, device=device) < node_limits[:, None])
    # Sorting by pool index puts parents first: alive candidates are 0 .. size-1, inert ones size .. 2*size-1.
    keys, order = torch.where(alive, best, best + size).sort(dim=1)
    alive = keys < size
    index = keys.remainder(size)
    # Column of a parent = 1 + its rank among the kept = how many kept pool indices are <= it; 0 for the root (-1).
    parents = torch.searchsorted(keys, pool.parents.gather(1, index), right=True)
    parents = torch.where(alive, parents, 0)
    tokens = torch.where(alive, pool.token_ids.gather(1, index), -1)
    # Pool 0..K-1 is level 1, then K*K a level.
    depths = torch.where(alive, (index + (topk * topk - topk)) // (topk * topk) + 1, 1)
    kept_scores = scores.gather(1, order).masked_fill(~alive, -torch.inf)

    def with_root(root: Tensor | int | float, rest: Tensor) -> Tensor:
        head = root[:, None] if isinstance(root, Tensor) else rest.new_full((batch, 1), root)
        return torch.cat((head, rest), 1)

    num_levels = 1 + (size - topk) // (topk * topk)
    bits = own_bits(0, num_draft_tokens, words, device).expand(batch, num_draft_tokens, words)
    jump = with_root(0, parents)  # each pass doubles how many generations a node has gathered
    for _ in range(num_levels.bit_length()):
        bits = bits | bits.gather(1, jump[..., None].expand(-1, -1, words))
        jump = jump.gather(1, jump)
    return DraftTree(
        token_ids=with_root(root_ids, tokens),
        parents=with_root(-1, parents),
        depths=with_root(0, depths),
        ancestor_bits=bits,
        scores=with_root(0.0, kept_scores),
    )
