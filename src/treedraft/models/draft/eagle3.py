"""EAGLE-3 draft head (arXiv 2503.01840) whose decoder layer has latent attention.

Checkpoint layout: the hub's `Eagle3DeepseekV2ForCausalLM` (`fc`, `midlayer.*`, `norm`, optionally `lm_head`,
`embed_tokens`, `d2t`, `t2d`). Draft row i takes the target's features at position i and the embedding of token i + 1,
at position id i, and predicts token i + 2:

    g = fc([f_low; f_mid; f_high])                 the first step; later steps feed the head's own output as g
    x = g + mla([input_norm(embed); hidden_norm(g)])
    out = x + mlp(post_norm(x))                    recycled as the next step's g, before the final norm
    logits = lm_head(norm(out))
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from treedraft.errors import CheckpointError, ConfigError
from treedraft.models.config import (
    HARMLESS_FIELDS,
    READ_FIELDS,
    MlaConfig,
    ModelConfig,
    check_plain_layers,
    mla_config,
    positive_int,
    refuse_unread,
    require,
    rope_config,
)
from treedraft.models.deepseek import DeepseekModel
from treedraft.models.layers import (
    MLP,
    Matrix,
    NamedViews,
    Products,
    RMSNorm,
    choose_products,
    empty_weight,
    pack_matrices,
)
from treedraft.models.mla import MLA, Attend
from treedraft.models.rope import Rope
from treedraft.weights.loader import load_weights, read_config, shards

ARCHITECTURE = "Eagle3DeepseekV2ForCausalLM"
HEAD_FIELDS = frozenset(
    """draft_vocab_size eagle_aux_hidden_state_layer_ids eagle_config fc_norm input_norm norm_before_fc
    norm_before_residual norm_output target_hidden_size target_model_type target_num_hidden_layers""".split()
)
EAGLE_CONFIG_FIELDS = frozenset(
    "eagle_aux_hidden_state_layer_ids use_aux_hidden_state use_input_layernorm_in_first_layer "
    "use_last_layernorm use_mtp_layernorm".split()
)


@dataclass(frozen=True)
class Eagle3Config:
    """One draft head. `vocab_size` is the target's, `draft_vocab_size` that of the head's logits."""

    hidden_size: int
    intermediate_size: int
    vocab_size: int
    draft_vocab_size: int
    taps: tuple[int, ...]  # target layers whose input the head reads, in this order
    mla: MlaConfig
    rms_norm_eps: float
    norm_output: bool  # recycle the state after the final norm instead of before
    has_own_embedding: bool  # else the target's
    has_own_lm_head: bool  # else the target's
    has_vocab_map: bool  # d2t and t2d: draft ids are not target ids

    @classmethod
    def from_hf(cls, fields: Mapping[str, Any], target: ModelConfig, tensors: frozenset[str]) -> Eagle3Config:
        """Read a head's config.json; `tensors` are the names in its checkpoint. Raises ConfigError."""
        names = fields.get("architectures") or []
        if ARCHITECTURE not in names:
            raise ConfigError(f"a draft head of architecture {ARCHITECTURE} is expected; got {names!r}")
        refuse_unread(fields, READ_FIELDS | HARMLESS_FIELDS | HEAD_FIELDS)
        check_plain_layers(fields)
        require(fields, "num_hidden_layers", 1, 1)
        for flag in ("fc_norm", "input_norm", "norm_before_fc", "norm_before_residual"):
            require(fields, flag, False, False)
        hidden_size = positive_int(fields, "hidden_size")
        for name, size in (("hidden_size", hidden_size), ("target_hidden_size", fields.get("target_hidden_size"))):
            if size is not None and size != target.hidden_size:
                raise ConfigError(
                    f"the draft head's {name} is {size}, but the target's hidden_size is {target.hidden_size}: "
                    "this head belongs to another model"
                )
        vocab_size = positive_int(fields, "vocab_size")
        if vocab_size != target.vocab_size:
            raise ConfigError(
                f"the draft head's vocab_size is {vocab_size}, but the target's is {target.vocab_size}: "
                "this head belongs to another model"
            )
        own_rope = any(fields.get(name) for name in ("rope_theta", "rope_scaling", "rope_parameters"))
        return cls(
            hidden_size=hidden_size,
            intermediate_size=positive_int(fields, "intermediate_size"),
            vocab_size=vocab_size,
            draft_vocab_size=int(fields.get("draft_vocab_size") or vocab_size),
            taps=_taps(fields, target.num_hidden_layers),
            mla=mla_config(fields, rope_config(fields) if own_rope else target.mla.rope),
            rms_norm_eps=float(fields.get("rms_norm_eps", 1e-6)),
            norm_output=bool(fields.get("norm_output", False)),
            has_own_embedding="embed_tokens.weight" in tensors,
            has_own_lm_head="lm_head.weight" in tensors,
            has_vocab_map="d2t" in tensors or int(fields.get("draft_vocab_size") or vocab_size) != vocab_size,
        )


