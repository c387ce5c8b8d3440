"""From the runner to the chunks of a stream: the rounds of the requests that asked to see them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

from treedraft.engine.request import Request
from treedraft.server.pages.rounds import chunk_as_json

if TYPE_CHECKING:
    from treedraft.debug.trace import RoundTrace
    from treedraft.llm import LLM


class RoundLog:
    """Keeps watched requests' rounds until their tokens are delivered. Belongs to the thread that steps the engine.

    A round is seen when it is launched, and its tokens are known when it is collected, one or more steps later. While
    no request is watched the runner has no observer, and rounds cost what they always do.
    """

    def __init__(self, llm: LLM, decode: Callable[[int], str]):
        """decode: a token id's text."""
        self._runner, self._decode = llm.runner, decode
        self._rounds: dict[int | str, deque[RoundTrace]] = {}

    def watch(self, request_id: int) -> None:
        """Keep this request's rounds from now on."""
        self._rounds[request_id] = deque()
        if self._runner.observer is None:
            # By name: nothing but this line knows that there is debugging.
            recorder = import_module("treedraft.debug.trace").Recorder
            self._runner.observer = recorder(self, self._runner.target.model.logits)

    def forget(self, request_id: int) -> None:
        """Drop a request and its rounds, watched or not."""
        self._rounds.pop(request_id, None)
        if not self._rounds:
            self._runner.observer = None

    def append(self, trace: RoundTrace, /) -> None:
        """Take a round from the observer."""
        waiting = self._rounds.get(trace.request_id)
        if waiting is None:
            return
        # A round that begins where a waiting one did, or before it, says that the waiting one was void (preemption).
        while waiting and waiting[-1].kv_len >= trace.kv_len:
            waiting.pop()
        waiting.append(trace)

    def take(self, request: Request, start: int) -> dict[str, Any] | None:
        """The `treedraft` field of a chunk with the request's tokens from number `start` on; None: not watched.

        Tokens of no round (a prefill's) have depth 0; rounds are cut where the request ended.
        """
        waiting = self._rounds.get(request.request_id)
        if waiting is None:
            return None
        end = len(request.prompt_token_ids) + len(request.output_token_ids)
        rounds = []
        while waiting and waiting[0].kv_len + 1 < end:  # the root is at kv_len
            each = waiting.popleft()
            rounds.append(replace(each, emitted_token_ids=each.emitted_token_ids[: end - each.kv_len - 1]))
        token_ids = request.output_token_ids[start:]
        num_in_rounds = sum(len(each.emitted_token_ids) for each in rounds)
        return chunk_as_json(rounds, self._decode, token_ids[: len(token_ids) - num_in_rounds])
