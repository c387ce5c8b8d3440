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
    """x + attention(norm(x)), then x + mlp(norm(x))."""

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

    def forward(self, x: Tensor, rope: Rope, table: Tensor, attend: Attend) -> Tensor:
        x = x + self.attention(self.input_norm(x), rope, table, attend, self.index)
        normed = self.post_norm(x)
        return x + (self.mlp(normed, attend.is_static) if isinstance(self.mlp, MoE) else self.mlp(normed))

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
        x = self.embed(token_ids)
        table = self.rope(positions)
        states: dict[int, Tensor] = {}
        for index, layer in enumerate(self.layers):
            if index in taps:
                states[index] = x
            x = layer(x, self.rope, table, attend)
        if len(self.layers) in taps:
            states[len(self.layers)] = x
        features = torch.cat([states[tap] for tap in taps], -1) if taps else x[..., :0]
        return ModelOutput(hidden=self.norm(x), features=features)

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
