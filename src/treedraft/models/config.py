"""What a checkpoint's config.json says, as frozen dataclasses; a field that would be ignored is an error that names it.

Sources: transformers 5 `configuration_deepseek_v2.py`, `configuration_deepseek_v3.py` and `modeling_rope_utils.py` for
names, defaults and meaning; DeepSeek-V2 (arXiv 2405.04434) and DeepSeek-V3 (arXiv 2412.19437) for the architecture.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from treedraft.errors import ConfigError

# DeepSeek's own code and transformers both build the norms inside the attention with this epsilon, whatever
# rms_norm_eps says.
LORA_NORM_EPS = 1e-6

FAMILIES = {
    "deepseek_v2": "deepseek_v2",
    "deepseek_v3": "deepseek_v3",
    "kimi_k2": "deepseek_v3",
    "DeepseekV2ForCausalLM": "deepseek_v2",
    "DeepseekV3ForCausalLM": "deepseek_v3",
}

# Read by other parts, or without any influence on the result of a forward pass.
HARMLESS_FIELDS = frozenset(
    """_name_or_path architectures attention_dropout attn_implementation auto_map aux_loss_alpha bos_token_id
    chunk_size_feed_forward dtype eos_token_id ep_size finetuning_task head_dim id2label initializer_range is_decoder
    is_encoder_decoder label2id max_length max_position_embeddings model_max_length model_type name_or_path
    output_attentions output_hidden_states output_router_logits pad_token_id pretraining_tp problem_type
    qk_head_dim return_dict router_aux_loss_coef sep_token_id seq_aux task_specific_params tokenizer_class torch_dtype
    transformers_version transformers.js_config unk_token_id use_cache""".split()
)

READ_FIELDS = frozenset(
    """attention_bias first_k_dense_replace hidden_act hidden_size intermediate_size kv_lora_rank mlp_bias
    moe_intermediate_size moe_layer_freq n_group n_routed_experts n_shared_experts norm_topk_prob num_attention_heads
    num_experts_per_tok num_hidden_layers num_key_value_heads num_mtp_layers num_nextn_predict_layers q_lora_rank
    qk_nope_head_dim qk_rope_head_dim rms_norm_eps rope_interleave rope_parameters rope_scaling rope_theta
    routed_scaling_factor scoring_func tie_word_embeddings topk_group topk_method v_head_dim vocab_size""".split()
)


@dataclass(frozen=True)
class YarnConfig:
    """YaRN (arXiv 2309.00071): long contexts by rescaling the slow rotations and the attention's temperature."""

    factor: float
    original_max_positions: int
    beta_fast: float
    beta_slow: float
    mscale: float  # 0: not given
    mscale_all_dim: float  # 0: not given
    attention_factor: float | None  # None: derived from mscale and mscale_all_dim
    truncate: bool  # round the ramp's ends to whole dimensions

    @property
    def table_scale(self) -> float:
        """What cos and sin are multiplied by."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return yarn_mscale(self.factor, self.mscale) / yarn_mscale(self.factor, self.mscale_all_dim)
        return yarn_mscale(self.factor, 1.0)

    @property
    def softmax_scale(self) -> float:
        """What the attention scores are multiplied by, besides (nope + rope) ** -0.5."""
        return yarn_mscale(self.factor, self.mscale_all_dim) ** 2 if self.mscale_all_dim else 1.0


def yarn_mscale(factor: float, mscale: float) -> float:
    """Return YaRN's attention temperature for a context stretched `factor` times."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding."""

    theta: float
    is_interleaved: bool  # pairs (0, 1), (2, 3), ...; else (0, d/2), (1, d/2 + 1), ...
    yarn: YarnConfig | None


