"""How models write calls of tools and thoughts, by the names that other servers know.

qwen           <tool_call>\n{"name": NAME, "arguments": {...}}\n</tool_call>
glm45          <tool_call>NAME\n<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n</tool_call>
deepseek_v3    <｜tool▁calls▁begin｜> calls <｜tool▁calls▁end｜>, each
               <｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\n{...}\n```<｜tool▁call▁end｜>
deepseek_v31   the same, each <｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}<｜tool▁call▁end｜>
kimi_k2        <|tool_calls_section_begin|> calls <|tool_calls_section_end|>, each
               <|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{...}<|tool_call_end|>
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from treedraft.errors import ConfigError
from treedraft.server.reply.reader import Reader, Steps

_T = TypeVar("_T")

MAX_HEADER = 256  # characters between a call's beginning and its arguments; with more it is no call


@dataclass(frozen=True)
class Header:
    """What a call says before its arguments."""

    name: str
    call_id: str | None = None  # the model's own
    has_arguments: bool = True


@dataclass(frozen=True)
class CallFormat:
    """A way to write calls. `header` reads from behind `begin` to the arguments; None: this is no call."""

    begin: str  # of a call; "": nothing stands before it
    end: str
    header: Callable[[Reader], Steps[Header | None]]
    section: tuple[str, str] | None = None  # what stands before and behind all calls
    has_pairs: bool = False  # arguments are keys and values with marks; else one JSON object
    absent_content: str | None = ""  # what its chat templates expect as the content of a message of calls alone

    @property
    def beginnings(self) -> tuple[str, ...]:
        """Marks that calls may begin with."""
        return tuple(mark for mark in ((self.section or ("",))[0], self.begin) if mark)

    @property
    def marks(self) -> tuple[str, ...]:
        """Every mark, for those that are special tokens."""
        return (*self.beginnings, self.end, *(self.section or ())[1:], *_INNER_MARKS)


@dataclass(frozen=True)
class ReasoningFormat:
    """Marks around thoughts at the beginning of a text. Its template may write the first one itself."""

    begin: str = "<think>"
    end: str = "</think>"
    ends_before: tuple[str, ...] = ()  # marks of calls, which end thoughts as well


# ---------------------------------------------------------------------- headers


def _object_header(reader: Reader) -> Steps[Header | None]:
    """{"name": "NAME", "arguments": with any white space; the name comes first."""
    if not (yield from _tokens(reader, "{", '"name"', ":", '"')):
        return None
    name = yield from reader.until(('"',), MAX_HEADER)
    if name is None or not (yield from reader.take('"')):
        return None
    yield from reader.skip("")
    if (yield from reader.starts_with("}")):
        return Header(name, has_arguments=False)
    if not (yield from _tokens(reader, ",")):
        return None
    yield from reader.skip("")
    for key in ('"arguments"', '"parameters"'):
        if (yield from reader.take(key)):
            return Header(name) if (yield from _tokens(reader, ":")) else None
    return None


def _tokens(reader: Reader, *literals: str) -> Steps[bool]:
    """Take literals with white space between them."""
    for literal in literals:
        yield from reader.skip("")
        if not (yield from reader.take(literal)):
            return False
    return True


_SEPARATOR = "<｜tool▁sep｜>"
_KIMI_SEPARATOR = "<|tool_call_argument_begin|>"
_INNER_MARKS = (_SEPARATOR, _KIMI_SEPARATOR, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
_KIMI_ID = re.compile(r"(?:functions\.)?([^:]+)(:\d+)?")


def _fenced_header(reader: Reader) -> Steps[Header | None]:
    kind = yield from reader.until((_SEPARATOR,), MAX_HEADER)
    if kind is None or not (yield from reader.take(_SEPARATOR)):
        return None
    name = yield from reader.until(("\n",), MAX_HEADER)
    if name is None or not (yield from reader.take("\n```json")):
        return None
    return Header(name.strip())


def _separated_header(reader: Reader) -> Steps[Header | None]:
    name = yield from reader.until((_SEPARATOR,), MAX_HEADER)
    if name is None or not (yield from reader.take(_SEPARATOR)):
        return None
    return Header(name.strip())


def _kimi_header(reader: Reader) -> Steps[Header | None]:
    given = yield from reader.until((_KIMI_SEPARATOR,), MAX_HEADER)
    if given is None or not (yield from reader.take(_KIMI_SEPARATOR)):
        return None
    match = _KIMI_ID.fullmatch(given.strip())
    return match and Header(match[1], match[0] if match[2] else None)


def _glm_header(reader: Reader) -> Steps[Header | None]:
    name = yield from reader.until(("\n", "<arg_key>", "</tool_call>"), MAX_HEADER)
    return None if name is None else Header(name.strip())


# ---------------------------------------------------------------------- tables

_DEEPSEEK = {
    "begin": "<｜tool▁call▁begin｜>",
    "end": "<｜tool▁call▁end｜>",
    "section": ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    "absent_content": None,
}
_KIMI_SECTION = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")

CALLS: dict[str, CallFormat] = {
    "deepseek_v3": CallFormat(header=_fenced_header, **_DEEPSEEK),  # type: ignore[arg-type]
    "deepseek_v31": CallFormat(header=_separated_header, **_DEEPSEEK),  # type: ignore[arg-type]
    "kimi_k2": CallFormat("<|tool_call_begin|>", "<|tool_call_end|>", _kimi_header, _KIMI_SECTION),
    "glm45": CallFormat("<tool_call>", "</tool_call>", _glm_header, has_pairs=True),
    "qwen": CallFormat("<tool_call>", "</tool_call>", _object_header),
}
# What a grammar makes of forced calls, whatever the model's own format, see server.reply.forced.
LISTED = CallFormat("", ",", _object_header, ("[", "]"))

REASONING: dict[str, ReasoningFormat] = {
    "deepseek_r1": ReasoningFormat(),
    "kimi_k2": ReasoningFormat(ends_before=(_KIMI_SECTION[0],)),
    "glm45": ReasoningFormat(),
    "qwen3": ReasoningFormat(),
}

_ALIASES = {
    "deepseekv3": "deepseek_v3",
    "deepseekv31": "deepseek_v31",
    "hermes": "qwen",
    "qwen25": "qwen",
    "qwen3": "qwen",
    "glm": "glm45",
    "glm47": "glm45",
}
_REASONING_ALIASES = {"deepseek_v3": "deepseek_r1", "deepseek_v31": "deepseek_r1", "qwen3_thinking": "qwen3"}


def call_format(name: str | None) -> CallFormat | None:
    """The format of `--tool-call-parser`. Raises ConfigError for a name that nobody knows."""
    return None if name is None else _look_up(name, CALLS, _ALIASES, "tool-call-parser")


def reasoning_format(name: str | None) -> ReasoningFormat | None:
    """The format of `--reasoning-parser`. Raises ConfigError for a name that nobody knows."""
    return None if name is None else _look_up(name, REASONING, _REASONING_ALIASES, "reasoning-parser")


def _look_up(name: str, table: dict[str, _T], aliases: dict[str, str], flag: str) -> _T:
    plain = name.lower().replace("-", "_")
    known = aliases.get(plain, plain)
    if known not in table:
        raise ConfigError(f"{flag} must be one of {', '.join(table)}; got {name!r}")
    return table[known]
