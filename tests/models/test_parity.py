"""Our models against transformers' DeepseekV2 and DeepseekV3, on random checkpoints in the hub's layout."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from treedraft.attention.dense import DenseAttend
from treedraft.models.deepseek import DeepseekModel
from treedraft.models.registry import load_model

BASE = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": None,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "max_position_embeddings": 256,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 32}

CONFIGS = {
    "v2-plain": ("v2", {"topk_method": "greedy", "routed_scaling_factor": 1.0}),
    "v2-groups-qlora": (
        "v2",
        {
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "q_lora_rank": 20,
            "routed_scaling_factor": 16.0,
            "v_head_dim": 16,
        },
    ),
    "v2-lite-yarn": (
        "v2",
        {
            "topk_method": "greedy",
            "n_shared_experts": 2,
            "num_experts_per_tok": 3,
            "rope_parameters": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
        },
    ),
    "v2-all-moe-tied": (
        "v2",
        {"topk_method": "greedy", "first_k_dense_replace": 0, "tie_word_embeddings": True, "rms_norm_eps": 1e-5},
    ),
    "v3-plain": ("v3", {}),
    "v3-groups-qlora": (
        "v3",
        {"n_group": 4, "topk_group": 2, "q_lora_rank": 20, "num_experts_per_tok": 4, "first_k_dense_replace": 2},
    ),
    "v3-raw-weights": ("v3", {"norm_topk_prob": False, "routed_scaling_factor": 1.7, "v_head_dim": 20}),
    "v3-yarn": (
        "v3",
        {"rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32, "beta_slow": 1}},
    ),
    "v3-yarn-unequal": (
        "v3",
        {
            "rope_parameters": {**YARN, "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.5},
            "q_lora_rank": 24,
            "qk_nope_head_dim": 16,
        },
    ),
    "v3-halves": ("v3", {"rope_interleave": False, "v_head_dim": 8}),
    "v3-halves-qlora-shared3": (
        "v3",
        {"rope_interleave": False, "q_lora_rank": 16, "n_shared_experts": 3, "tie_word_embeddings": True},
    ),
    "v3-dense-only": (
        "v3",
        {"first_k_dense_replace": 3, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    ),
}


def build_hf(name: str, folder: Path) -> torch.nn.Module:
    """A random transformers model, saved as a checkpoint of several shards."""
    transformers = pytest.importorskip("transformers")
    family, changes = CONFIGS[name]
    config_class = getattr(transformers, f"Deepseek{family.upper()}Config")
    torch.manual_seed(sum(map(ord, name)))
    config = config_class(**{**BASE, **changes}, attn_implementation="eager")
    model = getattr(transformers, f"Deepseek{family.upper()}ForCausalLM")(config).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.copy_(1 + 0.1 * torch.randn_like(parameter))  # norms: not all ones
            else:
                parameter.copy_(torch.randn_like(parameter) * (0.5 if "gate.weight" in key else 0.15))
        for key, buffer in model.named_buffers():
            if key.endswith("e_score_correction_bias"):
                buffer.copy_(0.2 * torch.randn_like(buffer))
    model.save_pretrained(folder, max_shard_size="60KB")
    return model


def greedy(logits_of, prompt: list[int], count: int) -> list[int]:
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(logits_of(torch.tensor([ids]))[0, -1].argmax()))
    return ids[len(prompt) :]


def our_logits(model: DeepseekModel, ids: Tensor, attend: object) -> Tensor:
    positions = torch.arange(ids.shape[1]).expand(ids.shape)
    return model.logits(model(ids, positions, attend).hidden)


class AbsorbedAttend:
    """Causal attention over the latents themselves, one row at a time: the oracle of the absorbed form."""

    is_static = True

    def mla(self, layer, q_nope, q_rope, latent, k_rope, kv_b, scale):
        w_key, w_value = kv_b.split([q_nope.shape[-1], kv_b.shape[1] - q_nope.shape[-1]], 1)
        out = []
        for row in range(q_nope.shape[1]):
            absorbed = torch.einsum("bhd,hdc->bhc", q_nope[:, row], w_key)
            scores = torch.einsum("bhc,bjc->bhj", absorbed, latent[:, : row + 1])
            scores = scores + torch.einsum("bhr,bjr->bhj", q_rope[:, row], k_rope[:, : row + 1])
            mixed = torch.einsum("bhj,bjc->bhc", (scores * scale).softmax(-1), latent[:, : row + 1])
            out.append(torch.einsum("bhc,hdc->bhd", mixed, w_value))
        return torch.stack(out, 1)


@pytest.mark.parametrize("name", CONFIGS)
def test_model_on_random_checkpoint_equals_transformers(name: str, tmp_path: Path) -> None:
    reference = build_hf(name, tmp_path)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    model = load_model(tmp_path, max_positions=128)
    config = model.config
    ids = torch.randint(0, config.vocab_size, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = reference(ids).logits
        given = our_logits(model, ids, DenseAttend())
        # Relative to the largest logit; float32 sums in another order differ by about 1e-6.
        assert (given - expected).abs().max() < 1e-4 * expected.abs().max()
        prompt = ids[0, :8].tolist()
        ours = greedy(lambda x: our_logits(model, x, DenseAttend()), prompt, 64)
        assert ours == greedy(lambda x: reference(x).logits, prompt, 64)
        assert len(set(ours)) > 4  # not a constant, which would prove little


@pytest.mark.parametrize("name", CONFIGS)
def test_model_in_float64_absorbed_equals_expanded(name: str, tmp_path: Path) -> None:
    build_hf(name, tmp_path)
    model = load_model(tmp_path, max_positions=32, dtype=torch.float64)
    config = model.config
    ids = torch.randint(0, config.vocab_size, (2, 20), generator=torch.Generator().manual_seed(2))
    with torch.inference_mode():
        expanded = our_logits(model, ids, DenseAttend())
        absorbed = our_logits(model, ids, AbsorbedAttend())
    assert expanded.dtype == torch.float64
    torch.testing.assert_close(absorbed, expanded, rtol=1e-11, atol=1e-11)


def test_model_in_float64_stays_float64(tmp_path: Path) -> None:
    build_hf("v3-yarn", tmp_path)
    model = load_model(tmp_path, max_positions=32, dtype=torch.float64)
    narrow = load_model(tmp_path, max_positions=32, dtype=torch.float32)
    assert all(t.dtype == torch.float64 for t in model.state_dict().values())
    ids = torch.arange(20)[None]
    with torch.inference_mode():
        wide = our_logits(model, ids, DenseAttend())
        difference = (wide - our_logits(narrow, ids, DenseAttend())).abs().max()
    # A hidden float32 step would leave nothing but rounding between the two; a float64 path leaves float32's own.
    assert 0 < difference < 1e-4


def test_model_in_bfloat16_gives_float32_logits(tmp_path: Path) -> None:
    build_hf("v3-plain", tmp_path)
    model = load_model(tmp_path, max_positions=32, dtype=torch.bfloat16)
    wide = load_model(tmp_path, max_positions=32)
    ids = torch.arange(20)[None]
    with torch.inference_mode():
        given, expected = our_logits(model, ids, DenseAttend()), our_logits(wide, ids, DenseAttend())
    assert given.dtype == torch.float32
    assert len(given[0, -1].unique()) == given.shape[-1]  # bfloat16 would tie
    assert torch.cosine_similarity(given.flatten(), expected.flatten(), dim=0) > 0.99


def test_forward_with_taps_returns_inputs_of_the_layers(tmp_path: Path) -> None:
    build_hf("v3-plain", tmp_path)
    model = load_model(tmp_path, max_positions=32)
    config = model.config
    ids = torch.arange(12)[None]
    positions = torch.arange(12)[None]
    with torch.inference_mode():
        output = model(ids, positions, DenseAttend(), taps=(2, 0, 3, 0))
        mid, low, last, again = output.features.split(config.hidden_size, -1)
        table = model.rope(positions)
        x, residual = model.embed(ids), None
        torch.testing.assert_close(low, x, rtol=0, atol=0)
        torch.testing.assert_close(again, x, rtol=0, atol=0)
        for index, layer in enumerate(model.layers):
            x, residual, entered = layer(x, residual, model.rope, table, DenseAttend())
            if index == 2:
                torch.testing.assert_close(mid, entered, rtol=0, atol=0)
        torch.testing.assert_close(last, x + residual, rtol=0, atol=0)
        assert model(ids, positions, DenseAttend()).features.shape == (1, 12, 0)


def test_forward_accepts_any_leading_shape(tmp_path: Path) -> None:
    build_hf("v3-groups-qlora", tmp_path)
    model = load_model(tmp_path, max_positions=32, dtype=torch.float64)
    ids = torch.arange(24).view(2, 12)
    with torch.inference_mode():
        both = our_logits(model, ids, DenseAttend())
        for row in range(2):
            one = model.logits(model(ids[row], torch.arange(12), DenseAttend()).hidden)
            torch.testing.assert_close(one, both[row], rtol=1e-12, atol=1e-12)
