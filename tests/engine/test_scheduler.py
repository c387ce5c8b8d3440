"""Random traces of arrivals, aborts and NaNs against a fake runner that checks ownership at every step."""

import random
from collections import Counter
from dataclasses import replace

import pytest

from engine.fake_runner import MAX_CONTEXT, expected_output, make_engine, make_request, text_of
from treedraft.config import EngineConfig, SpeculativeConfig
from treedraft.engine.scheduler import MIN_SHARED, Scheduler
from treedraft.errors import ConfigError, InvariantError, RequestError
from treedraft.kv.prefix import PrefixCache
from treedraft.types import StepResult

FAR = 1e18  # a deadline that never passes, unless a trace brings it forward
TREE = SpeculativeConfig(3, 2, 6)
SHAPES = [None, TREE, SpeculativeConfig(5, 1, 2)]


def random_prompt(rng, texts):
    """A new prompt, one that begins as an earlier text, or one that was asked before."""
    if not texts or rng.random() < 0.3:
        return [rng.randrange(1, 90) for _ in range(rng.randrange(1, 40))]
    text = rng.choice(texts)
    beginning = list(text[: rng.randrange(1, 40)])
    return (beginning + [rng.randrange(1, 90) for _ in range(rng.randrange(6))])[: MAX_CONTEXT - 1]


class Trace:
    """Random arrivals, priorities, deadlines and aborts; invariants after every step."""

    def __init__(self, seed, **options):
        self.rng = random.Random(seed)
        self.max_pending = options.get("max_pending", 0)
        self.engine, self.runner = make_engine(seed=seed, **options)
        self.scheduler = self.engine.scheduler
        self.scheduler.min_shared = 1 if seed % 2 else MIN_SHARED
        self.requests, self.texts = [], []
        self.first, self.first_state, self.num_idle_steps = None, None, 0

    def arrive(self):
        rng = self.rng
        prompt = random_prompt(rng, self.texts)
        self.texts.append(text_of(prompt))
        fields = {"priority": rng.choice([0, 0, 0, 1, 2])}
        if rng.random() < 0.1:
            fields["deadline_s"] = FAR
        request = make_request(len(self.requests), prompt, rng.randrange(1, 40), **fields)
        if rng.random() < 0.2:
            request.params = replace(request.params, num_draft_tokens=rng.choice([1, 1, 3]))
        try:
            self.scheduler.check_fits(request)
        except RequestError:
            return
        self.scheduler.add(request)
        self.requests.append(request)

    def step(self):
        first_before = self._first_in_rank()
        self.engine.step()
        self.scheduler.check_integrity()
        kv = self.scheduler.kv
        for request in self.scheduler.running:
            assert tuple(self.runner.tables[request.slot]) == kv.owned(request.slot), "the table mirrors the owner"
        self._check_progress(first_before)

    def _first_in_rank(self):
        return min(self.scheduler.by_id.values(), key=lambda r: r.rank(), default=None)

    def _check_progress(self, first_before):
        """The first in rank never stands still for longer than it takes to read what is in flight.

        first_before: the first before the step. A more urgent one may come, take its place, and end in a single step.
        """
        first = self._first_in_rank()
        state = None if first is None else (first.num_known, first.kv_len, first.pending)
        is_still = first is not None and first is first_before is self.first and state == self.first_state
        self.num_idle_steps = self.num_idle_steps + 1 if is_still else 0
        self.first, self.first_state = first, state
        assert self.num_idle_steps <= self.max_pending + 2, "the first in rank starves"

    def run(self, num_steps, most=30):
        for _ in range(num_steps):
            if self.rng.random() < 0.25 and len(self.scheduler.by_id) < most:
                self.arrive()
            if self.rng.random() < 0.03 and self.scheduler.by_id:
                self.scheduler.abort(self.rng.choice(list(self.scheduler.by_id)))
            timed = [r for r in self.scheduler.by_id.values() if r.deadline_s == FAR]
            if self.rng.random() < 0.05 and timed:
                self.rng.choice(timed).deadline_s = 0
            self.step()
        for _ in range(5000):
            if self.engine.is_idle:
                break
            self.step()
        assert self.engine.is_idle and all(r.is_finished for r in self.requests)
        for request in self.requests:
            want = expected_output(request)
            if request.finish_reason == "abort":
                assert request.output_token_ids == want[: len(request.output_token_ids)]
            else:
                assert request.output_token_ids == want
        return self

    def counts(self):
        scheduler = self.scheduler
        return Counter(
            {
                "requests": len(self.requests),
                "aborts": sum(r.finish_reason == "abort" for r in self.requests),
                "preemptions": scheduler.num_preemptions,
                "prompt tokens": scheduler.num_prompt_tokens,
                "cached tokens": scheduler.num_cached_tokens,
            }
        )


