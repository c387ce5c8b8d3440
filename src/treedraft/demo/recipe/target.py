"""Trains the target: a DeepSeek-V3-architecture model, through the class that serves."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from treedraft.attention.dense import DenseAttend
from treedraft.demo.recipe.corpus import Windows
from treedraft.demo.recipe.optimizer import Schedule, build_optimizers
from treedraft.models.config import ModelConfig
from treedraft.models.deepseek import DeepseekModel
from treedraft.models.layers import init_weights
from treedraft.models.moe import MoE, Router, Routing
from treedraft.weights.loader import load_weights, read_config

TARGET_FIELDS: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "torch_dtype": "bfloat16",
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 768,
    "moe_intermediate_size": 192,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "n_shared_experts": 1,
    "n_routed_experts": 8,
    "routed_scaling_factor": 1.0,
    "kv_lora_rank": 64,
    "q_lora_rank": None,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
    "qk_nope_head_dim": 32,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rope_theta": 10000.0,
    "rope_interleave": True,
    "rms_norm_eps": 1e-06,
    "tie_word_embeddings": True,
    "initializer_range": 0.02,
    "attention_bias": False,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


@dataclass(frozen=True)
class TargetRecipe:
    """How the target is trained."""

    seconds: float = 360.0  # wall clock after compilation; the schedule follows it
    max_steps: int = 10**9
    length: int = 512  # tokens of a row
    rows: int = 256  # rows of a step
    lr: float = 3e-3
    weight_decay: float = 0.1
    warmup: int = 200  # steps
    decay: float = 0.4  # share of the training over which the learning rate falls
    bias_step: float = 1e-2  # router balance without a loss (DeepSeek-V3, section 2.1.2): step of the bias, annealed
    aux_weight: float = 1e-2  # router balance by a loss: both are needed, else one expert takes every token
    seed: int = 0
    is_compiled: bool = True
    log_every: int = 50


class BalanceRecorder:
    """Hooks every router: after a forward, `loads` [layers, E] (share of tokens) and `aux` (balance loss)."""

    def __init__(self, model: nn.Module):
        self.routers = [m.router for m in model.modules() if isinstance(m, MoE)]
        for router in self.routers:
            router.register_forward_hook(_record_routing)

    def loads(self) -> Tensor:
        return torch.stack([r.load for r in self.routers])  # type: ignore[misc]

    def aux(self) -> Tensor:
        return torch.stack([r.balance_loss for r in self.routers]).mean()  # type: ignore[misc]

    @torch.no_grad()
    def push_biases(self, loads: Tensor, step: float) -> None:
        """Raise the bias of experts that got less than their share, lower the others'."""
        for router, load in zip(self.routers, loads, strict=True):
            router.bias += step * torch.sign(load.mean() - load)  # type: ignore[operator]


def _record_routing(router: Router, inputs: tuple[Tensor, ...], routing: Routing) -> None:
    """Balance loss of one layer (DeepSeek-V2, section 2.2.3, over the whole batch): 1 where the load is even."""
    experts, chosen = routing.scores.shape[-1], routing.indices.shape[-1]
    picked = torch.zeros_like(routing.scores).scatter(-1, routing.indices, 1.0)
    share = routing.scores / routing.scores.sum(-1, keepdim=True)
    load = picked.mean(0).detach()
    router.load = load
    router.balance_loss = (experts / chosen) * (load * share.mean(0)).sum()


def new_target(fields: dict[str, Any], max_positions: int, seed: int, device: torch.device) -> DeepseekModel:
    """Build an untrained target in float32: projections into the residual stream start smaller."""
    model = DeepseekModel(ModelConfig.from_hf(fields), max_positions, torch.float32, device)
    init_weights(model, seed)
    with torch.no_grad():
        for name, view in model.checkpoint():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                view.mul_(1 / math.sqrt(2 * model.config.num_hidden_layers))
    return model


def load_target(folder: Path, max_positions: int, dtype: torch.dtype, device: torch.device) -> DeepseekModel:
    """Build the target of a folder and fill it, frozen. Raises ConfigError, CheckpointError."""
    model = DeepseekModel(ModelConfig.from_hf(read_config(folder)), max_positions, dtype, device)
    load_weights(model.checkpoint(), folder, model.is_skipped, model.aliases())
    return model.requires_grad_(False).eval()


def train_target(
    model: DeepseekModel, windows: Windows, recipe: TargetRecipe, log: Callable[[str], None]
) -> dict[str, Any]:
    """Train in place. Returns steps, tokens and the last losses. bfloat16 products on a GPU, float32 weights."""
    device = model.embedding.device
    recorder = BalanceRecorder(model)
    amp = torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda")
    positions = torch.arange(recipe.length, device=device).expand(recipe.rows, -1)

    def loss_of(token_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = model(token_ids[:, :-1], positions, DenseAttend()).hidden
        logits = F.linear(hidden, model.head).float()
        loss = F.cross_entropy(logits.flatten(0, 1), token_ids[:, 1:].flatten())
        return loss, recorder.aux(), recorder.loads()

    compiled = torch.compile(loss_of, dynamic=False) if recipe.is_compiled else loss_of
    optimizers = build_optimizers(model, recipe.lr, recipe.weight_decay, use_muon=False, tables=("embedding",))
    schedule = Schedule(recipe.lr, recipe.seconds, recipe.max_steps, recipe.warmup, recipe.decay)
    with amp:
        compiled(windows.draw(recipe.rows, recipe.length + 1))[0].backward()  # compiles before the clock starts
    model.zero_grad(set_to_none=True)
    schedule.start()
    step, history = 0, []
    while schedule.progress(step) < 1:
        schedule.apply(optimizers, step)
        with amp:
            loss, aux, loads = compiled(windows.draw(recipe.rows, recipe.length + 1))
        (loss + recipe.aux_weight * aux).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad(set_to_none=True)
        annealed = min(1.0, (1 - schedule.progress(step)) / recipe.decay)
        recorder.push_biases(loads, recipe.bias_step * annealed)
        step += 1
        if step % recipe.log_every == 0:
            history.append((step, float(loss.detach())))
            busiest = float((loads / loads.mean(-1, keepdim=True)).max())
            log(f"target step {step} loss {history[-1][1]:.4f} busiest expert {busiest:.2f} times its share")
    return {"steps": step, "tokens": step * recipe.rows * recipe.length, "history": history}
