"""Where the commands print."""

from __future__ import annotations

import sys

from rich.console import Console


def make_console() -> Console:
    """The terminal at its own width; a pipe or a file at one that no table needs to be folded for."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else 140)
