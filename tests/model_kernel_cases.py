"""Comparisons of the model's Triton kernels with their torch twins: for the interpreter, and for a GPU.

python tests/model_kernel_cases.py       every case on the CPU, for Triton's interpreter (TRITON_INTERPRET=1)
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from small_models import TARGET
from treedraft.attention.paged import PagedTreeAttend, absorb, expand_values
from treedraft.kv.pool import LatentPool
from treedraft.models import layers, mla, moe
from treedraft.models.config import ModelConfig, MoeConfig, RopeConfig
from treedraft.models.deepseek import DeepseekModel
from treedraft.models.layers import RMSNorm, init_weights
from treedraft.models.moe import MoE
from treedraft.models.rope import Rope

# (experts, chosen, shared, size, method, groups, kept groups, normalised, scale)
MOES = [
    MoeConfig(8, 2, 1, 24, "greedy", 1, 1, False, 1.0),
    MoeConfig(8, 3, 0, 32, "group_limited_greedy", 4, 2, False, 16.0),
    MoeConfig(12, 4, 2, 40, "noaux_tc", 4, 2, True, 2.5),
    MoeConfig(20, 3, 1, 24, "noaux_tc", 1, 1, False, 1.5),
]


def random(*shape: int, device: str, dtype: torch.dtype = torch.float32, seed: int = 0, scale: float = 1.0) -> Tensor:
    noise = torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))
    return (noise * scale).to(device=device, dtype=dtype)


def assert_near(given: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """Compare, relative to the largest number of `expected`: float32 sums in another order, bfloat16 rounding."""
    assert given.shape == expected.shape
    tolerance = 2e-5 if dtype == torch.float32 else 1.6e-2
    scale = float(expected.double().abs().max().clamp(min=1e-30))
    assert not given.isnan().any()
    error = float((given.double() - expected.double()).abs().max()) / scale
    assert error < tolerance, f"relative error {error:.1e}"


def make_moe(config: MoeConfig, hidden: int, device: str, dtype: torch.dtype) -> MoE:
    moe = MoE(config, hidden, dtype, "cpu")
    init_weights(moe, 1, std=0.3)
    if config.topk_method == "noaux_tc":
        moe.router.bias.copy_(random(config.num_experts, device="cpu", scale=0.1))
    return moe.to(device).requires_grad_(False)


def check_linear(device: str, dtype: torch.dtype) -> None:
    from treedraft.kernels.linear import linear_heads_triton, linear_triton

    for rows, width, columns in ((1, 64, 48), (5, 100, 40), (16, 33, 7), (37, 96, 130)):
        x, weight = random(rows, width, device=device, dtype=dtype), random(columns, width, device=device, dtype=dtype)
        assert_near(linear_triton(x, weight), F.linear(x, weight), dtype)
        logits = linear_triton(x.view(1, rows, width), weight, torch.float32)
        assert logits.dtype == torch.float32
        assert_near(logits, F.linear(x.float(), weight.float())[None], torch.float32)
    assert linear_triton(x[:0], weight).shape == (0, columns)
    x, weight = random(6, 5, 70, device=device, dtype=dtype), random(3, 20, 64, device=device, dtype=dtype)
    strided = x[:, 1:4, 3:67]
    assert_near(linear_heads_triton(strided, weight), torch.einsum("thk,hnk->thn", strided, weight), dtype)


def check_norm(device: str, dtype: torch.dtype) -> None:
    from treedraft.kernels.norm import add_rms_norm_triton, silu_and_mul_triton

    for size in (7, 64, 300):
        weight = random(size, device=device, dtype=dtype)
        residual = random(2, 3, size, device=device, dtype=dtype)
        parts = random(2, 3, 4, size, device=device, seed=1)
        delta = random(2, 3, size + 9, device=device, dtype=dtype, seed=2)[..., 4 : size + 4]
        for given, base in ((delta, None), (delta, residual), (parts, residual)):
            total = given if base is None else base + (given.sum(-2).to(dtype) if given is parts else given)
            normed, summed = add_rms_norm_triton(given, base, weight, 1e-5)
            assert_near(summed, total, dtype)
            assert_near(normed, F.rms_norm(summed.float(), (size,), weight.float(), 1e-5), dtype)
    gate_up = random(2, 3, 88, device=device, dtype=dtype)
    gate, up = gate_up.chunk(2, -1)
    assert_near(silu_and_mul_triton(gate_up, block=16), F.silu(gate) * up, dtype)


def check_router(device: str, dtype: torch.dtype) -> None:
    """The routing is compared on the kernel's own normed rows: near ties may fall otherwise on rows rounded twice."""
    from treedraft.kernels.router import Choice, norm_route_triton

    for config, hidden in zip(MOES, (32, 20, 48, 2052), strict=True):
        moe = make_moe(config, hidden, device, dtype)
        c = config
        choice = Choice(
            c.topk_method == "noaux_tc",
            c.num_experts_per_tok,
            c.num_groups,
            c.topk_groups,
            c.norm_topk_prob,
            c.routed_scaling_factor,
        )
        norm = RMSNorm(hidden, 1e-5, dtype, device)
        norm.weight.data.copy_(random(hidden, device=device, dtype=dtype, seed=4))
        residual = random(3, hidden, device=device, dtype=dtype)
        arrivals = torch.zeros(16, dtype=torch.int32, device=device)
        bias = getattr(moe.router, "bias", None)
        for delta in (random(3, hidden, device=device, dtype=dtype), random(3, 3, hidden, device=device)):
            normed, total, indices, weights = norm_route_triton(
                delta, residual, norm.weight.detach(), 1e-5, moe.router.weight, bias, choice, arrivals
            )
            summed = residual + (delta.sum(1).to(dtype) if delta.dim() == 3 else delta)
            assert_near(total, summed, dtype)
            assert_near(normed, F.rms_norm(total.float(), (hidden,), norm.weight.float(), 1e-5), dtype)
            expected = moe.router(normed)
            assert torch.equal(indices.long().sort(-1).values, expected.indices.sort(-1).values)
            dense = torch.zeros_like(expected.scores)
            assert_near(
                dense.scatter(1, indices.long(), weights),
                dense.scatter(1, expected.indices, expected.weights),
                torch.float32,
            )
            assert not arrivals.any()
        residual[2] = torch.nan
        *_, indices, weights = norm_route_triton(
            delta, residual, norm.weight.detach(), 1e-5, moe.router.weight, bias, choice, arrivals
        )
        assert len(indices[2].unique()) == c.num_experts_per_tok
        assert bool(weights[2].isnan().any()) and not bool(weights[:2].isnan().any())


