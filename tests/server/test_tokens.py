"""Texts of single tokens, and what of a growing text may be sent."""

from __future__ import annotations

import random

import pytest

from treedraft.engine.request import Request
from treedraft.engine.text import TextStream
from treedraft.server.async_engine import Generation, _increment, _Live
from treedraft.server.tokens import TokenTexts, num_held_back, with_marks
from treedraft.types import SamplingParams

TEXTS = ["plain words", "héllo wörld", "🌍🌍 and 👩‍👩‍👧", "日本語のテキスト", "\ttabs\r\n", "", "a\u0000b"]


@pytest.fixture(scope="module")
def tokenizer():
    from importlib.resources import files

    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(files("treedraft") / "demo" / "model"))


@pytest.mark.parametrize("text", TEXTS)
def test_bytes_of_all_tokens_are_the_text(tokenizer, text: str) -> None:
    tokens = TokenTexts(tokenizer)
    token_ids = tokenizer(text)["input_ids"]
    assert bytes(b for t in token_ids for b in tokens.bytes(t)).decode() == text


def test_every_token_of_the_vocabulary_has_bytes(tokenizer) -> None:
    tokens = TokenTexts(tokenizer)
    for token_id in range(4096):
        assert bytes(tokens.bytes(token_id)).decode(errors="replace") == tokens.text(token_id)


def test_tokens_without_a_tokenizer_have_their_number() -> None:
    assert TokenTexts(None).text(7) == "token_id:7" and bytes(TokenTexts(None).bytes(7)) == b"token_id:7"


def test_num_held_back_is_the_longest_suffix_that_begins_a_stop_string() -> None:
    rng = random.Random(0)
    for _ in range(2000):
        text = "".join(rng.choices("ab", k=rng.randrange(8)))
        stop = ["".join(rng.choices("ab", k=rng.randrange(1, 6))) for _ in range(rng.randrange(3))]
        suffixes = [text[i:] for i in range(len(text))]
        expected = max([len(x) for x in suffixes if any(s.startswith(x) and s != x for s in stop)], default=0)
        assert num_held_back(text, stop) == expected


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("seed", range(3))
def test_increments_hold_no_half_character_and_join_to_the_text(tokenizer, text: str, seed: int) -> None:
    rng = random.Random(seed)
    token_ids = tokenizer(text + " end")["input_ids"]
    params = SamplingParams(max_tokens=len(token_ids))
    request = Request(0, (1,), params, 0, 0, frozenset(), 10**6, TextStream(tokenizer, ()))
    live = _Live(request, 0, Generation([request]))
    sent = []
    while token_ids:
        size = rng.randrange(1, 5)
        request.append(tuple(token_ids[:size]))
        token_ids = token_ids[size:]
        sent.append(_increment(live, None))
        live.num_tokens += len(sent[-1].token_ids)
        live.num_chars += len(sent[-1].text)
    assert "".join(s.text for s in sent) == text + " end"
    assert not any("\ufffd" in s.text for s in sent)
    assert sent[-1].finish_reason == "length" and not any(s.finish_reason for s in sent[:-1])


def test_special_tokens_that_are_marks_are_text_and_the_others_are_not(tokenizer) -> None:
    import copy

    own = copy.deepcopy(tokenizer)
    own.add_special_tokens({"additional_special_tokens": ["<|call|>", "<|end_call|>", "<|other|>"]})
    marked = with_marks(own, ("<|call|>", "<|end_call|>", "<think>"))
    text = "Sé 🌍 a<|other|> <|call|>now é<|end_call|> b<|endoftext|>"
    token_ids = own(text)["input_ids"]
    stream = TextStream(marked, ())
    for token_id in token_ids:
        stream.push(token_id)
    stream.close()
    expected = text.replace("<|other|>", "").replace("<|endoftext|>", "")
    assert stream.text == expected == marked.decode(token_ids)
    assert marked.decode(token_ids, skip_special_tokens=False) == text
    assert own.decode(token_ids, skip_special_tokens=True) != expected
    assert with_marks(own, ("<think>",)) is own and with_marks(None, ("<think>",)) is None
