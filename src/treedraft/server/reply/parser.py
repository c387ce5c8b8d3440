"""A choice's text, piece by piece, into thoughts, content and calls. However it is cut, the sum is the same.

    text:   <think> thoughts </think>   content   calls   content ...

White space beside marks belongs to them and is dropped. A beginning of a call that does not become one is content. A
call counts from its name on, which cannot be taken back: what follows is passed on as its arguments, right or wrong.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from treedraft.server.reply.formats import CallFormat, ReasoningFormat
from treedraft.server.reply.reader import Reader, Steps


@dataclass
class Call:
    """A call, or what was added to one: then id and name are there in its first piece alone."""

    index: int  # among the calls of its choice
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass
class Delta:
    """What a piece of text added."""

    reasoning: str = ""
    content: str = ""
    calls: list[Call] = field(default_factory=list)  # at most one piece of each call

    @property
    def is_empty(self) -> bool:
        return not (self.reasoning or self.content or self.calls)


@dataclass(frozen=True)
class ReplyForm:
    """What is looked for in the texts of one body's choices."""

    reasoning: ReasoningFormat | None = None
    is_thinking: bool = False  # the prompt ends with the mark that thoughts begin with
    calls: CallFormat | None = None  # None: there are no tools
    tools: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # JSON schema of the arguments, by name
    max_calls: int | None = None  # further ones are dropped


def random_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


class ReplyParser:
    """Takes one choice's text as it comes; `reasoning`, `content` and `calls` hold all of it so far."""

    def __init__(self, form: ReplyForm, new_id: Callable[[], str] = random_id):
        self.reasoning = ""
        self.content = ""
        self.has_thoughts = False
        self.calls: list[Call] = []
        self._form, self._new_id = form, new_id
        self._reader = Reader()
        self._delta = Delta()
        self._space = ""  # white space that may turn out to stand before a mark
        self._is_behind_mark = False
        self._num_calls = 0  # those that are dropped among them
        self.thoughts_end: int | None = None  # characters of the text up to the mark behind thoughts, and with it
        self._steps = self._read()

    def push(self, text: str, is_last: bool = False) -> Delta:
        """Take a piece of text, and return what it added. is_last: nothing is held back any more."""
        self._reader.text += text
        self._reader.is_closed = is_last
        next(self._steps, None)
        delta, self._delta = self._delta, Delta()
        self.reasoning += delta.reasoning
        self.content += delta.content
        for piece in delta.calls:
            if piece.name is not None:
                self.calls.append(replace(piece))
            else:
                self.calls[piece.index].arguments += piece.arguments
        return delta

    # ------------------------------------------------------------------ what was understood

    def _say(self, text: str, is_reasoning: bool) -> None:
        """Add to thoughts or content; white space at the end waits for what comes next."""
        text = self._space + text
        if self._is_behind_mark:
            text = text.lstrip()
            self._is_behind_mark = not text
        kept = text.rstrip()
        self._space = text[len(kept) :]
        if is_reasoning:
            self._delta.reasoning += kept
        else:
            self._delta.content += kept

    def _end_of_text(self, is_reasoning: bool) -> None:
        if is_reasoning:
            self._delta.reasoning += self._space
        else:
            self._delta.content += self._space
        self._space = ""

    def _mark(self) -> None:
        """A mark was read: white space before and behind it says nothing."""
        self._space, self._is_behind_mark = "", True

    def _begin_call(self, name: str, call_id: str | None) -> None:
        self._mark()
        self._num_calls += 1
        if not self._is_dropped:
            self._delta.calls.append(Call(self._num_calls - 1, call_id or self._new_id(), name))

    def _argue(self, text: str) -> None:
        """Add to the arguments of the present call."""
        if self._is_dropped or not text:
            return
        calls, index = self._delta.calls, self._num_calls - 1
        if not calls or calls[-1].index != index:
            calls.append(Call(index))
        calls[-1].arguments += text

    @property
    def _is_dropped(self) -> bool:
        return self._form.max_calls is not None and self._num_calls > self._form.max_calls

    # ------------------------------------------------------------------ grammar

    def _read(self) -> Steps[None]:
        if self._form.reasoning is not None:
            yield from self._thoughts(self._form.reasoning)
        if self._form.calls is not None:
            yield from self._content_and_calls(self._form.calls)
        else:
            yield from self._text_until((), is_reasoning=False)

    def _text_until(self, marks: tuple[str, ...], is_reasoning: bool) -> Steps[bool]:
        """Pass text on up to the first mark, or to the end; whether there was a mark."""
        pieces = self._reader.pieces_until(marks)
        while True:
            try:
                piece = next(pieces)
            except StopIteration as end:
                if not end.value:
                    self._end_of_text(is_reasoning)
                return bool(end.value)
            if piece is None:
                yield
            else:
                self._say(piece, is_reasoning)

    def _thoughts(self, marks: ReasoningFormat) -> Steps[None]:
        start = self._reader.at
        yield from self._reader.skip("")
        has_mark = yield from self._reader.take(marks.begin)
        if not (has_mark or self._form.is_thinking):
            self._reader.at = start
            return
        self._mark()
        self.has_thoughts = True
        if (yield from self._text_until((marks.end, *marks.ends_before), is_reasoning=True)):
            yield from self._reader.take(marks.end)
            self.thoughts_end = self._reader.at
        self._mark()

    def _content_and_calls(self, form: CallFormat) -> Steps[None]:
        reader = self._reader
        while (yield from self._text_until(form.beginnings, is_reasoning=False)):
            start = reader.at
            if not (yield from self._calls(form)):
                reader.at = start + min(len(m) for m in form.beginnings if reader.text.startswith(m, start))
                self._say(reader.text[start : reader.at], is_reasoning=False)

    def _calls(self, form: CallFormat) -> Steps[bool]:
        """Read calls, one behind the other, and say whether there was one. What is no call is left unread."""
        reader, num_before = self._reader, self._num_calls
        opening, closing = form.section or ("", "")
        yield from reader.take(opening)
        while True:
            behind = reader.at
            yield from reader.skip("")
            if not (yield from self._call(form)):
                break
        if self._num_calls == num_before:
            return False
        reader.at = behind
        yield from reader.skip("")
        if not (closing and (yield from reader.take(closing))):
            reader.at = behind
        return True

    def _call(self, form: CallFormat) -> Steps[bool]:
        reader = self._reader
        if not (yield from reader.take(form.begin)):
            return False
        yield from reader.skip("")
        header = yield from form.header(reader)
        if header is None or header.name not in self._form.tools:
            return False
        yield from reader.skip("")
        has_none = not header.has_arguments or (yield from reader.starts_with(form.end))
        first = "<arg_key>" if form.has_pairs else "{"
        if not has_none and not (yield from reader.starts_with(first)):
            return False
        self._begin_call(header.name, header.call_id)
        if has_none:
            self._argue("{}")
        elif form.has_pairs:
            yield from self._pairs(self._form.tools[header.name])
        else:
            yield from self._object()
        yield from reader.skip("} \t\r\n`")  # what encloses the arguments
        yield from reader.take(form.end)
        return True

    def _object(self) -> Steps[None]:
        """Pass a JSON object on as it comes, up to its end, or to a mark outside its strings."""
        reader, scan = self._reader, _ObjectScan()
        while True:
            end = scan.end_of(reader.text, reader.at)
            self._argue(reader.text[reader.at : end])
            reader.at = end
            if scan.is_done or reader.is_closed:
                return
            yield

    def _pairs(self, schema: Mapping[str, Any]) -> Steps[None]:
        """Keys and values with marks around them, as one JSON object."""
        reader, before = self._reader, "{"
        while (yield from reader.take("<arg_key>")):
            key = yield from reader.until(("</arg_key>",))
            if key is None:  # the text ended in it
                return self._argue(before + _quoted(self._rest())[:-1])
            self._argue(f"{before}{_quoted(key.strip())}: ")
            before = ", "
            yield from reader.take("</arg_key>")
            yield from reader.skip("")
            if not (yield from reader.take("<arg_value>")):
                self._argue("null")
            elif not (yield from self._value(_types_of(schema, key.strip()))):
                return
            yield from reader.skip("")
        self._argue("}")

    def _value(self, types: frozenset[str]) -> Steps[bool]:
        """One value; False: the text ended in it."""
        reader, end = self._reader, "</arg_value>"
        if types == {"string"}:
            return (yield from self._string(end))
        value = yield from reader.until((end,))
        if value is None:
            self._argue(self._rest())
            return False
        self._argue(_as_json(value, types))
        return (yield from reader.take(end))

    def _string(self, end: str) -> Steps[bool]:
        self._argue('"')
        pieces = self._reader.pieces_until((end,))
        while True:
            try:
                piece = next(pieces)
            except StopIteration as last:
                if not last.value:
                    return False
                self._argue('"')
                return (yield from self._reader.take(end))
            if piece is None:
                yield
            else:
                self._argue(_quoted(piece)[1:-1])

    def _rest(self) -> str:
        start, self._reader.at = self._reader.at, len(self._reader.text)
        return self._reader.text[start:]


