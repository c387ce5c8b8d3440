"""Grouped-query attention over a paged cache for rows of trees. The heads of a group share a KV head's row tiles.

The twin of both functions in plain torch is attention.reference.TorchTreeAttention.run_gqa. The kernels are those of
kernels.paged_tree.
"""

from __future__ import annotations

import torch
from torch import Tensor

from treedraft.kernels.paged_launch import Pages, Shape, Splits, Tiles, attend_fixed, attend_shares


def gqa_tiles(dtype: torch.dtype, head_dim: int) -> Tiles:
    """How the kernel is compiled for a dtype and width."""
    if dtype == torch.float32:  # products without tensor cores: more would spill registers
        return Tiles(block_m=16, block_n=16, num_warps=8, num_stages=1, per_sm=2)
    if head_dim > 128:
        return Tiles(block_m=64, block_n=64, num_warps=8, num_stages=2)
    return Tiles(block_m=64, block_n=64, num_warps=4, num_stages=3, per_sm=2)


def paged_gqa_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pages: Pages,
    ancestor_bits: Tensor,
    tree_len: int,
    splits: Splits,
    scale: float,
    tiles: Tiles,
) -> tuple[Tensor, Tensor]:
    """Attend over equal shares of all keys: out [B, R, h, dv] of q's dtype, lse [B, R, h] float32, base e.

    q [B, R, h, d], k [slots, hk, d], v [slots, hk, dv], bfloat16 or float32, last strides 1; query head i reads KV head
    i // (h // hk). ancestor_bits [B, R, words] int64 name tree slots below tree_len. splits: made for
    tiles.block_n.
    """
    return attend_shares(q, k, v, pages, ancestor_bits, tree_len, splits, _shape(k, v), scale, tiles)


def paged_gqa_fixed_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pages: Pages,
    row_lens: Tensor,
    path_slots: Tensor | None,
    max_len: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """As paged_gqa_triton, a row's bits independent of all else. row_lens, path_slots, max_len: see attend_fixed."""
    tiles = gqa_tiles(q.dtype, k.shape[-1])
    return attend_fixed(q, k, v, pages, row_lens, path_slots, max_len, _shape(k, v), scale, tiles)


def _shape(k: Tensor, v: Tensor) -> Shape:
    return Shape(key=k.shape[-1], rope=0, value=v.shape[-1], shared_value=False)
