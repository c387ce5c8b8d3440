"""The walk: which drafts the target itself would have said."""

from __future__ import annotations

import torch
from torch import Tensor

from treedraft.types import Accepted, DraftTree


def walk(tree: DraftTree, sampled: Tensor, max_path: int) -> Accepted:
    """Descend from the root while a child carries the token that the target sampled at its parent.

    sampled int64 [B, N]: the target's token at every node, in 0 .. 2^31 - 1. max_path P <= N: columns of the result;
    the walk emits at most P tokens, bonus included. Where siblings carry the same token, the lowest column is taken.
    """
    num_nodes = sampled.shape[1]
    nodes = torch.arange(num_nodes, device=sampled.device)
    # A node and a wish are the same integer when the node is a child of the wisher and carries the token wished for.
    is_child = (tree.parents * (1 << 32) + tree.token_ids)[:, None, :] == (nodes * (1 << 32) + sampled)[:, :, None]
    found, child = is_child.max(-1)  # the first child, where there are several
    step = torch.where(found, child, nodes)  # where the walk goes on; a node without such a child stays
    node = torch.zeros_like(sampled[:, :1])
    path = [node]
    for _ in range(max_path - 1):
        node = step.gather(1, node)
        path.append(node)
    columns = torch.cat(path, 1)
    num_accepted = (columns[:, 1:] != columns[:, :-1]).sum(1)
    # The token sampled at a node of the path is the next node's token, and at the last node the bonus token.
    on_path = nodes[:max_path] <= num_accepted[:, None]
    token_ids = torch.where(on_path, sampled.gather(1, columns), -1)
    # Siblings are columns in the order in which the draft ranked them.
    is_sibling = tree.parents[:, None, :] == tree.parents.gather(1, columns)[..., None]
    ranks = (is_sibling & (nodes < columns[..., None])).sum(-1)
    return Accepted(
        num_accepted, torch.where(on_path, columns, nodes[:max_path]), token_ids, torch.where(on_path, ranks, 0)
    )
