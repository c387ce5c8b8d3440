"""Tests of Triton kernels run in its interpreter, in a process of their own: the choice is made at import."""

import os
import subprocess
import sys

import pytest

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not IS_INTERPRETED, reason="runs in the process that test_interpreted_* starts")


def run_interpreted(file: str, select: str) -> None:
    """Run the tests of `file` that `select` (-k) names under TRITON_INTERPRET=1; fail if they fail or are none."""
    pytest.importorskip("triton")
    if IS_INTERPRETED:
        pytest.skip("the interpreter's process itself")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        file,
        "-k",
        select,
    ]
    result = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
