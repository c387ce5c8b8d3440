"""The tree explorer on a real server: what it shows is what the model said, and errors are shown and got over."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from browser import ask, begin, chromium, contrast, opened_page, told
from live_server import Live, live_server
from treedraft import LLM

ROOT = Path(__file__).parents[2]
STORY = "Once upon a time there was a little"
FAILED = "Failed to load resource"  # what Chromium logs for every answer that is no 200, and for none at all


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as launched:
        yield launched


@pytest.fixture
def page(browser: Any, live: Live) -> Iterator[Any]:
    with opened_page(browser, live.url, (FAILED,)) as opened:
        yield opened


def settings(page: Any, **values: Any) -> None:
    for name, value in values.items():
        page.fill(f"#{name.replace('_', '-')}", str(value))


def errors_of(page: Any) -> list[str]:
    return page.eval_on_selector_all(".turn.error", "all => all.map(e => e.lastChild.textContent)")


def answer_of(page: Any) -> str:
    """The text of the last answer."""
    return page.evaluate(
        "[...[...document.querySelectorAll('.turn.model')].at(-1).querySelectorAll('.token')]"
        ".map(t => t.textContent).join('')"
    )


def choose_longest(page: Any) -> Any:
    """Click a token of the round with the longest path; returns the round."""
    rounds = page.evaluate("state.rounds")
    number = max(range(len(rounds)), key=lambda i: len(rounds[i]["accepted"]))
    page.locator(f'.token[data-round="{number}"]').first.click()
    return rounds[number]


# ------------------------------------------------------------------ what it shows


def test_chat_shows_the_models_own_text_and_remembers_the_conversation(page: Any, live: Live) -> None:
    page.select_option("#kind", "chat")
    settings(page, max_tokens=24, temperature=0.8, seed=3)
    messages = []
    for question in ("Tell me a story", "And then?"):
        ask(page, question)
        messages.append({"role": "user", "content": question})
        expected = plain_text(live, live.llm._encode_chat(messages), max_tokens=24, temperature=0.8, seed=3)
        assert answer_of(page) == expected
        messages.append({"role": "assistant", "content": expected})
    assert errors_of(page) == []


def plain_text(live: Live, prompt: list[int], **fields: Any) -> str:
    """The model's text without a tree, through the API."""
    without_tree = {"speculative": {"enabled": False}}
    return (
        live.openai.completions.create(model="demo", prompt=prompt, **fields, extra_body=without_tree).choices[0].text
    )


def test_tokens_have_the_colour_of_their_depth_and_a_click_shows_their_round(page: Any, live: Live) -> None:
    settings(page, max_tokens=60)
    ask(page, STORY)
    tokens, rounds = told(page), page.evaluate("state.rounds")
    depths = [depth for each in rounds for depth in each["emitted_depths"]]
    assert [depth for _, depth, _ in tokens] == [0, *depths] and max(depths) >= 3
    colours = {
        d: page.eval_on_selector(f'.token[data-depth="{d}"]', "t => getComputedStyle(t).backgroundColor")
        for d in set(depths)
    }
    assert len(set(colours.values())) == len(colours)
    chosen = choose_longest(page)
    assert page.locator("#tree .node").count() == len(chosen["tokens"]) + 1
    assert page.locator("#tree .node.accepted").count() == len(chosen["accepted"]) >= 4
    path = page.eval_on_selector_all("#tree .node.accepted text:not(.note)", "all => all.map(n => n.textContent)")
    said = [chosen["texts"][node].replace(" ", "␣").replace("\n", "⏎") for node in chosen["accepted"]]
    assert [text[:13] for text in path] == [text[:13] for text in said]
    notes = page.eval_on_selector_all("#tree .note", "all => all.map(n => n.textContent)")
    assert sum(bool(re.fullmatch(r"(\.\d\d|1\.0) (\.\d\d|1\.0)", note)) for note in notes) == len(chosen["tokens"]) - 1


