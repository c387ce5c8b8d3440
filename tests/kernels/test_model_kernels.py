"""The model's Triton kernels under Triton's interpreter, against their torch twins. On a GPU: tests/gpu."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CASES = Path(__file__).parent.parent / "model_kernel_cases.py"
NAMES = ("linear", "norm", "router", "experts", "latent", "invariance", "model")


@pytest.fixture(scope="module")
def printed() -> str:
    """What the cases print. A process of their own: the interpreter is chosen when a kernel's module is imported."""
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, str(CASES)], env=environment, capture_output=True, text=True)
    return done.stdout + done.stderr


@pytest.mark.parametrize("name", NAMES)
def test_kernel_interpreted_equals_its_twin(printed: str, name: str) -> None:
    assert f"check_{name} torch.float32 agrees" in printed, printed
