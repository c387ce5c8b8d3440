"""Checkpoints on disk: what loads, and how every damage is named."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from treedraft.errors import CheckpointError
from treedraft.models.config import ModelConfig
from treedraft.models.deepseek import DeepseekModel
from treedraft.models.layers import init_weights
from treedraft.models.registry import load_model
from treedraft.weights.loader import load_weights, read_config, resolve_folder, save_checkpoint, shards

FIELDS = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "vocab_size": 40, "hidden_size": 16,
    "intermediate_size": 24, "moe_intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2,
    "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1, "kv_lora_rank": 6, "q_lora_rank": None, "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4, "v_head_dim": 4, "max_position_embeddings": 32,
}  # fmt: skip
INDEX = "model.safetensors.index.json"


def save_random(folder: Path, shard_bytes: int = 4000, dtype: torch.dtype | None = None, **changes) -> DeepseekModel:
    fields = {**FIELDS, **changes}
    model = DeepseekModel(ModelConfig.from_hf(fields), 32)
    init_weights(model, 0)
    model.layers[1].mlp.router.bias.copy_(torch.arange(4) / 3)
    save_checkpoint(folder, model.checkpoint(), fields, dtype, shard_bytes)
    return model


def edit(folder: Path, change) -> None:
    """Merge the shards into one file after `change` has edited the tensors."""
    tensors: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors.update(load_file(path))
        path.unlink()
    (folder / INDEX).unlink(missing_ok=True)
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("shard_bytes", [1, 4000, 2**30])
def test_save_and_load_round_trip_is_lossless(shard_bytes: int, tmp_path: Path) -> None:
    model = save_random(tmp_path, shard_bytes)
    again = load_model(tmp_path, 32)
    config = again.config
    assert config == model.config
    for (name, a), (same, b) in zip(model.checkpoint(), again.checkpoint(), strict=True):
        assert name == same and torch.equal(a, b), name
    assert (tmp_path / INDEX).exists() == (shard_bytes < 2**30)


def test_save_in_bfloat16_keeps_the_routers_bias_in_float32(tmp_path: Path) -> None:
    model = save_random(tmp_path, 2**30, torch.bfloat16)
    stored = load_file(tmp_path / "model.safetensors")
    narrow = {name for name, tensor in stored.items() if tensor.dtype == torch.bfloat16}
    assert set(stored) - narrow == {"model.layers.1.mlp.gate.e_score_correction_bias"}
    again = load_model(tmp_path, 32, dtype=torch.bfloat16)
    assert torch.equal(again.layers[1].mlp.router.bias, model.layers[1].mlp.router.bias)


def test_checkpoint_names_are_the_hubs(tmp_path: Path) -> None:
    names = {name for name, _ in save_random(tmp_path).checkpoint()}
    assert {
        "model.embed_tokens.weight",
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.0.self_attn.kv_a_proj_with_mqa.weight",
        "model.layers.0.mlp.gate_proj.weight",
        "model.layers.1.mlp.experts.3.down_proj.weight",
        "model.layers.1.mlp.shared_experts.up_proj.weight",
        "model.layers.1.mlp.gate.e_score_correction_bias",
        "model.norm.weight",
        "lm_head.weight",
    } <= names


def test_load_with_missing_tensor_names_it(tmp_path: Path) -> None:
    save_random(tmp_path)
    edit(tmp_path, lambda t: t.pop("model.layers.1.mlp.experts.2.up_proj.weight"))
    with pytest.raises(CheckpointError, match=r"lacks model.layers.1.mlp.experts.2.up_proj.weight"):
        load_model(tmp_path, 32)


def test_load_with_left_over_tensor_names_it(tmp_path: Path) -> None:
    save_random(tmp_path)
    edit(tmp_path, lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(16)}))
    with pytest.raises(CheckpointError, match=r"holds model.layers.0.self_attn.q_proj.bias"):
        load_model(tmp_path, 32)


def test_load_with_many_missing_tensors_counts_the_rest(tmp_path: Path) -> None:
    save_random(tmp_path)
    edit(tmp_path, lambda t: [t.pop(k) for k in list(t) if "experts" in k])
    with pytest.raises(CheckpointError, match=r"and 10 more"):
        load_model(tmp_path, 32)


def test_load_with_other_shape_gives_both(tmp_path: Path) -> None:
    save_random(tmp_path)
    edit(tmp_path, lambda t: t.update({"model.norm.weight": torch.zeros(17)}))
    with pytest.raises(CheckpointError, match=r"model.norm.weight.*\[16\].*\[17\]"):
        load_model(tmp_path, 32)


def test_load_with_quantised_tensor_names_its_dtype(tmp_path: Path) -> None:
    save_random(tmp_path)
    edit(tmp_path, lambda t: t.update({"lm_head.weight": t["lm_head.weight"].to(torch.float8_e4m3fn)}))
    with pytest.raises(CheckpointError, match=r"lm_head.weight.*float8_e4m3fn"):
        load_model(tmp_path, 32)


def test_load_skips_mtp_layers_only_as_many_as_announced(tmp_path: Path) -> None:
    save_random(tmp_path, num_nextn_predict_layers=1)
    edit(tmp_path, lambda t: t.update({"model.layers.2.eh_proj.weight": torch.zeros(16, 32)}))
    load_model(tmp_path, 32)
    edit(tmp_path, lambda t: t.update({"model.layers.3.eh_proj.weight": torch.zeros(16, 32)}))
    with pytest.raises(CheckpointError, match=r"model.layers.3.eh_proj.weight"):
        load_model(tmp_path, 32)


def test_load_of_tied_model_accepts_an_equal_head_only(tmp_path: Path) -> None:
    save_random(tmp_path, tie_word_embeddings=True)
    model = load_model(tmp_path, 32)
    assert model.head is model.embedding
    edit(tmp_path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    load_model(tmp_path, 32)
    edit(tmp_path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + 1}))
    with pytest.raises(CheckpointError, match=r"lm_head.weight differs from model.embed_tokens.weight"):
        load_model(tmp_path, 32)


@pytest.mark.parametrize("keep", [0, 4, 100, -7])
def test_load_of_truncated_file_names_it(keep: int, tmp_path: Path) -> None:
    save_random(tmp_path, 2**30)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match="model.safetensors"):
        load_model(tmp_path, 32)


def test_load_with_shard_missing_names_it(tmp_path: Path) -> None:
    save_random(tmp_path)
    victim = sorted(tmp_path.glob("*.safetensors"))[1]
    victim.unlink()
    with pytest.raises(CheckpointError, match=victim.name):
        load_model(tmp_path, 32)


def test_load_with_contradicting_index_names_the_tensor(tmp_path: Path) -> None:
    save_random(tmp_path)
    content = json.loads((tmp_path / INDEX).read_text())
    content["weight_map"]["model.ghost"] = content["weight_map"]["model.norm.weight"]
    (tmp_path / INDEX).write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="model.ghost"):
        load_model(tmp_path, 32)
    (tmp_path / INDEX).write_text("{}")
    with pytest.raises(CheckpointError, match="weight_map"):
        shards(tmp_path)


def test_load_of_folder_without_weights_says_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(FIELDS))
    with pytest.raises(CheckpointError, match="neither"):
        load_model(tmp_path, 32)
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(CheckpointError, match="pytorch_model.bin"):
        load_model(tmp_path, 32)


def test_read_config_of_bad_files_names_them(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="config.json"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="config.json"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(CheckpointError, match="object"):
        read_config(tmp_path)


def test_load_weights_converts_between_float_dtypes(tmp_path: Path) -> None:
    save_file({"a": torch.tensor([1.5, 2.5], dtype=torch.float16)}, tmp_path / "model.safetensors")
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        view = torch.empty(2, dtype=dtype)
        load_weights([("a", view)], tmp_path)
        assert view.tolist() == [1.5, 2.5]


def test_resolve_folder_of_demo_and_folder(tmp_path: Path) -> None:
    assert (resolve_folder("demo") / "config.json").exists()
    assert (resolve_folder("demo", kind="draft") / "config.json").exists()
    assert resolve_folder(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("name", ["/no/such/folder", "./nowhere", "a/b/c", ""])
def test_resolve_folder_of_missing_path_names_it(name: str) -> None:
    with pytest.raises(CheckpointError, match="no such folder"):
        resolve_folder(name)


def test_resolve_folder_of_unknown_model_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def absent(name: str, **_: object) -> str:
        from huggingface_hub.errors import LocalEntryNotFoundError

        raise LocalEntryNotFoundError(f"nothing about {name}\nmore")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", absent)
    with pytest.raises(CheckpointError, match="unknown model 'nobody/nothing'.*nothing about nobody/nothing"):
        resolve_folder("nobody/nothing")
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match="unknown model"):
        resolve_folder("bad name!")
