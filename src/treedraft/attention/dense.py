"""Causal attention without a cache, in the expanded form: for training and as the tests' yardstick."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


class DenseAttend:
    """Causal over whole sequences: leading shape [B, T] (or [T]), row t sees rows 0..t of its own sequence."""

    is_static = True

    def mla(
        self,
        layer: int,
        q_nope: Tensor,
        q_rope: Tensor,
        latent: Tensor,
        k_rope: Tensor,
        kv_b: Tensor,
        scale: float,
    ) -> Tensor:
        """Return [..., T, h, dv]. See models.mla for the shapes. Autograd and autocast work through it."""
        num_heads, v_size = kv_b.shape[0], kv_b.shape[1] - q_nope.shape[-1]
        kv = F.linear(latent, kv_b.flatten(0, 1)).unflatten(-1, (num_heads, -1))
        k_nope, v = kv.split([q_nope.shape[-1], v_size], -1)
        q = torch.cat([q_nope, q_rope.to(q_nope.dtype)], -1)
        shared = k_rope.to(k_nope.dtype).unsqueeze(-2).expand(*k_nope.shape[:-1], -1)
        k = torch.cat([k_nope, shared], -1)
        v = F.pad(v, (0, max(0, q.shape[-1] - v_size)))  # equal head sizes reach the fused kernels
        out = F.scaled_dot_product_attention(
            q.transpose(-2, -3), k.transpose(-2, -3), v.transpose(-2, -3), is_causal=True, scale=scale
        )
        return out.transpose(-2, -3)[..., :v_size]
