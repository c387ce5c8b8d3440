"""Grammars compile once, and whatever a user may write ends soon: with a grammar, or an error that says why."""

from __future__ import annotations

import json
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from treedraft import LLM, RequestError, StructuredOutput
from treedraft.grammar import compiler as module
from treedraft.grammar.compiler import MAX_CACHED, MAX_CHARACTERS, GrammarCompiler

NO_STOPS: frozenset[int] = frozenset()


@pytest.fixture(scope="module")
def compiler(plain64: LLM) -> GrammarCompiler:
    return GrammarCompiler(plain64.tokenizer, plain64.vocab_size, plain64.eos_token_ids)


def is_matched(compiler: GrammarCompiler, tokenizer: Any, structured: StructuredOutput, text: str) -> bool:
    """Whether the grammar takes the whole text and then its end."""
    state = compiler.compile(structured).start(0, NO_STOPS)
    for token_id in [*tokenizer(text)["input_ids"], 0]:
        if state.is_finished:
            return token_id == 0
        state.advance(token_id)
        if state.error is not None:
            return False
    return state.is_finished


PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("fields", "good", "bad"),
    [
        ({"json_schema": PERSON}, '{"name": "Ada", "age": 36}', '{"name": "Ada"}'),
        ({"json_schema": json.dumps(PERSON)}, '{\n  "name": "",\n  "age": 0\n}', '{"name": "Ada", "age": -1}'),
        ({"json_schema": PERSON}, '{"name":"Ada","age":1}', '{"name":  "Ada","age":1}'),  # white space is bounded
        ({"json_object": True}, '{"a": [1, null]}', "[1]"),
        ({"regex": "(ab|c)+"}, "ababc", "abx"),
        ({"regex": "a{2,4}"}, "aaa", "a"),
        ({"grammar": 'root ::= "yes" | "no" root'}, "nonoyes", "maybe"),
        ({"grammar": 'start: "x" y\ny: "y" | "z"'}, "xz", "yx"),
        ({"choice": ("red", 'a "quoted"\n\\ é')}, 'a "quoted"\n\\ é', "blue"),
        ({"choice": ["red", "reddish"]}, "reddish", "redd"),
    ],
)
def test_compile_takes_what_matches_and_nothing_else(
    compiler: GrammarCompiler, plain64: LLM, fields: dict[str, Any], good: str, bad: str
) -> None:
    structured = StructuredOutput(**fields)
    assert is_matched(compiler, plain64.tokenizer, structured, good)
    assert not is_matched(compiler, plain64.tokenizer, structured, bad)


def nested_schema(depth: int) -> str:
    return '{"type":"object","properties":{"a":' * depth + "{}" + "}}" * depth


HOSTILE = {
    "catastrophic": {"regex": "(a+)+b" * 50},
    "repeated repeats": {"regex": "(a{1000}){1000}"},
    "deep parentheses": {"regex": "(" * 30_000 + "a" + ")" * 30_000},
    "look-ahead": {"regex": "(?=a)b"},
    "unclosed": {"regex": "(a"},
    "nothing matches": {"regex": r"[^\s\S]"},
    "deep schema": {"json_schema": nested_schema(1700)},
    "cut schema": {"json_schema": '{"type": "obj'},
    "no type": {"json_schema": {"type": "banana"}},
    "no schema": {"json_schema": "[]"},
    "endless reference": {"json_schema": {"$ref": "#"}},
    "foreign reference": {"json_schema": {"$ref": "http://localhost/schema.json"}},
    "intersections": {
        "json_schema": {"allOf": [{"type": "string", "pattern": f"^(.*a.{{{i}}}b.*)$"} for i in range(1, 20)]}
    },
    "many properties": {"json_schema": {"properties": {f"property {i}": {"type": "null"} for i in range(1500)}}},
    "doubling references": {
        "json_schema": {
            "$defs": {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(40)} | {"d40": {}},
            "$ref": "#/$defs/d0",
        }
    },
    "rules that name rules": {
        "grammar": "start: r0\n" + "\n".join(f"r{i}: r{i + 1} r{i + 1}" for i in range(3000)) + '\nr3000: "a"'
    },
    "a long chain of rules": {
        "grammar": "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(4500)) + '\nr4500: "a"'
    },
    "many literals": {"grammar": "start: " + '"a" ' * 16_000},
    "many alternatives": {"grammar": "start: " + " | ".join(f'"{i}"' for i in range(7000))},
    "deep grammar": {"grammar": "root ::= " + "(" * 30_000 + '"a"' + ")" * 30_000},
    "ambiguous": {"grammar": 'start: s\ns: s s | "a" |'},
    "no grammar": {"grammar": "\x00\udc80"},
    "too long": {"regex": "a" * (MAX_CHARACTERS + 1)},
    "many choices": {"choice": [f"choice number {i}" for i in range(3000)]},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_compile_of_hostile_input_ends_soon(compiler: GrammarCompiler, name: str) -> None:
    started = time.perf_counter()
    try:
        compiler.compile(StructuredOutput(**HOSTILE[name]))
    except RequestError as error:
        assert 10 < len(str(error)) < 900, "the message says something, and not everything"
    assert time.perf_counter() - started < 8, "2 s on an idle machine"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("unclosed", "unclosed group"),
        ("no type", "Invalid type: banana"),
        ("nothing matches", "no text can match"),
        ("endless reference", "no text can match"),
        ("repeated repeats", "too complex"),
        ("too long", f"at most {MAX_CHARACTERS} characters"),
        ("cut schema", "EOF"),
    ],
)
def test_compile_says_what_is_wrong(compiler: GrammarCompiler, name: str, expected: str) -> None:
    with pytest.raises(RequestError, match=expected):
        compiler.compile(StructuredOutput(**HOSTILE[name]))


