"""What a client sees of single tokens: their text and their bytes; and what of a text may not be sent yet."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import Any

_BYTE_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenTexts:
    """Text and bytes of each token of a tokenizer; a model without a tokenizer has `token_id:17` for token 17."""

    def __init__(self, tokenizer: Any | None):
        self.tokenizer = tokenizer
        decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
        self._is_byte_level = "ByteLevel" in repr(decoder)

    def text(self, token_id: int) -> str:
        """Text of one token alone; bytes that are no whole character appear as U+FFFD."""
        if self.tokenizer is None:
            return f"token_id:{token_id}"
        return self.tokenizer.decode([token_id], skip_special_tokens=False)

    def bytes(self, token_id: int) -> list[int]:
        """Bytes of one token: those of all tokens of a text, joined, are the text in UTF-8."""
        if self.tokenizer is None:
            return list(self.text(token_id).encode())
        piece = self.tokenizer.convert_ids_to_tokens(token_id) or ""
        if fallback := _BYTE_FALLBACK.fullmatch(piece):
            return [int(fallback[1], 16)]
        table = byte_of_character()
        if self._is_byte_level and all(c in table for c in piece):
            return [table[c] for c in piece]
        return list(self.text(token_id).encode())


class MarkedTokenizer:
    """A tokenizer that writes some special tokens as text and leaves the others out, as `skip_special_tokens` does."""

    def __init__(self, tokenizer: Any, dropped: frozenset[int]):
        self._tokenizer, self._dropped = tokenizer, dropped
        self.added_tokens_encoder: dict[str, int] = tokenizer.added_tokens_encoder

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        kept = [t for t in token_ids if t not in self._dropped] if skip_special_tokens else token_ids
        return self._tokenizer.decode(kept, skip_special_tokens=False)


def with_marks(tokenizer: Any | None, marks: Collection[str]) -> Any | None:
    """The tokenizer, or where some of the marks are special tokens one that writes these."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    special = {token_id: str(token) for token_id, token in added.items() if token.special}
    dropped = frozenset(token_id for token_id, text in special.items() if text not in marks)
    return tokenizer if len(dropped) == len(special) else MarkedTokenizer(tokenizer, dropped)


@lru_cache(maxsize=1)
def byte_of_character() -> dict[str, int]:
    """The characters that byte-level vocabularies write bytes with, as GPT-2's does.

    Printable ones stand for themselves, the others are numbered from 256 on.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


def num_held_back(text: str, stop: Sequence[str]) -> int:
    """Characters at the end of an unfinished text that may be the beginning of a stop string, and so of nothing."""
    longest = 0
    for string in stop:
        for length in range(min(len(string) - 1, len(text)), longest, -1):
            if text.endswith(string[:length]):
                longest = length
                break
    return longest
