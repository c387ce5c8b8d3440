"""The engine in a thread of its own: the event loop hands it requests, and gets increments back."""

from __future__ import annotations

import asyncio
import logging
import queue
import sys
import time
import traceback
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from threading import Thread
from typing import TYPE_CHECKING, Any

from treedraft.engine.request import Request
from treedraft.errors import RequestError, TreedraftError
from treedraft.server.metrics import Metrics
from treedraft.server.pages.log import RoundLog
from treedraft.server.tokens import TokenTexts, num_held_back

if TYPE_CHECKING:
    from treedraft.llm import LLM

logger = logging.getLogger(__name__)

STEP_TIMEOUT_S = 300.0  # far beyond any step, kernels that are compiled when first used included
WATCHED_EACH_S = 1.0


class QueueFull(TreedraftError):
    """As many requests wait as may wait; try again later (HTTP 429)."""


class Unavailable(TreedraftError):
    """The server is ending, or its engine is dead (HTTP 503)."""


@dataclass(frozen=True)
class Increment:
    """What one step added to one choice. Texts of all increments, joined, are the choice's text."""

    index: int  # of the choice among the generation's requests
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]  # of each token; empty unless asked for
    top_logprobs: tuple[dict[int, float], ...]
    finish_reason: str | None  # not None: the choice's last increment
    error: str | None = None
    trace: dict[str, Any] | None = None  # its rounds, where the generation is traced
    is_at_fault: bool = False  # the error is the request's own


class Generation:
    """The requests of one HTTP body, on the event loop's side."""

    def __init__(self, requests: Sequence[Request], is_traced: bool = False):
        self.requests = tuple(requests)
        self.is_traced = is_traced
        self.arrived_s = time.perf_counter()
        self._increments: asyncio.Queue[Increment] = asyncio.Queue()
        self._num_open = len(requests)

    def put(self, increment: Increment) -> None:
        self._increments.put_nowait(increment)

    async def increments(self, timeout_s: float | None = None) -> AsyncIterator[Increment]:
        """Yield each choice's increments, in the order in which they were made, until all choices are finished.

        Raises TimeoutError when they are not, timeout_s after arrival.
        """
        loop = asyncio.get_running_loop()
        deadline_s = None if timeout_s is None else loop.time() + self.arrived_s + timeout_s - time.perf_counter()
        while self._num_open:
            async with asyncio.timeout_at(deadline_s):
                increment = await self._increments.get()
            self._num_open -= increment.finish_reason is not None
            yield increment


@dataclass
class _Live:
    """One unfinished request, and what of it was handed out."""

    request: Request
    index: int
    generation: Generation
    num_tokens: int = 0
    num_chars: int = 0
    last_s: float | None = None  # when its latest tokens came


