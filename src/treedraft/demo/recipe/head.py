"""Trains the draft head on the corpus and on the target's own texts, through the class that serves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from treedraft.attention.dense import DenseAttend
from treedraft.demo.recipe.attend import attend_unrolled, attend_unrolled_fused
from treedraft.demo.recipe.corpus import Windows
from treedraft.demo.recipe.optimizer import Schedule, build_optimizers
from treedraft.demo.recipe.samples import SampleSet
from treedraft.demo.recipe.unroll import first_step, later_step, unroll
from treedraft.errors import ConfigError
from treedraft.models.deepseek import DeepseekModel
from treedraft.models.draft.eagle3 import ARCHITECTURE, Eagle3Config, Eagle3MlaHead, target_tables
from treedraft.models.layers import init_weights

CORPUS = "corpus"
FIGURE_ROWS = 16  # rows on which the log's figures are taken
COVERED = 4  # a draft covers a token when it is among its best four: what a tree of topk 4 offers


@dataclass(frozen=True)
class HeadRecipe:
    """How the head is built and trained."""

    seconds: float = 470.0  # wall clock after compilation; the schedule follows it
    max_steps: int = 10**9
    num_steps: int = 7  # unrolled steps; the shipped tree drafts 5 levels, the widest that is measured 7
    length: int = 392  # tokens of a row
    rows: int = 160  # rows of a step
    mix: tuple[tuple[str, float], ...] = (("corpus", 0.2), ("0.0", 0.2), ("0.8", 0.25), ("1.0", 0.35))  # share of rows
    step_weight: float = 0.85  # loss of step j counts step_weight ** j
    lr: float = 2e-3
    weight_decay: float = 0.01
    use_muon: bool = True
    warmup: int = 100  # steps
    decay: float = 0.5  # share of the training over which the learning rate falls
    seed: int = 1
    is_compiled: bool = True
    log_every: int = 250
    taps: tuple[int, ...] = (2, 3, 5)  # target layers whose input the head reads
    intermediate_size: int = 768
    num_attention_heads: int = 8
    kv_lora_rank: int = 128
    qk_nope_head_dim: int = 32
    v_head_dim: int = 64
    has_own_lm_head: bool = False
    has_own_embedding: bool = True


def head_fields(recipe: HeadRecipe, target_fields: dict[str, Any]) -> dict[str, Any]:
    """config.json of the head: the hub's Eagle3DeepseekV2ForCausalLM."""
    kept = """vocab_size hidden_size hidden_act max_position_embeddings rope_theta rope_interleave rms_norm_eps
        qk_rope_head_dim bos_token_id eos_token_id""".split()
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "deepseek_v3",
        "num_hidden_layers": 1,
        **{name: target_fields[name] for name in kept if name in target_fields},
        "intermediate_size": recipe.intermediate_size,
        "num_attention_heads": recipe.num_attention_heads,
        "num_key_value_heads": recipe.num_attention_heads,
        "kv_lora_rank": recipe.kv_lora_rank,
        "q_lora_rank": None,
        "qk_nope_head_dim": recipe.qk_nope_head_dim,
        "v_head_dim": recipe.v_head_dim,
        "tie_word_embeddings": not recipe.has_own_lm_head,
        "attention_bias": False,
        "torch_dtype": "bfloat16",
        "draft_vocab_size": target_fields["vocab_size"],
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(recipe.taps), "use_aux_hidden_state": True},
    }


def new_head(recipe: HeadRecipe, target: DeepseekModel, fields: dict[str, Any], max_positions: int) -> Eagle3MlaHead:
    """Build an untrained head in float32; tables of its own start as the target's."""
    own = {"lm_head.weight": recipe.has_own_lm_head, "embed_tokens.weight": recipe.has_own_embedding}
    config = Eagle3Config.from_hf(fields, target.config, frozenset(name for name, is_own in own.items() if is_own))
    head = Eagle3MlaHead(config, target_tables(target), max_positions, torch.float32, target.embedding.device)
    init_weights(head, recipe.seed)
    with torch.no_grad():
        if config.has_own_lm_head:
            head.own_lm_head.copy_(target.head)
        if config.has_own_embedding:
            head.own_embedding.copy_(target.embedding)
    return head