@dataclass(frozen=True)
class MlaConfig:
    """Multi-head latent attention: sizes of one layer."""

    num_heads: int
    q_lora_rank: int | None  # None: queries are projected directly
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    rope: RopeConfig

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def latent_width(self) -> int:
        """Numbers cached for one token and layer: the normed latent, then the roped key part."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def scale(self) -> float:
        """Softmax scale. Absorbed and expanded form share it: it belongs to nope + rope, not to the latent."""
        yarn = self.rope.yarn
        return self.qk_head_dim**-0.5 * (yarn.softmax_scale if yarn else 1.0)


@dataclass(frozen=True)
class MoeConfig:
    """Mixture of experts: sizes of one layer, and how its router chooses."""

    num_experts: int
    num_experts_per_tok: int
    num_shared_experts: int
    intermediate_size: int  # of one expert
    topk_method: str  # "greedy" | "group_limited_greedy" (V2, softmax) | "noaux_tc" (V3, sigmoid)
    num_groups: int
    topk_groups: int  # groups that stay eligible
    norm_topk_prob: bool
    routed_scaling_factor: float


@dataclass(frozen=True)
class ModelConfig:
    """One target model. Names follow config.json where the meaning is the same."""

    architecture: str  # "deepseek_v2" | "deepseek_v3"
    vocab_size: int
    hidden_size: int
    intermediate_size: int  # of a dense layer's MLP
    num_hidden_layers: int
    first_k_dense_replace: int  # layers before this one have a dense MLP
    mla: MlaConfig
    moe: MoeConfig | None
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    num_nextn_predict_layers: int  # MTP layers in the checkpoint; knowingly skipped
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]

    @property
    def kv_lora_rank(self) -> int:
        return self.mla.kv_lora_rank

    @property
    def qk_rope_head_dim(self) -> int:
        return self.mla.qk_rope_head_dim

    @classmethod
    def from_hf(cls, fields: Mapping[str, Any]) -> ModelConfig:
        """Read a config.json. Raises ConfigError naming the field for all that cannot be followed exactly."""
        family = _family(fields)
        refuse_unread(fields, READ_FIELDS | HARMLESS_FIELDS)
        check_plain_layers(fields)
        num_layers = positive_int(fields, "num_hidden_layers")
        moe = _moe(fields, family)
        return cls(
            architecture=family,
            vocab_size=positive_int(fields, "vocab_size"),
            hidden_size=positive_int(fields, "hidden_size"),
            intermediate_size=positive_int(fields, "intermediate_size"),
            num_hidden_layers=num_layers,
            first_k_dense_replace=_first_moe_layer(fields, family, num_layers, moe),
            mla=mla_config(fields, rope_config(fields)),
            moe=moe,
            rms_norm_eps=float(fields.get("rms_norm_eps", 1e-6)),
            max_position_embeddings=positive_int(fields, "max_position_embeddings"),
            tie_word_embeddings=bool(fields.get("tie_word_embeddings", False)),
            num_nextn_predict_layers=int(fields.get("num_nextn_predict_layers", fields.get("num_mtp_layers", 0)) or 0),
            bos_token_id=fields.get("bos_token_id"),
            eos_token_ids=_token_ids(fields.get("eos_token_id")),
        )


# ------------------------------------------------------------------ parts that draft heads read too


def positive_int(fields: Mapping[str, Any], name: str) -> int:
    """Return a required field. Raises ConfigError when it is absent or no positive integer."""
    value = fields.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        given = "nothing" if value is None else repr(value)
        raise ConfigError(f"config field {name} must be a positive integer; got {given}")
    return value


def check_plain_layers(fields: Mapping[str, Any]) -> None:
    """Raise ConfigError for a layer variant that this code does not have."""
    if fields.get("quantization_config"):
        method = fields["quantization_config"].get("quant_method", "unknown")
        raise ConfigError(
            f"config field quantization_config (quant_method {method!r}): quantised checkpoints are not supported yet; "
            "use one stored in bfloat16, float32 or float64"
        )
    require(fields, "hidden_act", "silu", "silu")
    require(fields, "attention_bias", False, False)
    require(fields, "mlp_bias", False, False)
    require(fields, "moe_layer_freq", 1, 1)
    heads = fields.get("num_attention_heads")
    require(fields, "num_key_value_heads", heads, heads)


def require(fields: Mapping[str, Any], name: str, default: Any, *supported: Any) -> Any:
    """Return a field whose value must be one of `supported`. Raises ConfigError with both."""
    value = fields.get(name, default)
    if value is None:
        value = default
    if value not in supported:
        expected = " or ".join(repr(s) for s in supported)
        raise ConfigError(f"config field {name}: only {expected} is supported; got {value!r}")
    return value


def mla_config(fields: Mapping[str, Any], rope: RopeConfig) -> MlaConfig:
    """Read the sizes of latent attention. Raises ConfigError naming the field at fault."""
    rank = fields.get("q_lora_rank")
    rope_dim = positive_int(fields, "qk_rope_head_dim")
    if rope_dim % 2:
        raise ConfigError(f"config field qk_rope_head_dim must be even; got {rope_dim}")
    return MlaConfig(
        num_heads=positive_int(fields, "num_attention_heads"),
        q_lora_rank=None if rank is None else positive_int(fields, "q_lora_rank"),
        kv_lora_rank=positive_int(fields, "kv_lora_rank"),
        qk_nope_head_dim=positive_int(fields, "qk_nope_head_dim"),
        qk_rope_head_dim=rope_dim,
        v_head_dim=positive_int(fields, "v_head_dim"),
        rope=rope,
    )


ROPE_KEYS = frozenset(
    """rope_type type rope_theta factor original_max_position_embeddings beta_fast beta_slow mscale mscale_all_dim
    attention_factor truncate partial_rotary_factor""".split()
)


def rope_config(fields: Mapping[str, Any]) -> RopeConfig:
    """Read `rope_parameters` (transformers 5) or `rope_scaling` with `rope_theta` (before). Raises ConfigError."""
    scaling = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    unknown = sorted(set(scaling) - ROPE_KEYS)
    if unknown:
        raise ConfigError(f"rope parameter {unknown[0]} (value {scaling[unknown[0]]!r}) is not supported")
    require(scaling, "partial_rotary_factor", 1.0, 1.0)
    rope_type = scaling.get("rope_type", scaling.get("type")) or "default"
    if rope_type not in ("default", "yarn"):
        raise ConfigError(f"rope type {rope_type!r} is not supported; supported are 'default' and 'yarn'")
    return RopeConfig(
        theta=float(scaling.get("rope_theta", fields.get("rope_theta")) or 10000.0),
        is_interleaved=fields.get("rope_interleave", True) is not False,
        yarn=_yarn(fields, scaling) if rope_type == "yarn" else None,
    )


def _yarn(fields: Mapping[str, Any], scaling: Mapping[str, Any]) -> YarnConfig:
    original = scaling.get("original_max_position_embeddings") or positive_int(fields, "max_position_embeddings")
    factor = scaling.get("factor") or positive_int(fields, "max_position_embeddings") / original
    mscale, mscale_all_dim = float(scaling.get("mscale") or 0), float(scaling.get("mscale_all_dim") or 0)
    if bool(mscale) != bool(mscale_all_dim) and scaling.get("attention_factor") is None and mscale not in (0, 1):
        # DeepSeek's code reads a lone mscale as mscale / 1, transformers ignores it.
        raise ConfigError(f"rope parameter mscale ({mscale}) needs mscale_all_dim beside it")
    attention_factor = scaling.get("attention_factor")
    return YarnConfig(
        factor=float(factor),
        original_max_positions=int(original),
        beta_fast=float(scaling.get("beta_fast") or 32),
        beta_slow=float(scaling.get("beta_slow") or 1),
        mscale=mscale,
        mscale_all_dim=mscale_all_dim,
        attention_factor=None if attention_factor is None else float(attention_factor),
        truncate=bool(scaling.get("truncate", True)),
    )


# ------------------------------------------------------------------ private


def _family(fields: Mapping[str, Any]) -> str:
    names = [fields.get("model_type"), *(fields.get("architectures") or ())]
    for name in names:
        if name in FAMILIES:
            return FAMILIES[name]
    given = ", ".join(repr(n) for n in names if n) or "nothing"
    raise ConfigError(f"model_type and architectures name no supported model: got {given}; supported are "
                      f"{', '.join(sorted(FAMILIES))}")  # fmt: skip


def refuse_unread(fields: Mapping[str, Any], known: frozenset[str]) -> None:
    for name, value in fields.items():
        if name in known or name == "quantization_config" or name.startswith("_"):
            continue
        if value is None or value is False or value == 0 or value == [] or value == {}:
            continue
        raise ConfigError(
            f"config field {name} (value {value!r}) is not known to treedraft and might change the model's output; "
            "remove it from config.json if it does not"
        )


def _first_moe_layer(fields: Mapping[str, Any], family: str, num_layers: int, moe: MoeConfig | None) -> int:
    if moe is None:
        return num_layers
    default = 3 if family == "deepseek_v3" else 0
    first = fields.get("first_k_dense_replace")
    return min(default if first is None else int(first), num_layers)


def _moe(fields: Mapping[str, Any], family: str) -> MoeConfig | None:
    if fields.get("n_routed_experts") is None:
        return None
    num_experts = positive_int(fields, "n_routed_experts")
    per_token = positive_int(fields, "num_experts_per_tok")
    if family == "deepseek_v2":
        require(fields, "scoring_func", "softmax", "softmax")
        method = require(fields, "topk_method", "greedy", "greedy", "group_limited_greedy")
        # DeepSeek's V2 code normalises instead of scaling, transformers ignores the field: no reading is right.
        require(fields, "norm_topk_prob", False, False)
        norm = False
    else:
        require(fields, "scoring_func", "sigmoid", "sigmoid")
        method = require(fields, "topk_method", "noaux_tc", "noaux_tc")
        norm = fields.get("norm_topk_prob", True) is not False
    groups = 1 if method == "greedy" else positive_int(fields, "n_group")
    topk_groups = 1 if method == "greedy" else positive_int(fields, "topk_group")
    if num_experts % groups or not 1 <= topk_groups <= groups:
        raise ConfigError(
            f"config fields n_group ({groups}) and topk_group ({topk_groups}): n_group must divide "
            f"n_routed_experts ({num_experts}), topk_group must be in 1..n_group"
        )
    group_size = num_experts // groups
    if method == "noaux_tc" and groups > 1 and group_size < 2:
        raise ConfigError(f"config field n_group ({groups}) leaves {group_size} expert a group; at least 2 are needed")
    if per_token > topk_groups * group_size:
        raise ConfigError(
            f"config field num_experts_per_tok must be at most {topk_groups * group_size}, the experts of topk_group "
            f"groups; got {per_token}"
        )
    scale = fields.get("routed_scaling_factor")
    return MoeConfig(
        num_experts=num_experts,
        num_experts_per_tok=per_token,
        num_shared_experts=int(fields.get("n_shared_experts") or 0),
        intermediate_size=positive_int(fields, "moe_intermediate_size"),
        topk_method=method,
        num_groups=groups,
        topk_groups=topk_groups,
        norm_topk_prob=norm,
        routed_scaling_factor=1.0 if scale is None else float(scale),
    )


def _token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)
