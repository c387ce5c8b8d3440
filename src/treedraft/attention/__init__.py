"""Attention of a few rows for each sequence over its paged KV: one interface, several backends, chosen by name.

A new backend is one file and one entry in BACKENDS; tests/conformance picks it up by itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

from treedraft.errors import ConfigError

if TYPE_CHECKING:
    from treedraft.attention.base import TreeAttention


@dataclass(frozen=True)
class Backend:
    """Where a backend's class is, and what it runs on. The class is imported when asked for."""

    module: str
    class_name: str
    devices: tuple[str, ...]  # torch device types
    dtypes: tuple[str, ...]  # of KV and queries, by their names in torch


BACKENDS: dict[str, Backend] = {
    "reference": Backend(
        module="treedraft.attention.reference",
        class_name="TorchTreeAttention",
        devices=("cpu", "cuda"),
        dtypes=("float64", "float32", "bfloat16"),
    ),
}


def make_backend(name: str) -> TreeAttention:
    """Return a backend by its registered name. Raise ConfigError for an unknown one."""
    if name not in BACKENDS:
        raise ConfigError(f"attention backend must be one of {', '.join(sorted(BACKENDS))}; got {name!r}")
    entry = BACKENDS[name]
    made: TreeAttention = getattr(import_module(entry.module), entry.class_name)()
    return made