def check_experts(device: str, dtype: torch.dtype) -> None:
    from treedraft.kernels import moe as kernel

    for config in MOES[::2]:
        moe = make_moe(config, 48, device, dtype)
        for rows in (1, 19):
            x = random(rows, 48, device=device, dtype=dtype)
            routing = moe.router(x)
            exact = make_moe(config, 48, device, torch.float64)
            for given, wanted in zip(exact.parameters(), moe.parameters(), strict=True):
                given.copy_(wanted)
            expected = exact.gathered(x.double(), routing)
            assert_near(moe.few(x, routing), expected, dtype)
    with patch.object(kernel, "SEARCHED_PAIRS", 32):  # pairs of the last case are found in several steps
        assert_near(moe.few(x, routing), expected, dtype)


def check_latent(device: str, dtype: torch.dtype) -> None:
    from treedraft.kernels.latent import absorb_and_write_triton

    batch, rows, value = 2, 5, 12
    for heads, nope, rope, latent, is_interleaved in ((3, 16, 8, 24, True), (17, 20, 6, 40, False)):
        turn = Rope(RopeConfig(10000.0, is_interleaved, None), rope, 64, dtype, device)
        table = turn(torch.arange(batch * rows, device=device).view(batch, rows) * 5)
        q = random(batch, rows, 3 + heads * (nope + rope), device=device, dtype=dtype)
        q = q[..., 3:].unflatten(-1, (heads, nope + rope))
        kv = random(batch, rows, latent + rope + 5, device=device, dtype=dtype, seed=3)[..., : latent + rope]
        kv[1, 2, 1] = torch.nan
        kv[0, 1, latent] = torch.inf
        norm = RMSNorm(latent, 1e-6, dtype, device)
        norm.weight.data.copy_(random(latent, device=device, dtype=dtype))
        kv_b = random(heads, nope + value, latent, device=device, dtype=dtype, scale=0.3)
        slots = torch.randperm(24, device=device)[: batch * (rows + 1)].view(batch, rows + 1)[:, :rows]
        pools = [LatentPool(1, 6, 4, latent + rope, dtype, device) for _ in range(2)]
        given = absorb_and_write_triton(
            q,
            kv,
            table,
            norm.weight.detach(),
            1e-6,
            kv_b[:, :nope],
            slots,
            pools[0].layer(0),
            is_interleaved,
        )
        with torch.enable_grad():  # the torch operators of the norm
            normed = norm(kv[..., :latent]).detach()
        rotated = turn.rotate(kv[..., latent:].unsqueeze(-2), table).squeeze(-2)
        pools[1].write_finite(0, slots, normed, rotated)
        expected = absorb(q[..., :nope], turn.rotate(q[..., nope:], table), kv_b[:, :nope])
        assert_near(given, expected, dtype)
        assert torch.equal(pools[0].data.isinf(), pools[1].data.isinf())
        assert_near(*(pool.data.nan_to_num(0, 0, 0) for pool in pools), dtype)
        assert given.is_contiguous()
    values = random(batch, rows, heads, latent, device=device, dtype=dtype)
    from treedraft.kernels.linear import linear_heads_triton

    expanded = linear_heads_triton(values.flatten(0, 1), kv_b[:, nope:]).unflatten(0, (batch, rows))
    assert_near(expanded, expand_values(values, kv_b[:, nope:]), dtype)


