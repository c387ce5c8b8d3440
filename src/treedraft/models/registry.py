"""Which class runs which architecture; classes are imported when first asked for."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from treedraft.models.config import ModelConfig
from treedraft.models.layers import Products, choose_products, pack_matrices
from treedraft.weights.loader import load_weights, read_config

if TYPE_CHECKING:
    from treedraft.models.deepseek import DeepseekModel

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
) -> DeepseekModel:
    """Build the target model of a folder and fill it. `max_positions`: size of the rope tables.

    Raises ConfigError, CheckpointError.
    """
    config = ModelConfig.from_hf(read_config(folder))
    model = model_class(config.architecture)(config, max_positions, dtype, device)
    load_weights(model.checkpoint(), folder, model.is_skipped, model.aliases())
    pack_matrices(model)
    choose_products(model, products)
    return model.requires_grad_(False).eval()