@torch.no_grad()
def grow_from(head: Eagle3MlaHead, small: Eagle3MlaHead) -> None:
    """Start `head` as the same function as `small`, a head of the same target that is at most as wide.

    What is new either reads zeros or is read with weight zero, but not both, so that it learns. The latent's norm is
    taken over more numbers than before, the new ones zero: its weight makes up for that.
    """
    old, new = dict(small.checkpoint()), dict(head.checkpoint())
    missing = sorted(old.keys() - new.keys())
    if missing:
        raise ConfigError(f"the head to start from holds {missing[0]}, which the new head has not")
    before, after = small.config.mla, head.config.mla
    heads = (before.num_heads, after.num_heads)
    if heads[0] != heads[1] or before.qk_head_dim != after.qk_head_dim or small.config.taps != head.config.taps:
        raise ConfigError("the head to start from must have the same heads, query widths and taps as the new one")
    for name, view in old.items():
        if view.shape == new[name].shape:
            new[name].copy_(view)
    attention = "midlayer.self_attn"
    grown = after.kv_lora_rank - before.kv_lora_rank
    rope_and_latent = old[f"{attention}.kv_a_proj_with_mqa.weight"].split(
        [before.kv_lora_rank, before.qk_rope_head_dim]
    )
    zeros = rope_and_latent[0].new_zeros(grown, head.config.hidden_size * 2)
    new[f"{attention}.kv_a_proj_with_mqa.weight"].copy_(torch.cat([rope_and_latent[0], zeros, rope_and_latent[1]]))
    norm = new[f"{attention}.kv_a_layernorm.weight"]
    norm[: before.kv_lora_rank] = old[f"{attention}.kv_a_layernorm.weight"]
    norm[: before.kv_lora_rank] *= (before.kv_lora_rank / after.kv_lora_rank) ** 0.5
    kept = before.qk_nope_head_dim + before.v_head_dim
    kv_b = new[f"{attention}.kv_b_proj.weight"].unflatten(0, (after.num_heads, -1))
    kv_b[:, :kept, : before.kv_lora_rank] = old[f"{attention}.kv_b_proj.weight"].unflatten(0, (after.num_heads, -1))
    out = new[f"{attention}.o_proj.weight"].unflatten(1, (after.num_heads, -1))
    out.zero_()[..., : before.v_head_dim] = old[f"{attention}.o_proj.weight"].unflatten(1, (after.num_heads, -1))
    width = small.config.intermediate_size
    new["midlayer.mlp.gate_proj.weight"][:width] = old["midlayer.mlp.gate_proj.weight"]
    new["midlayer.mlp.up_proj.weight"][:width] = old["midlayer.mlp.up_proj.weight"]
    new["midlayer.mlp.down_proj.weight"].zero_()[:, :width] = old["midlayer.mlp.down_proj.weight"]


class MixedRows:
    """Draws rows of the corpus and of sample sets, in fixed shares."""

    def __init__(self, recipe: HeadRecipe, windows: Windows, samples: list[SampleSet]):
        by_name = {str(s.temperature): s for s in samples}
        missing = [name for name, _ in recipe.mix if name != CORPUS and name not in by_name]
        if missing:
            raise ConfigError(f"the mix asks for samples at temperature {missing[0]}; there are {sorted(by_name)}")
        total = sum(share for _, share in recipe.mix)
        bounds = [round(sum(s for _, s in recipe.mix[:i]) / total * recipe.rows) for i in range(len(recipe.mix) + 1)]
        self.parts = [(by_name.get(n), b - a) for (n, _), a, b in zip(recipe.mix, bounds, bounds[1:], strict=False)]
        self.windows, self.length = windows, recipe.length

    def draw(self) -> Tensor:
        """token_ids [rows, length] int64."""
        tokens = []
        for samples, count in self.parts:
            if samples is None:
                tokens.append(self.windows.draw(count, self.length))
            else:
                texts = samples.token_ids
                row = torch.randint(len(texts), (count,), device=texts.device, generator=self.windows.generator)
                tokens.append(texts[row, : self.length].long())
        return torch.cat(tokens)


def step_loss(draft: Tensor, teacher: Tensor) -> Tensor:
    """Cross-entropy of the head's logits [B, N, V] against the target's probabilities, mean over positions.

    The whole distribution is the label: drafting under shared noise needs every likely token's logit, not the best's.
    """
    return (draft.logsumexp(-1) - (teacher * draft).sum(-1, dtype=torch.float32)).mean()


