"""One sequence being generated: the scheduler's only mutable record."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from itertools import zip_longest

from treedraft.engine.text import TextStream
from treedraft.types import Choice, Grammar, PromptLogprob, RequestMetrics, SamplingParams, ScoredTokens


@dataclass(eq=False)
class Request:
    """One choice of one prompt, from arrival to its last token.

    Once its prefill was launched, `kv_len` is exact as of the last collected step; before, it is where the next chunk
    begins. A request without a slot waits: it is new, or was preempted and its known tokens are prefilled again.
    """

    request_id: int
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    choice_index: int
    noise_key: int
    stop_token_ids: frozenset[int]
    max_len: int  # prompt and output together end here at the latest
    text: TextStream
    grammar: Grammar | None = None  # has taken output_token_ids, at any time
    priority: int = 0  # the lower, the more urgent
    deadline_s: float = math.inf  # by time.perf_counter: then the request ends, finished or not
    arrival: int = 0
    slot: int = -1
    owned_len: int = 0  # positions that its pages cover
    kv_len: int = 0
    prefill_len: int = 0  # known tokens that are prefilled: all of a prompt, all but the last with output
    pending: int = 0  # launched rows not yet collected
    pending_rounds: int = 0  # rounds among them
    num_cached_tokens: int = 0  # of the prompt, found in the prefix cache when it was first admitted
    num_preemptions: int = 0
    output_token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[dict[int, float]] = field(default_factory=list)
    prompt_logprobs: list[PromptLogprob] = field(default_factory=list)  # of prompt tokens 1, 2, ... as far as known
    finish_reason: str | None = None
    error: str | None = None
    is_at_fault: bool = False  # the error is the request's own
    num_rounds: int = 0
    rounds_by_accepted: list[int] = field(default_factory=list)  # rounds that accepted 0, 1, ... drafts
    started_s: float = 0.0
    prefilled_s: float = 0.0
    finished_s: float = 0.0

    def __post_init__(self) -> None:
        self.output_limit = min(self.params.max_tokens, self.max_len - len(self.prompt_token_ids))

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    def rank(self) -> tuple[int, int]:
        """The order in which requests are served; a preempted one keeps its place."""
        return self.priority, self.arrival

    @property
    def num_known(self) -> int:
        """Tokens of prompt and output so far."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def known_token_ids(self) -> tuple[int, ...]:
        """Prompt and output so far."""
        return (*self.prompt_token_ids, *self.output_token_ids) if self.output_token_ids else self.prompt_token_ids

    def append(
        self,
        token_ids: tuple[int, ...],
        logprobs: tuple[float, ...] | None = None,
        top_logprobs: tuple[dict[int, float], ...] | None = None,
    ) -> None:
        """Take a step's tokens up to the first one that ends the request (class 17: stop inside an accepted run)."""
        if self.grammar is not None and self.grammar.error is not None:  # it gave no masks for these tokens
            return self._fail_grammar(self.grammar.error)
        output, stops, push = self.output_token_ids, self.stop_token_ids, self.text.push
        cannot_end = len(output) + len(token_ids) < self.output_limit and stops.isdisjoint(token_ids)
        if cannot_end and not self.text.stop and self.grammar is None:
            output += token_ids
            self.logprobs += logprobs or ()
            self.top_logprobs += top_logprobs or ()
            return self.text.extend(token_ids)
        for i, token_id in enumerate(token_ids):
            output.append(token_id)
            if logprobs is not None:
                self.logprobs.append(logprobs[i])
            if top_logprobs is not None:
                self.top_logprobs.append(top_logprobs[i])
            num_output = len(output)
            may_stop = num_output >= self.params.min_tokens
            if token_id in stops and may_stop:
                return self.finish("stop")
            if push(token_id) and may_stop:
                return self.finish("stop")
            if self.grammar is not None and self._advance_grammar(self.grammar, token_id):
                return None
            if num_output >= self.output_limit:
                return self.finish("length")

    def _advance_grammar(self, grammar: Grammar, token_id: int) -> bool:
        """True when this ended the request: as its text is complete, however early, nothing may follow."""
        grammar.advance(token_id)
        if grammar.error is not None:
            self._fail_grammar(grammar.error)
        elif grammar.is_finished:
            self.finish("stop")
        return self.is_finished

    def _fail_grammar(self, error: str) -> None:
        """Its text turned out to be too complex."""
        self.is_at_fault = True
        self.finish("error", f"request {self.request_id}: the grammar failed: {error}")

    def to_score(self, start: int, end: int) -> tuple[int, int]:
        """Of the rows [start, end) those whose next prompt token has no log-probability yet, if it is wanted."""
        if self.params.prompt_logprobs is None:
            return 0, 0
        first, last = max(start, len(self.prompt_logprobs)), min(end, len(self.prompt_token_ids) - 1)
        return (first, last) if first < last else (0, 0)

    def add_prompt_logprobs(self, scored: ScoredTokens) -> None:
        """Take a chunk's log-probabilities. Chunks come in order; one that was prefilled again replaces itself."""
        self.prompt_logprobs[scored.start :] = scored.logprobs

    def whole_prompt_logprobs(self) -> tuple[PromptLogprob | None, ...]:
        """One for each prompt token; None for the first, and for those that an early end left unknown."""
        rest = len(self.prompt_token_ids) - 1 - len(self.prompt_logprobs)
        return (None, *self.prompt_logprobs, *[None] * rest)

    @property
    def num_reusable(self) -> int:
        """Rows that cached pages may stand for: not the last, whose state sampling and drafting begin with, nor those
        whose log-probabilities are wanted and not yet known."""
        num_rows = self.num_known - bool(self.output_token_ids)
        num_scored, num_wanted = len(self.prompt_logprobs), len(self.prompt_token_ids) - 1
        is_scored = self.params.prompt_logprobs is None or num_scored == num_wanted
        return num_rows - 1 if is_scored else min(num_rows - 1, num_scored)

    def count_round(self, num_accepted: int) -> None:
        """Record one verify round that accepted drafts down to depth `num_accepted`."""
        self.num_rounds += 1
        counts = self.rounds_by_accepted
        if num_accepted >= len(counts):
            counts += [0] * (num_accepted + 1 - len(counts))
        counts[num_accepted] += 1

    @property
    def accepted_at_depth(self) -> list[int]:
        """Rounds in which the draft at depth 1, 2, ... was accepted."""
        return [sum(self.rounds_by_accepted[depth:]) for depth in range(1, len(self.rounds_by_accepted))]

    def finish(self, reason: str, error: str | None = None) -> None:
        self.finish_reason, self.error, self.finished_s = reason, error, time.perf_counter()
        self.text.close()

    def choice(self) -> Choice:
        """The result so far, in the form that users see."""
        wants_logprobs = self.params.logprobs is not None
        return Choice(
            index=self.choice_index,
            text=self.text.text,
            token_ids=tuple(self.output_token_ids),
            finish_reason=self.finish_reason or "unfinished",
            logprobs=tuple(self.logprobs) if wants_logprobs else None,
            top_logprobs=tuple(self.top_logprobs) if wants_logprobs else None,
            error=self.error,
        )


def metrics_of(requests: list[Request]) -> RequestMetrics:
    """Metrics of one prompt over all its choices. The prefill's token is no part of accept_length."""
    rounds = sum(r.num_rounds for r in requests)
    generated = sum(len(r.output_token_ids) for r in requests)
    in_rounds = sum(max(0, len(r.output_token_ids) - 1) for r in requests)
    at_depth = [r.accepted_at_depth for r in requests]
    per_depth = [sum(counts) for counts in zip_longest(*at_depth, fillvalue=0)]
    elapsed_s = max(r.finished_s for r in requests) - min(r.started_s for r in requests)
    return RequestMetrics(
        num_prompt_tokens=len(requests[0].prompt_token_ids),
        num_rounds=rounds,
        num_generated_tokens=generated,
        accept_length=in_rounds / rounds if rounds else float("nan"),
        accepted_per_depth=tuple(n / rounds for n in per_depth) if rounds else (),
        elapsed_s=elapsed_s,
        tokens_per_s=generated / elapsed_s if elapsed_s > 0 else float("nan"),
        num_cached_tokens=requests[0].num_cached_tokens,
        num_preemptions=sum(r.num_preemptions for r in requests),
    )
