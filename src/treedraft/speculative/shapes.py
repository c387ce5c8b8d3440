"""What smaller trees would have accepted, read off a round of a larger one."""

from __future__ import annotations

import torch
from torch import Tensor

from treedraft.types import Accepted, DraftTree


def accepted_by_shape(tree: DraftTree, accepted: Accepted, limits: Tensor) -> Tensor:
    """Return how many drafts trees of J other shapes would have had accepted in this round: [B, J] int64.

    limits: [2, J] int64, levels and nodes (root included) of each shape; (0, 1) is no tree. The walk accepts what the
    target itself says, so it is the same in every tree up to the first node that the tree lacks. A tree of fewer nodes
    and levels and the same topk keeps the best nodes among those of its levels, and never a child without its parent:
    so the node of depth d on the path is in it when d is among its levels and fewer than its nodes score better there.

    Exact, but for equal scores, for shapes inside the round's own: no more levels, no more nodes. Of another shape it
    is the round's own tree, cut. Scores fall along a path (speculative.tree), so the kept nodes are its first ones.
    """
    steps, nodes = limits
    scores, columns = tree.scores, accepted.columns
    is_better = scores[:, None, :] > scores.gather(1, columns)[..., None]  # [B, P, N], the root among them
    is_shallow = tree.depths[:, :, None] <= steps  # [B, N, J]
    rank = torch.bmm(is_better.to(scores.dtype), is_shallow.to(scores.dtype))  # [B, P, J]
    depth = torch.arange(1, columns.shape[1], device=columns.device)
    reached = torch.minimum(accepted.num_accepted[:, None], steps)[:, None] >= depth[:, None]  # [B, P - 1, J]
    return ((rank[:, 1:] < nodes) & reached).sum(1)