@pytest.mark.parametrize("max_pending", [0, 1, 2])
@pytest.mark.parametrize("speculative", SHAPES, ids=["no tree", "tree", "short chain"])
def test_engine_random_traces_end_every_request_with_its_own_text(max_pending, speculative):
    total = {"chunks": 0, "resumed": 0, "cached": 0}
    for seed in range(10):
        rng = random.Random(seed)
        options = {
            "num_pages": rng.choice([25, 40, 90]) * 3,
            "page_size": 1,
            "chunked_prefill": rng.choice([1, 5, 16, 4096]),
            "prefix_cache": seed % 4 != 3,
        }
        if seed % 3:
            options["page_size"] = rng.choice([2, 3, 8])
            options["num_pages"] = rng.choice([60, 75, 120, 270]) // options["page_size"] + 1
        trace = Trace(seed, speculative=speculative, max_pending=max_pending, **options).run(200)
        total["chunks"] += trace.runner.counts["chunks"]
        total["resumed"] += trace.runner.counts["resumed"]
        total["cached"] += trace.scheduler.num_cached_tokens
    assert all(total.values()), "the traces must see chunks, preemptions and cache hits"


@pytest.mark.slow
@pytest.mark.parametrize("max_pending", [0, 1])
@pytest.mark.parametrize("speculative", SHAPES[:2], ids=["no tree", "tree"])
def test_engine_a_hundred_thousand_steps(max_pending, speculative):
    """25,000 in each of the four. `-s` prints the counts that benchmarks/notes.md quotes."""
    total = Counter()
    for seed, page_size in enumerate([1, 2, 3, 16, 64]):
        num_pages = max(2, 150 // page_size)
        options = {"num_pages": num_pages, "page_size": page_size, "chunked_prefill": [1, 7, 64, 16, 4096][seed]}
        trace = Trace(seed, speculative=speculative, max_pending=max_pending, **options).run(5000)
        total += trace.counts()
    print(dict(total))
    assert total["aborts"] and total["preemptions"] and total["cached tokens"]


def test_schedule_pool_too_small_for_a_tree_shrinks_it_and_the_request_finishes():
    engine, runner = make_engine(
        num_pages=20, seed=0, speculative=TREE
    )  # 60 slots: the whole context, no room for a tail
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
    assert len(long.output_token_ids) == 25 and runner.counts["shrunk"] > 0


def prefills_by_step(engine, runner):
    """Run to the end; the (request id, first token, number of tokens) that each step prefilled."""
    steps, launch = [], runner.launch

    def watched(plan):
        steps.append([(row.request_id, row.start, len(row.token_ids)) for row in plan.prefills])
        return launch(plan)

    runner.launch = watched
    while not engine.is_idle:
        engine.step()
        engine.scheduler.check_integrity()
    return steps


def twins(min_shared=6, **options):
    """Three requests of one prompt, one that shares 9 tokens with them, and one of its own."""
    engine, runner = make_engine(num_pages=90, seed=1, speculative=TREE, max_batch=5, **options)
    engine.scheduler.min_shared = min_shared
    prompt = list(range(1, 21))
    prompts = [prompt, prompt, [*prompt[:9], 70, 71, 72], prompt, [80, 81, 82]]
    requests = [make_request(i, each, 10) for i, each in enumerate(prompts)]
    for request in requests:
        engine.scheduler.add(request)
    return engine, runner, requests


def test_schedule_same_prompts_in_one_step_are_computed_once():
    engine, runner, requests = twins()
    steps = prefills_by_step(engine, runner)
    assert steps[:2] == [[(0, 0, 20)], [(1, 18, 2), (2, 6, 6), (3, 18, 2), (4, 0, 3)]]
    assert all(r.output_token_ids == expected_output(r) for r in requests)


def test_schedule_same_prompts_in_chunks_wait_for_the_last_of_them():
    engine, runner, requests = twins(chunked_prefill=8)
    steps = prefills_by_step(engine, runner)
    assert steps[:4] == [[(0, 0, 8)], [(0, 8, 8)], [(0, 16, 4)], [(1, 18, 2), (2, 6, 6)]]
    assert all(r.output_token_ids == expected_output(r) for r in requests)


def test_schedule_few_shared_tokens_or_no_cache_are_not_waited_for():
    for options in ({"min_shared": MIN_SHARED}, {"prefix_cache": False}):
        engine, runner, _ = twins(**options)
        assert [row[0] for row in prefills_by_step(engine, runner)[0]] == [0, 1, 2, 3, 4]


def test_schedule_twins_whose_prompt_is_scored_wait_for_nothing_as_they_compute_every_row():
    engine, runner, requests = twins()
    for request in requests[1:]:
        request.params = replace(request.params, prompt_logprobs=0)
    assert [row[0] for row in prefills_by_step(engine, runner)[0]] == [0, 1, 2, 3, 4]


def test_schedule_twin_of_an_aborted_request_goes_on_by_itself():
    engine, runner, requests = twins(chunked_prefill=8)
    engine.step()
    engine.scheduler.abort(0)
    steps = prefills_by_step(engine, runner)
    assert steps[0] == [(1, 0, 8)]
    assert all(r.output_token_ids == expected_output(r) for r in requests[1:])


def test_schedule_nobody_waits_for_a_less_urgent_twin_or_one_that_was_read():
    engine, runner, requests = twins(chunked_prefill=8)
    for request in requests[1:]:
        engine.scheduler.abort(request.request_id)
    requests[0].priority = 1
    engine.step()
    urgent = make_request(9, list(range(1, 21)), 10)
    engine.scheduler.add(urgent)
    assert [row[0] for row in prefills_by_step(engine, runner)[0]] == [9]
    engine, _, requests = twins(min_shared=1)
    for request in requests[1:]:
        engine.scheduler.abort(request.request_id)
    engine.step()
    engine.scheduler.add(late := make_request(9, list(range(1, 21)), 10))
    engine.step()
    assert late.slot >= 0 and not requests[0].is_finished


def test_check_fits_request_larger_than_the_pool_names_pages():
    engine, _ = make_engine(num_pages=10, seed=0, speculative=TREE)
    with pytest.raises(RequestError, match="need 20 pages of 3 tokens, the whole pool has 10"):
        engine.scheduler.check_fits(make_request(0, 20, 40))


def test_commit_nan_ends_that_request_alone():
    engine, runner = make_engine(num_pages=90, seed=1, speculative=TREE)
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
            self.batches, self.counted, self.timed = [], [], []

        def choose(self, batch):
            self.batches.append(batch)
            return len(self.batches) % 3

        def count(self, shape, accepted_by_shape):
            self.counted += [(shape, accepted) for accepted in accepted_by_shape]

        def time(self, batch, shape, seconds):
            self.timed.append((batch, shape))
            assert 0 < seconds < 1

    engine, runner = make_engine(num_pages=90, seed=1, speculative=TREE)
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
    assert chooser.timed == [(len(plan.decodes), plan.shape) for plan in rounds]
    assert [plan.shape for plan in rounds] == [(i + 1) % 3 for i in range(len(rounds))]
    assert chooser.counted == [(plan.shape, (2, 1, 0)) for plan in rounds for _ in plan.decodes]
    assert engine.scheduler.acceptance.num_rounds == sum(len(p.decodes) for p in rounds if p.shape == 0)


def test_check_integrity_planted_leak_is_noticed():
    engine, _ = make_engine(num_pages=30, seed=0, speculative=TREE)
    engine.scheduler.kv.reserve(3, 9)
    with pytest.raises(InvariantError, match="idle"):
        engine.scheduler.check_integrity()


def test_config_resolve_is_frozen():
    config = EngineConfig()
    with pytest.raises(AttributeError):
        config.page_size = 3
    assert replace(config, page_size=3).page_size == 3


@pytest.mark.parametrize("chunked_prefill", [0, -1, 2.5])
def test_config_chunk_of_no_tokens_raises(chunked_prefill):
    with pytest.raises(ConfigError, match="chunked_prefill must be at least 1 token"):
        EngineConfig(chunked_prefill=chunked_prefill).check()


def run_until_idle(engine):
    plans, launch = [], engine.runner.launch

    def recorded(plan):
        plans.append(plan)
        return launch(plan)

    engine.runner.launch = recorded
    while not engine.is_idle:
        engine.step()
        engine.scheduler.check_integrity()
    return plans


def test_schedule_a_long_prompt_enters_in_chunks_beside_the_rounds_of_others():
    engine, _ = make_engine(num_pages=90, seed=0, speculative=TREE, chunked_prefill=8)
    short, long = make_request(1, 3, 30), make_request(2, 40, 5)
    for request in (short, long):
        request.stop_token_ids = frozenset()
        engine.scheduler.add(request)
    plans = run_until_idle(engine)
    chunks = [[(r.request_id, r.start, len(r.token_ids)) for r in plan.prefills] for plan in plans if plan.prefills]
    assert chunks == [[(1, 0, 3), (2, 0, 5)], [(2, 5, 8)], [(2, 13, 8)], [(2, 21, 8)], [(2, 29, 8)], [(2, 37, 3)]]
    assert all([r.request_id for r in plan.decodes] == [1] for plan in plans[1:6]), "nobody waits for a long prompt"


def test_schedule_a_text_that_was_seen_is_not_prefilled_again():
    engine, _ = make_engine(num_pages=90, seed=0, speculative=TREE)
    prompt = [3, 1, 4, 1, 5, 9, 2, 6]
    first, again = make_request(1, prompt, 5), make_request(2, prompt, 5)
    other = make_request(3, [*prompt[:6], 7, 7], 5)  # page 2 is (1 5 9), but another token follows
    for request in (first, again, other):
        request.stop_token_ids = frozenset()
        engine.scheduler.add(request)
        run_until_idle(engine)
    assert [r.num_cached_tokens for r in (first, again, other)] == [0, 6, 3]
    assert engine.scheduler.num_cached_tokens == 9 and engine.scheduler.num_prompt_tokens == 24
    longer = make_request(4, [*prompt, *first.output_token_ids], 5)
    engine.scheduler.add(longer)
    run_until_idle(engine)
    assert longer.num_cached_tokens == 12, "the output is found like the prompt"
    assert engine.scheduler.kv.drop_cache() > 0
    assert engine.scheduler.kv.allocator.num_free == 90


def test_schedule_the_last_row_of_a_cached_prompt_is_computed():
    """Sampling and drafting begin with the state of the last row, which no page holds."""
    for length in range(1, 13):
        engine, _ = make_engine(num_pages=90, seed=0, speculative=TREE)
        for i in range(2):
            engine.scheduler.add(make_request(i, range(1, length + 1), 20))
            plans = run_until_idle(engine)
        assert sum(len(r.token_ids) for plan in plans for r in plan.prefills) == (length - 1) % 3 + 1


def test_schedule_pool_for_one_preempts_the_youngest_and_all_finish():
    engine, runner = make_engine(num_pages=20, seed=0, speculative=TREE, prefix_cache=False)
    requests = [make_request(i, 10, 40) for i in range(4)]
    for request in requests:
        request.stop_token_ids = frozenset()
        engine.scheduler.add(request)
    run_until_idle(engine)
    assert [r.output_token_ids for r in requests] == [expected_output(r) for r in requests]
    assert requests[0].num_preemptions == 0 and engine.scheduler.num_preemptions > 0
    assert runner.counts["resumed"] > 0
    assert engine.scheduler.num_preemptions == sum(r.num_preemptions for r in requests)


def test_schedule_an_urgent_request_takes_the_place_of_another():
    engine, _ = make_engine(num_pages=90, seed=0, speculative=TREE, max_batch=1)
    patient, urgent = make_request(1, 10, 40, priority=1), make_request(2, 10, 10, priority=0)
    patient.stop_token_ids = frozenset()
    engine.scheduler.add(patient)
    for _ in range(3):
        engine.step()
    engine.scheduler.add(urgent)
    engine.step()
    assert [r.request_id for r in engine.scheduler.running] == [2]
    run_until_idle(engine)
    assert [r.output_token_ids for r in (patient, urgent)] == [expected_output(r) for r in (patient, urgent)]
    assert patient.num_preemptions == 1 and patient.finished_s > urgent.finished_s


def test_schedule_a_passed_deadline_ends_the_request_and_reports_it():
    engine, _ = make_engine(num_pages=90, seed=0, speculative=TREE, max_batch=1)
    requests = [make_request(i, 5, 40, deadline_s=FAR) for i in range(2)]
    for request in requests:
        request.stop_token_ids = frozenset()
        engine.scheduler.add(request)
    engine.step()
    for request in requests:
        request.deadline_s = 0
    assert engine.step() == requests and engine.is_idle
    assert all(r.finish_reason == "abort" and "deadline" in r.error for r in requests)
    engine.scheduler.check_integrity()


def test_abort_of_a_preempted_request_with_a_round_in_flight_drops_it():
    engine, _ = make_engine(num_pages=90, seed=0, speculative=TREE, max_pending=1, max_batch=1)
    patient, urgent = make_request(1, 10, 40, priority=1), make_request(2, 10, 10)
    engine.scheduler.add(patient)
    for _ in range(3):
        engine.step()
    engine.scheduler.add(urgent)
    engine.scheduler.schedule()
    assert patient.slot < 0 and patient.pending > 0
    engine.scheduler.abort(1)
    engine.scheduler.check_integrity()
    assert list(engine.scheduler.by_id) == [2]


def test_commit_nan_pages_are_not_kept():
    engine, runner = make_engine(num_pages=90, seed=1, speculative=TREE)
    runner.nan_ids = {1}
    prompt = list(range(1, 20))
    for i in (1, 2):
        engine.scheduler.add(make_request(i, prompt, 30))
    run_until_idle(engine)
    kept = engine.scheduler.kv.find_prefix(prompt, 99)
    assert len(kept) == 6, "request 2 is good"
    assert engine.scheduler.kv.check_integrity() is None


def _keys_without_followers(self, token_ids, first, max_pages):
    size = self.page_size
    for start in range(first * size, min(max_pages, (len(token_ids) - 1) // size) * size, size):
        yield tuple(token_ids[start : start + size])


def _never_used(self, path):
    pass


def _last_row_from_the_cache(self, request):
    num_rows = request.num_known - bool(request.output_token_ids)
    return self.kv.find_prefix((*request.known_token_ids, 1), num_rows // self.kv.page_size)


def _launched_or_not(self, request):
    return request.known_token_ids


def _nothing_in_flight(self, request):
    return request.kv_len


def _nobody_makes_way(self):
    pass


def _pages_stay(self, request):
    self._free_slots.append(request.slot)
    self._released_slots.append(request.slot)
    self.running.remove(request)
    request.slot, request.owned_len = -1, 0


FAULTS = {
    "a page is found by its own tokens alone": (PrefixCache, "_keys", _keys_without_followers),
    "shared pages are evicted": (PrefixCache, "use", _never_used),
    "nothing is left to compute": (Scheduler, "_cached", _last_row_from_the_cache),
    "pages are cached before they are computed": (Scheduler, "_committed", _launched_or_not),
    "rounds in flight are forgotten": (Scheduler, "_upper", _nothing_in_flight),
    "priorities only order the queue": (Scheduler, "_make_way", _nobody_makes_way),
    "pages stay with an empty slot": (Scheduler, "_leave_slot", _pages_stay),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_random_traces_notice_a_planted_fault(fault, monkeypatch):
    owner, name, wrong = FAULTS[fault]
    monkeypatch.setattr(owner, name, wrong)
    options = {"speculative": TREE, "max_pending": 1, "page_size": 2, "num_pages": 33, "chunked_prefill": 8}
    with pytest.raises((AssertionError, InvariantError, IndexError)):
        for seed in range(30):
            Trace(seed, **options).run(150)
