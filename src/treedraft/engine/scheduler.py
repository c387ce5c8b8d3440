"""Which sequences run in the next step, and which pages they own. Host integers only."""

from __future__ import annotations

import time
from collections import deque

from treedraft.config import EngineConfig, speculative_tail
from treedraft.engine.acceptance import AcceptanceWatch
from treedraft.engine.request import Request
from treedraft.engine.shapes import ShapeChooser
from treedraft.errors import InvariantError, RequestError
from treedraft.kv.manager import KVManager
from treedraft.types import DecodeRow, PageUpdate, PrefillRow, StepPlan, StepResult


class Scheduler:
    """First come, first served. A request is admitted once the pool can hold all it may ever need.

    What a sequence owns before a round is launched, U being the upper end of what the host knows of kv_len:

        0 ............ kv_len .... U ............. U + tail
        committed      |<- interval ->| tree or draft rows |

    Pages are taken step by step, but promised at admission, so that a running sequence never waits for one.
    """

    def __init__(
        self,
        config: EngineConfig,
        kv: KVManager,
        max_prefill_tokens: int = 4096,
        chooser: ShapeChooser | None = None,
    ):
        """chooser: of each round's tree shape; None: always the configured one."""
        self.kv = kv
        self.chooser = chooser
        self.num_pages = kv.allocator.num_allocatable
        self.max_prefill_tokens = max_prefill_tokens
        self.tail = speculative_tail(config.speculative)
        self.max_path = 1 if config.speculative is None else config.speculative.max_path
        self.max_nodes = 1 if config.speculative is None else config.speculative.num_draft_tokens
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.by_id: dict[int, Request] = {}
        self.acceptance = AcceptanceWatch()
        self.promised_pages = 0
        self._num_slots = config.max_batch
        self._free_slots = list(range(config.max_batch))[::-1]
        self._released_slots: list[int] = []

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
        self.by_id[request.request_id] = request
        self.waiting.append(request)

    def abort(self, request_id: int) -> None:
        """End a request now; its tokens so far stay in it. Unknown or finished ids are ignored."""
        request = self.by_id.get(request_id)
        if request is None:
            return
        request.finish("abort")
        if request.slot >= 0:
            self._release(request)
        else:
            self.waiting.remove(request)
            del self.by_id[request_id]

    def reset(self) -> None:
        """Forget every request and own nothing, whatever an interrupt left half done."""
        self.waiting.clear()
        self.running.clear()
        self.by_id.clear()
        self.kv.reset()
        self.promised_pages = 0
        self._free_slots = list(range(self._num_slots))[::-1]
        self._released_slots = list(range(self._num_slots))  # every row of the page table may be stale

    @property
    def is_idle(self) -> bool:
        return not self.by_id

    # ------------------------------------------------------------------ one step

    def schedule(self) -> StepPlan:
        """Choose the next step: a round for every running sequence that may still emit, and admitted prompts."""
        updates: list[PageUpdate] = []
        decodes = tuple(self._decode_row(r, updates) for r in self.running if self._may_emit(r))
        prefills = tuple(self._prefill_row(r, updates) for r in self._admit())
        released, self._released_slots = tuple(self._released_slots), []
        shape = self.chooser.choose(len(decodes)) if self.chooser is not None and decodes else 0
        return StepPlan(released, tuple(updates), prefills, decodes, shape)

    def commit(self, result: StepResult) -> list[Request]:
        """Take a collected step's tokens; returns the requests that it changed. A finished one's rows are dropped."""
        changed = []
        for row in result.rows:
            request = self.by_id.get(row.request_id)
            if request is None:  # finished or aborted while this round was in flight: a dead round
                continue
            request.pending -= 1
            if row.is_round and result.overflow is not None:
                request.finish("error", f"request {request.request_id}: {result.overflow}")
            elif row.has_nan:
                where = "a round" if row.is_round else "the prefill"
                request.finish("error", f"request {request.request_id}: the model's logits held a NaN in {where}")
            else:
                if row.is_round:
                    request.kv_len += len(row.token_ids)
                    request.count_round(len(row.token_ids) - 1)
                    has_own_tree = request.params.num_draft_tokens is not None  # says nothing about the engine's
                    if self.chooser is not None and not has_own_tree:
                        self.chooser.count(row.shape, row.accepted_by_shape)
                    if self.max_nodes > 1 and row.shape == 0 and not has_own_tree:  # the largest tree
                        self.acceptance.count(len(row.token_ids) - 1)
                else:
                    request.prefilled_s = time.perf_counter()
                request.append(row.token_ids, row.logprobs, row.top_logprobs)
            changed.append(request)
            if request.is_finished:
                self._release(request)
        return changed

    # ------------------------------------------------------------------ parts

    def _may_emit(self, request: Request) -> bool:
        """Whether a further round could emit a token that counts: each step in flight emits at least one."""
        at_least = len(request.output_token_ids) + request.pending
        limit = min(request.params.max_tokens, request.max_len - len(request.prompt_token_ids))
        return at_least < limit

    def _decode_row(self, request: Request, updates: list[PageUpdate]) -> DecodeRow:
        rounds_in_flight = request.pending - (not request.output_token_ids)  # a prefill in flight adds no length
        upper = request.kv_len + max(0, rounds_in_flight) * self.max_path
        owned = min(self.kv.pages_for(upper + self.tail), request.promised_pages) * self.kv.page_size
        self._reserve(request, owned, updates)
        request.pending += 1
        return DecodeRow(
            request_id=request.request_id,
            slot=request.slot,
            max_kv_len=upper,
            node_limit=max(1, min(self.max_nodes, request.params.num_draft_tokens or self.max_nodes, owned - upper)),
            sampling=request.params,
            is_exact=rounds_in_flight <= 0,
        )

    def _admit(self) -> list[Request]:
        admitted: list[Request] = []
        tokens = 0
        while self.waiting and self._free_slots:
            request = self.waiting[0]
            want = self.kv.pages_for(request.max_len + self.tail)
            # A pool too small for the tail: the tree shrinks, down to N = 1.
            request.promised_pages = min(want, self.num_pages)
            tokens += len(request.prompt_token_ids)
            if self.promised_pages + request.promised_pages > self.num_pages:
                break
            if admitted and tokens > self.max_prefill_tokens:
                break
            self.waiting.popleft()
            request.slot = self._free_slots.pop()
            request.started_s = time.perf_counter()
            self.promised_pages += request.promised_pages
            self.running.append(request)
            admitted.append(request)
        return admitted

    def _prefill_row(self, request: Request, updates: list[PageUpdate]) -> PrefillRow:
        self._reserve(request, len(request.prompt_token_ids), updates)
        request.kv_len = len(request.prompt_token_ids)
        request.pending += 1
        return PrefillRow(
            request_id=request.request_id,
            slot=request.slot,
            token_ids=request.prompt_token_ids,
            noise_key=request.noise_key,
            sampling=request.params,
            stop_token_ids=tuple(sorted(request.stop_token_ids)),
        )

    def _reserve(self, request: Request, num_tokens: int, updates: list[PageUpdate]) -> None:
        update = self.kv.reserve(request.slot, num_tokens)
        if update is not None:
            updates.append(update)

    def _release(self, request: Request) -> None:
        self.kv.release(request.slot)
        self.promised_pages -= request.promised_pages
        self._free_slots.append(request.slot)
        self._released_slots.append(request.slot)
        self.running.remove(request)
        del self.by_id[request.request_id]

    def check_integrity(self) -> None:
        """Raise InvariantError when pages or slots are owned twice, or lost."""
        self.kv.check_integrity()
        slots = [r.slot for r in self.running] + self._free_slots
        if len(set(slots)) != len(slots):
            raise InvariantError(f"a slot has two owners: {sorted(slots)}")
        if self.is_idle and self.kv.allocator.num_free != self.num_pages:
            num_free = self.kv.allocator.num_free
            raise InvariantError(f"idle, but only {num_free} of {self.num_pages} pages are free")
        if self.promised_pages != sum(r.promised_pages for r in self.running):
            raise InvariantError(f"{self.promised_pages} pages promised, running requests hold another number")
