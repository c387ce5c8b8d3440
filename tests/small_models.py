"""A target and a head of a few kilobytes with random weights, as checkpoints in the hub's layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from treedraft.models.config import ModelConfig
from treedraft.models.deepseek import DeepseekModel
from treedraft.models.draft.eagle3 import Eagle3Config, Eagle3MlaHead, target_tables
from treedraft.models.layers import init_weights
from treedraft.weights.loader import save_checkpoint

TARGET = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "vocab_size": 48, "hidden_size": 16,
    "intermediate_size": 24, "moe_intermediate_size": 8, "num_hidden_layers": 3, "num_attention_heads": 2,
    "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1, "kv_lora_rank": 6, "q_lora_rank": None, "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4, "v_head_dim": 4, "max_position_embeddings": 64, "eos_token_id": 0,
}  # fmt: skip
HEAD = {
    "architectures": ["Eagle3DeepseekV2ForCausalLM"], "model_type": "deepseek_v3", "vocab_size": 48,
    "draft_vocab_size": 48, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
    "num_attention_heads": 2, "kv_lora_rank": 6, "q_lora_rank": None, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4,
    "v_head_dim": 4, "max_position_embeddings": 64,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2], "use_aux_hidden_state": True},
}  # fmt: skip


def write_target(folder: Path, seed: int = 0, **fields: Any) -> Path:
    """Save a random target; `fields` replace those of its config.json."""
    made = {**TARGET, **fields}
    model = DeepseekModel(ModelConfig.from_hf(made), 64)
    init_weights(model, seed, std=0.4)
    save_checkpoint(folder, model.checkpoint(), made)
    return folder


def write_head(folder: Path, seed: int = 1, draft_vocab_size: int = 48, **fields: Any) -> Path:
    """Save a random head for `write_target`'s model. One of a smaller vocabulary has its own lm_head and maps."""
    made = {**HEAD, "draft_vocab_size": draft_vocab_size, **fields}
    target = DeepseekModel(ModelConfig.from_hf(TARGET), 64)
    init_weights(target, 0, std=0.4)
    own = {"lm_head.weight", "d2t", "t2d"} if draft_vocab_size < 48 else set()
    head = Eagle3MlaHead(Eagle3Config.from_hf(made, target.config, frozenset(own)), target_tables(target), 64)
    init_weights(head, seed, std=0.4)
    if own:
        head.t2d[:draft_vocab_size] = True
    save_checkpoint(folder, head.checkpoint(), made)
    return folder


def change_config(folder: Path, **fields: Any) -> Path:
    """Edit a checkpoint's config.json; its tensors stay."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    return folder


def write_pair(folder: Path, **fields: Any) -> dict[str, str]:
    """Save a target and a head; returns the arguments `model` and `draft` of an LLM."""
    folder.mkdir(exist_ok=True)
    return {"model": str(write_target(folder / "model")), "draft": str(write_head(folder / "draft", **fields))}


def spoil(head: torch.nn.Module, seed: int = 1) -> None:
    """Give a loaded head random weights: untrained, of no use."""
    with torch.no_grad():
        init_weights(head, seed, std=0.5)
