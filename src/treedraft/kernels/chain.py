"""Kernels that start while the one before them ends: programmatic dependent launch (CUDA programming guide).

A chained kernel may be on the device before its predecessor has ended. It may then read constants (weights, which no
kernel under way writes), and must `join` before it touches anything else, in every program: so whoever waits for it
waits for all before it too. `join` also lets the next chained kernel start. Between other kernels this has no effect.
"""

# mypy: disable-error-code="no-untyped-def"
# (Triton reads the annotations of a kernel: tl.constexpr or none.)

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


def chained(x: Tensor) -> dict[str, Any]:
    """Launch options of a chained kernel on x's device; plain ones where the device has no such launch."""
    return {"IS_CHAINED": True, "launch_pdl": True} if x.is_cuda and _has_chains(x.device) else {"IS_CHAINED": False}


@cache
def _has_chains(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device)[0] >= 9


@triton.jit
def join(IS_CHAINED: tl.constexpr):
    """Wait until all kernels before this one have ended and their results are seen; then let the next one start."""
    if IS_CHAINED:
        gdc_wait()
        gdc_launch_dependents()
