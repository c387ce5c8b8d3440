"""config.json: what is read, and what is refused by name."""

import math

import pytest
import torch

from treedraft.errors import ConfigError
from treedraft.models.config import ModelConfig, RopeConfig
from treedraft.models.rope import Rope

V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "kv_lora_rank": 8,
    "q_lora_rank": None,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 6,
    "v_head_dim": 6,
    "max_position_embeddings": 128,
}
V2 = {**V3, "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "topk_method": "greedy"}

# The fields of deepseek-ai/DeepSeek-V3's config.json besides sizes and quantisation.
HUB_V3 = {
    "attention_bias": False, "attention_dropout": 0.0, "auto_map": {"AutoConfig": "x"}, "aux_loss_alpha": 0.001,
    "bos_token_id": 0, "eos_token_id": 1, "ep_size": 1, "first_k_dense_replace": 3, "hidden_act": "silu",
    "initializer_range": 0.02, "moe_layer_freq": 1, "norm_topk_prob": True, "num_nextn_predict_layers": 1,
    "pretraining_tp": 1, "rms_norm_eps": 1e-06, "rope_theta": 10000, "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid", "seq_aux": True, "tie_word_embeddings": False, "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16", "transformers_version": "4.33.1", "use_cache": True,
    "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
                     "original_max_position_embeddings": 4096, "type": "yarn"},
}  # fmt: skip


def test_from_hf_of_hub_config_reads_all_of_it() -> None:
    config = ModelConfig.from_hf({**V3, **HUB_V3})
    assert config.architecture == "deepseek_v3"
    assert config.first_k_dense_replace == 3
    assert config.num_nextn_predict_layers == 1
    assert config.eos_token_ids == (1,)
    assert config.moe is not None and config.moe.norm_topk_prob and config.moe.routed_scaling_factor == 2.5
    yarn = config.mla.rope.yarn
    assert yarn is not None and yarn.factor == 40 and yarn.table_scale == 1.0
    mscale = 0.1 * math.log(40) + 1
    assert config.mla.scale == pytest.approx(10**-0.5 * mscale * mscale)


def test_from_hf_of_kimi_is_deepseek_v3() -> None:
    assert ModelConfig.from_hf({**V3, "model_type": "kimi_k2", "architectures": ["X"]}).architecture == "deepseek_v3"


def test_from_hf_reads_rope_in_both_places_alike() -> None:
    yarn = {"factor": 8, "mscale": 0.5, "mscale_all_dim": 0.25, "original_max_position_embeddings": 16}
    old = {**V3, "rope_theta": 777.0, "rope_scaling": {**yarn, "type": "yarn"}}
    new = {**V3, "rope_parameters": {**yarn, "rope_type": "yarn", "rope_theta": 777.0}}
    assert ModelConfig.from_hf(old).mla == ModelConfig.from_hf(new).mla
    assert ModelConfig.from_hf(old).mla.rope.theta == 777.0


@pytest.mark.parametrize(
    ("base", "field", "value"),
    [
        (V3, "quantization_config", {"quant_method": "fp8", "weight_block_size": [128, 128]}),
        (V3, "hidden_act", "gelu"),
        (V3, "attention_bias", True),
        (V2, "mlp_bias", True),
        (V3, "sliding_window", 4096),
        (V3, "topk_method", "greedy"),
        (V3, "scoring_func", "softmax"),
        (V2, "topk_method", "noaux_tc"),
        (V2, "scoring_func", "sigmoid"),
        (V2, "norm_topk_prob", True),
        (V3, "moe_layer_freq", 2),
        (V3, "num_key_value_heads", 1),
        (V3, "index_topk", 2048),
        (V3, "logit_scale", 0.5),
        (V3, "n_group", 3),
        (V3, "topk_group", 3),
        (V3, "num_experts_per_tok", 5),
        (V3, "vocab_size", None),
        (V3, "kv_lora_rank", 0),
        (V3, "hidden_size", "32"),
        (V3, "qk_rope_head_dim", 5),
        (V3, "rope_scaling", {"type": "linear", "factor": 2}),
        (V3, "rope_scaling", {"type": "yarn", "factor": 2, "short_factor": [1]}),
        (V3, "rope_parameters", {"rope_type": "default", "partial_rotary_factor": 0.5}),
        (V3, "rope_scaling", {"type": "yarn", "factor": 2, "mscale": 0.7}),
    ],
)
def test_from_hf_of_field_that_would_be_ignored_names_it(base: dict, field: str, value: object) -> None:
    ModelConfig.from_hf(base)  # the rest is fine
    named = field
    if isinstance(value, dict) and field.startswith("rope"):
        named = next(k for k in ("short_factor", "partial_rotary_factor", "mscale", "linear") if k in str(value))
    with pytest.raises(ConfigError, match=named):
        ModelConfig.from_hf({**base, field: value})


def test_from_hf_of_unknown_architecture_lists_the_supported() -> None:
    with pytest.raises(ConfigError, match=r"LlamaForCausalLM.*DeepseekV3ForCausalLM|Deepseek.*"):
        ModelConfig.from_hf({**V3, "model_type": "llama", "architectures": ["LlamaForCausalLM"]})


def test_from_hf_ignores_unknown_fields_that_are_off() -> None:
    config = ModelConfig.from_hf({**V3, "sliding_window": None, "use_sliding_window": False, "new_thing": 0})
    assert config == ModelConfig.from_hf(V3)


@pytest.mark.parametrize("is_interleaved", [True, False])
def test_rope_rotates_each_pair_by_position_times_frequency(is_interleaved: bool) -> None:
    dim = 8
    rope = Rope(RopeConfig(100.0, is_interleaved, None), dim, 50, torch.float64, "cpu")
    x = torch.randn(3, 2, dim, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    positions = torch.tensor([0, 7, 49])
    given = rope.rotate(x, rope(positions))
    expected = torch.empty_like(x)
    for row, position in enumerate(positions.tolist()):
        for i in range(dim // 2):
            a, b = (2 * i, 2 * i + 1) if is_interleaved else (i, i + dim // 2)
            angle = position * 100.0 ** (-2 * i / dim)
            cos, sin = math.cos(angle), math.sin(angle)
            expected[row, :, a] = x[row, :, a] * cos - x[row, :, b] * sin
            expected[row, :, b] = x[row, :, b] * cos + x[row, :, a] * sin
    torch.testing.assert_close(given, expected, rtol=1e-13, atol=1e-13)
