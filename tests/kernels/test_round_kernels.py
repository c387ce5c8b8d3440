"""A round's kernels in Triton's interpreter against their torch twins, on small shapes and edges.

TRITON_INTERPRET=1 python -m pytest tests/kernels/test_round_kernels.py       runs the cases in this process
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@pytest.mark.skipif(IS_INTERPRETED, reason="the cases run in this process")
def test_round_kernels_interpreted_equal_torch() -> None:
    """The interpreter is chosen when a kernel's module is imported, so the cases need a process of their own."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", __file__]
    result = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


if IS_INTERPRETED:
    from round_kernel_cases import *  # noqa: F403
