"""The tree explorer: one page that needs nothing but the server it came from."""

from __future__ import annotations

from importlib.resources import files


def explorer_html() -> str:
    """The page, UTF-8 text with its style and script inside."""
    return (files("treedraft.server.pages") / "index.html").read_text(encoding="utf-8")
