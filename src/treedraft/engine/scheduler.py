"""Which sequences run in the next step, and which pages they own. Host integers only."""

from __future__ import annotations

import math
import time
from bisect import insort
from typing import NamedTuple

from treedraft.config import EngineConfig, speculative_tail
from treedraft.engine.acceptance import AcceptanceWatch
from treedraft.engine.request import Request
from treedraft.engine.shapes import ShapeChooser
from treedraft.errors import InvariantError, RequestError
from treedraft.kv.manager import KVManager
from treedraft.kv.prefix import LOOKAHEAD, CachedPage
from treedraft.types import DecodeRow, PageUpdate, PrefillRow, RowResult, StepPlan, StepResult

MIN_SHARED = 256  # tokens of a prompt that are worth a step's wait rather than computed twice


class _Launched(NamedTuple):
    """The round scheduled last."""

    num_rounds: int = 0
    shape: int = 0
    began_s: float = 0.0


class Scheduler:
    """Most urgent first, and first come, first served among equals: `Request.rank` orders both lists.

    What a sequence owns before a round is launched, U being the upper end of what the host knows of kv_len:

        0 ............ kv_len .... U ............. U + tail
        committed      |<- interval ->| tree or draft rows |

    A request is admitted when the pool has room for its text so far and a tree; what it will write later is not kept
    for it. When pages run out the tree shrinks, down to plain decoding. When not even that fits, the request of the
    last rank gives up its pages and waits. Later its text so far is prefilled again; a token once emitted is known, and
    never sampled again. The request of the first rank never waits, so every request ends.

    A step has a round for every running sequence, and beside it at most `chunked_prefill` tokens of prompts: a long
    prompt enters in chunks and holds nobody up.
    """

    def __init__(self, config: EngineConfig, kv: KVManager, chooser: ShapeChooser | None = None):
        """chooser: of each round's tree shape; None: always the configured one."""
        self.kv = kv
        self.chooser = chooser
        self.num_pages = kv.allocator.num_allocatable
        self.chunked_prefill = config.chunked_prefill
        self.tail = speculative_tail(config.speculative)
        self.max_path = 1 if config.speculative is None else config.speculative.max_path
        self.max_nodes = 1 if config.speculative is None else config.speculative.num_draft_tokens
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.by_id: dict[int, Request] = {}
        self.acceptance = AcceptanceWatch()
        self.min_shared = MIN_SHARED
        self.num_preemptions = 0
        self.num_constrained = 0  # unfinished requests with a grammar
        self.num_prompt_tokens = 0  # of all requests that were ever admitted
        self.num_cached_tokens = 0  # of these, found in the prefix cache
        self._num_added = 0
        self._num_slots = config.max_batch
        self._free_slots = list(range(config.max_batch))[::-1]
        self._released_slots: list[int] = []
        self._with_deadline: dict[int, Request] = {}
        self._ended: list[Request] = []  # by their deadline, since the last commit
        self._is_pipelined = config.max_pending > 0  # else a step is committed before the next is scheduled
        self._launched = _Launched()

    # ------------------------------------------------------------------ arrivals

    def check_fits(self, request: Request) -> None:
        """Raise RequestError when the whole pool could not hold the request, even without a tree."""
        need = self.kv.pages_for(request.max_len)
        if need > self.num_pages:
            raise RequestError(
                f"prompt and output of {request.max_len} tokens need {need} pages of {self.kv.page_size} tokens, the "
                f"whole pool has {self.num_pages}; lower max_tokens or raise the KV memory"
            )

    def add(self, request: Request) -> None:
        """Queue a request that fits."""
        request.arrival, self._num_added = self._num_added, self._num_added + 1
        self.by_id[request.request_id] = request
        self.num_constrained += request.grammar is not None
        if request.deadline_s < math.inf:
            self._with_deadline[request.request_id] = request
        insort(self.waiting, request, key=Request.rank)

    def abort(self, request_id: int) -> None:
        """End a request now; its tokens so far stay in it. Unknown or finished ids are ignored."""
        request = self.by_id.get(request_id)
        if request is not None:
            request.finish("abort")
            self._end(request)

    def reset(self) -> None:
        """Forget every request and own nothing, whatever an interrupt left half done."""
        self.waiting.clear()
        self.running.clear()
        self.by_id.clear()
        self.num_constrained = 0
        self.kv.reset()
        self._with_deadline.clear()
        self._ended.clear()
        self._free_slots = list(range(self._num_slots))[::-1]
        self._released_slots = list(range(self._num_slots))  # every row of the page table may be stale

    @property
    def is_idle(self) -> bool:
        return not self.by_id

    # ------------------------------------------------------------------ one step

    def schedule(self) -> StepPlan:
        """Choose the next step: a round for every running sequence that may still emit, and chunks of prompts."""
        self._end_overdue()
        self._make_way()
        updates: list[PageUpdate] = []
        decodes = self._rounds(updates)
        prefills = self._chunks(updates)
        released, self._released_slots = tuple(self._released_slots), []
        shape = self.chooser.choose(len(decodes)) if self.chooser is not None and decodes else 0
        freed = self.kv.allocator.take_freed()
        self._launched = _Launched(len(decodes), shape, time.perf_counter())
        return StepPlan(released, tuple(updates), tuple(prefills), tuple(decodes), shape, freed)

    def commit(self, result: StepResult) -> list[Request]:
        """Take a collected step's tokens; returns the requests that it changed. A finished one's rows are dropped."""
        if result.overflow is None:
            self._time_round()
        changed, self._ended = self._ended, []
        for scored in result.scored:
            if scored.request_id in self.by_id:
                self.by_id[scored.request_id].add_prompt_logprobs(scored)
        own_trees: list[RowResult] = []  # rounds of the engine's tree; a request's own tree says nothing about it
        unbound: list[RowResult] = []  # of these, rounds without a grammar: it forbids drafts of the best head
        for row in result.rows:
            request = self.by_id.get(row.request_id)
            if request is None:  # finished or aborted while this round was in flight: a dead round
                continue
            request.pending -= 1
            request.pending_rounds -= row.is_round
            if row.has_nan or (row.is_round and result.overflow is not None):
                self._fail(request, row, result.overflow)
            elif row.is_round:
                request.kv_len += len(row.token_ids)
                request.count_round(len(row.token_ids) - 1)
                request.append(row.token_ids, row.logprobs, row.top_logprobs)
                if request.params.num_draft_tokens is None:
                    own_trees.append(row)
                    if request.grammar is None:
                        unbound.append(row)
            else:
                self._commit_prefill(request, row)
            is_finished = request.finish_reason is not None
            if row.token_ids or is_finished:
                changed.append(request)
            if is_finished:
                self._end(request)
        if own_trees:
            self._learn(own_trees, unbound)
        return changed

    # ------------------------------------------------------------------ before the rows

    def _end_overdue(self) -> None:
        """End what has passed its deadline."""
        now_s = time.perf_counter()
        for request in [r for r in self._with_deadline.values() if r.deadline_s <= now_s]:
            request.finish("abort", f"request {request.request_id}: its deadline has passed")
            self._end(request)
            self._ended.append(request)

    def _make_way(self) -> None:
        """Let the first of those who wait take the place of less urgent ones."""
        if not self.waiting or self.waiting[0].pending:
            return
        first = self.waiting[0]
        while self.running and self.running[-1].priority > first.priority:
            if self._free_slots and self._has_room(first):
                return
            self._preempt(self.running[-1])

    # ------------------------------------------------------------------ rows

    def _rounds(self, updates: list[PageUpdate]) -> list[DecodeRow]:
        """A round for all that may emit, in the order of rank: who is preempted for another has no row yet."""
        decodes = []
        for request in tuple(self.running):
            # Without a slot it was preempted just now; below prefill_len a part of its text is still to be launched.
            if request.slot < 0 or request.kv_len < request.prefill_len or not self._may_emit(request):
                continue
            upper = self._upper(request)
            if upper + self.tail <= request.owned_len or self._grow(request, upper, updates):
                decodes.append(self._decode_row(request, upper))
        return decodes

    def _chunks(self, updates: list[PageUpdate]) -> list[PrefillRow]:
        """Chunks of prompts in the order of rank, of those who wait as well, until the step's tokens are used up."""
        prefills: list[PrefillRow] = []
        for request in [r for r in self.running if r.kv_len < r.prefill_len]:
            self._admit(prefills, updates, before=request)
            self._prefill(request, prefills)
        self._admit(prefills, updates)
        return prefills

    def _may_emit(self, request: Request) -> bool:
        """Whether a further round could emit a token that counts: each round in flight emits at least one."""
        at_least = (len(request.output_token_ids) or 1) + request.pending_rounds  # the first token may be in flight
        return at_least < request.output_limit

    def _upper(self, request: Request) -> int:
        """Upper end of the interval that the host knows for kv_len."""
        return request.kv_len + request.pending_rounds * self.max_path

    def _grow(self, request: Request, upper: int, updates: list[PageUpdate]) -> bool:
        """Own pages for a round, of one token at least. False: even these were missing, and it was preempted itself."""
        want = min(self.kv.pages_for(upper + self.tail), self._most_pages(request))
        need = self.kv.pages_for(min(upper + 1, request.max_len))
        page_size = self.kv.page_size
        while not self.kv.can_reserve(request.slot, need * page_size):
            last = self.running[-1]
            self._preempt(last)
            if last is request:
                return False
        within_reach = request.owned_len // page_size + self.kv.num_available
        self._reserve(request, min(want, within_reach) * page_size, updates)
        return True

    def _decode_row(self, request: Request, upper: int) -> DecodeRow:
        params, is_exact = request.params, request.pending_rounds == 0
        request.pending += 1
        request.pending_rounds += 1
        node_limit = self.max_nodes
        if params.num_draft_tokens is not None or upper + node_limit > request.owned_len:
            node_limit = max(1, min(params.num_draft_tokens or node_limit, node_limit, request.owned_len - upper))
        return DecodeRow(request.request_id, request.slot, upper, node_limit, params, is_exact, request.grammar)

    def _prefill(self, request: Request, prefills: list[PrefillRow]) -> None:
        """Append the request's next chunk, as far as the step's tokens go."""
        left = self.chunked_prefill - sum(len(row.token_ids) for row in prefills)
        start, end = request.kv_len, min(request.prefill_len, request.kv_len + left)
        if end <= start:
            return
        request.kv_len = end
        request.pending += 1
        known = request.known_token_ids
        prefills.append(
            PrefillRow(
                request_id=request.request_id,
                slot=request.slot,
                prompt_token_ids=request.prompt_token_ids,
                noise_key=request.noise_key,
                sampling=request.params,
                stop_token_ids=tuple(sorted(request.stop_token_ids)),
                output_token_ids=tuple(request.output_token_ids),
                token_ids=known[start:end],
                start=start,
                next_token=known[end] if end < len(known) else None,
                is_last=end == request.prefill_len,
                scored=request.to_score(start, end),
                grammar=request.grammar,
            )
        )

    # ------------------------------------------------------------------ admission and preemption

    def _admit(self, prefills: list[PrefillRow], updates: list[PageUpdate], before: Request | None = None) -> None:
        """Start those who wait (and come before another in rank), strictly in their order: nobody is overtaken."""
        while self.waiting and self._free_slots:
            request = self.waiting[0]
            if before is not None and request.rank() > before.rank():
                return
            has_tokens = sum(len(row.token_ids) for row in prefills) < self.chunked_prefill
            if request.pending or not has_tokens or not self._has_room(request):
                return  # pending: tokens are on their way, which will be known then
            if self._has_twin_ahead(request):
                return  # what both begin with is found in the cache soon, and computed once
            self._start(self.waiting.pop(0), updates)
            self._prefill(request, prefills)

    def _has_twin_ahead(self, request: Request) -> bool:
        """Whether one of an earlier rank, admitted but not yet read, begins with many tokens that begin this one too.

        It runs, so it goes on in each step, whatever becomes of the others: nobody waits for long.
        """
        if self.kv.cache is None or not request.num_reusable:  # every row is computed anyway, e.g. of a scored prompt
            return False
        known, least = request.known_token_ids, self.min_shared + LOOKAHEAD
        for twin in self.running:
            if (
                not twin.output_token_ids
                and twin.rank() < request.rank()
                and twin.prompt_token_ids[:least] == known[:least]
            ):
                least += len(self._cached(request)) * self.kv.page_size
                return (
                    min(len(known), len(twin.prompt_token_ids)) >= least
                    and twin.prompt_token_ids[:least] == known[:least]
                )
        return False

    def _has_room(self, request: Request) -> bool:
        """Whether the text so far and a tree fit, with a page to spare for everyone who runs."""
        num_tokens = len(request.known_token_ids) + self.tail
        need = min(self.kv.pages_for(num_tokens), self._most_pages(request)) + len(self.running)
        if need > self.num_pages:  # no more is to be had
            return not self.running
        path = self._cached(request) if need > self.kv.allocator.num_free else []
        unused = sum(page.num_users == 0 for page in path)
        return need - len(path) <= self.kv.num_available - unused

    def _start(self, request: Request, updates: list[PageUpdate]) -> None:
        """Give a request a slot, the cached pages that begin its text, and pages for the rest of its text."""
        request.slot = self._free_slots.pop()
        request.prefill_len = request.num_known - bool(request.output_token_ids)
        path = self._cached(request)
        request.kv_len = len(path) * self.kv.page_size
        attached = self.kv.attach(request.slot, path)
        if attached is not None:
            updates.append(attached)
        self._reserve(request, request.prefill_len, updates)
        if request.started_s == 0:
            request.started_s = time.perf_counter()
            request.num_cached_tokens = request.kv_len
            self.num_prompt_tokens += len(request.prompt_token_ids)
            self.num_cached_tokens += request.kv_len
        insort(self.running, request, key=Request.rank)

    def _preempt(self, request: Request) -> None:
        """Take a request's pages. It waits until they can be recomputed; rounds in flight still give their tokens."""
        self._leave_slot(request)
        request.num_preemptions += 1
        self.num_preemptions += 1
        insort(self.waiting, request, key=Request.rank)

    # ------------------------------------------------------------------ parts

    def _fail(self, request: Request, row: RowResult, overflow: str | None) -> None:
        if row.is_round and overflow is not None:
            return request.finish("error", f"request {request.request_id}: {overflow}")
        where = "a round" if row.is_round else "the prefill"
        request.finish("error", f"request {request.request_id}: the model's logits held a NaN in {where}")

    def _time_round(self) -> None:
        """Tell the chooser how long the round took that was scheduled last."""
        launched, self._launched = self._launched, _Launched()
        if self.chooser is not None and launched.num_rounds and not self._is_pipelined:
            self.chooser.time(launched.num_rounds, launched.shape, time.perf_counter() - launched.began_s)

    def _learn(self, rounds: list[RowResult], unbound: list[RowResult]) -> None:
        """Tell the chooser, and the watch over the head, what became of a step's drafts: its trees have one shape."""
        if self.chooser is not None:
            self.chooser.count(rounds[0].shape, [row.accepted_by_shape for row in rounds])
        if self.max_nodes > 1 and unbound and rounds[0].shape == 0:  # the largest tree
            self.acceptance.count(len(unbound), sum(len(row.token_ids) - 1 for row in unbound))

    def _commit_prefill(self, request: Request, row: RowResult) -> None:
        if row.token_ids:
            request.prefilled_s = time.perf_counter()
            if request.output_limit == 0:
                request.finish("length")
            else:
                request.append(row.token_ids, row.logprobs, row.top_logprobs)
        if request.slot >= 0:
            self.kv.publish(request.slot, self._committed(request))

    def _committed(self, request: Request) -> tuple[int, ...]:
        """The tokens whose KV is known to be good, and the next one.

        A prompt's KV is, once its logits were read: a NaN in it would be in them.
        """
        is_good = request.prefilled_s > 0 and request.finish_reason != "error"
        return request.known_token_ids[: request.kv_len + 1] if is_good else ()

    def _cached(self, request: Request) -> list[CachedPage]:
        """Cached pages that begin the text, as far as its rows need not be computed."""
        return self.kv.find_prefix(request.known_token_ids, request.num_reusable // self.kv.page_size)

    def _most_pages(self, request: Request) -> int:
        """Pages that the request may own at most. A pool too small for its last tree: the tree shrinks."""
        return min(self.kv.pages_for(request.max_len + self.tail), self.num_pages)

    def _reserve(self, request: Request, num_tokens: int, updates: list[PageUpdate]) -> None:
        update = self.kv.reserve(request.slot, num_tokens)
        if update is not None:
            updates.append(update)
        request.owned_len = self.kv.num_pages(request.slot) * self.kv.page_size

    def _end(self, request: Request) -> None:
        """Forget a finished request, wherever it is."""
        if request.slot >= 0:
            self._leave_slot(request)
        else:
            self.waiting.remove(request)
        del self.by_id[request.request_id]
        self.num_constrained -= request.grammar is not None
        self._with_deadline.pop(request.request_id, None)

    def _leave_slot(self, request: Request) -> None:
        """Give back slot and pages; full pages of good KV go to the prefix cache."""
        if request.finish_reason == "error":
            self.kv.distrust(request.slot)
        self.kv.release(request.slot, self._committed(request))
        self._free_slots.append(request.slot)
        self._released_slots.append(request.slot)
        self.running.remove(request)
        request.slot = -1
        request.owned_len = 0

    def check_integrity(self) -> None:
        """Raise InvariantError when pages or slots are owned twice, or lost."""
        self.kv.check_integrity()
        slots = [r.slot for r in self.running] + self._free_slots
        if sorted(slots) != list(range(self._num_slots)):
            raise InvariantError(f"each slot has one owner or is free; got {sorted(slots)}")
        if len(self.by_id) != len(self.running) + len(self.waiting):
            raise InvariantError(
                f"{len(self.by_id)} requests, but {len(self.running)} run and {len(self.waiting)} wait"
            )
        if self.is_idle and self.kv.num_available != self.num_pages:
            num_free = self.kv.num_available
            raise InvariantError(f"idle, but only {num_free} of {self.num_pages} pages are free or cached")
