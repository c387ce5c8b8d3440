"""DeepSeek-V2 and DeepSeek-V3 (and Kimi-K2): latent attention, dense first layers, then mixture of experts."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from treedraft.models.config import ModelConfig
from treedraft.models.layers import MLP, Matrix, NamedViews, RMSNorm, empty_weight
from treedraft.models.mla import MLA, Attend
from treedraft.models.moe import MoE
from treedraft.models.rope import Rope
from treedraft.types import ModelOutput


class DecoderLayer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); each sum is made with the norm that reads it."""

    def __init__(self, config: ModelConfig, index: int, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.index = index
        self.input_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype, device)
        self.attention = MLA(config.mla, config.hidden_size, config.hidden_size, dtype, device)
        self.post_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype, device)
        self.mlp: MLP | MoE
        if config.moe is None or index < config.first_k_dense_replace:
            self.mlp = MLP(config.hidden_size, config.intermediate_size, dtype, device)
        else:
            self.mlp = MoE(config.moe, config.hidden_size, dtype, device)

    def forward(
        self, delta: Tensor, residual: Tensor | None, rope: Rope, table: Tensor, attend: Attend
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return (delta, residual, what entered the layer). The residual stream is delta + residual, as in the next.

        delta: [..., H], or parts of it, see RMSNorm.add.
        """
        normed, entered = self.input_norm.add(delta, residual)
        attended = self.attention(normed, rope, table, attend, self.index)
        if isinstance(self.mlp, MoE):
            if self.mlp.is_fused(attended):
                return *self.mlp.fused(attended, entered, self.post_norm), entered
            normed, residual = self.post_norm.add(attended, entered)
            return self.mlp(normed, attend.is_static), residual, entered
        normed, residual = self.post_norm.add(attended, entered)
        return self.mlp(normed), residual, entered

    def checkpoint(self, prefix: str) -> NamedViews:
        yield from self.input_norm.checkpoint(f"{prefix}.input_layernorm")
        yield from self.attention.checkpoint(f"{prefix}.self_attn")
        yield from self.post_norm.checkpoint(f"{prefix}.post_attention_layernorm")
        yield from self.mlp.checkpoint(f"{prefix}.mlp")


class DeepseekModel(nn.Module):
    """Token ids in, hidden states and logits out. Parameters are uninitialised until a checkpoint fills them."""

    def __init__(
        self,
        config: ModelConfig,
        max_positions: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        """Build for position ids 0 .. max_positions - 1."""
        super().__init__()
        self.config = config
        self.embedding = empty_weight(config.vocab_size, config.hidden_size, dtype=dtype, device=device)
        self.rope = Rope(config.mla.rope, config.mla.qk_rope_head_dim, max_positions, dtype, device)
        layers = range(config.num_hidden_layers)
        self.layers = nn.ModuleList([DecoderLayer(config, i, dtype, device) for i in layers])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype, device)
        self.head = (
            self.embedding
            if config.tie_word_embeddings
            else empty_weight(config.vocab_size, config.hidden_size, dtype=dtype, device=device)
        )
        self.vocab = Matrix(self.head, gives_logits=True)

    def embed(self, token_ids: Tensor) -> Tensor:
        """Return the embeddings, [...] int64 -> [..., H]."""
        return F.embedding(token_ids, self.embedding)

    def forward(self, token_ids: Tensor, positions: Tensor, attend: Attend, taps: tuple[int, ...] = ()) -> ModelOutput:
        """Run every layer. token_ids, positions: [...] int64; taps: layers whose input is wanted.

        Tap i is the residual stream that enters layer i; tap num_hidden_layers is what enters the final norm.
        """
        delta, residual = self.embed(token_ids), None
        table = self.rope(positions)
        states: dict[int, Tensor] = {}
        for index, layer in enumerate(self.layers):
            delta, residual, entered = layer(delta, residual, self.rope, table, attend)
            if index in taps:
                states[index] = entered
        hidden, last = self.norm.add(delta, residual)
        if len(self.layers) in taps:
            states[len(self.layers)] = last
        features = torch.cat([states[tap] for tap in taps], -1) if taps else last[..., :0]
        return ModelOutput(hidden=hidden, features=features)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return [..., H] -> [..., V] in at least float32."""
        return self.vocab.logits(hidden)

    def checkpoint(self, prefix: str = "") -> NamedViews:
        """Yield (name in the checkpoint, view of the parameter) for every tensor that the checkpoint must hold."""
        yield f"{prefix}model.embed_tokens.weight", self.embedding.detach()
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, DecoderLayer)
            yield from layer.checkpoint(f"{prefix}model.layers.{index}")
        yield from self.norm.checkpoint(f"{prefix}model.norm")
        if not self.config.tie_word_embeddings:
            yield f"{prefix}lm_head.weight", self.head.detach()

    def is_skipped(self, name: str) -> bool:
        """True for a tensor of the checkpoint that is knowingly not used: MTP layers, stored rope tables."""
        if name.endswith(".rotary_emb.inv_freq"):
            return True
        first = self.config.num_hidden_layers
        mtp = range(first, first + self.config.num_nextn_predict_layers)
        return any(name.startswith(f"model.layers.{index}.") for index in mtp)

    def aliases(self) -> dict[str, str]:
        """Names that may repeat another tensor of the checkpoint, which they must then equal."""
        return {"lm_head.weight": "model.embed_tokens.weight"} if self.config.tie_word_embeddings else {}
