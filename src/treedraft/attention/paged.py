"""`attend` objects over page pools: what a model's layers call while serving (attention.dense does it for training)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from treedraft.attention.base import Plan, TreeAttention
from treedraft.kv.page_table import slots_of
from treedraft.kv.pool import LatentPool


@dataclass(frozen=True)
class PagedTreeAttend:
    """Rows of trees, leading shape [B, R], in absorbed form: queries meet the latents themselves.

    Every layer first writes its rows' KV at write_slots, so a row's own slot may be among those that its bits name.
    """

    backend: TreeAttention
    plan: Plan
    pool: LatentPool
    write_slots: Tensor  # [B, R] int64

    is_static = True  # shapes depend on no device value: layers must not sync

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
        """Attend with one layer's rows; returns [B, R, h, dv].

        q_nope [B, R, h, dn], q_rope [B, R, h, dr] roped, latent [B, R, c] normed, k_rope [B, R, dr] roped,
        kv_b [h, dn + dv, c], per head the key part before the value part.
        """
        self.pool.write_finite(layer, self.write_slots, latent, k_rope)
        q = absorb(q_nope, q_rope, kv_b[:, : q_nope.shape[-1]])
        out = self.backend.run_mla(self.plan, self.pool.layer(layer), q, latent.shape[-1], scale)
        return expand_values(out, kv_b[:, q_nope.shape[-1] :])

    def mla_raw(
        self,
        layer: int,
        q: Tensor,
        kv: Tensor,
        table: Tensor,
        is_interleaved: bool,
        norm_weight: Tensor,
        norm_eps: float,
        kv_b: Tensor,
        scale: float,
    ) -> Tensor:
        """As `mla` on a GPU, of rows that are neither rotated nor normed; all before the attention is one kernel.

        q [B, R, h, dn + dr], kv [B, R, c + dr], table [B, R, 2, 1, dr] float32: models.rope.Rope's rows.
        """
        from treedraft.kernels.latent import absorb_and_write_triton  # here: triton is needed on a GPU alone
        from treedraft.kernels.linear import linear_heads_triton

        nope, slots = q.shape[-1] - table.shape[-1], self.pool.layer(layer)
        absorbed = absorb_and_write_triton(
            q, kv, table, norm_weight, norm_eps, kv_b[:, :nope], self.write_slots, slots, is_interleaved
        )
        out = self.backend.run_mla(self.plan, slots, absorbed, kv_b.shape[-1], scale)
        return linear_heads_triton(out.flatten(0, 1), kv_b[:, nope:]).unflatten(0, out.shape[:2])


class PagedPrefillAttend:
    """Chunks of prompts, joined to a leading shape [T], in expanded form: per-head keys and values, causal.

    sequence i:  0 ........ start-1 | start .. start+length-1
                 in the pool        | this chunk's rows, written to the pool too
    """

    is_static = False  # lengths are known on the host, and layers may sync

    def __init__(
        self,
        pool: LatentPool,
        sequences: Sequence[tuple[int, int]],
        write_slots: Tensor,
        page_rows: Tensor,
        page_size: int,
    ) -> None:
        """sequences: (start, length) of each chunk; write_slots: [T] int64; page_rows: [B, W] int32."""
        self.pool, self.write_slots = pool, write_slots
        device = page_rows.device
        self._chunks = []
        row = 0
        for b, (start, length) in enumerate(sequences):
            prefix = torch.arange(start, device=device)[None]
            slots = slots_of(page_rows[b : b + 1], prefix, page_size)[0] if start else None
            mask = (
                None if start == 0 else torch.ones(length, start + length, dtype=torch.bool, device=device).tril(start)
            )
            self._chunks.append((slice(row, row + length), slots, mask))
            row += length

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
        """As PagedTreeAttend.mla with leading shape [T]; returns [T, h, dv]."""
        self.pool.write(layer, self.write_slots, latent, k_rope)
        kv, q = self.pool.layer(layer), torch.cat((q_nope, q_rope), -1)
        c = latent.shape[-1]
        outs = []
        for rows, prefix_slots, mask in self._chunks:
            latents, ropes = latent[rows], k_rope[rows]
            if prefix_slots is not None:
                prefix = kv.index_select(0, prefix_slots)
                latents, ropes = torch.cat((prefix[:, :c], latents)), torch.cat((prefix[:, c:], ropes))
            k, v = expand_kv(latents, ropes, kv_b, q_nope.shape[-1])
            outs.append(attend_causally(q[rows], k, v, mask, scale))
        return outs[0] if len(outs) == 1 else torch.cat(outs)


def absorb(q_nope: Tensor, q_rope: Tensor, key_weight: Tensor) -> Tensor:
    """Move the key projection to the query's side (DeepSeek-V2 paper, section 2.1.2).

    q_nope [B, R, h, dn], q_rope [B, R, h, dr], key_weight [h, dn, c] -> [B, R, h, c + dr], heads outside rows in
    memory, as the score product of attention.reference wants them.
    """
    batch, num_rows, num_heads, _ = q_nope.shape
    absorbed = torch.bmm(q_nope.flatten(0, 1).transpose(0, 1), key_weight)  # [h, B*R, c]
    absorbed = absorbed.view(num_heads, batch, num_rows, -1).transpose(0, 1)
    return torch.cat((absorbed, q_rope.transpose(1, 2)), -1).transpose(1, 2)


def expand_values(out: Tensor, value_weight: Tensor) -> Tensor:
    """Project attended latents to values: out [B, R, h, c], value_weight [h, dv, c] -> [B, R, h, dv]."""
    batch, num_rows, num_heads, c = out.shape
    by_head = out.permute(2, 0, 1, 3).reshape(num_heads, batch * num_rows, c)
    values = torch.bmm(by_head, value_weight.transpose(1, 2))
    return values.transpose(0, 1).unflatten(0, (batch, num_rows))


def expand_kv(latent: Tensor, k_rope: Tensor, kv_b: Tensor, key_dim: int) -> tuple[Tensor, Tensor]:
    """Project latents to each head's keys and values.

    latent [T, c], k_rope [T, dr], kv_b [h, dn + dv, c], key_dim = dn -> keys [T, h, dn + dr], values [T, h, dv].
    """
    num_heads = kv_b.shape[0]
    expanded = F.linear(latent, kv_b.flatten(0, 1)).unflatten(-1, (num_heads, -1))
    rope = k_rope[:, None].expand(-1, num_heads, -1)
    return torch.cat((expanded[..., :key_dim], rope), -1), expanded[..., key_dim:]


def attend_causally(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Attend one sequence's rows: q [n, h, d], k [m, h, d], v [m, h, dv] -> [n, h, dv].

    mask: [n, m] bool, or None for plain causal with n = m. Values are padded to the keys' width, since torch's
    flash kernels want both equal and the fallback materialises [h, n, m].
    """
    value_dim = v.shape[-1]
    pad = q.shape[-1] - value_dim
    if pad > 0:
        v = F.pad(v, (0, pad))
    elif pad < 0:
        q, k = F.pad(q, (0, -pad)), F.pad(k, (0, -pad))
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale)
    return out[0].transpose(0, 1)[..., :value_dim]