@torch.no_grad()
def training_figures(
    head: Eagle3MlaHead, token_ids: Tensor, teacher: Tensor, features: Tensor, recipe: HeadRecipe
) -> tuple[list[float], list[float]]:
    """Per unrolled step: share of positions with the target's best token, and with the text's among the best four."""
    best, covered = [], []
    for step, hidden in enumerate(unroll(head, features, token_ids, recipe.num_steps)):
        rows = hidden.shape[1]
        logits = head.logits(hidden)
        next_ids = token_ids[:, 2 + step : 2 + step + rows, None]
        best.append(float((logits.argmax(-1) == teacher[:, 1 + step : 1 + step + rows].argmax(-1)).float().mean()))
        covered.append(float(((logits > logits.gather(-1, next_ids)).sum(-1) < COVERED).float().mean()))
    return best, covered


def train_head(
    head: Eagle3MlaHead,
    target: DeepseekModel,
    rows: MixedRows,
    recipe: HeadRecipe,
    log: Callable[[str], None],
) -> dict[str, Any]:
    """Train in place. Returns steps, tokens and history. bfloat16 products on a GPU, float32 weights."""
    device = head.fc.device
    is_cuda = device.type == "cuda"
    amp = torch.autocast(device.type, dtype=torch.bfloat16, enabled=is_cuda)
    positions = torch.arange(recipe.length, device=device).expand(recipe.rows, -1)
    num_rows = recipe.length - recipe.num_steps - 1
    is_fused = is_cuda and recipe.v_head_dim == recipe.qk_nope_head_dim + target.config.mla.qk_rope_head_dim

    def teach(token_ids: Tensor) -> tuple[Tensor, Tensor]:
        output = target(token_ids, positions, DenseAttend(), recipe.taps)
        return target.logits(output.hidden).softmax(-1).to(torch.bfloat16), output.features

    later = partial(later_step, core=attend_unrolled_fused if is_fused else attend_unrolled)

    def score(hidden: Tensor, teacher: Tensor) -> Tensor:
        return step_loss(head.logits(hidden), teacher)

    functions: list[Callable[..., Any]] = [teach, first_step, later, score]
    if recipe.is_compiled:
        functions = [torch.compile(f, dynamic=False, fullgraph=True) for f in functions]
    teach_, first_, later_, score_ = functions

    def loss_of(token_ids: Tensor) -> Tensor:
        with torch.no_grad():
            teacher, features = teach_(token_ids)
        loss = torch.zeros((), device=device)
        for step, hidden in enumerate(unroll(head, features, token_ids, recipe.num_steps, first_, later_)):
            part = score_(hidden, teacher[:, 1 + step : 1 + step + num_rows])
            loss = loss + recipe.step_weight**step * part
        return loss

    optimizers = build_optimizers(
        head, recipe.lr, recipe.weight_decay, recipe.use_muon, ("own_lm_head", "own_embedding")
    )
    schedule = Schedule(recipe.lr, recipe.seconds, recipe.max_steps, recipe.warmup, recipe.decay)
    with amp:
        loss_of(rows.draw()).backward()  # compiles before the clock starts
    head.zero_grad(set_to_none=True)
    log("head compiled")
    schedule.start()
    step, history = 0, []
    while schedule.progress(step) < 1:
        schedule.apply(optimizers, step)
        token_ids = rows.draw()
        with amp:
            loss = loss_of(token_ids)
        loss.backward()
        nn.utils.clip_grad_norm_(head.parameters(), 1.0, foreach=True)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        step += 1
        if step % recipe.log_every == 0:
            with amp, torch.no_grad():
                few = slice(None, None, max(1, recipe.rows // FIGURE_ROWS))
                output = target(token_ids[few], positions[few], DenseAttend(), recipe.taps)
                teacher = target.logits(output.hidden)
                best, covered = training_figures(head, token_ids[few], teacher, output.features, recipe)
            history.append({"step": step, "loss": float(loss.detach()), "agreement": best, "covered": covered})
            log(f"head step {step} loss {history[-1]['loss']:.3f} agreement {_short(best)} covered {_short(covered)}")
    return {"steps": step, "tokens": step * recipe.rows * recipe.length, "history": history}


def _short(values: list[float]) -> str:
    return " ".join(f"{v:.3f}" for v in values)
