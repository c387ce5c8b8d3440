"""Attention of a few rows for each sequence over its paged KV: one interface, several backends, chosen by name.

A new backend is one file and one line in BACKENDS; tests/conformance picks it up by itself.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from treedraft.errors import ConfigError

if TYPE_CHECKING:
    from treedraft.attention.base import TreeAttention

# name -> (module, class, device types it runs on); the class is imported when asked for
BACKENDS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "reference": ("treedraft.attention.reference", "TorchTreeAttention", ("cpu", "cuda")),
}


def make_backend(name: str) -> TreeAttention:
    """Return a backend by its registered name. Raise ConfigError for an unknown one."""
    if name not in BACKENDS:
        raise ConfigError(f"attention backend must be one of {', '.join(sorted(BACKENDS))}; got {name!r}")
    module, class_name, _ = BACKENDS[name]
    return getattr(import_module(module), class_name)()
