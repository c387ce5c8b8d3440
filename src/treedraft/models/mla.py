"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1): projections; the attending is `attend`'s.

`attend.mla(layer, q_nope [..., h, dn], q_rope [..., h, dr], latent [..., c], k_rope [..., dr], kv_b [h, dn + dv, c],
scale) -> [..., h, dv]` knows the layout of the rows, writes the KV and picks the absorbed or the expanded form.
What it caches is the latent after its norm and k_rope after its rotation.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from treedraft.models.config import LORA_NORM_EPS, MlaConfig
from treedraft.models.layers import Matrix, NamedViews, RMSNorm, empty_weight, is_served
from treedraft.models.rope import Rope


class Attend(Protocol):
    """What a model needs from the attention below it."""

    @property
    def is_static(self) -> bool:
        """True: shapes must not depend on values and the host must not wait for the device."""
        ...

    def mla(
        self,
        layer: int,
        q_nope: Tensor,
        q_rope: Tensor,
        latent: Tensor,
        k_rope: Tensor,
        kv_b: Tensor,
        scale: float,
    ) -> Tensor: ...


@runtime_checkable
class RawAttend(Protocol):
    """An `attend` that can also rotate, norm and write rows as the projections give them, in one kernel on a GPU.

    q [..., h, dn + dr], kv [..., c + dr], table [..., 2, 1, dr] from models.rope.Rope -> [..., h, dv].
    """

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
    ) -> Tensor: ...


class DirectQueries(nn.Module):
    """Queries, latent and rotary key in one product.

        columns:  latent c | k_rope dr | q_nope_0 dn | q_rope_0 dr | q_nope_1 dn | q_rope_1 dr | ...
                             `---------- dn + dr ---------'
    The rotary parts lie dn + dr apart, the key's first, so one rotation serves them all.
    """

    def __init__(self, config: MlaConfig, in_size: int, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.config = config
        width = config.latent_width + config.num_heads * config.qk_head_dim
        self.weight = empty_weight(width, in_size, dtype=dtype, device=device)
        self.to_fused = Matrix(self.weight)

    def forward(self, x: Tensor, rope: Rope, table: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        c = self.config
        fused = self.to_fused.linear(x)
        q_nope = fused[..., c.latent_width :].unflatten(-1, (c.num_heads, c.qk_head_dim))[..., : c.qk_nope_head_dim]
        rotary = fused[..., c.kv_lora_rank :].unfold(-1, c.qk_rope_head_dim, c.qk_head_dim)
        rotary = rope.rotate(rotary, table)
        return q_nope, rotary[..., 1:, :], fused[..., : c.kv_lora_rank], rotary[..., 0, :]

    def raw(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return queries [..., h, dn + dr], and latent and key [..., c + dr], neither rotated nor normed."""
        c = self.config
        fused = self.to_fused.linear(x)
        return fused[..., c.latent_width :].unflatten(-1, (c.num_heads, c.qk_head_dim)), fused[..., : c.latent_width]

    def checkpoint(self, prefix: str) -> NamedViews:
        weight = self.weight.detach()
        yield f"{prefix}.kv_a_proj_with_mqa.weight", weight[: self.config.latent_width]
        yield f"{prefix}.q_proj.weight", weight[self.config.latent_width :]


class LowRankQueries(nn.Module):
    """Queries through a normed bottleneck; its projection and the latent's are one product.

    columns:  query bottleneck | latent c | k_rope dr
    """

    def __init__(self, config: MlaConfig, in_size: int, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        assert config.q_lora_rank is not None
        self.config = config
        self.rank = config.q_lora_rank
        self.a = empty_weight(self.rank + config.latent_width, in_size, dtype=dtype, device=device)
        self.norm = RMSNorm(self.rank, LORA_NORM_EPS, dtype, device)
        self.b = empty_weight(config.num_heads * config.qk_head_dim, self.rank, dtype=dtype, device=device)
        self.to_bottleneck, self.to_queries = Matrix(self.a), Matrix(self.b)

    def forward(self, x: Tensor, rope: Rope, table: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        c = self.config
        bottleneck, latent, k_rope = self.to_bottleneck.linear(x).split(
            [self.rank, c.kv_lora_rank, c.qk_rope_head_dim], -1
        )
        q = self.to_queries.linear(self.norm(bottleneck)).unflatten(-1, (c.num_heads, c.qk_head_dim))
        q_nope, q_rope = q.split([c.qk_nope_head_dim, c.qk_rope_head_dim], -1)
        k_rope = rope.rotate(k_rope.unsqueeze(-2), table).squeeze(-2)
        return q_nope, rope.rotate(q_rope, table), latent, k_rope

    def raw(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """As DirectQueries.raw."""
        c = self.config
        bottleneck, kv = self.to_bottleneck.linear(x).split([self.rank, c.latent_width], -1)
        return self.to_queries.linear(self.norm(bottleneck)).unflatten(-1, (c.num_heads, c.qk_head_dim)), kv

    def checkpoint(self, prefix: str) -> NamedViews:
        a = self.a.detach()
        yield f"{prefix}.q_a_proj.weight", a[: self.rank]
        yield f"{prefix}.kv_a_proj_with_mqa.weight", a[self.rank :]
        yield from self.norm.checkpoint(f"{prefix}.q_a_layernorm")
        yield f"{prefix}.q_b_proj.weight", self.b.detach()


class MLA(nn.Module):
    """One attention block: [..., in_size] -> [..., out_size]. A draft head's takes two hidden widths and gives one."""

    def __init__(
        self, config: MlaConfig, in_size: int, out_size: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        super().__init__()
        queries = DirectQueries if config.q_lora_rank is None else LowRankQueries
        self.queries = queries(config, in_size, dtype, device)
        self.norm = RMSNorm(config.kv_lora_rank, LORA_NORM_EPS, dtype, device)
        # Per head the rows of W_UK, then those of W_UV.
        self.kv_b = empty_weight(
            config.num_heads,
            config.qk_nope_head_dim + config.v_head_dim,
            config.kv_lora_rank,
            dtype=dtype,
            device=device,
        )
        self.out = empty_weight(out_size, config.num_heads * config.v_head_dim, dtype=dtype, device=device)
        self.to_out = Matrix(self.out)
        self.scale = config.scale

    def forward(self, x: Tensor, rope: Rope, table: Tensor, attend: Attend, layer: int) -> Tensor:
        if is_served(x) and isinstance(attend, RawAttend):
            q, kv = self.queries.raw(x)
            weight, eps = self.norm.weight, self.norm.eps_host
            heads = attend.mla_raw(layer, q, kv, table, rope.is_interleaved, weight, eps, self.kv_b, self.scale)
            return self.to_out.linear(heads.flatten(-2))
        q_nope, q_rope, latent, k_rope = self.queries(x, rope, table)
        heads = attend.mla(layer, q_nope, q_rope, self.norm(latent), k_rope, self.kv_b, self.scale)
        return self.to_out.linear(heads.flatten(-2))

    def checkpoint(self, prefix: str) -> NamedViews:
        yield from self.queries.checkpoint(prefix)
        yield from self.norm.checkpoint(f"{prefix}.kv_a_layernorm")
        yield f"{prefix}.kv_b_proj.weight", self.kv_b.detach().flatten(0, 1)
        yield f"{prefix}.o_proj.weight", self.out.detach()
