"""A device of host integers: a page table, lengths, and KV whose every row says of which text it is.

The KV of position p is a digest of tokens 0 .. p, the draft's one of tokens 0 .. p + 1. So a row that was computed from
a wrong prefix, or paired with a wrong next token, or that another sequence wrote over, is noticed at the next round.
"""

import random
from collections import Counter

from treedraft.config import EngineConfig, max_logical_len, speculative_tail
from treedraft.engine.engine import Engine
from treedraft.engine.request import Request
from treedraft.engine.scheduler import Scheduler
from treedraft.engine.text import TextStream
from treedraft.kv.allocator import PageAllocator
from treedraft.kv.manager import KVManager
from treedraft.kv.prefix import PrefixCache
from treedraft.types import RowResult, SamplingParams, StepResult

EOS = 0
MAX_CONTEXT = 60


def said(prompt, index):
    """The token at output index `index`: the same prompt is always continued the same way, whatever the rounds."""
    value = (sum(prompt) * 7919 + len(prompt) * 31 + index * 104729) % 97
    return EOS if value == 5 else 1 + value


def text_of(prompt, num_output=80):
    return (*prompt, *(said(prompt, i) for i in range(num_output)))


def digests_of(token_ids, before=0):
    out = []
    for token in token_ids:
        before = hash((before, token))
        out.append(before)
    return out


