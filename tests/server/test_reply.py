"""Thoughts, content and calls in a model's text: what was put in comes out, however the text is cut into pieces."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treedraft.errors import ConfigError
from treedraft.server.reply.formats import CALLS, LISTED, REASONING, CallFormat, call_format, reasoning_format
from treedraft.server.reply.parser import Call, ReplyForm, ReplyParser

FORMATS = {**CALLS, "listed": LISTED}
TOOLS: dict[str, Any] = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "exact": {"type": ["boolean", "string"]},
            "place": {"type": "object"},
            "anything": {},
        },
    },
    "now": {"type": "object", "properties": {}},
}
WHOLE = ReplyForm(reasoning=REASONING["qwen3"], calls=CALLS["qwen"], tools=TOOLS)


def parser_of(form: ReplyForm) -> ReplyParser:
    numbers = itertools.count()
    return ReplyParser(form, lambda: f"id{next(numbers)}")


def parse(form: ReplyForm, pieces: list[str]) -> ReplyParser:
    """The result of a stream, put together by its deltas alone as a client does."""
    parser, sum_of = parser_of(form), ReplyParser(form)
    for delta in [*map(parser.push, pieces), parser.push("", is_last=True)]:
        sum_of.reasoning += delta.reasoning
        sum_of.content += delta.content
        assert len({piece.index for piece in delta.calls}) == len(delta.calls)
        for piece in delta.calls:
            if piece.index == len(sum_of.calls):
                assert piece.id and piece.name
                sum_of.calls.append(Call(piece.index, piece.id, piece.name))
            else:
                assert piece.id is None and piece.name is None and piece.index == len(sum_of.calls) - 1
            sum_of.calls[piece.index].arguments += piece.arguments
    for name in ("reasoning", "content", "calls"):
        assert getattr(sum_of, name) == getattr(parser, name)
    return sum_of


def pieces_of(text: str, cuts: list[int]) -> list[str]:
    at = [0, *sorted(c % (len(text) + 1) for c in cuts), len(text)]
    return [text[a:b] for a, b in zip(at, at[1:])]


def same(a: ReplyParser, b: ReplyParser) -> bool:
    return (a.reasoning, a.content, a.calls) == (b.reasoning, b.content, b.calls)


# ------------------------------------------------------------------ writing calls, as the models' templates do


def write_one(name: str, call: str, arguments: dict[str, Any], number: int) -> str:
    text = json.dumps(arguments, ensure_ascii=False)
    if name == "qwen":
        return f'<tool_call>\n{{"name": "{call}", "arguments": {text}}}\n</tool_call>'
    if name == "deepseek_v3":
        return f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{call}\n```json\n{text}\n```<｜tool▁call▁end｜>"
    if name == "deepseek_v31":
        return f"<｜tool▁call▁begin｜>{call}<｜tool▁sep｜>{text}<｜tool▁call▁end｜>"
    if name == "kimi_k2":
        return f"<|tool_call_begin|>functions.{call}:{number}<|tool_call_argument_begin|>{text}<|tool_call_end|>"
    if name == "glm45":
        values = {k: v if isinstance(v, str) else json.dumps(v) for k, v in arguments.items()}
        pairs = "".join(f"<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>\n" for k, v in values.items())
        return f"<tool_call>{call}\n{pairs}</tool_call>"
    return f'{{"name": "{call}", "parameters": {text}}}'


def write(name: str, calls: list[tuple[str, dict[str, Any]]]) -> str:
    ones = [write_one(name, call, arguments, i) for i, (call, arguments) in enumerate(calls)]
    section = FORMATS[name].section
    if section is None:
        return "\n".join(ones)
    return section[0] + (", " if name == "listed" else "\n").join(ones) + section[1]


# Text without the beginnings of marks; GLM's values and other marks would be read as what they are.
plain = st.text(st.sampled_from('ab {}"\\é🌍\n:,;'), max_size=12)
words = plain.map(str.strip)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | plain, lambda v: st.lists(v, max_size=3), max_leaves=5
)
weather = st.fixed_dictionaries(
    {"city": plain},
    optional={
        "days": st.integers(),
        "exact": st.booleans() | st.just("rather"),
        "place": st.dictionaries(plain, values, max_size=3),
        "anything": values.filter(lambda v: not isinstance(v, str)),
    },
)
calls = st.lists(st.tuples(st.just("get_weather"), weather) | st.just(("now", {})), min_size=1, max_size=3)
cuts = st.lists(st.integers(0, 10**6), max_size=30)


@pytest.mark.parametrize("name", FORMATS)
@settings(deadline=None, max_examples=60)
@given(thoughts=st.none() | words, before=words, made=calls, after=words, is_thinking=st.booleans(), at=cuts)
def test_what_was_written_comes_out_of_any_pieces(name, thoughts, before, made, after, is_thinking, at) -> None:
    form = ReplyForm(REASONING["qwen3"], is_thinking, FORMATS[name], TOOLS)
    head = f"\n{thoughts or ''}\n</think>\n\n" if is_thinking else ""
    if thoughts is not None and not is_thinking:
        head = f"<think>\n{thoughts}\n</think>\n\n"
    text = f"{head}{before}\n{write(name, made)}\n{after}"
    if name == "listed":
        text, before, after = f"{head}{write(name, made)}", "", ""
    for pieces in ([text], pieces_of(text, at), list(text)):
        result = parse(form, pieces)
        assert [(c.name, json.loads(c.arguments)) for c in result.calls] == made
        assert result.content == before + after
        assert result.reasoning == (thoughts or "")
        ids = [f"functions.{c}:{i}" if name == "kimi_k2" else f"id{i}" for i, (c, _) in enumerate(made)]
        assert [c.id for c in result.calls] == ids


# ------------------------------------------------------------------ what only looks like it

MARKS = sorted({m for f in CALLS.values() for m in f.marks if m} | {"<think>", "</think>", "[", "]"})
FRAGMENTS = [
    *MARKS,
    *(m[: len(m) // 2] for m in MARKS),
    *('{"name": "now", "arguments": {}}', '{"name": "now"}', '{"name": "no", "arguments": {"a": "<', '"}', "{", "}"),
    *("now", "functions.now:0", "get_weather", "function", "\n```json\n", "```", "\n", " ", "<", "a", "é", "city"),
]
soup = st.lists(st.sampled_from(FRAGMENTS), max_size=25).map("".join)


@pytest.mark.parametrize("name", FORMATS)
@settings(deadline=None, max_examples=150)
@given(text=soup, is_thinking=st.booleans(), at=cuts)
def test_any_text_gives_the_same_in_any_pieces(name, text, is_thinking, at) -> None:
    form = ReplyForm(REASONING["kimi_k2"], is_thinking, FORMATS[name], TOOLS)
    whole = parse(form, [text])
    assert same(whole, parse(form, pieces_of(text, at)))
    assert same(whole, parse(form, list(text)))


@pytest.mark.parametrize("name", FORMATS)
@settings(deadline=None, max_examples=100)
@given(text=soup, at=cuts)
def test_without_tools_of_those_names_every_character_is_content(name, text, at) -> None:
    result = parse(ReplyForm(calls=FORMATS[name], tools={"other": {}}), pieces_of(text, at))
    assert (result.content, result.reasoning, result.calls) == (text, "", [])


@settings(deadline=None, max_examples=100)
@given(text=st.text(), at=cuts)
def test_text_without_marks_is_content(text, at) -> None:
    for form in (WHOLE, ReplyForm()):
        result = parse(form, pieces_of(text, at))
        assert (result.content, result.reasoning, result.calls) == (text, "", [])


@pytest.mark.parametrize("name", CALLS)
def test_no_half_mark_is_ever_sent(name: str) -> None:
    text = "Let me see. " + write(name, [("get_weather", {"city": "Bern"}), ("now", {})])
    parser = parser_of(ReplyForm(calls=CALLS[name], tools=TOOLS))
    sent = ""
    for delta in [*map(parser.push, text), parser.push("", is_last=True)]:
        sent += delta.content
        assert "Let me see.".startswith(sent)
    assert sent == "Let me see."


@pytest.mark.parametrize("name", [n for n in CALLS if n != "glm45"])
def test_arguments_come_as_they_are_written(name: str) -> None:
    parser = parser_of(ReplyForm(calls=CALLS[name], tools=TOOLS))
    text = write(name, [("get_weather", {"city": "Bern"})])
    cut = text.index("Bern") + 2
    [first] = parser.push(text[:cut]).calls
    assert (first.name, first.arguments) == ("get_weather", '{"city": "Be')
    assert parser.push(text[cut : cut + 1]).calls == [Call(0, arguments="r")]


def test_string_arguments_of_glm_come_as_they_are_written() -> None:
    parser = parser_of(ReplyForm(calls=CALLS["glm45"], tools=TOOLS))
    assert parser.push('<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>"Be').calls == [
        Call(0, "id0", "get_weather", '{"city": "\\"Be')
    ]
    assert parser.push("rn</arg").calls == [Call(0, arguments="rn")]
    assert parser.push("_value>").calls == [Call(0, arguments='"')]


@pytest.mark.parametrize(
    ("types", "value", "expected"),
    [
        ("days", "3", 3),
        ("days", " 3\n", 3),
        ("days", "three", "three"),
        ("days", "NaN", "NaN"),
        ("city", "3", "3"),
        ("exact", "true", True),
        ("exact", "3", "3"),
        ("anything", "3", 3),
        ("anything", "three", "three"),
        ("unknown", "[1]", [1]),
        ("anything", "[" * 5000, "[" * 5000),
    ],
)
def test_glm_values_are_of_the_type_that_the_schema_says(types: str, value: str, expected: Any) -> None:
    text = f"<tool_call>get_weather<arg_key>{types}</arg_key><arg_value>{value}</arg_value></tool_call>"
    [call] = parse(ReplyForm(calls=CALLS["glm45"], tools=TOOLS), [text]).calls
    assert json.loads(call.arguments) == {types: expected}


@pytest.mark.parametrize("name", CALLS)
def test_an_end_inside_a_call_leaves_the_arguments_so_far(name: str) -> None:
    text = write(name, [("now", {}), ("get_weather", {"city": "Bern in Switzerland"})])
    result = parse(ReplyForm(calls=CALLS[name], tools=TOOLS), list(text[: text.index(" in ")]))
    assert [(c.name, c.arguments) for c in result.calls] == [("now", "{}"), ("get_weather", '{"city": "Bern')]
    assert result.content == ""


def test_an_object_that_is_not_closed_ends_with_its_call() -> None:
    first = '<tool_call>{"name": "get_weather", "arguments": {"city": "Bern"</tool_call>'
    result = parse(ReplyForm(calls=CALLS["qwen"], tools=TOOLS), [first + write("qwen", [("now", {})])])
    assert [c.arguments for c in result.calls] == ['{"city": "Bern"', "{}"] and result.content == ""


def test_a_mark_inside_a_string_is_a_part_of_it() -> None:
    made = [("get_weather", {"city": '</tool_call> \\" {<tool_call>'})]
    result = parse(ReplyForm(calls=CALLS["qwen"], tools=TOOLS), [write("qwen", made)])
    assert json.loads(result.calls[0].arguments) == made[0][1] and result.content == ""


def test_calls_of_deepseek_and_kimi_without_their_section_are_calls() -> None:
    for name in ("deepseek_v3", "deepseek_v31", "kimi_k2"):
        text = "So: " + write_one(name, "now", {}, 0)
        result = parse(ReplyForm(calls=CALLS[name], tools=TOOLS), [text])
        assert [c.name for c in result.calls] == ["now"] and result.content == "So:"


def test_further_calls_are_dropped_where_one_is_wanted() -> None:
    form = ReplyForm(calls=CALLS["qwen"], tools=TOOLS, max_calls=1)
    result = parse(form, list(write("qwen", [("now", {}), ("get_weather", {"city": "Bern"})]) + "done"))
    assert [c.name for c in result.calls] == ["now"] and result.content == "done"


def test_a_call_ends_thoughts_of_kimi_alone() -> None:
    text = "I must look." + write("kimi_k2", [("now", {})])
    form = ReplyForm(REASONING["kimi_k2"], True, CALLS["kimi_k2"], TOOLS)
    result = parse(form, [text])
    assert (result.reasoning, result.content, len(result.calls)) == ("I must look.", "", 1)
    qwen = "I must look." + write("qwen", [("now", {})])
    result = parse(ReplyForm(REASONING["qwen3"], True, CALLS["qwen"], TOOLS), [qwen])
    assert (result.reasoning, result.content, result.calls) == (qwen, "", [])


@pytest.mark.parametrize(
    ("text", "is_thinking", "reasoning", "content"),
    [
        ("<think>a</think>b", False, "a", "b"),
        ("<think>\na\n</think>\n\nb\n", False, "a", "b\n"),
        ("a</think>b", True, "a", "b"),
        ("<think>a</think>b", True, "a", "b"),  # the template's mark and the model's own
        ("a</think>b", False, "", "a</think>b"),
        ("x <think>a</think>b", False, "", "x <think>a</think>b"),
        ("<think></think>b", False, "", "b"),
        ("<think>a", False, "a", ""),
        ("a\n", True, "a\n", ""),
        ("", True, "", ""),
        (" <thin", False, "", " <thin"),
    ],
)
def test_thoughts_are_what_stands_between_the_marks(text, is_thinking, reasoning, content) -> None:
    for pieces in ([text], list(text)):
        result = parse(ReplyForm(REASONING["deepseek_r1"], is_thinking), pieces)
        assert (result.reasoning, result.content) == (reasoning, content)


def test_names_of_other_servers_are_known_and_others_refused() -> None:
    assert call_format(None) is None and reasoning_format(None) is None
    for name in ("hermes", "deepseekv3", "kimi_k2", "glm47", "Qwen25"):
        assert isinstance(call_format(name), CallFormat)
    for name in ("deepseek-r1", "qwen3-thinking", "kimi_k2", "glm45"):
        assert reasoning_format(name) in REASONING.values()
    with pytest.raises(ConfigError, match="tool-call-parser must be one of deepseek_v3, .*; got 'pythonic'"):
        call_format("pythonic")
    with pytest.raises(ConfigError, match="reasoning-parser must be one of deepseek_r1, .*; got 'x'"):
        reasoning_format("x")


def test_long_texts_of_beginnings_take_time_in_proportion() -> None:
    text = '<tool_call>{"name": "' * 4000
    parser = parser_of(ReplyForm(calls=CALLS["qwen"], tools=TOOLS))
    for at in range(0, len(text), 7):
        parser.push(text[at : at + 7])
    parser.push("", is_last=True)
    assert parser.content == text
