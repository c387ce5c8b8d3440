"""Absorbed MLA over a paged cache for rows of trees: every head reads the same latent | roped key.

The twin of both functions in plain torch is attention.reference.TorchTreeAttention.run_mla_with_lse. The kernels are
those of kernels.paged_tree, with the latent read once, as key and as value.
"""

from __future__ import annotations

import torch
from torch import Tensor

from treedraft.kernels.paged_launch import Pages, Shape, Splits, Tiles, attend_fixed, attend_shares

WIDE = 256  # a latent of so many columns fills a multiprocessor's memory with two tiles


def mla_tiles(dtype: torch.dtype, v_width: int, batch: int, num_rows: int) -> Tiles:
    """How the kernel is compiled for num_rows query rows (tokens * heads) a sequence.

    Microseconds on an H200, 16 heads, latent 512, for 64 x 64 | what is chosen: 1 token x 4k, batch 1: 32 | 22;
    1 x 32k, batch 1: 60 | 40; 1 x 4k, batch 64: 191 | 121; 8 x 4k, batch 1: 34 | 28; but 8 x 32k, batch 1: 66 | 85,
    as the length is known on the device alone (2026-12).
    """
    if dtype == torch.float32 or v_width <= WIDE:
        return fixed_mla_tiles(dtype, v_width)
    if num_rows <= 16:
        return Tiles(16, 64, num_warps=8, num_stages=3) if batch < 16 else Tiles(16, 32, 4, 4, per_sm=2)
    if batch * num_rows <= 128:
        return Tiles(32, 64, num_warps=8, num_stages=2)
    return fixed_mla_tiles(dtype, v_width)


def fixed_mla_tiles(dtype: torch.dtype, v_width: int) -> Tiles:
    """How the kernel is compiled whatever the number of rows."""
    if dtype == torch.float32:  # products without tensor cores: more would spill registers
        return Tiles(block_m=16, block_n=16, num_warps=8, num_stages=1, per_sm=2)
    if v_width > WIDE:
        return Tiles(block_m=64, block_n=64, num_warps=8, num_stages=2)
    return Tiles(block_m=64, block_n=64, num_warps=4, num_stages=3, per_sm=2)


def paged_mla_triton(
    q: Tensor,
    kv: Tensor,
    pages: Pages,
    ancestor_bits: Tensor,
    tree_len: int,
    splits: Splits,
    v_width: int,
    scale: float,
    tiles: Tiles,
) -> tuple[Tensor, Tensor]:
    """Attend over equal shares of all keys: out [B, R, h, v_width] of q's dtype, lse [B, R, h] float32, base e.

    q [B, R, h, w] and kv [slots, w], bfloat16 or float32, last strides 1; ancestor_bits [B, R, words] int64 name tree
    slots below tree_len. splits: made for tiles.block_n. A row that sees nothing gets 0 and -inf.
    """
    shape = _shape(kv, v_width)
    k = kv[:, None]
    return attend_shares(q, k, k, pages, ancestor_bits, tree_len, splits, shape, scale, tiles)


def paged_mla_fixed_triton(
    q: Tensor,
    kv: Tensor,
    pages: Pages,
    row_lens: Tensor,
    path_slots: Tensor | None,
    max_len: int,
    v_width: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """As paged_mla_triton, a row's bits independent of all else. row_lens, path_slots, max_len: see attend_fixed."""
    k = kv[:, None]
    tiles = fixed_mla_tiles(q.dtype, v_width)
    return attend_fixed(q, k, k, pages, row_lens, path_slots, max_len, _shape(kv, v_width), scale, tiles)


def _shape(kv: Tensor, v_width: int) -> Shape:
    return Shape(key=v_width, rope=kv.shape[-1] - v_width, value=v_width, shared_value=True)
