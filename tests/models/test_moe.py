"""Routing and the forms of a mixture of experts, against loops over tokens and experts."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from treedraft.models.config import MoeConfig
from treedraft.models.layers import init_weights
from treedraft.models.moe import MoE
from treedraft.weights.loader import stored_shape

CONFIGS = [
    MoeConfig(8, 2, 1, 12, "greedy", 1, 1, False, 1.0),
    MoeConfig(8, 3, 0, 12, "group_limited_greedy", 4, 2, False, 16.0),
    MoeConfig(8, 2, 1, 12, "noaux_tc", 1, 1, True, 2.5),
    MoeConfig(12, 4, 2, 10, "noaux_tc", 4, 2, True, 2.5),
    MoeConfig(16, 3, 3, 7, "noaux_tc", 2, 1, False, 1.5),
]
HIDDEN = 20
ALIGNED = 24  # torch's grouped product wants rows of 16 bytes or a multiple


def build(config: MoeConfig, seed: int = 0, hidden: int = HIDDEN) -> MoE:
    moe = MoE(config, hidden, torch.float64, "cpu")
    init_weights(moe, seed, std=0.4)
    if config.topk_method == "noaux_tc":
        moe.router.bias.copy_(
            torch.randn(config.num_experts, generator=torch.Generator().manual_seed(seed)) * 0.3 - 0.6
        )
    return moe


def rows(count: int, seed: int = 3, hidden: int = HIDDEN) -> Tensor:
    return torch.randn(count, hidden, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def silu(x: Tensor) -> Tensor:
    return x / (1 + (-x).exp())


def route(moe: MoE, x: Tensor) -> dict[int, float]:
    """Expert -> weight of one row, from the papers' formulas, in plain Python."""
    c = moe.config
    logits = [float(w @ x) for w in moe.router.weight]
    if c.topk_method == "noaux_tc":
        scores = [1 / (1 + math.exp(-v)) for v in logits]
        choice = [s + float(b) for s, b in zip(scores, moe.router.bias, strict=True)]
    else:
        total = sum(math.exp(v) for v in logits)
        scores = choice = [math.exp(v) / total for v in logits]
    size = c.num_experts // c.num_groups
    groups = [choice[g * size : (g + 1) * size] for g in range(c.num_groups)]
    best = [sum(sorted(g)[-2:]) if c.topk_method == "noaux_tc" else max(g) for g in groups]
    kept = sorted(range(c.num_groups), key=lambda g: -best[g])[: c.topk_groups]
    eligible = [e for e in range(c.num_experts) if e // size in kept]
    chosen = sorted(eligible, key=lambda e: -choice[e])[: c.num_experts_per_tok]
    norm = sum(scores[e] for e in chosen) + 1e-20 if c.norm_topk_prob else 1.0
    return {e: scores[e] / norm * c.routed_scaling_factor for e in chosen}


def oracle(moe: MoE, x: Tensor) -> Tensor:
    tensors = {name: view.reshape(stored_shape(view)) for name, view in moe.checkpoint("m")}

    def mlp(name: str, row: Tensor) -> Tensor:
        gate, up, down = (tensors[f"{name}.{part}_proj.weight"] for part in ("gate", "up", "down"))
        return down @ (silu(gate @ row) * (up @ row))

    out = []
    for row in x:
        y = mlp("m.shared_experts", row) if moe.config.num_shared_experts else torch.zeros_like(row)
        for expert, weight in route(moe, row).items():
            y = y + weight * mlp(f"m.experts.{expert}", row)
        out.append(y)
    return torch.stack(out)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"{c.topk_method}-{c.num_experts}")
