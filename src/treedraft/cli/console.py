"""Where the commands print, and in which colours."""

from __future__ import annotations

import sys

from rich.console import Console

# A token's colour says at which depth of the tree it was accepted; the bonus token is plain.
DEPTH_STYLES = ("", "green", "cyan", "blue", "magenta", "red", "yellow")


def make_console() -> Console:
    """The terminal at its own width; a pipe or a file at one that no table needs to be folded for."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else 140)


def depth_style(depth: int) -> str:
    """The style of a token accepted at a depth; 0: the target's own."""
    return DEPTH_STYLES[depth] if depth < len(DEPTH_STYLES) else "bright_white"
