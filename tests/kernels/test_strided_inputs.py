"""Kernels of rows take any view of rows: expanded, or a part of wider ones. In Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from interpreted import interpreted, run_interpreted

SIZE, EXPERTS = 48, 8


def views(rows: int) -> dict[str, torch.Tensor]:
    """The same rows in three layouts of memory; what lies beside them is NaN."""
    generator = torch.Generator().manual_seed(rows)
    one = torch.randn(1, 1, SIZE, generator=generator)
    wide = torch.full((1, rows, 3 * SIZE), torch.nan)
    wide[..., SIZE : 2 * SIZE] = one
    return {
        "contiguous": one.expand(1, rows, SIZE).contiguous(),
        "expanded": one.expand(1, rows, SIZE),
        "part of wider rows": wide[..., SIZE : 2 * SIZE],
    }


LAYOUTS = ("contiguous", "expanded", "part of wider rows")


def test_interpreted_kernels_take_any_view() -> None:
    run_interpreted(__file__, "equals_torch")


@interpreted
@pytest.mark.parametrize("residual_layout", LAYOUTS)
@pytest.mark.parametrize("delta_layout", LAYOUTS)
def test_add_rms_norm_of_views_equals_torch(delta_layout: str, residual_layout: str) -> None:
    """At batch 1 the nodes of a tree's first level share one recycled state: an expanded residual."""
    from treedraft.kernels.norm import add_rms_norm_triton

    delta, residual, weight = views(3)[delta_layout], views(3)[residual_layout], torch.rand(SIZE)
    normed, total = add_rms_norm_triton(delta, residual, weight, 1e-6)
    torch.testing.assert_close(total, delta + residual)
    torch.testing.assert_close(normed, F.rms_norm(delta + residual, (SIZE,), weight, 1e-6))


@interpreted
@pytest.mark.parametrize("residual_layout", LAYOUTS)
@pytest.mark.parametrize("delta_layout", LAYOUTS)
def test_norm_route_of_views_equals_torch(delta_layout: str, residual_layout: str) -> None:
    from treedraft.kernels.router import Choice, norm_route_triton

    delta, residual = views(4)[delta_layout][0], views(4)[residual_layout][0]
    weight, router = torch.rand(SIZE), torch.randn(EXPERTS, SIZE)
    choice = Choice(is_sigmoid=False, topk=2, num_groups=1, topk_groups=1, norm_topk_prob=True, scale=1.0)
    arrivals = torch.zeros(4, dtype=torch.int32)
    normed, total, indices, weights = norm_route_triton(delta, residual, weight, 1e-6, router, None, choice, arrivals)
    expected = F.rms_norm(delta + residual, (SIZE,), weight, 1e-6)
    scores, best = (expected @ router.t()).softmax(-1).topk(2, -1)
    torch.testing.assert_close(total, delta + residual)
    torch.testing.assert_close(normed, expected)
    assert torch.equal(indices.long(), best)
    torch.testing.assert_close(weights, scores / scores.sum(-1, keepdim=True))


@interpreted
@pytest.mark.parametrize("layout", LAYOUTS)
def test_linear_and_silu_of_views_equals_torch(layout: str) -> None:
    from treedraft.kernels.linear import linear_triton
    from treedraft.kernels.norm import silu_and_mul_triton

    x, weight = views(5)[layout], torch.randn(7, SIZE)
    torch.testing.assert_close(linear_triton(x, weight, torch.float32), x @ weight.t(), rtol=1e-4, atol=1e-4)
    gate, up = x.chunk(2, -1)
    torch.testing.assert_close(silu_and_mul_triton(x), F.silu(gate) * up)
