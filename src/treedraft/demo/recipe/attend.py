"""Attends for training: one causal forward, a head unrolled on its own states, cached sampling, and drafted trees.

Each is passed to the very model classes that serve (`attend.mla(layer, ...)`); only where keys come from differs.
Notation: B rows, N positions, h heads, dn + dr the width of a key (nope, rope), dv of a value, c of a latent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from treedraft.attention.dense import DenseAttend


def expand_latent(latent: Tensor, k_rope: Tensor, kv_b: Tensor, value_width: int) -> tuple[Tensor, Tensor]:
    """Keys [..., h, dn + dr] and values [..., h, dv] of latents [..., c] and rotated k_rope [..., dr]."""
    heads, width, _ = kv_b.shape
    kv = F.linear(latent, kv_b.flatten(0, 1)).unflatten(-1, (heads, width))
    k_nope, values = kv.split([width - value_width, value_width], -1)
    return torch.cat([k_nope, k_rope[..., None, :].expand(*k_nope.shape[:-1], -1).to(k_nope.dtype)], -1), values


def attend_unrolled(
    queries: Tensor, keys: Tensor, values: Tensor, own_keys: Tensor, own_values: Tensor, taken: Tensor, scale: float
) -> Tensor:
    """Attention of one unrolled step: causal over step 0's keys, plus the row's own key of every later step.

    queries, keys [B, N, h, d], values [B, N, h, dv]: of this step and of step 0. own_keys, own_values
    [S, B, N, h, d | dv]: keys of steps 1..S at the row's own index. taken [S] bool: steps that count.

            keys of step 0            steps 1, 2 (own index only)
        row 0:  x                     x . .   x . .
        row 1:  x x                   . x .   . x .
        row 2:  x x x                 . . x   . . x
    """
    num_rows = queries.shape[1]
    prefix = torch.einsum("bihd,bjhd->bhij", queries, keys).float() * scale
    future = torch.ones(num_rows, num_rows, dtype=torch.bool, device=queries.device).triu(1)
    prefix = prefix.masked_fill(future, float("-inf"))
    own = own_scores(queries, own_keys, taken, scale)
    weights = torch.cat([prefix, own.permute(1, 3, 2, 0)], -1).softmax(-1).to(values.dtype)
    out = torch.einsum("bhij,bjhd->bihd", weights[..., :num_rows], values)
    return out + torch.einsum("bhis,sbihd->bihd", weights[..., num_rows:], own_values)


def own_scores(queries: Tensor, own_keys: Tensor, taken: Tensor, scale: float) -> Tensor:
    """[S, B, N, h] float32: scores of the rows' own keys, -inf for steps that do not count."""
    scores = (queries * own_keys).sum(-1, dtype=torch.float32) * scale
    return scores.masked_fill(~taken[:, None, None, None], float("-inf"))


class FusedUnrolledAttention(torch.autograd.Function):
    """`attend_unrolled` on flash attention.

    The plain form's products alone took 12 of the 51 ms of a training step of 64 rows (H200, 2026-12).

    Forward merges the flash result over step 0's keys with the own keys by log-sum-exp. Backward needs no gradient of
    that log-sum-exp: flash attention's backward, given the *merged* output and log-sum-exp, computes
    P = exp(scores - lse) and P * (dO V^T - dO . out), which is right for its share of the joint softmax.
    All head dims equal; dtypes as flash attention takes them (bfloat16 on a GPU, float32 on a CPU).
    """

    @staticmethod
    def forward(
        ctx: Any,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        own_keys: Tensor,
        own_values: Tensor,
        taken: Tensor,
        scale: float,
    ) -> Tensor:
        prefix, prefix_lse, random_state = _flash(queries, keys, values, scale)
        own = own_scores(queries, own_keys, taken, scale)
        lse = torch.logaddexp(prefix_lse, own.logsumexp(0))  # [B, N, h]
        out = prefix * (prefix_lse - lse).exp()[..., None] + ((own - lse).exp()[..., None] * own_values).sum(0)
        out = out.to(values.dtype)
        ctx.save_for_backward(queries, keys, values, own_keys, own_values, taken, out, lse, *random_state)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        queries, keys, values, own_keys, own_values, taken, out, lse, *random_state = ctx.saved_tensors
        scale = ctx.scale
        grad = grad.to(out.dtype).contiguous()
        d_queries, d_keys, d_values = _flash_backward(grad, queries, keys, values, out, lse, scale, random_state)
        weights = (own_scores(queries, own_keys, taken, scale) - lse).exp()  # [S, B, N, h]
        mean = (grad * out).sum(-1, dtype=torch.float32)
        d_scores = weights * ((grad * own_values).sum(-1, dtype=torch.float32) - mean) * scale
        d_queries = d_queries + (d_scores[..., None] * own_keys).sum(0).to(queries.dtype)
        d_own_keys = (d_scores[..., None] * queries).to(own_keys.dtype)
        d_own_values = (weights[..., None] * grad).to(own_values.dtype)
        return d_queries, d_keys, d_values, d_own_keys, d_own_values, None, None


