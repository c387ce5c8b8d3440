"""A request's end inside an accepted run (failure class 17), its text and its metrics."""

import itertools
import random

import pytest

from treedraft.engine.request import Request, metrics_of
from treedraft.engine.text import TextStream
from treedraft.types import SamplingParams

EOS = 7


class LetterTokenizer:
    """Token i is the i-th letter; token 26 is half a character."""

    def decode(self, token_ids, skip_special_tokens=True):
        return "".join("\ufffd" if t == 26 else chr(97 + t) for t in token_ids if t != EOS or not skip_special_tokens)


def request(max_tokens=100, max_len=1000, tokenizer=None, **params):
    sampling = SamplingParams(max_tokens=max_tokens, **params)
    return Request(0, (1, 2, 3), sampling, 0, 0, frozenset({EOS}), max_len, TextStream(tokenizer, sampling.stop))


def feed(req, tokens, run_lens):
    tokens = list(tokens)
    for n in run_lens:
        if req.is_finished or not tokens:
            return
        req.append(tuple(tokens[:n]))
        tokens = tokens[n:]


def expected(tokens, max_tokens, min_tokens=0):
    out = []
    for t in tokens:
        out.append(t)
        if t == EOS and len(out) >= min_tokens:
            return out, "stop"
        if len(out) == max_tokens:
            return out, "length"
    return out, None


@pytest.mark.parametrize("run_len", range(1, 7))
def test_append_stop_position_and_cap_over_runs_end_at_the_first_of_both(run_len):
    for stop_at, cap in itertools.product(range(9), range(1, 10)):
        tokens = [1] * stop_at + [EOS] + [2] * 5
        req = request(max_tokens=cap)
        feed(req, tokens, [run_len] * 20)
        assert (req.output_token_ids, req.finish_reason) == expected(tokens, cap)


def test_append_end_of_sequence_at_the_cap_is_a_stop():
    req = request(max_tokens=3)
    req.append((1, 2, EOS, 4))
    assert req.finish_reason == "stop" and req.output_token_ids == [1, 2, EOS]


def test_append_context_limit_ends_with_length():
    req = request(max_len=5)
    req.append((1, 2, 3, 4))
    assert req.finish_reason == "length" and len(req.output_token_ids) == 2


def test_append_ignores_stops_before_min_tokens():
    req = request(max_tokens=10, min_tokens=3)
    req.append((EOS, 1, EOS, 1))
    assert req.output_token_ids == [EOS, 1, EOS]


def test_append_stop_string_over_tokens_and_rounds_cuts_text_at_every_split():
    text = [0, 1, 2, 3, 4, 5]  # abcdef
    for run_len in range(1, 6):
        req = request(tokenizer=LetterTokenizer(), stop=("cd",))
        feed(req, text, [run_len] * 10)
        assert (req.text.text, req.finish_reason, req.output_token_ids) == ("ab", "stop", [0, 1, 2, 3])


def test_append_the_first_of_two_stop_strings_wins():
    rng = random.Random(0)
    for _ in range(300):
        tokens = [rng.randrange(3) for _ in range(12)]
        whole = "".join(chr(97 + t) for t in tokens)
        stops = ("bb", "cab", "a")[: rng.randrange(1, 4)]
        req = request(tokenizer=LetterTokenizer(), stop=stops)
        feed(req, tokens, [rng.randrange(1, 5) for _ in range(20)])
        # brute force: grow the text a letter at a time
        want = next((whole[:n] for n in range(1, 13) if any(s in whole[:n] for s in stops)), whole)
        cut = min((want.find(s) for s in stops if s in want), default=len(want))
        assert req.text.text == want[:cut]


def test_text_stream_never_shows_half_a_character_and_close_emits_the_rest():
    stream = TextStream(LetterTokenizer(), ())
    stream.push(0)
    stream.push(26)
    assert stream.text == "a"
    stream.close()
    assert stream.text == "a\ufffd"


def test_metrics_accept_length_leaves_out_the_prefill_token():
    req = request(max_tokens=8)
    req.append((1,))
    for run in ((1, 2, 3), (1,), (1, 2)):
        req.append(run)
        req.count_round(len(run) - 1)
    req.finish("length")
    metrics = metrics_of([req])
    assert metrics.accept_length == pytest.approx(6 / 3)
    assert metrics.accepted_per_depth == pytest.approx((2 / 3, 1 / 3))
