"""Layers with a second way of computing for inference on a CPU: both agree, and training takes the plain one."""

import pytest
import torch

from treedraft.models.layers import Matrix, RMSNorm

# Sums in another order, float32, 200 terms of about 1.
TOLERANCE = {"rtol": 1e-5, "atol": 5e-5}


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("rows", [1, 3, 16, 70])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_of_packed_weight_equal_plain(rows: int, dtype: torch.dtype) -> None:
    vocab = Matrix(random(900, 200, dtype=dtype), gives_logits=True)
    x = random(2, rows, 200, dtype=dtype, seed=1)
    expected = x.float() @ vocab.weight.float().T
    vocab.pack()
    assert vocab.packed is not None
    with torch.inference_mode():
        given = vocab.logits(x)
    assert given.dtype == torch.float32 and given.shape == (2, rows, 900)
    torch.testing.assert_close(given, expected, **TOLERANCE)


@pytest.mark.parametrize("rows", [1, 3, 16])
def test_linear_of_packed_weight_equals_plain(rows: int) -> None:
    matrix = Matrix(random(900, 200))
    x = random(rows, 200, seed=1)
    expected = x @ matrix.weight.T
    matrix.pack()
    with torch.inference_mode():
        torch.testing.assert_close(matrix.linear(x), expected, **TOLERANCE)


def test_logits_of_packed_weight_have_gradients() -> None:
    vocab = Matrix(random(900, 200))
    vocab.pack()
    x = random(4, 200).requires_grad_()
    vocab.logits(x).sum().backward()
    torch.testing.assert_close(x.grad, vocab.weight.sum(0).expand(4, -1), **TOLERANCE)


def test_pack_in_bfloat16_copies_the_lm_head_alone() -> None:
    """Other products of a bfloat16 model are bfloat16: a float32 copy would take memory and never serve."""
    for gives_logits in (True, False):
        matrix = Matrix(random(900, 200, dtype=torch.bfloat16), gives_logits)
        matrix.pack()
        assert (matrix.packed is not None) == gives_logits


def test_pack_in_float64_keeps_the_plain_weight() -> None:
    vocab = Matrix(random(900, 200, dtype=torch.float64))
    vocab.pack()
    assert vocab.packed is None and vocab.logits(random(1, 200, dtype=torch.float64)).dtype == torch.float64


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 8e-3)]
)
def test_norm_in_inference_equals_formula(dtype: torch.dtype, tolerance: float) -> None:
    norm = RMSNorm(200, 1e-5, dtype, "cpu")
    with torch.no_grad():
        norm.weight.copy_(random(200, seed=2))
    x = random(3, 5, 200, dtype=dtype) * torch.tensor([1e-4, 1e-2, 1.0, 30.0, 0.0], dtype=dtype)[:, None]
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight.double()
    trained = norm(x).double()
    with torch.inference_mode():
        served = norm(x)
    assert served.dtype == dtype
    torch.testing.assert_close(served.double(), expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(trained, expected, rtol=tolerance, atol=tolerance)