def attend_unrolled_fused(
    queries: Tensor, keys: Tensor, values: Tensor, own_keys: Tensor, own_values: Tensor, taken: Tensor, scale: float
) -> Tensor:
    """The same as `attend_unrolled`, for equal head dims."""
    return FusedUnrolledAttention.apply(queries, keys, values, own_keys, own_values, taken, scale)


def _flash(queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Causal flash attention over [B, N, h, d]: output, log-sum-exp [B, N, h] float32, state for the backward."""
    heads_first = [x.transpose(1, 2) for x in (queries, keys, values)]
    aten = torch.ops.aten
    if queries.is_cuda:
        out, lse, _, _, _, _, seed, offset, _ = aten._scaled_dot_product_flash_attention(
            *heads_first, 0.0, True, False, scale=scale
        )
        return out.transpose(1, 2), lse.transpose(1, 2), [seed, offset]
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(*heads_first, 0.0, True, scale=scale)
    return out.transpose(1, 2), lse.transpose(1, 2), []


def _flash_backward(
    grad: Tensor,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    random_state: list[Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    heads_first = [x.transpose(1, 2) for x in (grad, queries, keys, values, out)]
    lse, length = lse.transpose(1, 2).contiguous(), queries.shape[1]
    aten = torch.ops.aten
    if queries.is_cuda:
        grads = aten._scaled_dot_product_flash_attention_backward(
            *heads_first, lse, None, None, length, length, 0.0, True, *random_state, scale=scale
        )
    else:
        grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(*heads_first, lse, 0.0, True, scale=scale)
    d_queries, d_keys, d_values = (g.transpose(1, 2) for g in grads)
    return d_queries, d_keys, d_values


class FirstStepAttend(DenseAttend):
    """Step 0 of an unrolled head: causal. Afterwards `keys` [B, N, h, d], `values` [B, N, h, dv] are set."""

    keys: Tensor
    values: Tensor

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
        self.keys, self.values = expand_latent(latent, k_rope, kv_b, kv_b.shape[1] - q_nope.shape[-1])
        return super().mla(layer, q_nope, q_rope, latent, k_rope, kv_b, scale)


class LaterStepAttend:
    """A later step of an unrolled head (training-time test: EAGLE-3, section 3.2): see `attend_unrolled`.

    prefix: keys and values of step 0. own: stacked keys and values of steps 1..S, zeros where not taken yet, this
    step's among the zeros at index `step` - 1. Afterwards `keys` and `values` hold this step's.
    """

    is_static = True
    keys: Tensor
    values: Tensor

    def __init__(
        self,
        prefix: tuple[Tensor, Tensor],
        own: tuple[Tensor, Tensor],
        taken: Tensor,
        is_this: Tensor,
        core: Callable[..., Tensor] = attend_unrolled,
    ):
        """taken, is_this: [S] bool. core: `attend_unrolled` or `attend_unrolled_fused`."""
        self.prefix, self.own, self.taken, self.is_this, self.core = prefix, own, taken, is_this, core

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
        self.keys, self.values = expand_latent(latent, k_rope, kv_b, kv_b.shape[1] - q_nope.shape[-1])
        queries = torch.cat([q_nope, q_rope.to(q_nope.dtype)], -1).to(self.keys.dtype)
        this = self.is_this[:, None, None, None, None]
        own_keys, own_values = torch.where(this, self.keys, self.own[0]), torch.where(this, self.values, self.own[1])
        return self.core(queries, *self.prefix, own_keys, own_values, self.taken | self.is_this, scale)


class SamplingCache:
    """Latents of rows that grow in step: all B rows have the same length. Absorbed form, one position a call.

    `data`: [layers, B, max_len, c + dr]. The caller sets `length`, the number of positions cached before the call.
    """

    is_static = True

    def __init__(self, layers: int, rows: int, max_len: int, width: int, dtype: torch.dtype, device: torch.device):
        self.data = torch.zeros(layers, rows, max_len, width, dtype=dtype, device=device)
        self.length = 0

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
        """q_nope [B, R, h, dn] and so on: R = the prompt at length 0, else R = 1."""
        num_rows, end = q_nope.shape[1], self.length + q_nope.shape[1]
        self.data[layer, :, self.length : end] = torch.cat([latent, k_rope.to(latent.dtype)], -1).to(self.data.dtype)
        if self.length == 0:
            return DenseAttend().mla(layer, q_nope, q_rope, latent, k_rope, kv_b, scale)
        if num_rows != 1:
            raise ValueError(f"SamplingCache takes a prompt at length 0, then one position a call; got {num_rows}")
        nope_width, latent_width = q_nope.shape[-1], latent.shape[-1]
        cached = self.data[layer, :, :end]
        w_key, w_value = kv_b.to(cached.dtype).split([nope_width, kv_b.shape[1] - nope_width], 1)
        absorbed = torch.einsum("bhd,hdc->bhc", q_nope[:, 0].to(cached.dtype), w_key)
        queries = torch.cat([absorbed, q_rope[:, 0].to(cached.dtype)], -1)
        weights = (queries @ cached.transpose(1, 2) * scale).softmax(-1)
        mixed = weights @ cached[..., :latent_width]
        return torch.einsum("bhc,hdc->bhd", mixed, w_value)[:, None]


class TreeProbe:
    """Drafts a tree at every position at once: each position of known text as the root of its own tree.

    The first call takes [B, N] rows, causal; it is draft rows 0..N-1 of the text. Every later call takes [B, N, K]:
    the frontier whose tree grows from draft row i sees rows 0..i and its own ancestors, itself included.
    Before a later call set `ancestors`: [B, N, K, level] which of the K rows at each level, own level last.
    """

    is_static = True

    def __init__(self) -> None:
        self.ancestors: Tensor | None = None
        self.keys: list[Tensor] = []  # [B, N, h, d], then [B, N, K, h, d] a frontier
        self.values: list[Tensor] = []

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
        keys, values = expand_latent(latent, k_rope, kv_b, kv_b.shape[1] - q_nope.shape[-1])
        queries = torch.cat([q_nope, q_rope], -1).to(keys.dtype)
        self.keys.append(keys)
        self.values.append(values)
        num_rows = queries.shape[1]
        future = torch.ones(num_rows, num_rows, dtype=torch.bool, device=queries.device).triu(1)
        if len(self.keys) == 1:
            scores = torch.einsum("bihd,bjhd->bhij", queries, keys) * scale
            weights = scores.float().masked_fill(future, float("-inf")).softmax(-1).to(values.dtype)
            return torch.einsum("bhij,bjhd->bihd", weights, values)
        assert self.ancestors is not None
        prefix = torch.einsum("bikhd,bjhd->bhkij", queries, self.keys[0]) * scale
        prefix = prefix.float().masked_fill(future, float("-inf"))
        own_keys = torch.stack([_pick(k, self.ancestors[..., i]) for i, k in enumerate(self.keys[1:])])
        own_values = torch.stack([_pick(v, self.ancestors[..., i]) for i, v in enumerate(self.values[1:])])
        own = (queries * own_keys).sum(-1) * scale  # [levels, B, N, K, h]
        weights = torch.cat([prefix, own.float().permute(1, 4, 3, 2, 0)], -1).softmax(-1).to(values.dtype)
        out = torch.einsum("bhkij,bjhd->bikhd", weights[..., :num_rows], self.values[0])
        return out + torch.einsum("bhkil,lbikhd->bikhd", weights[..., num_rows:], own_values)


def _pick(frontier: Tensor, index: Tensor) -> Tensor:
    """frontier [B, N, K, h, d] at index [B, N, K]: the K rows that each row names."""
    return frontier.gather(2, index[..., None, None].expand(-1, -1, -1, *frontier.shape[-2:]))