class _ObjectScan:
    """Finds the end of a JSON object whose text comes in pieces."""

    def __init__(self) -> None:
        self.is_done = False
        self._depth = 0
        self._in_string = self._is_escaped = False

    def end_of(self, text: str, start: int) -> int:
        """Where in text[start:] the object ends, or what is there of it."""
        for at in range(start, len(text)):
            character = text[at]
            if self._in_string:
                self._in_string = self._is_escaped or character != '"'
                self._is_escaped = character == "\\" and not self._is_escaped
            elif character in "<`":  # a mark: the object was left unfinished
                self.is_done = True
                return at
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth == 0:
                    self.is_done = True
                    return at + 1
        return len(text)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


_JSON_TYPES = {
    bool: {"boolean"},
    int: {"integer", "number"},
    float: {"number"},
    str: {"string"},
    list: {"array"},
    dict: {"object"},
    type(None): {"null"},
}


def _types_of(schema: Mapping[str, Any], key: str) -> frozenset[str]:
    """The JSON types that a schema allows for an argument; empty: it does not say."""
    properties = schema.get("properties")
    about = properties.get(key) if isinstance(properties, dict) else None
    types = about.get("type") if isinstance(about, dict) else None
    if isinstance(types, str):
        return frozenset((types,))
    return frozenset(t for t in types if isinstance(t, str)) if isinstance(types, list) else frozenset()


def _as_json(value: str, types: frozenset[str]) -> str:
    """A value's text as JSON: as it stands where it is that and may be, else as a string."""
    try:
        parsed = json.loads(value, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return _quoted(value)
    is_other = types and not types & _JSON_TYPES[type(parsed)]
    return _quoted(value) if is_other and "string" in types else value.strip()


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")
