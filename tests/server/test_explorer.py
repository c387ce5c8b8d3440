"""The tree explorer in headless Chromium: streamed text by depth, trees, the chart, keys, dark mode, errors."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from browser import ask, chromium, contrast, opened_page, told
from explorer_server import Chunk, ExplorerServer, serving
from fake_llm import make_round
from treedraft.debug.trace import Recorder, live_rounds
from treedraft.engine.text import TextStream
from treedraft.server.pages import explorer_html
from treedraft.server.pages.rounds import chunk_as_json
from treedraft.types import SamplingParams

STORY = "Once upon a time there was a little"


def recorded_stream(llm, prompt: str) -> list[Chunk]:
    """The demo model's own rounds, one chunk a round."""
    traced, runner = [], llm.runner
    runner.observer = Recorder(traced, runner.target.model.logits)
    try:
        params = SamplingParams(max_tokens=120, temperature=0.8, seed=1)
        [output] = llm.generate([prompt], params, progress=False)
    finally:
        runner.observer = None
    token_ids = output.outputs[0].token_ids
    rounds = live_rounds(traced, output.prompt_token_ids, token_ids)
    text, chunks, shown, known = TextStream(llm.tokenizer, ()), [], 0, 0

    def add(extension: dict) -> None:
        nonlocal shown, known
        for token_id in token_ids[known : known + len(extension["depths"])]:
            text.push(token_id)
        known += len(extension["depths"])
        chunks.append((text.text[shown:], extension))
        shown = len(text.text)

    def decode(token_id: int) -> str:
        return llm.tokenizer.decode([token_id])

    add(chunk_as_json([], decode, first_token_ids=token_ids[:1]))
    for each in rounds:
        add(chunk_as_json([each], decode))
    assert known == len(token_ids)
    return chunks


def hostile_stream() -> list[Chunk]:
    """Markup as text, a character of two tokens, text held back for a chunk, a chunk without the extension."""
    parts = {1: "a", 2: "<img src=x onerror=alert(1)>", 3: "\ufffd", 4: "\ufffd", 5: "b", 6: "&amp;", 7: "-", 8: "+"}

    def decode(token_id: int) -> str:
        return parts.get(token_id, "?")

    first = make_round(0, 5, 1, [2, 3, 4])
    second = make_round(0, 8, 4, [5, 6, 7])
    return [
        ("a", chunk_as_json([], decode, first_token_ids=[1])),
        ("<img src=x onerror=alert(1)>", chunk_as_json([first], decode)),  # and half of é
        ("éb&amp;-", chunk_as_json([second], decode)),
        ("plain", None),
    ]


@pytest.fixture(scope="module")
def server(tree64) -> Iterator[ExplorerServer]:
    served = ExplorerServer(
        {STORY: recorded_stream(tree64, STORY), "hostile": hostile_stream(), "cut": [("plain", None)]}, cut="cut"
    )
    with serving(served.app()) as url:
        served.url = url
        yield served


@pytest.fixture(scope="module")
def browser():
    with chromium() as launched:
        yield launched


@pytest.fixture
def page(browser, server: ExplorerServer):
    with opened_page(browser, server.url, expected_errors=("400",)) as opened:
        yield opened


def test_page_needs_nothing_from_elsewhere() -> None:
    html = explorer_html()
    assert re.findall(r"(?:src|href)=\"(?!data:)", html) == []
    assert re.findall(r"https?://(?!www\.w3\.org/2000/svg)", html) == []
    assert "innerHTML" not in html


def test_streamed_text_is_whole_and_its_tokens_carry_their_depths(page, server: ExplorerServer) -> None:
    ask(page, STORY)
    tokens = told(page)
    chunks = server.streams[STORY]
    assert "".join(text for text, _, _ in tokens) == "".join(text for text, _ in chunks)
    depths = [depth for _, extension in chunks for depth in extension["depths"]]
    assert [depth for _, depth, _ in tokens] == depths
    assert max(depths) >= 3
    colours = {
        depth: page.eval_on_selector(
            f'.token[data-depth="{depth}"]', "t => getComputedStyle(t).backgroundColor"
        )  # one colour a depth
        for depth in set(depths)
    }
    assert len(set(colours.values())) == len(colours)
    assert "tokens a round" in page.inner_text("#status")


def test_request_carries_the_settings(page, server: ExplorerServer) -> None:
    for field, value in {"temperature": "0.3", "max-tokens": "7", "seed": "", "nodes": "5", "key": "secret"}.items():
        page.fill(f"#{field}", value)
    page.select_option("#kind", "chat")
    ask(page, STORY)
    body = server.bodies[-1]
    assert body["messages"] == [{"role": "user", "content": STORY}]
    assert (body["temperature"], body["max_tokens"], "seed" in body) == (0.3, 7, False)
    assert body["speculative"] == {"enabled": True, "num_draft_tokens": 5}
    assert (body["treedraft"], body["stream"]) == ({"trace": True}, True)
    assert server.authorizations[-1] == "Bearer secret"
    page.uncheck("#speculation")
    ask(page, STORY)
    assert server.bodies[-1]["speculative"] == {"enabled": False}
    assert [m["role"] for m in server.bodies[-1]["messages"]] == ["user", "assistant", "user"]


