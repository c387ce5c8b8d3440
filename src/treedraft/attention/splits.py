"""How keys are split over programs, in plain torch: twins of kernels.paged_tree, and the lists of its fixed form."""

from __future__ import annotations

import torch
from torch import Tensor

from treedraft.attention.reference import unpack_bits

SEQUENCE_COST = 3  # tiles; as in kernels.paged_tree


def plan_splits(kv_lens: Tensor, tail: int, block_n: int, groups: int, min_tiles: int) -> tuple[Tensor, Tensor]:
    """Cut the key tiles of all sequences into equal shares: twin of kernels.paged_tree.plan_splits_triton.

    kv_lens [B] int64. Returns starts [groups + 1, 2] int32, the sequence and tile where each group begins, and parts
    [B, 3] int32: how many groups work on a sequence, the first of them, and how many sequences before it are cut.
    Syncs.
    """
    tiles = [max(1, -(-(length + tail) // block_n)) for length in kv_lens.tolist()]
    work = [(b, tile) for b, count in enumerate(tiles) for tile in range(-SEQUENCE_COST, count)]
    share = max(-(-len(work) // groups), min_tiles)
    starts = []
    for group in range(groups + 1):
        b, tile = work[group * share] if group * share < len(work) else (len(tiles), 0)
        starts.append((b, tile if tile > 1 else 0))
    parts, num_cut = [], 0
    for b in range(len(tiles)):
        first = sum(start <= (b, 0) for start in starts[:-1]) - 1
        last = sum(start[0] <= b for start in starts[:-1]) - 1
        parts.append((last - first + 1, first, num_cut))
        num_cut += last > first
    return tuple(torch.tensor(x, dtype=torch.int32, device=kv_lens.device) for x in (starts, parts))  # type: ignore


def path_lists(kv_lens: Tensor, tail_slots: Tensor, ancestor_bits: Tensor, tree_len: int) -> tuple[Tensor, Tensor]:
    """Each token's own keys behind the prefix, in path order.

    kv_lens [B] int64, tail_slots [B, tail] int64, ancestor_bits [B, R, words] int64 naming slots below tree_len.
    Returns row_lens [B, R] int64, prefix and path together, and path_slots [B, R, tree_len] int64, of which those of
    the path come first, ascending.
    """
    is_ancestor = unpack_bits(ancestor_bits, tree_len)
    nodes = is_ancestor.argsort(dim=-1, descending=True, stable=True)
    slots = tail_slots[:, None, :tree_len].expand(-1, nodes.shape[1], -1).gather(2, nodes)
    return kv_lens[:, None] + is_ancestor.sum(-1), slots