def test_probabilities_of_the_tree_are_the_targets_own(page: Any, live: Live) -> None:
    """The first level's, against the log-probabilities that the API gives for the same position."""
    settings(page, max_tokens=2, temperature=0, seed=1)
    ask(page, STORY)
    [first] = page.evaluate("state.rounds")
    answer = live.openai.completions.create(
        model="demo", prompt=STORY, max_tokens=2, temperature=0, logprobs=20, extra_body={"ignore_eos": True}
    )
    top = answer.choices[0].logprobs.top_logprobs[1]
    children = [n for n, parent in enumerate(first["parents"]) if parent == 0]
    shown = {first["texts"][n]: first["target_probs"][n] for n in children}
    common = set(top) & set(shown)
    assert len(common) >= 2
    assert all(shown[text] == pytest.approx(2.718281828459045 ** top[text], abs=1e-6) for text in common)


def test_settings_reach_the_engine(page: Any, live: Live) -> None:
    settings(page, max_tokens=30, nodes=4)
    ask(page, STORY)
    rounds = page.evaluate("state.rounds")
    assert rounds and max(len(each["tokens"]) for each in rounds) == 4
    small = answer_of(page)
    page.click("#clear")
    page.uncheck("#speculation")
    ask(page, STORY)
    assert answer_of(page) == small and len(told(page)) <= 30, "the tree changes no text"
    assert all(len(each["emitted"]) == 1 for each in page.evaluate("state.rounds"))


def test_keys_alone_send_choose_a_token_and_walk_the_rounds(page: Any, live: Live) -> None:
    settings(page, max_tokens=40)
    ask(page, STORY)
    page.focus("#prompt")
    for _ in range(30):
        if page.evaluate("document.activeElement.classList.contains('token')"):
            break
        page.keyboard.press("Shift+Tab")
    for key in ("End", "ArrowLeft", "Enter"):
        page.keyboard.press(key)
    number = page.evaluate("+document.activeElement.dataset.round")
    assert f"Round {number + 1} of" in page.inner_text("#tree-note")
    page.focus("#chart")
    page.keyboard.press("Home")
    assert "Round 1 of" in page.inner_text("#tree-note")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_both_colour_schemes_are_readable_with_a_real_answer(page: Any, scheme: str) -> None:
    page.emulate_media(color_scheme=scheme)
    settings(page, max_tokens=40)
    ask(page, STORY)
    assert page.evaluate("document.documentElement.dataset.theme") == scheme
    for place in (".token", "#status", "#tree-note", "#send", "#prompt"):
        assert contrast(page, place) >= 4.5, place


def test_screenshot_for_the_readme(page: Any, tmp_path: Path, pytestconfig: pytest.Config) -> None:
    """`pytest tests/server/test_explorer_live.py --screenshot docs/explorer.png` writes the README's."""
    ask(page, STORY)
    choose_longest(page)
    file = Path(pytestconfig.getoption("screenshot") or tmp_path / "explorer.png")
    page.mouse.move(0, 0)
    # The speed of float64 on a shared machine says nothing: it has no place in a picture.
    page.evaluate(
        "const s = document.getElementById('status'); s.textContent = s.textContent.replace(/ · \\d+ tokens\\/s/, '')"
    )
    assert "tokens/s" not in page.inner_text("#status")
    page.screenshot(path=file)
    assert file.stat().st_size < 300_000
    kept = (ROOT / "docs" / "explorer.png").read_bytes()
    assert kept[:8] == b"\x89PNG\r\n\x1a\n" and len(kept) < 300_000
    assert kept[16:24] == file.read_bytes()[16:24]  # width and height: the kept one is of this page


# ------------------------------------------------------------------ what goes wrong


def test_refusals_are_shown_and_the_next_request_works(page: Any) -> None:
    settings(page, max_tokens=8)
    page.fill("#temperature", "-1")
    page.evaluate("document.getElementById('form').noValidate = true")  # the server is asked, not the browser
    ask(page, STORY)
    assert "temperature" in errors_of(page)[0]
    settings(page, temperature=0)
    ask(page, "word " * 2000)
    assert "context" in errors_of(page)[1]
    ask(page, STORY)
    assert len(errors_of(page)) == 2 and answer_of(page)


