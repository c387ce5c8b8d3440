"""A headless Chromium on the tree explorer, and what a reader does there."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@contextmanager
def chromium() -> Iterator[Any]:
    """A running browser; skips the test where there is none."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("no Chromium is installed (Debian: apt-get install chromium)")
    with playwright.sync_playwright() as running:
        launched = running.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield launched
        launched.close()


@contextmanager
def opened_page(browser: Any, url: str, expected_errors: Sequence[str] = ()) -> Iterator[Any]:
    """The page at `url`. No script may fail, and nothing be logged as an error but what is expected."""
    opened = browser.new_page(viewport={"width": 1360, "height": 880}, color_scheme="light")
    opened.set_default_timeout(20_000)
    problems: list[str] = []

    def logged(message: Any) -> None:
        if message.type == "error" and not any(each in message.text for each in expected_errors):
            problems.append(message.text)

    opened.on("pageerror", lambda error: problems.append(str(error)))
    opened.on("console", logged)
    opened.on("dialog", lambda dialog: problems.append("a dialog: markup of the model ran"))
    opened.goto(url)
    yield opened
    opened.close()
    assert problems == []


def ask(page: Any, prompt: str) -> None:
    """Send a prompt with the Enter key and wait for the answer's end."""
    begin(page, prompt)
    page.wait_for_function("document.getElementById('stop').disabled && document.querySelector('.turn.model')")


def begin(page: Any, prompt: str) -> None:
    """Send a prompt with the Enter key."""
    page.fill("#prompt", prompt)
    page.press("#prompt", "Enter")


def told(page: Any) -> list[tuple[str, int, int]]:
    """Text, depth and round of every token on the page."""
    code = "all => all.map(t => [t.textContent, +t.dataset.depth, +t.dataset.round])"
    return [tuple(token) for token in page.eval_on_selector_all(".token", code)]


def contrast(page: Any, selector: str) -> float:
    """WCAG contrast of an element's text against its own or its card's background."""
    return page.eval_on_selector(
        selector,
        """e => {
          const light = c => { const [r, g, b] = c.match(/[\\d.]+/g).map(Number).map(v => v / 255)
              .map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
            return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
          const behind = e => { const c = getComputedStyle(e).backgroundColor;
            return c === 'rgba(0, 0, 0, 0)' ? behind(e.parentElement) : c; };
          const [a, b] = [light(getComputedStyle(e).color), light(behind(e))].sort((x, y) => y - x);
          return (a + 0.05) / (b + 0.05); }""",
    )
