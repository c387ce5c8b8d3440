"""Text that grows, read as if it were all there.

A grammar is a generator that reads; it yields where what is there does not decide. So what it decides depends on the
text alone, never on where the text was cut into pieces.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TypeVar

from treedraft.server.tokens import num_held_back

_T = TypeVar("_T")
Steps = Generator[None, None, _T]  # yields for more text, returns a value


class Reader:
    """A text so far, and a position in it. A grammar may go back to an earlier position."""

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.is_closed = False  # no more text comes

    def starts_with(self, literal: str) -> Steps[bool]:
        """Whether the text goes on with `literal`."""
        while True:
            given = self.text[self.at : self.at + len(literal)]
            if given == literal:
                return True
            if self.is_closed or not literal.startswith(given):
                return False
            yield

    def take(self, literal: str) -> Steps[bool]:
        """Go behind `literal` if the text goes on with it, and say whether it does."""
        is_there = yield from self.starts_with(literal)
        if is_there:
            self.at += len(literal)
        return is_there

    def skip(self, characters: str) -> Steps[None]:
        """Go to the first character that is none of these; "" stands for white space."""
        while True:
            while self.at < len(self.text) and _is_one_of(self.text[self.at], characters):
                self.at += 1
            if self.at < len(self.text) or self.is_closed:
                return
            yield

    def until(self, marks: Sequence[str], limit: int | None = None) -> Steps[str | None]:
        """Go to the first mark, and return the text before it. None, and nothing read, when none comes.

        limit: characters that may come before it; None: any number.
        """
        start, longest = self.at, max(map(len, marks))
        while True:
            end = None if limit is None else start + limit + longest
            found = first_of(self.text, marks, self.at, end)
            if found is not None and (limit is None or found <= start + limit):
                before, self.at = self.text[start:found], found
                return before
            if self.is_closed or (end is not None and len(self.text) >= end):
                self.at = start
                return None
            self.at = max(start, len(self.text) - longest)  # what lies before need not be searched again
            yield

    def pieces_until(self, marks: Sequence[str]) -> Generator[str | None, None, bool]:
        """Yield the text before the first mark as it comes, None for more; whether there was a mark, not yet read."""
        while True:
            found = first_of(self.text, marks, self.at)
            rest = len(self.text) if self.is_closed else len(self.text) - num_held_back(self.text[self.at :], marks)
            end = rest if found is None else found
            if end > self.at:
                start, self.at = self.at, end
                yield self.text[start:end]
            if found is not None or self.is_closed:
                return found is not None
            yield None


def first_of(text: str, marks: Sequence[str], start: int, end: int | None = None) -> int | None:
    """Where the first of the marks begins in text[start:end]."""
    found = [at for mark in marks if (at := text.find(mark, start, end)) >= 0]
    return min(found, default=None)


def _is_one_of(character: str, characters: str) -> bool:
    return character.isspace() if not characters else character in characters
