"""treedraft: exact EAGLE tree speculative decoding on MLA models."""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_WHERE = {
    "LLM": "treedraft.llm",
    "SamplingParams": "treedraft.types",
    "StructuredOutput": "treedraft.types",
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


def _revert_fixes() -> None:
    """Let every submodule come from a copy of this package without the fixes that TREEDRAFT_REVERT_FIX names."""
    import sys
    from importlib.util import module_from_spec, spec_from_file_location

    name = "_treedraft_patcher"  # a private name: treedraft._patcher itself comes from the copy
    spec = spec_from_file_location(name, os.path.join(os.path.dirname(os.path.abspath(__file__)), "_patcher.py"))
    assert spec is not None and spec.loader is not None
    patcher = sys.modules[name] = module_from_spec(spec)
    spec.loader.exec_module(patcher)
    patcher.activate(sys.modules[__name__])


if os.environ.get("TREEDRAFT_REVERT_FIX"):  # the one environment read: it must come before any submodule
    _revert_fixes()
