"""Which class runs which architecture; classes are imported when first asked for."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from treedraft.models.config import ModelConfig
from treedraft.models.layers import Products, choose_products, pack_matrices
from treedraft.weights.dummy import dummy_head_tensors, fill_random
from treedraft.weights.loader import load_weights, read_config

if TYPE_CHECKING:
    from treedraft.models.deepseek import DeepseekModel
    from treedraft.models.draft.eagle3 import Eagle3Config, Eagle3MlaHead

MODELS = {
    "deepseek_v2": "treedraft.models.deepseek:DeepseekModel",
    "deepseek_v3": "treedraft.models.deepseek:DeepseekModel",
}


def model_class(architecture: str) -> type[DeepseekModel]:
    """Return the class of an architecture that `ModelConfig.from_hf` gave."""
    module, name = MODELS[architecture].split(":")
    return getattr(import_module(module), name)


def load_model(
    folder: Path,
    max_positions: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    products: Products = "fast",
    load_format: str = "auto",
) -> DeepseekModel:
    """Build the target model of a folder and fill it. `max_positions`: size of the rope tables.

    load_format: "auto", or "dummy" for random weights from config.json alone. Raises ConfigError, CheckpointError.
    """
    config = ModelConfig.from_hf(read_config(folder))
    model = model_class(config.architecture)(config, max_positions, dtype, device)
    if load_format == "dummy":
        fill_random(model.checkpoint())
    else:
        load_weights(model.checkpoint(), folder, model.is_skipped, model.aliases())
    pack_matrices(model)
    choose_products(model, products)
    return model.requires_grad_(False).eval()


def draft_head_config(folder: Path, target: ModelConfig, load_format: str = "auto") -> Eagle3Config:
    """Read the configuration of a folder's head. Raises ConfigError, CheckpointError."""
    from treedraft.models.draft.eagle3 import Eagle3Config, read_head_config

    if load_format != "dummy":
        return read_head_config(folder, target)
    fields = read_config(folder)
    names = dummy_head_tensors(int(fields.get("draft_vocab_size") or target.vocab_size), target.vocab_size)
    return Eagle3Config.from_hf(fields, target, names)


def load_draft_head(
    folder: Path,
    target: DeepseekModel,
    dtype: torch.dtype,
    device: torch.device | str,
    products: Products = "fast",
    load_format: str = "auto",
) -> Eagle3MlaHead:
    """Build the draft head of a folder for this target and fill it, as `load_model`.

    products: those of the target, whose lm_head it may share.
    """
    from treedraft.models.draft.eagle3 import Eagle3MlaHead, load_head, target_tables

    if load_format != "dummy":
        return load_head(folder, target, dtype, device, products)
    config = draft_head_config(folder, target.config, load_format)
    head = Eagle3MlaHead(config, target_tables(target), target.rope.max_positions, dtype, device)
    fill_random(head.checkpoint())
    pack_matrices(head)
    choose_products(head, products)
    return head.requires_grad_(False).eval()