class FakeRunner:
    """Accepts a random number of drafts each round. Every launch checks what the step is about to rely on."""

    def __init__(self, config, seed):
        self.config, self.rng = config, random.Random(seed)
        self.tail = speculative_tail(config.speculative)
        self.max_path = 1 if config.speculative is None else config.speculative.max_path
        self.tables, self.kv_lens, self.owner = {}, {}, {}
        self.target, self.draft = {}, {}  # digest by physical slot
        self.texts = {}  # by request id: digests and tokens of its whole text
        self.nan_ids = set()
        self.counts = Counter()

    def launch(self, plan):
        for page in plan.freed_pages:
            self._poison(page)
        for slot in plan.released_slots:
            self.tables.pop(slot, None)
        for update in plan.page_updates:
            row = self.tables.setdefault(update.slot, [])
            assert update.column == len(row), "pages must be appended"
            row.extend(update.pages)
        assert sum(len(r.token_ids) for r in plan.prefills) <= self.config.chunked_prefill
        rows = [self._round(r) for r in plan.decodes] + [self._prefill(r) for r in plan.prefills]
        return StepResult(rows=tuple(rows))

    def collect(self, ticket):
        return ticket

    def _prefill(self, row):
        prompt, end = row.prompt_token_ids, row.start + len(row.token_ids)
        text = self._text(row.request_id, prompt)
        assert row.token_ids == text[row.start : end], "a chunk is a stretch of the text"
        is_sampled = end == len(prompt) and not row.output_token_ids
        assert row.next_token == (None if is_sampled else text[end])
        assert row.is_last == (end == len(prompt) + max(0, len(row.output_token_ids) - 1))
        assert self._owned(row.slot) >= end
        self._check_rows(row.request_id, row.slot, row.start)
        before = self.target[self._physical(row.slot, row.start - 1)] if row.start else 0
        following = said(prompt, 0) if row.next_token is None else row.next_token
        self._write(row.slot, row.start, digests_of((*row.token_ids, following), before))
        self.kv_lens[row.slot], self.owner[row.slot] = end, row.request_id
        self.counts["chunks"] += not row.is_last
        self.counts["resumed"] += row.is_last and not is_sampled
        return self._result(row, (following,) if is_sampled else (), False)

    def _round(self, row):
        slot, kv_len = row.slot, self.kv_lens[row.slot]
        assert self.owner[slot] == row.request_id
        assert kv_len <= row.max_kv_len, "the host's interval must hold the true length"
        assert not row.is_exact or kv_len == row.max_kv_len
        assert 1 <= row.node_limit
        if row.node_limit > 1:
            assert kv_len + row.node_limit <= self._owned(slot), "nodes beyond the owned pages"
        nodes = 1 if self.config.speculative is None else self.config.speculative.num_draft_tokens
        self.counts["shrunk"] += row.node_limit < nodes
        digests, text, prompt_len = self.texts[row.request_id]
        last = (
            min(prompt_len + row.sampling.max_tokens, self.config.max_context) - 1
        )  # its KV, and what follows, is dead
        self._check_rows(row.request_id, slot, min(kv_len, last))
        accepted = min(self.rng.randrange(min(self.max_path, row.node_limit)), len(text) - kv_len - 3)
        for position in range(kv_len, min(kv_len + self.tail, self._owned(slot))):
            self.target[self._physical(slot, position)] = self.draft[self._physical(slot, position)] = "a rejected node"
        num_kept = min(accepted + 1, self._owned(slot) - kv_len)  # the others go to the trash page
        assert num_kept == accepted + 1 or kv_len + num_kept >= last
        self._write(slot, kv_len, digests[kv_len : kv_len + num_kept + 1])
        self.kv_lens[slot] += accepted + 1
        return self._result(row, text[kv_len + 1 : kv_len + accepted + 2], True)

    def _check_rows(self, request_id, slot, num_rows):
        digests = self.texts[request_id][0]
        for position in range(min(num_rows, self._owned(slot))):
            at = self._physical(slot, position)
            assert self.target.get(at) == digests[position], f"target KV of position {position}"
            assert self.draft.get(at) == digests[position + 1], f"draft KV of position {position}"

    def _write(self, slot, start, digests):
        for i in range(len(digests) - 1):
            at = self._physical(slot, start + i)
            self.target[at], self.draft[at] = digests[i], digests[i + 1]

    def _text(self, request_id, prompt):
        if request_id not in self.texts:
            text = text_of(prompt)
            self.texts[request_id] = digests_of(text), text, len(prompt)
        return self.texts[request_id][1]

    def _poison(self, page):
        for at in range(page * self.config.page_size, (page + 1) * self.config.page_size):
            self.target.pop(at, None)
            self.draft.pop(at, None)

    def _physical(self, slot, position):
        size = self.config.page_size
        return self.tables[slot][position // size] * size + position % size

    def _owned(self, slot):
        return len(self.tables.get(slot, ())) * self.config.page_size

    def _result(self, row, tokens, is_round):
        has_nan = is_round and row.request_id in self.nan_ids
        return RowResult(row.request_id, is_round, tuple(tokens), has_nan, None, None)


def make_engine(num_pages, seed, speculative, max_pending=0, page_size=3, max_context=MAX_CONTEXT, **options):
    config = EngineConfig(
        speculative=speculative,
        page_size=page_size,
        max_context=max_context,
        max_pending=max_pending,
        **{"max_batch": 4, **options},
    )
    width = -(-max_logical_len(max_context, speculative, max_pending) // page_size)
    cache = PrefixCache(page_size) if config.prefix_cache else None
    kv = KVManager(PageAllocator(num_pages + 2), page_size, width, cache)
    runner = FakeRunner(config, seed)
    return Engine(Scheduler(config, kv), runner, max_pending), runner


def make_request(request_id, prompt, max_tokens, max_context=MAX_CONTEXT, **fields):
    """prompt: token ids, or a length."""
    prompt = (1 + request_id,) * prompt if isinstance(prompt, int) else tuple(prompt)
    params = SamplingParams(max_tokens=max_tokens)
    max_len = min(len(prompt) + max_tokens, max_context)
    return Request(request_id, prompt, params, 0, 0, frozenset({EOS}), max_len, TextStream(None, ()), **fields)


def expected_output(request):
    out = []
    limit = min(request.params.max_tokens, request.max_len - len(request.prompt_token_ids))
    while len(out) < limit:
        out.append(said(request.prompt_token_ids, len(out)))
        if out[-1] in request.stop_token_ids:
            break
    return out
