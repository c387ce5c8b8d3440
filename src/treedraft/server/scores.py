"""Log-probabilities of a prompt's tokens, in the forms of the three APIs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from treedraft.engine.request import Request
from treedraft.server.tokens import TokenTexts
from treedraft.types import PromptLogprob


def ranked(top: Mapping[int, float], count: int | None = None) -> list[tuple[int, float]]:
    """The best tokens and their log-probabilities, the best first; at most `count`."""
    return sorted(top.items(), key=lambda pair: -pair[1])[:count]


def finite(logprob: float) -> float:
    """JSON has no infinity: OpenAI writes -9999.0 for a token of probability 0."""
    return logprob if math.isfinite(logprob) else -9999.0


def by_token_id(request: Request, num_top: int, tokens: TokenTexts) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: for each token an object of the k best and itself by id; null for the first."""

    def entry(token_id: int, logprob: float, rank: int) -> dict[str, Any]:
        return {"logprob": finite(logprob), "rank": rank, "decoded_token": tokens.text(token_id)}

    def one(token_id: int, score: PromptLogprob) -> dict[str, Any]:
        best = enumerate(ranked(score.top_logprobs, num_top), start=1)
        entries = {str(other): entry(other, logprob, rank) for rank, (other, logprob) in best}
        return entries | {str(token_id): entry(token_id, score.logprob, score.rank)}

    pairs = zip(request.prompt_token_ids, request.whole_prompt_logprobs(), strict=True)
    return [None if score is None else one(token_id, score) for token_id, score in pairs]


def echoed(request: Request, num_top: int, tokens: TokenTexts) -> dict[str, list[Any]]:
    """OpenAI's form of an echoed prompt: tokens, token_logprobs and top_logprobs; null for the first."""
    scores = request.whole_prompt_logprobs()
    return {
        "tokens": [tokens.text(t) for t in request.prompt_token_ids],
        "token_logprobs": [None if s is None else finite(s.logprob) for s in scores],
        "top_logprobs": [
            None if s is None else {tokens.text(t): finite(x) for t, x in ranked(s.top_logprobs, num_top)}
            for s in scores
        ],
    }


def from_position(request: Request, start: int, tokens: TokenTexts) -> dict[str, list[Any]]:
    """SGLang's `input_token_logprobs` and `input_top_logprobs`, of the tokens from `start` on; the first has none."""
    scores = (None, *request.whole_prompt_logprobs()[start + 1 :])
    token_ids = request.prompt_token_ids[start:]
    return {
        "input_token_logprobs": [
            [None if score is None else finite(score.logprob), token_id, tokens.text(token_id)]
            for score, token_id in zip(scores, token_ids, strict=False)  # a start behind the prompt: nothing
        ],
        "input_top_logprobs": [
            None if score is None else [[finite(x), t, tokens.text(t)] for t, x in ranked(score.top_logprobs)]
            for score, _ in zip(scores, token_ids, strict=False)
        ],
    }
