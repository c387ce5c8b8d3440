"""Random traces of arrivals, aborts and NaNs against a fake runner that checks ownership at every step."""

import random
from dataclasses import replace

import pytest

from treedraft.config import EngineConfig, SpeculativeConfig, max_logical_len, speculative_tail
from treedraft.engine.engine import Engine
from treedraft.engine.request import Request
from treedraft.engine.scheduler import Scheduler
from treedraft.engine.text import TextStream
from treedraft.errors import InvariantError, RequestError
from treedraft.kv.allocator import PageAllocator
from treedraft.kv.manager import KVManager
from treedraft.types import RowResult, SamplingParams, StepResult

EOS = 0


def script(request_id, index):
    """The token that request `request_id` says at output index `index`: the text does not depend on the rounds."""
    value = (request_id * 7919 + index * 104729) % 97
    return EOS if value == 5 else 1 + value


class FakeRunner:
    """A device that keeps a page table and lengths, and accepts a random number of drafts each round."""

    def __init__(self, config, pages, seed):
        self.config, self.rng = config, random.Random(seed)
        self.tail = speculative_tail(config.speculative)
        self.max_path = 1 if config.speculative is None else config.speculative.max_path
        self.tables = {}
        self.kv_lens, self.owner, self.emitted = {}, {}, {}
        self.pages = pages
        self.shrunk_rounds = 0
        self.nan_ids = set()

    def launch(self, plan):
        for slot in plan.released_slots:
            self.tables.pop(slot, None)
        for update in plan.page_updates:
            row = self.tables.setdefault(update.slot, [])
            assert update.column == len(row), "pages must be appended"
            row.extend(update.pages)
        every = [page for row in self.tables.values() for page in row]
        assert len(set(every)) == len(every), "a page is in two rows of the table"
        rows = [self._round(r) for r in plan.decodes] + [self._prefill(r) for r in plan.prefills]
        return StepResult(rows=tuple(rows))

    def collect(self, ticket):
        return ticket

    def _prefill(self, row):
        assert self._owned(row.slot) >= len(row.token_ids)
        self.kv_lens[row.slot], self.owner[row.slot], self.emitted[row.slot] = len(row.token_ids), row.request_id, 1
        return self._result(row, (script(row.request_id, 0),), False)

    def _round(self, row):
        assert self.owner[row.slot] == row.request_id
        kv_len = self.kv_lens[row.slot]
        assert kv_len <= row.max_kv_len, "the host's interval must hold the true length"
        assert 1 <= row.node_limit
        if row.node_limit > 1:
            assert kv_len + row.node_limit <= self._owned(row.slot), "nodes beyond the owned pages"
        nodes = 1 if self.config.speculative is None else self.config.speculative.num_draft_tokens
        self.shrunk_rounds += row.node_limit < nodes
        accepted = self.rng.randrange(min(self.max_path, row.node_limit))
        start = self.emitted[row.slot]
        tokens = tuple(script(row.request_id, start + i) for i in range(accepted + 1))
        self.kv_lens[row.slot] += accepted + 1
        self.emitted[row.slot] += accepted + 1
        return self._result(row, tokens, True)

    def _owned(self, slot):
        return len(self.tables.get(slot, ())) * self.config.page_size

    def _result(self, row, tokens, is_round):
        has_nan = is_round and row.request_id in self.nan_ids
        return RowResult(row.request_id, is_round, tokens, has_nan, None, None)


TREE = SpeculativeConfig(3, 2, 6)