class TargetTables(NamedTuple):
    """What a head may share with its target; kept outside the module's parameters, so that training leaves it alone."""

    embedding: Tensor  # [V, H]
    vocab: Matrix  # [V, H]


class Eagle3MlaHead(nn.Module):
    """A draft head: the same class trains and serves, only `attend` differs."""

    d2t: Tensor
    t2d: Tensor

    def __init__(
        self,
        config: Eagle3Config,
        target: TargetTables,
        max_positions: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        """Build for position ids 0 .. max_positions - 1. Raises ConfigError for a small vocabulary without own head."""
        super().__init__()
        size = config.hidden_size
        if not config.has_own_lm_head and config.draft_vocab_size != config.vocab_size:
            raise ConfigError(
                f"the draft head's vocabulary ({config.draft_vocab_size}) is smaller than the target's "
                f"({config.vocab_size}), but it has no lm_head.weight of its own"
            )
        self.config = config
        self.taps = config.taps
        self.fc = empty_weight(size, len(config.taps) * size, dtype=dtype, device=device)
        self.to_fused = Matrix(self.fc)
        self.input_norm = RMSNorm(size, config.rms_norm_eps, dtype, device)
        self.hidden_norm = RMSNorm(size, config.rms_norm_eps, dtype, device)
        self.attention = MLA(config.mla, 2 * size, size, dtype, device)
        self.post_norm = RMSNorm(size, config.rms_norm_eps, dtype, device)
        self.mlp = MLP(size, config.intermediate_size, dtype, device)
        self.norm = RMSNorm(size, config.rms_norm_eps, dtype, device)
        self.rope = Rope(config.mla.rope, config.mla.qk_rope_head_dim, max_positions, dtype, device)
        self.shared = target
        if config.has_own_embedding:
            self.own_embedding = empty_weight(config.vocab_size, size, dtype=dtype, device=device)
        if config.has_own_lm_head:
            self.own_lm_head = empty_weight(config.draft_vocab_size, size, dtype=dtype, device=device)
        self.vocab = Matrix(self.own_lm_head, gives_logits=True) if config.has_own_lm_head else target.vocab
        if config.has_vocab_map:
            self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64, device=device))
            self.register_buffer("t2d", torch.zeros(config.vocab_size, dtype=torch.bool, device=device))

    @property
    def draft_vocab_size(self) -> int:
        return self.config.draft_vocab_size

    @property
    def latent_width(self) -> int:
        """Numbers cached for one draft row."""
        return self.config.mla.latent_width

    @property
    def embedding(self) -> Tensor:
        return self.own_embedding if self.config.has_own_embedding else self.shared.embedding

    @property
    def lm_head(self) -> Tensor:
        return self.vocab.weight

    @property
    def draft_to_target(self) -> Tensor | None:
        """Target id of each draft id, [Vd] int64; None where they are the same."""
        if not self.config.has_vocab_map:
            return None
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        """Return the target's ids of draft ids, any shape, int64."""
        return draft_ids + self.d2t[draft_ids] if self.config.has_vocab_map else draft_ids

    def fuse(self, features: Tensor) -> Tensor:
        """Return the head's input from the target's tapped states, [..., taps * H] -> [..., H]."""
        return self.to_fused.linear(features)

    def forward(self, hidden: Tensor, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Run the layer. hidden: [..., H], from `fuse` or recycled; ids, positions: [...] -> [..., H] recycled."""
        embedded = self.input_norm(F.embedding(token_ids, self.embedding))
        x = torch.cat([embedded, self.hidden_norm(hidden)], -1)
        attended = self.attention(x, self.rope, self.rope(positions), attend, 0)
        normed, y = self.post_norm.add(attended, hidden)
        out = y + self.mlp(normed)
        return self.norm(out) if self.config.norm_output else out

    def logits(self, hidden: Tensor) -> Tensor:
        """Return [..., H] recycled -> [..., Vd] in at least float32."""
        return self.vocab.logits(hidden if self.config.norm_output else self.norm(hidden))

    def checkpoint(self, prefix: str = "") -> NamedViews:
        """Yield (name in the checkpoint, view) for every tensor that the checkpoint must hold."""
        yield f"{prefix}fc.weight", self.fc.detach()
        yield from self.input_norm.checkpoint(f"{prefix}midlayer.input_layernorm")
        yield from self.hidden_norm.checkpoint(f"{prefix}midlayer.hidden_norm")
        yield from self.attention.checkpoint(f"{prefix}midlayer.self_attn")
        yield from self.post_norm.checkpoint(f"{prefix}midlayer.post_attention_layernorm")
        yield from self.mlp.checkpoint(f"{prefix}midlayer.mlp")
        yield from self.norm.checkpoint(f"{prefix}norm")
        if self.config.has_own_embedding:
            yield f"{prefix}embed_tokens.weight", self.own_embedding.detach()
        if self.config.has_own_lm_head:
            yield f"{prefix}lm_head.weight", self.own_lm_head.detach()
        if self.config.has_vocab_map:
            yield f"{prefix}d2t", self.d2t
            yield f"{prefix}t2d", self.t2d


def target_tables(target: DeepseekModel) -> TargetTables:
    """Return the tables of a target that heads may share."""
    return TargetTables(target.embedding, target.vocab)


def read_head_config(folder: Path, target: ModelConfig) -> Eagle3Config:
    """Read the configuration of a folder's head. Raises ConfigError, CheckpointError."""
    return Eagle3Config.from_hf(read_config(folder), target, frozenset(shards(folder)))


def load_head(
    folder: Path,
    target: DeepseekModel,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    products: Products = "fast",
) -> Eagle3MlaHead:
    """Build the head of a folder for this target (same positions) and fill it. Raises ConfigError, CheckpointError."""
    config = read_head_config(folder, target.config)
    head = Eagle3MlaHead(config, target_tables(target), target.rope.max_positions, dtype, device)
    load_weights(head.checkpoint(), folder)
    pack_matrices(head)
    choose_products(head, products)
    _check_vocab_map(head)
    return head.requires_grad_(False).eval()


def _check_vocab_map(head: Eagle3MlaHead) -> None:
    ids = head.draft_to_target
    if ids is None:
        return
    vocab_size = head.config.vocab_size
    if int(ids.min()) < 0 or int(ids.max()) >= vocab_size or len(ids.unique()) != len(ids):
        raise CheckpointError(f"tensor d2t must give {len(ids)} different token ids in 0..{vocab_size - 1}")
    expected = torch.zeros(vocab_size, dtype=torch.bool, device=ids.device).scatter(0, ids, True)
    if not torch.equal(expected, head.t2d):
        raise CheckpointError("tensors d2t and t2d contradict each other")


def _taps(fields: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    eagle = fields.get("eagle_config") or {}
    refuse_unread(eagle, EAGLE_CONFIG_FIELDS)
    require(eagle, "use_aux_hidden_state", True, True)
    given = eagle.get("eagle_aux_hidden_state_layer_ids", fields.get("eagle_aux_hidden_state_layer_ids"))
    taps = tuple(given) if given else (2, num_layers // 2, num_layers - 3)
    if not all(isinstance(tap, int) and 0 <= tap <= num_layers for tap in taps):
        raise ConfigError(
            f"eagle_aux_hidden_state_layer_ids must be layers in 0..{num_layers} (the input of layer i, "
            f"{num_layers} being what enters the final norm); got {list(taps)}"
        )
    return taps
