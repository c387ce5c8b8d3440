"""Zero-pad a checkpoint's latent attention to the sizes that fixed kernels want: latent 512 + rope 64.

The function stays what it was. Per attention block, c and dr being the latent's and the rotary part's old sizes:

    latent       zeros behind the first c, its projection times sqrt(512 / c) and its norm's weight divided by it: the
                 norm divides by the root of the mean square, and the mean is over more numbers now
    rotary part  pair i becomes pair i * 64 / dr, which turns at the same rate; the others are zero
    queries      zeros behind the plain part, so many that nope + rope grows fourfold, or 16-fold: the softmax scale
                 halves, and the queries double
"""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from treedraft.errors import ConfigError
from treedraft.weights.loader import SINGLE, read_config, shards

LATENT, ROPE = 512, 64
NOT_COPIED = (".safetensors", ".safetensors.index.json")


def pad_checkpoint(folder: Path, padded: Path) -> Path:
    """Write the checkpoint of a target or of a head, padded, in float32, to the folder `padded`; returns that folder.

    Raise ConfigError for sizes that cannot be padded so, or with YaRN, whose ramp depends on the rotary size.
    """
    config = read_config(folder)
    if config.get("rope_scaling") or LATENT < config["kv_lora_rank"] or ROPE % config["qk_rope_head_dim"]:
        raise ConfigError(
            f"only checkpoints without rope_scaling, kv_lora_rank up to {LATENT} and qk_rope_head_dim dividing {ROPE} "
            f"can be padded; got {config['kv_lora_rank']} and {config['qk_rope_head_dim']}"
        )
    sizes = _Sizes(config)
    tensors = {}
    for name, path in shards(folder).items():
        with safe_open(path, framework="pt") as stored:
            tensors[name] = sizes.pad(name, stored.get_tensor(name)).contiguous()
    padded.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        if path.is_file() and not path.name.endswith(NOT_COPIED):
            shutil.copy(path, padded / path.name)
    save_file(tensors, padded / SINGLE)
    (padded / "config.json").write_text(json.dumps(config | sizes.fields(), indent=1), encoding="utf-8")
    return padded


class _Sizes:
    """Old and new sizes of one checkpoint's attention blocks."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.latent, self.rope = config["kv_lora_rank"], config["qk_rope_head_dim"]
        self.nope, self.v, self.heads = config["qk_nope_head_dim"], config["v_head_dim"], config["num_attention_heads"]
        self.is_interleaved = config.get("rope_interleave", True)
        self.doublings = next(k for k in range(1, 9) if 4**k * (self.nope + self.rope) - ROPE >= self.nope)
        self.new_nope = 4**self.doublings * (self.nope + self.rope) - ROPE
        self.stretch = math.sqrt(LATENT / self.latent)

    def fields(self) -> dict[str, Any]:
        """What changes in config.json."""
        return {
            "kv_lora_rank": LATENT,
            "qk_rope_head_dim": ROPE,
            "qk_nope_head_dim": self.new_nope,
            "torch_dtype": "float32",
        }

    def pad(self, name: str, tensor: Tensor) -> Tensor:
        """Return the padded tensor of that name; what is no part of an attention block in its own dtype, as it is."""
        if not tensor.is_floating_point():
            return tensor
        tensor = tensor.float()
        if name.endswith("kv_a_proj_with_mqa.weight"):
            latent, rope = tensor.split([self.latent, self.rope])
            return torch.cat((_rows(latent * self.stretch, LATENT), self._spread(rope)))
        if name.endswith("kv_a_layernorm.weight"):
            return _rows(tensor / self.stretch, LATENT)
        if name.endswith(("q_proj.weight", "q_b_proj.weight")):
            by_head = tensor.unflatten(0, (self.heads, self.nope + self.rope)) * 2**self.doublings
            nope, rope = by_head.split([self.nope, self.rope], 1)
            heads = [torch.cat((_rows(n, self.new_nope), self._spread(r))) for n, r in zip(nope, rope, strict=True)]
            return torch.cat(heads)
        if name.endswith("kv_b_proj.weight"):
            nope, value = tensor.unflatten(0, (self.heads, self.nope + self.v)).split([self.nope, self.v], 1)
            heads = [torch.cat((_rows(n, self.new_nope), v)) for n, v in zip(nope, value, strict=True)]
            return _rows(torch.cat(heads).t(), LATENT).t()
        return tensor

    def _spread(self, rope: Tensor) -> Tensor:
        """[dr, H] -> [64, H]: each pair of rows at the place that turns at its rate."""
        step = ROPE // self.rope
        pairs = (-1, 2) if self.is_interleaved else (2, -1)
        axis = 0 if self.is_interleaved else 1
        by_pair = rope.unflatten(0, pairs)
        shape = list(by_pair.shape)
        shape[axis] *= step
        spread = by_pair.new_zeros(shape)
        spread[(slice(None),) * axis + (slice(None, None, step),)] = by_pair
        return spread.flatten(0, 1)


def _rows(tensor: Tensor, count: int) -> Tensor:
    """Zero rows behind the tensor's own, up to count."""
    return torch.cat((tensor, tensor.new_zeros(count - len(tensor), *tensor.shape[1:])))