class AsyncEngine:
    """Runs an LLM's engine in a thread. Every method but `_work` and what it calls belongs to the event loop.

    An exception in the thread is a bug: it ends every request with an error, and `error` is set for good. So does a
    watchdog on the event loop when a step does not end: a thread cannot be ended from outside, but nobody waits for it.
    """

    def __init__(self, llm: LLM, metrics: Metrics, max_waiting: int = 256, step_timeout_s: float = STEP_TIMEOUT_S):
        """max_waiting: choices that may wait beside those that run. step_timeout_s: after it a step counts as hung."""
        self.llm = llm
        self.metrics = metrics
        self.step_timeout_s = step_timeout_s
        self._log = RoundLog(llm, TokenTexts(llm.tokenizer).text)
        self.max_unfinished = llm.config.max_batch + max_waiting
        self.error: str | None = None
        self.is_draining = False  # what is here is finished, nothing new is taken
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._live: dict[int, _Live] = {}  # by request id; popping an entry is the right to end its request
        self._outbox: list[tuple[Generation, Increment]] = []
        self._thread: Thread | None = None
        self._watchdog: asyncio.Task[None] | None = None
        self._num_works = 0  # steps and commands that the thread took up
        self._is_busy = False  # with the latest of them; else it waits for commands
        self._loop: asyncio.AbstractEventLoop | None = None
        metrics.watch(llm.engine, self)

    # ------------------------------------------------------------------ the event loop's side

    def start(self) -> None:
        """Start the thread; increments come to the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread = Thread(target=self._work, name="treedraft-engine", daemon=True)
        self._thread.start()
        self._watchdog = self._loop.create_task(self._watch(), name="treedraft-watchdog")

    async def stop(self, timeout_s: float = 30) -> None:
        """End the thread after its present step; requests that are not finished end with an error.

        A hung thread is left behind: it is a daemon, which does not keep the process.
        """
        self.is_draining = True
        self._commands.put(None)
        if self._watchdog is not None:
            self._watchdog.cancel()
        if self._thread is not None and self.error is None:
            await asyncio.to_thread(self._thread.join, timeout_s)

    @property
    def num_unfinished(self) -> int:
        """Choices that wait or run."""
        return len(self._live)

    def check_open(self) -> None:
        """Raise Unavailable when nothing new is taken."""
        if self.error is not None:
            raise Unavailable(f"the engine is dead: {self.error}")
        if self.is_draining:
            raise Unavailable("the server is ending and takes no new requests")

    def submit(self, requests: Sequence[Request], is_traced: bool = False) -> Generation:
        """Queue checked requests. Raises QueueFull, Unavailable or RequestError, and then nothing was queued."""
        self.check_open()
        if len(requests) > self.max_unfinished:  # trying again would not help
            raise RequestError(f"a body may ask for {self.max_unfinished} choices at most; got {len(requests)}")
        if self.num_unfinished + len(requests) > self.max_unfinished:
            raise QueueFull(
                f"{self.num_unfinished} of at most {self.max_unfinished} choices are unfinished; "
                f"there is no room for {len(requests)} more: try again later"
            )
        generation = Generation(requests, is_traced)
        lives = [_Live(request, index, generation) for index, request in enumerate(requests)]
        self._live.update({live.request.request_id: live for live in lives})
        self._commands.put(partial(self._add, lives))
        if self.error is not None:  # it died meanwhile, perhaps before it could see these
            self._end_all(self.error)
        return generation

    def abort(self, generation: Generation) -> None:
        """End what is unfinished of a generation; its increments so far stay readable. Finished ones are ignored."""
        if any(r.request_id in self._live for r in generation.requests):
            self._commands.put(partial(self._abort, generation.requests))

    async def _watch(self) -> None:
        """End every request with an error once the thread is busy with one thing for too long."""
        nap_s = min(WATCHED_EACH_S, self.step_timeout_s / 4)
        seen, still_s = -1, 0.0
        while self.error is None:
            await asyncio.sleep(nap_s)
            # By naps, not by the clock: a process that was stopped for a while, or its machine, did not hang.
            still_s = still_s + nap_s if self._is_busy and self._num_works == seen else 0.0
            seen = self._num_works
            if still_s >= self.step_timeout_s:
                where = stack_of(self._thread)
                logger.critical("the engine's thread hangs; every request ends with an error. It is here:\n%s", where)
                self._die(f"a step did not end within {self.step_timeout_s:g} s (--step-timeout)")

    def _die(self, reason: str) -> None:
        """Take no more requests, and end those that are here. Both sides may call this; the first reason stays."""
        if self.error is None:
            self.error = reason
        self._end_all(self.error)

    # ------------------------------------------------------------------ the thread's side

    def _work(self) -> None:
        reason = "the server ended"
        try:
            self._use_device()
            while self._obey() and self.error is None:  # after a step that hung for a while nothing goes on
                self._take_up_work()
                for request in self.llm.engine.step():
                    self._deliver(request)
                self._flush()
        except BaseException as error:
            reason = f"{type(error).__name__}: {error}"
            logger.exception("the engine's thread died; every request ends with an error")
        self._is_busy = False
        self._die(reason)

    def _take_up_work(self) -> None:
        self._num_works += 1
        self._is_busy = True

    def _use_device(self) -> None:
        """The current GPU is a property of the thread."""
        if self.llm.config.device.startswith("cuda:"):
            import torch

            torch.cuda.set_device(self.llm.config.device)

    def _obey(self) -> bool:
        """Carry out the event loop's commands; waits for one while nothing is to be done. False: end."""
        while True:
            self._is_busy = False
            try:
                command = self._commands.get(block=self.llm.engine.is_idle)
            except queue.Empty:
                return True
            if command is None:
                return False
            self._take_up_work()
            command()
            self._flush()

    def _add(self, lives: Sequence[_Live]) -> None:
        for live in lives:
            self.llm.engine.scheduler.add(live.request)
            self.metrics.arrived(live.request)
            if live.generation.is_traced:
                self._log.watch(live.request.request_id)

    def _abort(self, requests: Sequence[Request]) -> None:
        for request in requests:
            if request.request_id in self._live and not request.is_finished:
                self.llm.engine.scheduler.abort(request.request_id)
                self._deliver(request)

    def _deliver(self, request: Request) -> None:
        """Put what is new of a request into the outbox."""
        live = self._live.get(request.request_id)
        if live is None:
            return
        if request.is_finished and self._live.pop(request.request_id, None) is None:
            return  # the watchdog ended it just now
        increment = _increment(live, self._log.take(request, live.num_tokens))
        if request.is_finished:
            self._log.forget(request.request_id)
        now = time.perf_counter()
        self.metrics.delivered(request, len(increment.token_ids), live.last_s, now, live.generation.arrived_s)
        live.num_tokens += len(increment.token_ids)
        live.num_chars += len(increment.text)
        live.last_s = now if increment.token_ids else live.last_s
        self._outbox.append((live.generation, increment))

    def _flush(self) -> None:
        """Hand the outbox to the event loop, which is woken once a step."""
        if not self._outbox:
            return
        outbox, self._outbox = self._outbox, []
        assert self._loop is not None
        self._put_soon(outbox)

    def _end_all(self, error: str) -> None:
        """End every request with an error. Both sides may call this; who pops an entry ends it."""
        ended = []
        for request_id in list(self._live):
            live = self._live.pop(request_id, None)
            if live is not None:
                message = f"the engine stopped: {error}"
                ended.append((live.generation, Increment(live.index, "", (), (), (), "error", message)))
        self._put_soon(ended)

    def _put_soon(self, outbox: Sequence[tuple[Generation, Increment]]) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(_put_all, outbox)
        except RuntimeError:  # the loop is closed: nobody listens
            pass


def stack_of(thread: Thread | None) -> str:
    """What a thread is doing now, as a traceback shows it."""
    frame = None if thread is None or thread.ident is None else sys._current_frames().get(thread.ident)
    return "(it has ended)" if frame is None else "".join(traceback.format_stack(frame))


def _increment(live: _Live, trace: dict[str, Any] | None) -> Increment:
    request, start = live.request, live.num_tokens
    text = request.text.text
    end = len(text) if request.is_finished else len(text) - num_held_back(text, request.params.stop)
    return Increment(
        index=live.index,
        text=text[live.num_chars : end],
        token_ids=tuple(request.output_token_ids[start:]),
        logprobs=tuple(request.logprobs[start:]),
        top_logprobs=tuple(request.top_logprobs[start:]),
        finish_reason=request.finish_reason,
        error=request.error,
        trace=trace,
        is_at_fault=request.is_at_fault,
    )


def _put_all(outbox: Sequence[tuple[Generation, Increment]]) -> None:
    for generation, increment in outbox:
        generation.put(increment)
