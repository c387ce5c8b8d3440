"""A floating-point number's bits as an integer."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor, library

INTEGER = {torch.float32: torch.int32, torch.float64: torch.int64}


def bits_of(x: Tensor) -> Tensor:
    """Return the bits of float32 or float64 numbers as int32 or int64, the same shape.

    A view; a copy while TorchScript records (runner.capture), whose `view` to another dtype fails.
    """
    return _copied_bits()(x) if torch._C._get_tracing_state() is not None else x.view(INTEGER[x.dtype])


@cache
def _copied_bits() -> Callable[[Tensor], Tensor]:
    """An operator that TorchScript calls without looking inside. Registered once for the process."""
    operators = library.Library("treedraft", "DEF")
    operators.define("bits_of(Tensor x) -> Tensor")
    operators.impl("bits_of", lambda x: x.view(INTEGER[x.dtype]).clone(), "CompositeExplicitAutograd")
    _copied_bits.owner = operators  # type: ignore[attr-defined]  # the operator lives as long as it
    return torch.ops.treedraft.bits_of