def test_moe_every_form_equals_loops_over_experts(config: MoeConfig) -> None:
    with torch.no_grad():
        moe = build(config)
        x = rows(40)
        expected, routing = oracle(moe, x), moe.router(x)
        for form in (moe.summed, moe.gathered, moe.dense, moe.grouped):
            torch.testing.assert_close(form(x, routing), expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("num_rows", [1, 2, 4, 16, 17, 100])
@pytest.mark.parametrize("is_static", [True, False])
def test_moe_of_any_row_count_equals_oracle(num_rows: int, is_static: bool) -> None:
    with torch.no_grad():
        moe = build(CONFIGS[2])
        x = rows(num_rows)
        torch.testing.assert_close(moe(x[None], is_static)[0], oracle(moe, x), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("config", [CONFIGS[0], CONFIGS[3]], ids=lambda c: f"{c.topk_method}-{c.num_experts}")
def test_moe_segmented_in_float32_equals_loops_recorded_too(config: MoeConfig) -> None:
    """torch's grouped product takes no float64. A record must not keep the row counts that it was made with."""
    config = replace(config, intermediate_size=16)
    with torch.no_grad():
        wide, moe = build(config, hidden=ALIGNED), MoE(config, ALIGNED, torch.float32, "cpu")
        moe.requires_grad_(False).load_state_dict(wide.state_dict())
        example = rows(40, hidden=ALIGNED).float()
        recorded = torch.jit.trace(lambda x: moe.segmented(x, moe.router(x)), (example,), check_trace=False)
        for x in (rows(40, 4, ALIGNED), rows(40, 5, ALIGNED), rows(1, 6, ALIGNED).expand(40, -1)):
            for form in (moe.segmented(x.float(), moe.router(x.float())), recorded(x.float())):
                torch.testing.assert_close(form, oracle(wide, x).float(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("size", "dtype", "expected"),
    [
        (16, torch.float32, ["summed", "summed", "dense", "segmented", "segmented"]),
        (12, torch.float32, ["summed", "summed", "dense", "dense", "dense"]),
        (16, torch.float64, ["summed", "summed", "dense", "dense", "dense"]),
    ],
)
def test_moe_many_static_rows_on_a_cpu_are_segmented_where_torch_can(
    size: int, dtype: torch.dtype, expected: list[str]
) -> None:
    moe = MoE(replace(CONFIGS[0], intermediate_size=size), ALIGNED, dtype, "cpu")
    init_weights(moe, 0, std=0.4)
    forms: list[str] = []
    for name in ("dense", "segmented", "summed"):
        setattr(moe, name, lambda x, routing, name=name: forms.append(name) or x)
    with torch.no_grad():
        for count in (2, 16, 24, 25, 256):
            moe(rows(count, hidden=ALIGNED).to(dtype)[None], is_static=True)
    assert forms == expected


def test_router_bias_changes_choice_but_not_weights() -> None:
    with torch.no_grad():
        moe = build(CONFIGS[2])
        moe.router.bias.zero_()
        x = rows(30)
        before = moe.router(x)
        moe.router.bias[5] = 10.0
        after = moe.router(x)
    assert bool((after.indices == 5).any(-1).all()) and not bool((before.indices == 5).any(-1).all())
    torch.testing.assert_close(after.scores, before.scores, rtol=0, atol=0)
    norm = after.scores.gather(-1, after.indices).sum(-1, keepdim=True)
    torch.testing.assert_close(after.weights, 2.5 * after.scores.gather(-1, after.indices) / norm)


def test_router_under_autocast_stays_in_float32() -> None:
    moe = MoE(CONFIGS[2], HIDDEN, torch.float32, "cpu")
    init_weights(moe, 0, std=0.4)
    x = rows(30).float()
    with torch.no_grad():
        expected = moe.router(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            given = moe.router(x)
    assert given.scores.dtype == torch.float32
    torch.testing.assert_close(given.scores, expected.scores, rtol=0, atol=0)


def test_moe_gradients_are_the_same_in_every_form() -> None:
    moe = build(CONFIGS[2])
    x = rows(6)
    grads = []
    for form in (moe.dense, moe.gathered, moe.summed, moe.grouped):
        moe.zero_grad()
        form(x, moe.router(x)).square().sum().backward()
        grads.append([p.grad.clone() for p in moe.parameters()])
    for other in grads[1:]:
        for a, b in zip(grads[0], other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
