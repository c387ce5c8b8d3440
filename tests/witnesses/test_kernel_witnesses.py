"""Witnesses of fixes in Triton kernels: run in Triton's interpreter, in a process of their own."""

from __future__ import annotations

from pathlib import Path

from interpreted import run_interpreted

STRIDED = Path(__file__).parent.parent / "kernels" / "test_strided_inputs.py"


def test_sum_and_norm_of_an_expanded_residual() -> None:
    run_interpreted(str(STRIDED), "add_rms_norm and equals_torch")
