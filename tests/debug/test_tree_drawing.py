"""Drawing a round: every live node appears once, the accepted path and the bonus token stand out."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

from rich.console import Console

from fake_llm import make_round
from treedraft.debug.explain import as_svg, children_of, render_tree, show_token
from treedraft.debug.trace import LiveTrace, live_rounds

ROUND = make_round(0, 10, ord("r"), [ord("<"), ord("b"), ord("c")])
SVG = "{http://www.w3.org/2000/svg}"


def text_of(trace) -> str:
    console = Console(width=100, record=True, file=open("/dev/null", "w"))
    console.print(render_tree(trace, chr))
    return console.export_text()


def test_show_token_makes_spaces_and_controls_visible() -> None:
    assert show_token(" a\n\tb\x07") == "␣a⏎⇥b�"
    assert len(show_token("x" * 50)) == 18


def test_children_of_leaves_inert_nodes_out_likeliest_first() -> None:
    assert children_of(ROUND) == {0: [1, 2], 1: [3], 2: [4], 3: [], 4: [], 5: []}


def test_render_tree_shows_the_accepted_path_first_and_the_bonus_under_its_end() -> None:
    assert [line.rstrip() for line in text_of(ROUND).splitlines()] == [
        "r  root",
        "├── <  0.33",
        "│   └── b  0.46",
        "│       └── c  bonus: the target's token",
        "└── -  0.67",
        "    └── &  0.45",
    ]


def test_as_svg_is_valid_and_shows_every_live_node_once() -> None:
    root = ElementTree.fromstring(as_svg(ROUND, chr, 'a "title" <&>'))
    groups = root.findall(f"{SVG}g")
    kinds = sorted((g.get("class"), g.find(f"{SVG}text").text) for g in groups)
    assert kinds == [
        *[("accepted", "<"), ("accepted", "b"), ("accepted", "r")],
        *[("bonus", "c"), ("draft", "&"), ("draft", "-")],
    ]
    assert root.get("aria-label") == 'a "title" <&>'


def test_as_svg_boxes_do_not_overlap() -> None:
    root = ElementTree.fromstring(as_svg(ROUND, chr))
    boxes = [
        tuple(float(r.get(k)) for k in ("x", "y", "width", "height")) for r in root.iter(f"{SVG}rect") if r.get("x")
    ]
    for i, (x, y, w, h) in enumerate(boxes):
        for other_x, other_y, other_w, other_h in boxes[:i]:
            apart = x + w <= other_x or other_x + other_w <= x or y + h <= other_y or other_y + other_h <= y
            assert apart


def test_as_svg_needs_nothing_from_outside_and_knows_dark_pages() -> None:
    svg = as_svg(ROUND, chr)
    assert svg.count("http") == 1  # the namespace
    assert "prefers-color-scheme: dark" in svg


def test_round_trace_says_what_was_accepted() -> None:
    assert (ROUND.num_accepted, ROUND.bonus_token_id, ROUND.emitted_depths) == (2, ord("c"), (1, 2, 0))


def test_round_trace_cut_by_max_tokens_keeps_its_depths() -> None:
    assert make_round(0, 10, 1, [2, 3, 4], num_emitted=1).emitted_depths == (1,)


def test_live_trace_hands_rounds_on_in_order() -> None:
    seen = []
    trace = LiveTrace(seen.append)
    trace.append(ROUND)
    trace.extend([ROUND, ROUND])
    assert seen == list(trace) == [ROUND] * 3


def test_live_rounds_cuts_at_the_end_and_drops_later_rounds() -> None:
    rounds = [make_round(0, 10, 1, [2, 3, 4]), make_round(0, 13, 4, [5, 6, 7]), make_round(0, 16, 7, [8, 9, 9])]
    prompt = list(range(10))
    assert [r.emitted_token_ids for r in live_rounds(rounds, prompt, [1, 2, 3, 4, 5])] == [(2, 3, 4), (5,)]
    assert [r.emitted_token_ids for r in live_rounds(rounds, prompt, [1, 2, 3, 4])] == [(2, 3, 4)]
