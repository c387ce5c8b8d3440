"""Text of outputs that are no text: bytes that never become a character."""

from __future__ import annotations

import random
from typing import Any

import pytest

from treedraft.engine.text import MAX_HELD, TextStream


class ByteTokenizer:
    """Token b is the byte b; remembers the longest window that it was asked for."""

    def __init__(self) -> None:
        self.longest = 0

    def decode(self, token_ids: list[int], skip_special_tokens: Any = None) -> str:
        self.longest = max(self.longest, len(token_ids))
        return bytes(token_ids).decode(errors="replace")


@pytest.mark.parametrize("seed", range(40))
def test_text_of_random_bytes_is_that_of_all_bytes_decoded_at_once(seed: int) -> None:
    rng = random.Random(seed)
    alphabet = rng.choice([b"\x80", b"\xe2\x82\xac", b"\xf0\x9f\x8c\x8da", bytes(range(128, 256)), bytes(range(256))])
    data = [rng.choice(alphabet) for _ in range(300)] if seed % 2 else list("ab€🌍é".encode() * 20 + alphabet * 30)
    tokenizer = ByteTokenizer()
    stream = TextStream(tokenizer, ())
    for token_id in data:
        stream.push(token_id)
    stream.close()
    assert stream.text == bytes(data).decode(errors="replace")
    assert tokenizer.longest <= 3 * MAX_HELD


@pytest.mark.parametrize("seed", range(40))
def test_extend_by_runs_emits_what_pushing_each_token_does(seed: int) -> None:
    """After every run, whatever it ends in; a run that is whole characters is decoded at once."""
    rng = random.Random(seed)
    alphabet = rng.choice([list("ab€🌍é".encode()), list(b"abc"), list(range(256)), [0xE2, 0x82, 0xAC]])
    one, many = TextStream(ByteTokenizer(), ()), TextStream(ByteTokenizer(), ())
    text = "ab€🌍é".encode() * 9 if seed % 2 else bytes(rng.choice(alphabet) for _ in range(99))
    start = 0
    while start < len(text):
        run = list(text[start : start + rng.randint(1, 6)])
        start += len(run)
        many.extend(run)
        for token_id in run:
            one.push(token_id)
        if "\ufffd" not in one.text:  # of bytes that are no character, push may hold back more
            assert many.text == one.text
    one.close()
    many.close()
    assert many.text == one.text == text.decode(errors="replace")
