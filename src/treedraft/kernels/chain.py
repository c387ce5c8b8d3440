"""Kernels that start while the one before them ends: programmatic dependent launch (CUDA programming guide).

A chained kernel may be on the device before its predecessors have ended, as soon as all programs of the one before it
have started. It may then read constants, such as weights, and must `join` before it touches anything else, in every
program: so whoever waits for it waits for all before it too. Beside kernels that are not chained this has no effect.
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
    """Let the next kernel start, and wait until all before this one have ended and their results are seen."""
    if IS_CHAINED:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def fetch_lines(pointers):
    """Bring the cache lines of pointers into the second cache. Before `join`: of constants only."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers.to(tl.int64)], tl.int32, is_pure=False, pack=1
    )


@triton.jit
def fetch_slab(start, NUM_BYTES: tl.constexpr, LANES: tl.constexpr):
    """As fetch_lines, of the bytes from a pointer on: a multiple of 16 * LANES, LANES being the threads."""
    EACH: tl.constexpr = NUM_BYTES // LANES
    lanes = start.to(tl.int64) + tl.arange(0, LANES) * EACH
    sizes = tl.full([LANES], EACH, tl.int32)
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
        "=r,l,r",
        [lanes, sizes],
        tl.int32,
        is_pure=False,
        pack=1,
    )
