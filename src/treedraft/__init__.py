"""treedraft: exact EAGLE tree speculative decoding on MLA models."""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_WHERE = {
    "LLM": "treedraft.llm",
    "SamplingParams": "treedraft.types",
    "SpeculativeConfig": "treedraft.config",
    "RequestOutput": "treedraft.types",
    "TreedraftError": "treedraft.errors",
    "RequestError": "treedraft.errors",
    "ConfigError": "treedraft.errors",
    "CheckpointError": "treedraft.errors",
    "InvariantError": "treedraft.errors",
}
__all__ = [*_WHERE, "__version__"]


def __getattr__(name: str) -> Any:
    """Load a public name where it is first used, so that importing treedraft never loads torch."""
    if name in _WHERE:
        return getattr(import_module(_WHERE[name]), name)
    raise AttributeError(f"module 'treedraft' has no attribute {name!r}")