def check_invariance(device: str, dtype: torch.dtype, hidden: int = 48, most: int = 20) -> None:
    """A row alone and among others: the same bits from every kernel."""
    from treedraft.kernels.linear import linear_heads_triton, linear_triton

    config = MoeConfig(12, 3, 1, 32, "greedy", 1, 1, False, 1.0)
    moe = make_moe(config, hidden, device, dtype)
    norm = RMSNorm(hidden, 1e-5, dtype, device)
    x, residual = (random(most, hidden, device=device, dtype=dtype, seed=s) for s in (5, 6))
    weight = random(130, hidden, device=device, dtype=dtype)
    of_heads = random(2, 24, hidden // 2, device=device, dtype=dtype)

    def compute(rows: slice) -> list[Tensor]:
        parts, total = moe.fused(x[rows], residual[rows], norm)
        return [
            linear_triton(x[rows], weight),
            linear_triton(x[rows], weight, torch.float32),
            linear_heads_triton(x[rows].unflatten(-1, (2, -1)), of_heads),
            total,
            parts,
        ]

    full = compute(slice(None))
    for rows in (slice(0, 1), slice(most - 2, most)):
        for alone, among in zip(compute(rows), full, strict=True):
            assert torch.equal(alone, among[rows])


class EchoAttention:
    """Stands where an attention backend does: gives each query's own first columns, and so tests what is around it."""

    def run_mla(self, plan: object, kv: Tensor, q: Tensor, v_width: int, scale: float) -> Tensor:
        return q[..., :v_width]


def check_model(device: str, dtype: torch.dtype) -> None:
    """A whole model on the kernels and on torch's operators: hidden states, logits and KV."""
    for fields in (TARGET, TARGET | {"q_lora_rank": 5, "rope_interleave": False}):
        model = DeepseekModel(ModelConfig.from_hf(fields), 64, dtype, "cpu")
        init_weights(model, 3, std=0.2)
        model = model.to(device).requires_grad_(False)
        config = model.config
        ids = torch.arange(6, device=device).view(2, 3) * 5 % config.vocab_size
        slots = (torch.arange(8, device=device).view(2, 4) + 9)[:, :3]
        found = []
        for is_served in (layers.is_served, lambda x: False) if device != "cpu" else (lambda x: True, layers.is_served):
            pool = LatentPool(config.num_hidden_layers, 6, 4, config.mla.latent_width, dtype, device)
            attend = PagedTreeAttend(EchoAttention(), None, pool, slots)
            with ExitStack() as stack:
                for module in (layers, mla, moe):
                    stack.enter_context(patch.object(module, "is_served", is_served))
                output = model(ids, ids + 3, attend, taps=(0, 2, config.num_hidden_layers))
                found.append((output.hidden, output.features, model.logits(output.hidden), pool.data))
        for given, expected in zip(*found, strict=True):
            assert given.dtype == expected.dtype
            assert_near(given, expected, dtype)


CASES: list[Callable[[str, torch.dtype], None]] = [
    check_linear,
    check_norm,
    check_router,
    check_experts,
    check_latent,
    check_invariance,
    check_model,
]


def main() -> None:
    names = sys.argv[1:] or [case.__name__ for case in CASES]
    with torch.inference_mode():
        for case in CASES:
            # The interpreter multiplies matrices of bfloat16 as if their bits were integers.
            for dtype in (torch.float32, torch.bfloat16) if case in (check_norm, check_router) else (torch.float32,):
                if case.__name__ in names:
                    case("cpu", dtype)
                    print(case.__name__, dtype, "agrees")


if __name__ == "__main__":
    main()