def test_compile_that_takes_too_long_is_given_up(plain64: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = GrammarCompiler(plain64.tokenizer, plain64.vocab_size, plain64.eos_token_ids)
    release = threading.Event()
    monkeypatch.setattr(module, "MAX_COMPILE_S", 0.05)
    monkeypatch.setattr(module, "grammar_text", lambda structured: release.wait())
    with pytest.raises(RequestError, match="not compiled within"):
        compiler.compile(StructuredOutput(regex="a"))
    release.set()
    monkeypatch.undo()
    assert compiler.compile(StructuredOutput(regex="a")), "tried again"


def test_compile_says_again_what_was_wrong(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    def message() -> str:
        with pytest.raises(RequestError) as raised:
            compiler.compile(StructuredOutput(regex="(never closed"))
        return str(raised.value)

    first = message()
    monkeypatch.setattr(module, "grammar_text", None)  # what would be called
    assert "unclosed group" in first and message() == first


def test_compile_keeps_the_last_grammars_alone(plain64: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = GrammarCompiler(plain64.tokenizer, plain64.vocab_size, plain64.eos_token_ids)
    first = compiler.compile(StructuredOutput(regex="a0"))
    for i in range(1, MAX_CACHED):
        compiler.compile(StructuredOutput(regex=f"a{i}"))
    assert compiler.compile(StructuredOutput(regex="a0")) is first  # and is the last used now
    compiler.compile(StructuredOutput(regex="one more"))
    assert len(compiler._compiled) == MAX_CACHED
    assert StructuredOutput(regex="a0") in compiler._compiled and StructuredOutput(regex="a1") not in compiler._compiled


def test_compile_from_many_threads(compiler: GrammarCompiler) -> None:
    made: list[object] = []
    threads = [
        threading.Thread(
            target=lambda i=i: made.append(compiler.compile(StructuredOutput(regex=f"[a-z]{{{1 + i % 3}}}")))
        )
        for i in range(12)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 12 and len(set(map(id, made))) == 3


def test_compile_without_a_tokenizer_an_end_or_a_known_kind_is_refused(plain64: LLM) -> None:
    structured = StructuredOutput(json_object=True)
    with pytest.raises(RequestError, match="needs a tokenizer"):
        GrammarCompiler(None, 48, (0,)).compile(structured)
    with pytest.raises(RequestError, match="end-of-sequence"):
        GrammarCompiler(plain64.tokenizer, 4096, ()).compile(structured)

    class Foreign(SimpleNamespace):
        def __len__(self) -> int:
            return 48

    with pytest.raises(RequestError, match="tokenizer"):
        GrammarCompiler(Foreign(), 48, (0,)).compile(structured)


@pytest.mark.parametrize("vocab_size", [4000, 4096, 4128, 5000])
def test_masks_have_the_models_vocabulary_not_the_tokenizers(plain64: LLM, vocab_size: int) -> None:
    """4,096 tokens in the tokenizer; a model may have fewer, or padded ones that nobody may say."""
    import numpy as np

    compiler = GrammarCompiler(plain64.tokenizer, vocab_size, plain64.eos_token_ids)
    words = -(-vocab_size // 32)
    masks = np.zeros((1, words), dtype=np.int32)
    compiler.compile(StructuredOutput(regex="(?s).*")).start(0, NO_STOPS).fill_masks([7], [-1], masks)
    allowed = np.flatnonzero(np.unpackbits(masks.view(np.uint8), bitorder="little"))
    assert len(allowed) > 3500 and allowed.max() < 4096


@pytest.mark.parametrize(
    "fields",
    [{}, {"regex": "a", "json_object": True}, {"choice": ()}, {"choice": "red"}, {"choice": (1,)}, {"regex": 3},
     {"json_schema": {"a": float("nan")}}, {"json_schema": {"a": object()}}, {"json_object": False}],
)  # fmt: skip
def test_structured_output_needs_exactly_one_proper_field(fields: dict[str, Any]) -> None:
    with pytest.raises(RequestError):
        StructuredOutput(**fields)