def test_stop_ends_the_request_on_the_server_and_keeps_the_text(page: Any, live: Live) -> None:
    settings(page, max_tokens=400)
    begin(page, STORY)
    page.wait_for_selector(".token")
    page.click("#stop")
    page.wait_for_function("document.getElementById('stop').disabled")
    live.wait_until_idle()
    assert errors_of(page) == [] and 0 < len(told(page)) < 390
    settings(page, max_tokens=5)
    ask(page, STORY)
    assert answer_of(page)


def test_abort_by_the_server_is_said(page: Any, live: Live) -> None:
    settings(page, max_tokens=400)
    begin(page, STORY)
    page.wait_for_selector(".token")
    [request_id] = live.service.generations
    assert live.http.post("/abort", json={"request_id": request_id}).status_code == 200
    page.wait_for_function("document.getElementById('stop').disabled")
    assert errors_of(page) == ["the server aborted the request"] and told(page)


def test_full_queue_is_shown_and_got_over(browser: Any, served_llm: LLM) -> None:
    with live_server(served_llm, max_waiting=0) as live, opened_page(browser, live.url, (FAILED,)) as page:
        settings(page, max_tokens=4)
        body = {"prompt": STORY, "n": 4, "max_tokens": 400, "ignore_eos": True, "stream": True}
        with live.http.stream("POST", "/v1/completions", json=body):
            ask(page, STORY)
            assert "there is no room" in errors_of(page)[0]
        live.wait_until_idle()
        ask(page, STORY)
        assert len(errors_of(page)) == 1 and answer_of(page)


def test_key_is_asked_for_and_taken(browser: Any, served_llm: LLM) -> None:
    with live_server(served_llm, api_key="secret") as live, opened_page(browser, live.url, (FAILED,)) as page:
        settings(page, max_tokens=4)
        ask(page, STORY)
        assert "API key" in errors_of(page)[0]
        page.fill("#key", "secret")
        ask(page, STORY)
        assert len(errors_of(page)) == 1 and answer_of(page)


def test_dead_engine_is_shown(browser: Any, served_llm: LLM) -> None:
    with live_server(served_llm) as live, opened_page(browser, live.url, (FAILED,)) as page:
        begin(page, STORY)
        page.wait_for_selector(".token")

        def die(plan: Any) -> Any:
            raise RuntimeError("the device is gone")

        live.llm.engine.runner.launch = die  # type: ignore[method-assign]
        page.wait_for_selector(".turn.error")
        ask(page, STORY)
        assert all("the device is gone" in message for message in errors_of(page)) and len(errors_of(page)) == 2


@contextmanager
def served_process(port: int) -> Iterator[tuple[subprocess.Popen[str], str]]:
    command = [sys.executable, "-m", "treedraft", "serve", "--port", str(port), "--max-batch", "1"]
    command += ["--max-context", "1024"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stderr is not None
            yield process, next(m[1] for line in process.stderr if (m := re.search(r"running on (http://\S+)", line)))
        finally:
            process.kill()


def test_server_killed_in_a_stream_is_shown_and_its_successor_answers(browser: Any) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with served_process(port) as (process, url), opened_page(browser, url, (FAILED,)) as page:
        settings(page, max_tokens=900)
        begin(page, STORY)
        page.wait_for_selector(".token")
        process.send_signal(signal.SIGKILL)
        page.wait_for_selector(".turn.error")
        ask(page, STORY)  # nobody there
        assert all("no connection to the server" in message for message in errors_of(page)), errors_of(page)
        with served_process(port) as (_, again):
            assert httpx.get(f"{again}/ready").status_code == 200
            settings(page, max_tokens=8)
            ask(page, STORY)
            assert len(errors_of(page)) == 2 and answer_of(page)
