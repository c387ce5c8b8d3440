"""Floating-point numbers with their index as one integer: the largest key is the largest number, the first of equals.

A selection over keys never ties, so it gives the same on every device and in any order of comparison.

    bits 63 .. 32    the number, as a signed integer that orders as it does
    bits 31 ..  0    2^31 - 1 - index
"""

# mypy: disable-error-code="no-untyped-def"
# (Triton reads the annotations of a kernel: tl.constexpr or none.)

from __future__ import annotations

import triton
import triton.language as tl

NO_KEY: tl.constexpr = tl.constexpr(-(1 << 63))  # smaller than every key


@triton.jit
def ordered_bits(x):
    """int32 that orders as float32 x does; -0.0 as 0.0, and a NaN by its bits."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def number_of(ordered):
    """The float32 that `ordered_bits` was given."""
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def keys_of(ordered, index):
    """int64 keys of int32 `ordered` numbers at int32 indices >= 0."""
    return (ordered.to(tl.int64) << 32) | (index ^ 0x7FFFFFFF).to(tl.int64)


@triton.jit
def index_of(keys):
    """int32 index of a key."""
    return ((keys & 0x7FFFFFFF) ^ 0x7FFFFFFF).to(tl.int32)


@triton.jit
def ordered_of(keys):
    """int32 `ordered` number of a key."""
    return (keys >> 32).to(tl.int32)