def test_click_on_a_token_draws_its_rounds_tree(page, server: ExplorerServer) -> None:
    ask(page, STORY)
    rounds = [round for _, extension in server.streams[STORY] for round in extension["rounds"]]
    number = max(range(len(rounds)), key=lambda i: len(rounds[i]["accepted"]))
    page.locator(f'.token[data-round="{number}"]').first.click()
    chosen = rounds[number]
    assert page.locator("#tree .node").count() == len(chosen["tokens"]) + 1  # and the target's own token
    assert page.locator("#tree .node.accepted").count() == len(chosen["accepted"])
    assert page.locator("#tree .node.bonus").count() == 1
    assert page.locator("#tree path").count() == len(chosen["tokens"])
    assert f"Round {number + 1} of {len(rounds)}" in page.inner_text("#tree-note")
    assert page.locator(".token.in-round").count() == len(chosen["emitted"])
    code = "all => all.map(r => ['x', 'y', 'width', 'height'].map(a => +r.getAttribute(a)))"
    boxes = page.eval_on_selector_all("#tree rect", code)
    for i, (x, y, w, h) in enumerate(boxes):
        assert all(x + w <= x2 or x2 + w2 <= x or y + h <= y2 or y2 + h2 <= y for x2, y2, w2, h2 in boxes[:i])


def test_tree_shows_draft_and_target_probabilities(page, server: ExplorerServer) -> None:
    ask(page, STORY)
    page.locator('.token[data-round="0"]').first.click()
    first = server.streams[STORY][1][1]["rounds"][0]
    notes = page.eval_on_selector_all("#tree .note", "all => all.map(n => n.textContent)")
    assert sum(bool(re.fullmatch(r"(\.\d\d|1\.0) (\.\d\d|1\.0)", note)) for note in notes) == len(first["tokens"]) - 1


def test_keys_alone_reach_a_token_its_tree_and_the_chart(page, server: ExplorerServer) -> None:
    ask(page, STORY)
    for _ in range(30):  # Shift+Tab from the prompt: the token that is a tab stop
        if page.evaluate("document.activeElement.classList.contains('token')"):
            break
        page.keyboard.press("Shift+Tab")
    assert page.evaluate("document.activeElement.classList.contains('token')")
    for _ in range(12):
        page.keyboard.press("ArrowRight")
    number = page.evaluate("+document.activeElement.dataset.round")
    page.keyboard.press("Enter")
    assert f"Round {number + 1} of" in page.inner_text("#tree-note")
    assert page.locator('.token[tabindex="0"]').count() == 1
    page.focus("#chart")
    page.keyboard.press("ArrowRight")
    assert f"Round {number + 2} of" in page.inner_text("#tree-note")
    page.keyboard.press("Home")
    assert "Round 1 of" in page.inner_text("#tree-note")


def test_chart_has_a_bar_of_its_tokens_for_every_round(page, server: ExplorerServer) -> None:
    ask(page, STORY)
    rounds = [round for _, extension in server.streams[STORY] for round in extension["rounds"]]
    assert page.locator("#chart .bar").count() == len(rounds)
    assert page.locator("#chart .bar rect").count() == sum(len(r["emitted"]) for r in rounds)
    page.locator("#chart .bar").nth(2).click()
    assert "Round 3 of" in page.inner_text("#tree-note")


def test_hostile_text_is_shown_as_text_and_broken_characters_whole(page) -> None:
    ask(page, "hostile")
    tokens = told(page)
    assert tokens == [
        *[("a", 0, -1), ("<img src=x onerror=alert(1)>", 1, 0), ("é", 0, 0)],
        *[("b", 1, 1), ("&amp;", 2, 1), ("-", 0, 1), ("plain", 0, -1)],
    ]
    assert page.locator("#conversation img").count() == 0


def test_refused_request_is_shown_and_the_next_one_works(page) -> None:
    ask(page, "unknown")
    assert page.inner_text(".turn.error").endswith("no such prompt: unknown")
    ask(page, "hostile")
    assert page.locator(".token").count() > 3
    page.click("#clear")
    assert page.locator(".token, .turn, #chart .bar, #tree svg").count() == 0


def test_stream_that_breaks_off_is_said(page) -> None:
    ask(page, "cut")
    assert page.inner_text(".turn.error").endswith("the stream broke off")
    assert page.inner_text(".token") == "plain"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_both_colour_schemes_are_readable(page, scheme: str) -> None:
    page.emulate_media(color_scheme=scheme)
    ask(page, STORY)
    assert page.evaluate("document.documentElement.dataset.theme") == scheme
    depths = page.eval_on_selector_all(".token", "all => [...new Set(all.map(t => t.dataset.depth))]")
    places = [f'.token[data-depth="{depth}"]' for depth in depths]
    for place in [*places, "#status", "#tree-note", "#legend span", "#send", "#prompt", "h1"]:
        assert contrast(page, place) >= 4.5, place
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (background == "rgb(13, 17, 23)") is (scheme == "dark")


def test_theme_button_switches_and_is_remembered(page) -> None:
    page.focus("#theme")
    page.keyboard.press("Enter")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    page.reload()
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
