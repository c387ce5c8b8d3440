"""The walk: which drafts the target itself would have said."""

from __future__ import annotations

import torch
from torch import Tensor

from treedraft.types import Accepted, DraftTree


def walk(tree: DraftTree, sampled: Tensor, max_path: int) -> Accepted:
    """Descend from the root while a child carries the token that the target sampled at its parent.

    sampled int64 [B, N]: the target's token at every node, never negative. max_path P <= N: columns of the result;
    the walk emits at most P tokens, bonus included. Where siblings carry the same token, the lowest column is taken.

    A node is on the path if it and all its ancestors carry their parents' sampled tokens; at most one a depth.
    """
    num_nodes = sampled.shape[1]
    nodes = torch.arange(num_nodes, device=sampled.device)
    parents = tree.parents.clamp(min=0)
    same_token = tree.token_ids[:, :, None] == tree.token_ids[:, None, :]
    same_parent = tree.parents[:, :, None] == tree.parents[:, None, :]
    is_repeat = (same_token & same_parent).tril_(-1).any(-1)
    carries = (tree.token_ids == sampled.gather(1, parents)) & ~is_repeat & (tree.depths < max_path)
    on_path = carries | (nodes == 0)
    jump = parents
    for _ in range((max_path - 1).bit_length()):
        on_path = on_path & on_path.gather(1, jump)
        jump = jump.gather(1, jump)
    num_accepted = on_path.sum(1) - 1
    steps = torch.arange(max_path + 1, device=sampled.device)
    # Off-path nodes are written to a spare last column.
    columns = steps.repeat(sampled.shape[0], 1)
    columns.scatter_(1, torch.where(on_path, tree.depths, max_path), nodes.expand_as(on_path))
    columns = columns[:, :max_path]
    # The token sampled at a node of the path is the next node's token, and at the last node the bonus token.
    token_ids = torch.where(steps[:max_path] <= num_accepted[:, None], sampled.gather(1, columns), -1)
    return Accepted(num_accepted=num_accepted, columns=columns, token_ids=token_ids)
