"""Token ids to text, one token at a time, and the search for stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

MAX_HELD = 16  # tokens held back as an unfinished character; more are bytes that will never be one
MAX_CHARACTER = 4  # bytes of one character, and so the tokens that it may be spread over


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that is used here."""

    def decode(self, token_ids: list[int], skip_special_tokens: bool = ...) -> str: ...


class TextStream:
    """Text of a growing output. Holds back an incomplete character; ends before the first stop string.

    tokens:  ... | prefix .. read | read .. end
                   decoded context  not yet emitted

    A token's text depends on the tokens before it (spaces, bytes of one character), so each push decodes a short
    window that starts a few tokens back, and emits what the window's text gained.
    """

    def __init__(self, tokenizer: Tokenizer | None, stop: tuple[str, ...]):
        self.tokenizer = tokenizer
        self.stop = stop
        self.text = ""
        self._token_ids: list[int] = []
        self._prefix = self._read = 0
        self._longest_stop = max((len(s) for s in stop), default=0)

    def push(self, token_id: int) -> bool:
        """Add one token; True when the text now holds a stop string, and was cut before it."""
        if self.tokenizer is None:
            return False
        self._token_ids.append(token_id)
        before = self._decode(self._prefix, self._read)
        end = len(self._token_ids)
        now = self._decode(self._prefix, end)
        if now.endswith("\ufffd"):  # an unfinished character
            if end - self._read < MAX_HELD:
                return False
            end -= (
                MAX_CHARACTER  # only the last ones can still become a character; a window that grew would cost O(n^2)
            )
            head = self._decode(self._prefix, end)
            if head + self._decode(end, len(self._token_ids)) != now:  # a character lies across
                return False
            now = head
        gained = now[len(before) :]
        self._prefix, self._read = self._read, end
        return self._emit(gained)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Add several tokens of a stream without stop strings: the text is that of pushing each, in fewer windows."""
        if self.tokenizer is None:
            return
        known = len(self._token_ids)
        self._token_ids += token_ids
        now = self._decode(self._prefix, len(self._token_ids))
        if now.endswith("\ufffd"):  # an unfinished character: only its tokens are held back, not the whole run
            del self._token_ids[known:]
            for token_id in token_ids:
                self.push(token_id)
            return
        gained = now[len(self._decode(self._prefix, self._read)) :]
        self._prefix, self._read = self._read, len(self._token_ids)
        self._emit(gained)

    def close(self) -> None:
        """Emit what is held back, complete or not."""
        if self.tokenizer is None or self._read == len(self._token_ids):
            return
        before = self._decode(self._prefix, self._read)
        gained = self._decode(self._prefix, len(self._token_ids))[len(before) :]
        self._prefix = self._read = len(self._token_ids)
        self._emit(gained)

    def _emit(self, gained: str) -> bool:
        start = max(0, len(self.text) - self._longest_stop + 1)
        self.text += gained
        hits = [i for s in self.stop if (i := self.text.find(s, start)) >= 0]
        if hits:
            self.text = self.text[: min(hits)]
        return bool(hits)

    def _decode(self, start: int, end: int) -> str:
        return self.tokenizer.decode(self._token_ids[start:end], skip_special_tokens=True) if self.tokenizer else ""