def make_engine(num_pages, seed, speculative=TREE, max_pending=0, page_size=3, max_context=60):
    config = EngineConfig(
        speculative=speculative, page_size=page_size, max_batch=4, max_context=max_context, max_pending=max_pending
    )
    width = -(-max_logical_len(max_context, speculative, max_pending) // page_size)
    kv = KVManager(PageAllocator(num_pages + 2), page_size, width)
    runner = FakeRunner(config, num_pages, seed)
    return Engine(Scheduler(config, kv), runner, max_pending), runner


def make_request(request_id, prompt_len, max_tokens, max_context=60):
    params = SamplingParams(max_tokens=max_tokens)
    max_len = min(prompt_len + max_tokens, max_context)
    return Request(request_id, (1,) * prompt_len, params, 0, 0, frozenset({EOS}), max_len, TextStream(None, ()))


def expected_output(request):
    out = []
    limit = min(request.params.max_tokens, request.max_len - len(request.prompt_token_ids))
    while len(out) < limit:
        out.append(script(request.request_id, len(out)))
        if out[-1] == EOS:
            break
    return out


@pytest.mark.parametrize("max_pending", [0, 1, 2])
@pytest.mark.parametrize("speculative", [None, SpeculativeConfig(3, 2, 6), SpeculativeConfig(5, 1, 2)])
def test_engine_random_traces_end_every_request_with_its_own_text(max_pending, speculative):
    for seed in range(25):
        rng = random.Random(seed)
        engine, runner = make_engine(rng.choice([25, 40, 90]), seed, speculative, max_pending)
        requests, next_id = [], 0
        for _ in range(200):
            if rng.random() < 0.25 and next_id < 30:
                request = make_request(next_id, rng.randrange(1, 40), rng.randrange(1, 40))
                engine.scheduler.check_fits(request)
                engine.scheduler.add(request)
                requests.append(request)
                next_id += 1
            if rng.random() < 0.03 and requests:
                engine.scheduler.abort(rng.choice(requests).request_id)
            engine.step()
            engine.scheduler.check_integrity()
        for _ in range(2000):
            if engine.is_idle:
                break
            engine.step()
            engine.scheduler.check_integrity()
        assert engine.is_idle and all(r.is_finished for r in requests)
        for request in requests:
            want = expected_output(request)
            if request.finish_reason == "abort":
                assert request.output_token_ids == want[: len(request.output_token_ids)]
            else:
                assert request.output_token_ids == want


def test_schedule_pool_too_small_for_a_tree_shrinks_it_and_the_request_finishes():
    engine, runner = make_engine(num_pages=20, seed=0)  # 60 slots: the whole context, no room for a tail
    request = make_request(0, 20, 40)
    engine.scheduler.add(request)
    for _ in range(100):
        engine.step()
    assert request.output_token_ids == expected_output(request)
    long = make_request(5, 35, 25)
    long.stop_token_ids = frozenset()
    engine.scheduler.add(long)
    for _ in range(100):
        engine.step()
    assert len(long.output_token_ids) == 25 and runner.shrunk_rounds > 0


def test_check_fits_request_larger_than_the_pool_names_pages():
    engine, _ = make_engine(num_pages=10, seed=0)
    with pytest.raises(RequestError, match="need 20 pages of 3 tokens, the whole pool has 10"):
        engine.scheduler.check_fits(make_request(0, 20, 40))


def test_commit_nan_ends_that_request_alone():
    engine, runner = make_engine(num_pages=90, seed=1)
    requests = [make_request(i, 5, 30) for i in (1, 2, 3)]
    runner.nan_ids = {2}
    for request in requests:
        engine.scheduler.add(request)
    while not engine.is_idle:
        engine.step()
    assert [r.finish_reason for r in requests][1] == "error" and "request 2" in requests[1].error
    for request in (requests[0], requests[2]):
        assert request.output_token_ids == expected_output(request)


def test_schedule_asks_the_chooser_once_a_round_and_commit_tells_it_every_row():
    class Chooser:
        def __init__(self):
            self.batches, self.counted = [], []

        def choose(self, batch):
            self.batches.append(batch)
            return len(self.batches) % 3

        def count(self, shape, accepted_by_shape):
            self.counted.append((shape, accepted_by_shape))

    engine, runner = make_engine(num_pages=90, seed=1)
    chooser = engine.scheduler.chooser = Chooser()
    for i in (1, 2):
        engine.scheduler.add(make_request(i, 5, 12))
    plans, launch = [], runner.launch

    def launch_shaped(plan):
        plans.append(plan)
        rows = launch(plan).rows
        return StepResult(rows=tuple(replace(r, shape=plan.shape, accepted_by_shape=(2, 1, 0)) for r in rows))

    runner.launch = launch_shaped
    while not engine.is_idle:
        engine.step()
    rounds = [plan for plan in plans if plan.decodes]
    assert chooser.batches == [len(plan.decodes) for plan in rounds]
    assert [plan.shape for plan in rounds] == [(i + 1) % 3 for i in range(len(rounds))]
    assert chooser.counted == [(plan.shape, (2, 1, 0)) for plan in rounds for _ in plan.decodes]
    assert engine.scheduler.acceptance.num_rounds == sum(len(p.decodes) for p in rounds if p.shape == 0)


def test_check_integrity_planted_leak_is_noticed():
    engine, _ = make_engine(num_pages=30, seed=0)
    engine.scheduler.kv.reserve(3, 9)
    with pytest.raises(InvariantError, match="idle"):
        engine.scheduler.check_integrity()


def test_config_resolve_is_frozen():
    config = EngineConfig()
    with pytest.raises(AttributeError):
        config.page_size = 3
    assert replace(config, page_size=3).page_size == 3
