"""The model's Triton kernels on a GPU, against their torch twins, and a row's bits alone against among others."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from model_kernel_cases import CASES, assert_near, check_invariance, make_moe, random
from treedraft.models.config import MoeConfig
from treedraft.models.layers import Matrix, RMSNorm, choose_products
from treedraft.models.moe import FEW_ROWS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
V2_LITE = MoeConfig(64, 6, 2, 1408, "greedy", 1, 1, False, 1.0)
V3 = MoeConfig(256, 8, 1, 256, "noaux_tc", 8, 4, True, 2.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__.removeprefix("check_"))
def test_kernel_equals_its_twin(case: Callable[[str, torch.dtype], None], dtype: torch.dtype) -> None:
    with torch.inference_mode():
        case("cuda", dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_row_alone_equals_row_among_64_others_bit_for_bit(dtype: torch.dtype) -> None:
    with torch.inference_mode():
        for most in (2, 17, 64):
            check_invariance("cuda", dtype, hidden=512, most=most)


@pytest.mark.parametrize("config", [V2_LITE, V3], ids=["V2-Lite", "V3"])
@pytest.mark.parametrize("num_rows", [1, 9, 64, FEW_ROWS, FEW_ROWS + 44])
def test_moe_at_real_shapes_equals_loop_over_experts(config: MoeConfig, num_rows: int) -> None:
    with torch.inference_mode():
        moe = make_moe(config, 1024, "cuda", torch.bfloat16)
        x = random(num_rows, 1024, device="cuda", dtype=torch.bfloat16)
        routing = moe.router(x)
        wide = x.float()
        expected = torch.zeros_like(wide)
        for expert in range(moe.num_all):
            gate, up = (wide @ moe.gate_up[expert].float()).chunk(2, -1)
            if expert < config.num_experts:
                weight = (routing.weights * (routing.indices == expert)).sum(-1, keepdim=True)
            else:
                weight = torch.ones_like(wide[:, :1])
            expected += torch.nn.functional.silu(gate) * up @ moe.down[expert].float() * weight
        for given in (moe.few(x, routing), moe.segmented(x, routing), moe(x, True)):
            assert_near(given, expected, torch.bfloat16)


def test_fused_moe_equals_norm_then_moe_and_calls_a_router_that_is_listened_to() -> None:
    with torch.inference_mode():
        moe = make_moe(V3, 1024, "cuda", torch.bfloat16)
        norm = RMSNorm(1024, 1e-6, torch.bfloat16, "cuda")
        x, residual = (random(2, 9, 1024, device="cuda", dtype=torch.bfloat16, seed=s) for s in (1, 2))
        assert moe.is_fused(x)
        parts, total = moe.fused(x, residual, norm)
        normed, expected_total = norm.add(x, residual)
        assert torch.equal(total, expected_total)
        assert_near(parts.sum(-2), moe(normed, True), torch.bfloat16)
        moe.router.register_forward_hook(lambda *_: None)
        assert not moe.is_fused(x)


def test_invariant_products_of_many_rows_are_those_of_few() -> None:
    with torch.inference_mode():
        moe = make_moe(V2_LITE, 512, "cuda", torch.bfloat16)
        choose_products(moe, "invariant")
        norm = RMSNorm(512, 1e-6, torch.bfloat16, "cuda")
        x, residual = (random(700, 512, device="cuda", dtype=torch.bfloat16, seed=s) for s in (1, 2))
        matrix = Matrix(random(1000, 512, device="cuda", dtype=torch.bfloat16))
        matrix.products = "invariant"

        def compute(rows: slice) -> list[Tensor]:
            return [*moe.fused(x[rows], residual[rows], norm), matrix.linear(x[rows]), matrix.logits(x[rows])]

        full = compute(slice(None))
        for rows in (slice(0, 1), slice(255, 258), slice(600, 664)):
            for some, all_rows in zip(compute(rows), full, strict=True):
                assert torch.equal(some, all_rows[rows])


@pytest.mark.parametrize("tile", [(16, 256, 4, 4, 16), (32, 128, 4, 4, 32), (64, 64, 4, 6, 64), (128, 64, 8, 4, 64)])
def test_bits_do_not_depend_on_the_tile(tile: tuple[int, int, int, int, int]) -> None:
    """So tiles may be chosen by the number of rows: the matrix units sum in the same steps in every shape."""
    from treedraft.kernels.linear import Tile, linear_triton
    from treedraft.kernels.moe import experts_triton

    with torch.inference_mode():
        x, weight = (random(n, 2048, device="cuda", dtype=torch.bfloat16) for n in (100, 3648))
        expected = linear_triton(x, weight, torch.float32, Tile(32, 128, 4, 4))
        assert torch.equal(linear_triton(x, weight, torch.float32, Tile(*tile)), expected)
        moe = make_moe(V2_LITE, 1024, "cuda", torch.bfloat16)
        rows = x[:, :1024].contiguous()
        routing = moe.router(rows)
        found = []
        for each in (Tile(64, 64, 4, 4), Tile(*tile)):
            hidden = rows.new_empty(100, 8, 1408)
            parts = torch.empty(100, 8, 1024, device="cuda")
            indices, weights = routing.indices.int(), routing.weights.float()
            experts_triton(rows, indices, weights, moe.gate_up, moe.down, hidden, parts, (each, each))
            found.append(parts)
        assert torch.equal(*found)


def test_fused_moe_captured_and_replayed_with_other_rows() -> None:
    """The kernels read nothing on the host, and leave the arrival counters as they were."""
    with torch.inference_mode():
        moe = make_moe(V2_LITE, 1024, "cuda", torch.bfloat16)
        norm = RMSNorm(1024, 1e-6, torch.bfloat16, "cuda")
        x, residual = (random(16, 1024, device="cuda", dtype=torch.bfloat16, seed=s) for s in (1, 2))
        moe.fused(x, residual, norm)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            parts, total = moe.fused(x, residual, norm)
        for seed in range(20):
            x.copy_(random(16, 1024, device="cuda", dtype=torch.bfloat16, seed=seed))
            graph.replay()
            expected_parts, expected_total = moe.fused(x, residual, norm)
            assert torch.equal(parts, expected_parts) and torch.equal(total, expected_total)
        assert not moe.router.arrivals.any()
