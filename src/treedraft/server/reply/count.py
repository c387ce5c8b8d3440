"""How many of a choice's tokens are thoughts."""

from __future__ import annotations

from bisect import bisect_left

from treedraft.engine.request import Request
from treedraft.server.reply.formats import ReasoningFormat
from treedraft.server.reply.parser import ReplyParser


def num_reasoning_tokens(request: Request, reply: ReplyParser, form: ReasoningFormat) -> int:
    """Tokens from the beginning to the mark behind the thoughts, and with it; all of them while there is none."""
    token_ids = request.output_token_ids
    if not reply.has_thoughts:
        return 0
    end, tokenizer = reply.thoughts_end, request.text.tokenizer
    if end is None or tokenizer is None:
        return len(token_ids)
    added = getattr(tokenizer, "added_tokens_encoder", {})
    if form.end in added and added[form.end] in token_ids:  # one token, as in models that were made to think
        return token_ids.index(added[form.end]) + 1
    counts = range(len(token_ids) + 1)
    return bisect_left(
        counts, end, key=lambda count: len(tokenizer.decode(token_ids[:count], skip_special_tokens=True))
    )
