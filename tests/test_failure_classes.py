"""Faults that other engines had (failure classes): each has a check, and each check fails once its fault is planted.

Most never show in the text. What shows them: the pools against a dense forward over the final text (kv_oracle), every
round's tree against that of another layout, and positions, page tables and pages seen from outside.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import pytest
import torch

from kv_oracle import generate_checked
from runner.drafters import use_perfect_drafter
from scripted_drafter import ScriptedDrafter
from small_models import change_config, spoil, write_pair
from treedraft import LLM, SamplingParams, SpeculativeConfig
from treedraft.attention.reference import BEYOND, TorchTreeAttention
from treedraft.debug.trace import recording
from treedraft.engine.acceptance import MIN_ROUNDS
from treedraft.engine.request import Request
from treedraft.errors import CheckpointError, ConfigError
from treedraft.kv.allocator import ZERO_PAGE
from treedraft.kv.manager import KVManager
from treedraft.kv.page_table import PageTable, slots_of
from treedraft.models.draft.eagle3 import Eagle3MlaHead
from treedraft.runner import operators as operators_module
from treedraft.runner import round as round_module
from treedraft.runner import runner as runner_module
from treedraft.runner.drafter import EagleDrafter
from treedraft.runner.round import Target
from treedraft.types import Accepted
from treedraft.weights import loader as loader_module

Problems = list[str]
Fault = Callable[[pytest.MonkeyPatch], None]
GREEDY = SamplingParams(temperature=0, max_tokens=18, ignore_eos=True)


def make_llm(shape: tuple[int, int, int] | None = (5, 4, 16), **options: Any) -> LLM:
    speculative = None if shape is None else SpeculativeConfig(*shape)
    settings = {"max_batch": 4, "max_context": 128, **options}
    return LLM("demo", dtype="float64", device="cpu", speculative=speculative, capture="off", **settings)


def expect(check: Callable[[], Problems], fault: Fault | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a fault the check finds nothing; with one it finds something, or the engine itself refuses to go on."""
    if fault is None:
        assert check() == []
        return
    fault(monkeypatch)
    try:
        problems = check()
    except (IndexError, RuntimeError, ValueError) as error:  # InvariantError is a RuntimeError
        problems = [repr(error)]
    assert problems, "the planted fault went unnoticed"


def faulty(**faults: Fault) -> Any:
    """Parametrise a test over no fault and each of the given ones."""
    names = ["none", *(name.replace("_", " ") for name in faults)]
    return pytest.mark.parametrize("fault", [None, *faults.values()], ids=names)


def wrap(owner: Any, name: str, make: Callable[[Any], Any]) -> Fault:
    """A fault that replaces `owner.name` by `make(original)`."""
    return lambda monkeypatch: monkeypatch.setattr(owner, name, make(getattr(owner, name)))


@pytest.fixture(scope="module")
def prompts(plain64: LLM, demo_prompts: list[str]) -> list[list[int]]:
    """Three prompts of different lengths."""
    return [plain64.encode(p)[:n] for p, n in zip(demo_prompts, (11, 18, 24), strict=False)]


@pytest.fixture(scope="module")
def expected(plain64: LLM) -> Callable[..., list[tuple[int, ...]]]:
    """What the model says without speculation; kept, since many tests ask for the same."""
    kept: dict[str, list[tuple[int, ...]]] = {}

    def ask(asked: list[list[int]], params: SamplingParams | list[SamplingParams]) -> list[tuple[int, ...]]:
        key = repr((asked, params))
        if key not in kept:
            kept[key] = tokens_of(plain64.generate(asked, params, progress=False))
        return kept[key]

    return ask


def tokens_of(outputs: Any) -> list[tuple[int, ...]]:
    return [c.token_ids for o in outputs for c in o.outputs]


def text_problems(given: Any, expected: list[tuple[int, ...]]) -> Problems:
    return [f"text {i} differs" for i, (a, b) in enumerate(zip(tokens_of(given), expected, strict=True)) if a != b]


Rounds = list[list[tuple[Any, ...]]]


def traced(llm: LLM, prompts: list[list[int]], params: Any) -> Rounds:
    """Every round of each prompt: the tree, the target's tokens and the walk, without page numbers or slots."""
    trace: list[Any] = []
    first_id = llm._next_id
    with recording(llm, trace):
        llm.generate(prompts, params, progress=False)
    rounds: Rounds = [[] for _ in prompts]
    for r in trace:
        rounds[r.request_id - first_id].append(
            (r.kv_len, r.token_ids, r.parents, r.sampled[: len(r.accepted_columns)], r.accepted_columns)
        )
    return rounds


def round_problems(given: Rounds, expected: Rounds) -> Problems:
    found = []
    for i, (a, b) in enumerate(zip(given, expected, strict=True)):
        first = next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
        if first is not None or len(a) != len(b):
            found.append(f"sequence {i} has another tree in round {first}")
    return found


# ------------------------------------------------------------------ 1: positions of draft rows


def _shifted_levels(original: Any) -> Any:
    return lambda self, batch, *rest: original(self, replace(batch, kv_lens=batch.kv_lens + 1), *rest)


def _mutated_lengths(original: Any) -> Any:
    def forward(self: Any, batch: Any, *rest: Any) -> Any:
        out = original(self, batch, *rest)
        batch.kv_lens.add_(1)  # a shared buffer is "advanced" between levels, and put back only by the next round
        return out

    return forward


def _shifted_extension(original: Any) -> Any:
    return lambda self, batch, *rest: original(self, replace(batch, tail_positions=batch.tail_positions + 1), *rest)


def _shifted_prefill(original: Any) -> Any:
    return lambda self, batch, *rest: original(self, replace(batch, positions=batch.positions + 1), *rest)


def check_positions(llm: LLM, prompts: list[list[int]]) -> Problems:
    """Prefill 0 .. L-1; the rows of level l >= 2, whose tokens have depth l - 1, at L + l - 2; extension L .. L+m."""
    log: list[Any] = []
    original = Eagle3MlaHead.forward
    shape = llm.config.speculative
    assert shape is not None

    def spy(self: Any, hidden: Any, token_ids: Any, positions: Any, attend: Any) -> Any:
        log.append(positions.clone())
        return original(self, hidden, token_ids, positions, attend)

    found: Problems = []

    def see_round(rows: Any, batch: Any, result: Any) -> None:
        start = torch.tensor([prompt_len + emitted[r.request_id] for r in rows])[:, None]
        levels = [start.expand(-1, shape.topk) + level - 2 for level in range(2, shape.num_steps + 1)]
        want = [*levels, start + torch.arange(shape.max_path)]
        found.extend(
            f"forward {i} of a round at {a.tolist()}, not {b.tolist()}"
            for i, (a, b) in enumerate(zip(log, want, strict=True))
            if not torch.equal(a, b)
        )
        log.clear()
        for b, row in enumerate(rows):
            emitted[row.request_id] += int(result.accepted.num_accepted[b]) + 1

    prompt_len, size = len(prompts[0]), len(prompts)
    emitted = dict.fromkeys(range(llm._next_id, llm._next_id + size), 0)
    steps: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Eagle3MlaHead, "forward", spy)
        launch = llm.runner._launch_prefill

        def launch_prefill(rows: Any) -> Any:
            out = launch(rows)
            steps.append([p.tolist() for p in log])
            log.clear()
            return out

        patch.setattr(llm.runner, "_launch_prefill", launch_prefill)
        llm.runner.observer = see_round
        try:
            llm.generate(prompts, GREEDY, progress=False)
        finally:
            llm.runner.observer = None
    if steps != [[list(range(prompt_len)) * size]]:
        found.append(f"prefill at {steps}")
    return found


@faulty(
    levels_one_too_far=wrap(EagleDrafter, "_forward_frontier", _shifted_levels),
    lengths_mutated_between_levels=wrap(EagleDrafter, "_forward_frontier", _mutated_lengths),
    extension_one_too_far=wrap(EagleDrafter, "extend", _shifted_extension),
    prefill_one_too_far=wrap(EagleDrafter, "prefill", _shifted_prefill),
)
def test_class_1_draft_rows_are_at_their_positions(fault, tree64, prompts, monkeypatch):
    same_length = [p[:11] for p in prompts[:2]]
    expect(lambda: check_positions(tree64, same_length), fault, monkeypatch)


@faulty(
    extension_one_too_far=wrap(EagleDrafter, "extend", _shifted_extension),
    prefill_one_too_far=wrap(EagleDrafter, "prefill", _shifted_prefill),
)
def test_class_1_draft_kv_equals_a_dense_forward_over_the_text(fault, tree64, prompts, monkeypatch):
    expect(lambda: generate_checked(tree64, prompts, GREEDY)[1], fault, monkeypatch)


# ------------------------------------------------------------------ 5: page-table rows and the tail


def _no_tail(*modules: str) -> Fault:
    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        for module in modules:
            monkeypatch.setattr(f"treedraft.{module}.speculative_tail", lambda speculative: 0)

    return plant


def _no_tail_and_no_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows without room for the tail, and nobody who looks: cells beyond a row are the next row's."""
    _no_tail("config")(monkeypatch)

    def apply(self: PageTable, updates: Any) -> None:
        for u in updates:
            start = u.slot * self.width + u.column
            self.table.view(-1)[start : start + len(u.pages)] = torch.tensor(u.pages, dtype=torch.int32)

    def reserve(self: KVManager, slot: int, num_tokens: int) -> Any:
        self.table_width, width = 10**6, self.table_width
        try:
            return original(self, slot, num_tokens)
        finally:
            self.table_width = width

    original = KVManager.reserve
    monkeypatch.setattr(PageTable, "apply", apply)
    monkeypatch.setattr(KVManager, "reserve", reserve)


@contextmanager
def watching_rows(llm: LLM, found: Problems) -> Iterator[None]:
    """After every step each row of the page table must hold the slot's own pages, then the trash page."""
    pages, kv = llm.runner.pages, llm.engine.scheduler.kv
    original = llm.runner.launch

    def launch(plan: Any) -> Any:
        ticket = original(plan)
        for request in llm.engine.scheduler.running:
            owned = kv.owned(request.slot)
            if pages.table[request.slot].tolist() != [*owned, *[1] * (pages.width - len(owned))]:
                found.append(f"row of slot {request.slot} is not what it owns")
        return ticket

    llm.runner.launch = launch  # type: ignore[method-assign]
    try:
        yield
    finally:
        llm.runner.launch = original  # type: ignore[method-assign]


def check_context_limit(page_size: int, prompts: list[list[int]], expected: Any, wide: Rounds) -> Problems:
    """A sequence ends exactly at the context limit beside one that does not; its last trees are as good as any."""
    limit = len(prompts[2]) + 16
    llm = make_llm((3, 4, 9), page_size=page_size, max_context=limit, max_batch=2)
    found: Problems = []
    params = [replace(GREEDY, max_tokens=100), replace(GREEDY, max_tokens=14)]
    with watching_rows(llm, found):
        rounds = traced(llm, [prompts[2], prompts[0]], params)
        outputs = llm.generate([prompts[2], prompts[0]], params, progress=False)
    lengths = [len(t) for t in tokens_of(outputs)]
    if lengths != [16, 14] or outputs[0].outputs[0].finish_reason != "length":
        found.append(f"ended after {lengths} tokens")
    found += text_problems(outputs, expected)
    llm.engine.scheduler.check_integrity()
    return found + round_problems(rounds, wide)


CONTEXT_FAULTS: dict[str, Fault | None] = {
    "none": None,
    "tail left out of the width": _no_tail("config"),
    "tail left out everywhere": _no_tail("config", "runner.build", "engine.scheduler"),
    "tail left out and unchecked": _no_tail_and_no_checks,
}


@pytest.fixture(scope="module")
def wide_rounds(prompts):
    """The rounds of check_context_limit where the context is far away."""
    params = [replace(GREEDY, max_tokens=16), replace(GREEDY, max_tokens=14)]
    return traced(make_llm((3, 4, 9), max_batch=2), [prompts[2], prompts[0]], params)


@pytest.mark.parametrize(
    ("page_size", "fault"),
    [(1, "none"), (2, "none"), (16, "none"), (64, "none")]
    + [(p, f) for f, p in zip(list(CONTEXT_FAULTS)[1:], (2, 1, 2), strict=True)],
)
def test_class_5_a_request_ends_exactly_at_the_context_limit(
    page_size, fault, prompts, expected, wide_rounds, monkeypatch
):
    params = [replace(GREEDY, max_tokens=16), replace(GREEDY, max_tokens=14)]
    text = expected([prompts[2], prompts[0]], params)
    check = lambda: check_context_limit(page_size, prompts, text, wide_rounds)  # noqa: E731
    expect(check, CONTEXT_FAULTS[fault], monkeypatch)


def test_class_5_unchecked_rows_without_a_tail_spoil_the_neighbours_row(prompts, monkeypatch):
    """The check of rows itself sees it, not only the engine's guards."""
    _no_tail_and_no_checks(monkeypatch)
    llm = make_llm((3, 4, 9), page_size=2, max_context=len(prompts[2]) + 16, max_batch=3)
    found: Problems = []
    with watching_rows(llm, found), suppress(IndexError):  # the rope table, too, has no room for the tail
        llm.generate([prompts[2], prompts[0]], replace(GREEDY, max_tokens=16), progress=False)
    assert "row of slot 1 is not what it owns" in found


def test_class_5_a_pool_without_room_for_a_tree_still_finishes(tree64, prompts, expected):
    limit = len(prompts[0]) + 20
    token_bytes = sum(p.data[:, 0].nbytes for p in (tree64.runner.target.pool, tree64.runner.drafter.pool))
    llm = make_llm((5, 4, 16), page_size=1, max_context=limit, max_batch=2, kv_memory_bytes=(limit + 2) * token_bytes)
    assert llm.engine.scheduler.kv.allocator.num_allocatable == limit
    given = llm.generate(prompts[:1] * 2, GREEDY, progress=False)  # one after the other
    assert text_problems(given, expected(prompts[:1] * 2, GREEDY)) == []
    llm.engine.scheduler.check_integrity()


# ------------------------------------------------------------------ 6: the order of batch, topk and step


def _branches_before_batch(original: Any) -> Any:
    def forward(self: Any, batch: Any, frontier: Any, hidden: Any, level: int) -> Any:
        return original(self, batch, frontier, hidden.transpose(0, 1).reshape(hidden.shape), level)

    return forward


def _noise_before_batch(original: Any) -> Any:
    def gumbel(keys: Any, positions: Any, vocab_size: int) -> Any:
        noise = original(keys, positions, vocab_size)
        return noise.transpose(0, 1).reshape(noise.shape)

    return gumbel


def check_duplicates(llm: LLM, prompt: list[int], params: SamplingParams) -> Problems:
    """One prompt alone and the same prompt three times: every round's tree and walk is the same."""
    alone = traced(llm, [prompt], params)
    return round_problems(traced(llm, [prompt] * 3, params), alone * 3)


ORDER_FAULTS: dict[str, Fault | None] = {
    "none": None,
    "hidden by branch, then batch": wrap(EagleDrafter, "_forward_frontier", _branches_before_batch),
    "noise by depth, then batch": wrap(operators_module, "gumbel", _noise_before_batch),
}


@pytest.mark.parametrize(
    ("temperature", "fault"), [(0.0, "none"), (0.0, "hidden by branch, then batch"), *((1.0, f) for f in ORDER_FAULTS)]
)
def test_class_6_a_prompt_alone_equals_its_duplicates_in_a_batch(temperature, fault, tree64, prompts, monkeypatch):
    params = replace(GREEDY, temperature=temperature, seed=5, max_tokens=16)
    expect(lambda: check_duplicates(tree64, prompts[1], params), ORDER_FAULTS[fault], monkeypatch)


# ------------------------------------------------------------------ 7: the partial last page


def _tail_on_a_new_page(original: Any) -> Any:
    """Tree nodes start at a page's beginning: what engines do that copy the partial page to every branch."""

    def slots(page_rows: Any, positions: Any, page_size: int) -> Any:
        if positions.shape[1] > 1:
            positions = positions + (-positions[:, :1]) % page_size
        return original(page_rows, positions, page_size)

    return slots


def _last_page_left_out(original: Any) -> Any:
    def plan_prefix(self: Any, page_table: Any, kv_lens: Any, max_kv_len: int, tail_slots: Any, page_size: int) -> Any:
        plan = original(self, page_table, kv_lens, max_kv_len, tail_slots, page_size)
        is_partial = torch.arange(plan.slots.shape[1]) >= kv_lens[:, None] // page_size * page_size
        return replace(
            plan, slots=plan.slots.masked_fill(is_partial, 0), mask=plan.mask.masked_fill(is_partial, BEYOND)
        )

    return plan_prefix


PAGE_FAULTS: dict[str, Fault | None] = {
    "none": None,
    "tree on a new page": wrap(operators_module, "slots_of", _tail_on_a_new_page),
    "last page left out": wrap(TorchTreeAttention, "plan_prefix", _last_page_left_out),
}


def lengths_of_every_remainder(prompts: list[list[int]], page_size: int) -> list[list[int]]:
    return [prompts[2][: 4 + n] for n in range(page_size)]


@pytest.fixture(scope="module")
def rounds_by_token(prompts):
    """Rounds of prompts of 16 lengths with pages of one token, where no page is ever partial."""
    params = replace(GREEDY, max_tokens=7)
    return traced(make_llm((3, 2, 6), page_size=1, max_batch=8), lengths_of_every_remainder(prompts, 16), params)


@pytest.mark.parametrize(
    ("page_size", "fault"),
    [(2, "none"), (3, "none"), (16, "none"), (3, "tree on a new page"), (3, "last page left out")],
)
def test_class_7_every_length_mod_page_size_gives_the_rounds_of_page_size_1(
    page_size, fault, prompts, rounds_by_token, monkeypatch
):
    llm = make_llm((3, 2, 6), page_size=page_size, max_batch=8)
    lengths = lengths_of_every_remainder(prompts, page_size)

    def check() -> Problems:
        return round_problems(traced(llm, lengths, replace(GREEDY, max_tokens=7)), rounds_by_token[: len(lengths)])

    expect(check, PAGE_FAULTS[fault], monkeypatch)


# ------------------------------------------------------------------ 8: num_draft_tokens is not num_steps + 1


def _rows_of_nodes(original: Any) -> Any:
    """Features indexed as if every sequence had num_draft_tokens rows: right for N = S + 1, or for one sequence."""

    def extend(self: Any, batch: Any, features: Any, accepted: Any) -> Any:
        size, path = features.shape[:2]
        index = torch.arange(size)[:, None] * self.shape.num_draft_tokens + torch.arange(path)
        return original(self, batch, features.flatten(0, 1)[index.clamp(max=size * path - 1)], accepted)

    return extend


def _path_of_steps(original: Any) -> Any:
    return lambda tree, sampled, max_path: original(tree, sampled, 4)  # num_steps + 1, whatever N


@pytest.mark.parametrize("shape", [(3, 2, 9), (4, 1, 3), (3, 4, 2), (1, 8, 6)], ids=str)
def test_class_8_trees_of_other_than_steps_plus_one_nodes(shape, prompts, expected):
    given, problems = generate_checked(make_llm(shape, page_size=3), prompts, GREEDY)
    assert problems + text_problems(given, expected(prompts, GREEDY)) == []


@pytest.mark.parametrize(
    ("shape", "fault"),
    [
        ((3, 2, 9), wrap(EagleDrafter, "extend", _rows_of_nodes)),
        ((3, 4, 2), wrap(operators_module, "walk", _path_of_steps)),
    ],
    ids=["rows counted by nodes", "paths of num_steps + 1"],
)
def test_class_8_assuming_steps_plus_one_nodes_is_noticed(shape, fault, prompts, expected, monkeypatch):
    llm = make_llm(shape)

    def check() -> Problems:
        given, problems = generate_checked(llm, prompts, GREEDY)
        return problems + text_problems(given, expected(prompts, GREEDY))

    expect(check, fault, monkeypatch)


# ------------------------------------------------------------------ 9: accepted nodes are no dense prefix

SCRIPTS = {
    "0 2 5": ([-1, 0, 0, 1, 2, 2], [0, 2, 5], (2, 2, 6)),
    "0 4 5 9 15": ([-1, 0, 0, 0, 0, 4, 4, 1, 5, 5, 5, 8, 9, 9, 9, 9], [0, 4, 5, 9, 15], (4, 4, 16)),
    "0 1 2 3 in 65": ([-1, 0, 1, 2, *[0] * 61], [0, 1, 2, 3], (3, 8, 65)),
    "0 62 63 64": ([-1, *[0] * 62, 62, 63], [0, 62, 63, 64], (3, 8, 65)),  # the sign bit, and a second word
}


def _dense(accepted: Accepted) -> Accepted:
    return replace(accepted, columns=torch.arange(accepted.columns.shape[1]).expand(accepted.columns.shape))


def _dense_commit(original: Any) -> Any:
    return lambda self, batch, accepted: original(self, batch, _dense(accepted))


def _dense_walk(original: Any) -> Any:
    return lambda *args: _dense(original(*args))


def _dense_features(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = {}
    verify, extend = Target.verify, EagleDrafter.extend

    def keep(self: Any, batch: Any, tree: Any) -> Any:
        kept["output"] = verify(self, batch, tree)
        return kept["output"]

    def dense(self: Any, batch: Any, features: Any, accepted: Any) -> None:
        extend(self, batch, kept["output"].features[:, : features.shape[1]], accepted)

    monkeypatch.setattr(Target, "verify", keep)
    monkeypatch.setattr(EagleDrafter, "extend", dense)


NODE_FAULTS: dict[str, Fault | None] = {
    "none": None,
    "dense commit": wrap(Target, "commit", _dense_commit),
    "dense walk": wrap(operators_module, "walk", _dense_walk),
    "dense features": _dense_features,
}


@pytest.mark.parametrize(
    ("script", "fault"), [*((s, "none") for s in SCRIPTS), *(("0 2 5", f) for f in list(NODE_FAULTS)[1:])]
)
def test_class_9_accepted_children_that_are_not_first_siblings(script, fault, prompts, expected, monkeypatch):
    parents, path, shape = SCRIPTS[script]
    num_tokens = 1 + 3 * len(path)
    params = replace(GREEDY, max_tokens=num_tokens)
    longer = expected(prompts[:2], replace(GREEDY, max_tokens=24))
    texts = [[*p, *t] for p, t in zip(prompts, longer, strict=False)]
    llm = make_llm(shape, page_size=3, max_batch=2)
    llm.runner.drafter = ScriptedDrafter(llm, parents, path, texts)

    def check() -> Problems:
        given, problems = generate_checked(llm, prompts[:2], params)
        if any(o.metrics.accept_length != len(path) for o in given):
            problems.append("the path was not accepted")
        return problems + text_problems(given, [t[:num_tokens] for t in longer])

    expect(check, NODE_FAULTS[fault], monkeypatch)


# ------------------------------------------------------------------ 12: pages per request, and what freed pages hold


def _one_page_leaks(original: Any) -> Any:
    def release(self: KVManager, slot: int, *text: Any) -> int:
        self._pages.get(slot, [0]).pop()
        return original(self, slot, *text)

    return release


@faulty(one_page_leaks=wrap(KVManager, "release", _one_page_leaks))
def test_class_12_when_idle_all_pages_are_free_or_cached(fault, prompts, monkeypatch):
    llm = make_llm((3, 2, 6), page_size=2, max_batch=2)
    kv = llm.engine.scheduler.kv

    def check() -> Problems:
        llm.generate(prompts * 2, replace(GREEDY, max_tokens=6), progress=False)
        llm.engine.scheduler.check_integrity()
        return [] if kv.num_available == kv.allocator.num_allocatable else ["pages are lost"]

    expect(check, fault, monkeypatch)


@contextmanager
def poisoning(llm: LLM) -> Iterator[None]:
    """Before every step, NaN in every page that is neither owned nor cached, the trash page included."""
    pools = [llm.runner.target.pool, llm.runner.drafter.pool]  # type: ignore[union-attr]
    kv = llm.engine.scheduler.kv
    original = llm.runner.launch

    def launch(plan: Any) -> Any:
        owned = {page for r in llm.engine.scheduler.running for page in kv.owned(r.slot)}
        cached = set(kv.cache.pages())
        new = {page for update in plan.page_updates for page in update.pages} - cached
        for pool in pools:
            for page in set(range(pool.num_pages)) - (owned - new) - cached - {ZERO_PAGE}:
                pool.data[:, page * pool.page_size : (page + 1) * pool.page_size] = torch.nan
        return original(plan)

    llm.runner.launch = launch  # type: ignore[method-assign]
    try:
        yield
    finally:
        llm.runner.launch = original  # type: ignore[method-assign]


def _unowned_slots_are_read(original: Any) -> Any:
    """Columns beyond kv_len are masked by their score alone, and read whatever page the row names."""

    def plan_prefix(self: Any, page_table: Any, kv_lens: Any, max_kv_len: int, tail_slots: Any, page_size: int) -> Any:
        plan = original(self, page_table, kv_lens, max_kv_len, tail_slots, page_size)
        columns = torch.arange(plan.slots.shape[1]).expand(len(kv_lens), -1)
        return replace(plan, slots=slots_of(page_table, columns, page_size))

    return plan_prefix


@faulty(unowned_slots_are_read=wrap(TorchTreeAttention, "plan_prefix", _unowned_slots_are_read))
def test_freed_pages_full_of_nan_change_nothing(fault, prompts, expected, monkeypatch):
    llm = make_llm((3, 4, 9), page_size=3, max_batch=2, max_context=64)
    params = [replace(GREEDY, max_tokens=n) for n in (6, 15, 11)]
    text = expected(prompts, params)
    clean = traced(llm, prompts, params)

    def check() -> Problems:
        with poisoning(llm):
            given = llm.generate(prompts, params, progress=False)
            rounds = traced(llm, prompts, params)
        return text_problems(given, text) + round_problems(rounds, clean)

    expect(check, fault, monkeypatch)


# ------------------------------------------------------------------ 14: one logprob for each token


def _first_of_each_round(original: Any) -> Any:
    return lambda *args: original(*args)[:, :1]


def _first_columns(original: Any) -> Any:
    return lambda result, *rest: original(replace(result, accepted=_dense(result.accepted)), *rest)


@faulty(
    one_for_each_round=wrap(runner_module, "path_logprobs", _first_of_each_round),
    of_the_first_columns=wrap(runner_module, "path_logprobs", _first_columns),
)
def test_class_14_every_token_has_its_logprob(fault, tree64, plain64, prompts, monkeypatch):
    params = replace(GREEDY, logprobs=1)
    plain = [o.outputs[0].logprobs for o in plain64.generate(prompts, params, progress=False)]

    def check() -> Problems:
        found = []
        for i, output in enumerate(tree64.generate(prompts, params, progress=False)):
            given = output.outputs[0].logprobs or ()
            if len(given) != len(output.outputs[0].token_ids):
                found.append(f"{len(given)} logprobs in text {i}")
            elif max(abs(a - b) for a, b in zip(given, plain[i], strict=True)) > 1e-9:
                found.append(f"logprobs of text {i} differ")
        return found

    expect(check, fault, monkeypatch)


# ------------------------------------------------------------------ 15: sampling parameters on tree nodes


def dropping(stage: str) -> Fault:
    """Verification forgets one stage of the sampling chain."""

    def make(original: Any) -> Any:
        def process(logits: Any, rows: Any, *rest: Any) -> Any:
            if logits.shape[1] > 1:
                rows = replace(rows, stages=rows.stages - {stage})
            return original(logits, rows, *rest)

        return process

    return wrap(operators_module, "process", make)


def frequent_token(texts: list[tuple[int, ...]]) -> int:
    return Counter(t for text in texts for t in text).most_common(1)[0][0]


@pytest.mark.parametrize("is_planted", [False, True], ids=["right", "dropped"])
@pytest.mark.parametrize("stage", ["bias", "min_p", "top_p", "top_k", "penalties", "min_tokens", "noise"])
def test_class_15_sampling_parameters_reach_every_node(stage, is_planted, tree64, prompts, expected, monkeypatch):
    greedy = expected(prompts, GREEDY)
    common = frequent_token(greedy)
    warm = replace(GREEDY, temperature=1.0, seed=7)
    params = {
        "bias": replace(GREEDY, logit_bias={common: -100}),
        "min_p": replace(warm, min_p=0.99),
        "top_p": replace(warm, top_p=1e-6),
        "top_k": replace(warm, top_k=1),
        "penalties": replace(GREEDY, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.5),
        "min_tokens": replace(GREEDY, stop_token_ids=(common,), min_tokens=18),
        "noise": replace(warm, temperature=0.6),
    }[stage]
    text = greedy if stage in ("min_p", "top_p", "top_k") else expected(prompts, params)

    def check() -> Problems:
        given = tree64.generate(prompts, params, progress=False)
        found = text_problems(given, text)
        if stage in ("bias", "min_tokens") and any(common in t for t in tokens_of(given)):
            found.append(f"token {common} was said")
        return found

    expect(check, dropping(stage) if is_planted else None, monkeypatch)


def _no_path(original: Any) -> Any:
    return lambda tree, *rest: tree.token_ids.new_empty((*tree.token_ids.shape, 0))


@faulty(own_path_not_counted=wrap(round_module, "paths_of", _no_path))
def test_class_15_penalties_count_the_nodes_own_path(fault, prompts, expected, monkeypatch):
    """A favoured token comes again and again, each time a little less: in a run of five the path's counts decide."""
    common = frequent_token(expected(prompts, GREEDY))
    params = replace(GREEDY, logit_bias={common: 9}, frequency_penalty=1.5, presence_penalty=1.0)
    text = expected(prompts[:2], params)
    assert max(t.count(common) for t in text) > 3
    llm = make_llm((5, 1, 6), max_batch=2)
    texts = [[*p, *t] for p, t in zip(prompts, text, strict=False)]
    llm.runner.drafter = ScriptedDrafter(llm, [-1, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5], texts)
    expect(lambda: text_problems(llm.generate(prompts[:2], params, progress=False), text), fault, monkeypatch)


# ------------------------------------------------------------------ 17: the end inside an accepted run


def _whole_runs(original: Any) -> Any:
    """Only a run's last token can end a request."""

    def append(self: Request, token_ids: Any, logprobs: Any = None, top_logprobs: Any = None) -> None:
        self.output_token_ids += token_ids[:-1]
        original(self, token_ids[-1:], logprobs, top_logprobs)

    return append


def _cap_before_stop(original: Any) -> Any:
    """max_tokens wins over a stop at the same token."""

    def append(self: Request, *args: Any) -> None:
        original(self, *args)
        if len(self.output_token_ids) == self.params.max_tokens:
            self.finish_reason = "length"

    return append


@pytest.fixture(scope="module")
def perfect(prompts):
    return use_perfect_drafter(make_llm((4, 1, 5), max_batch=8, max_context=64))


@faulty(
    stop_seen_at_the_end_of_a_run=wrap(Request, "append", _whole_runs),
    cap_before_stop=wrap(Request, "append", _cap_before_stop),
)
@pytest.mark.parametrize("is_eos", [True, False], ids=["eos", "stop id"])
def test_class_17_the_first_of_stop_and_cap_ends_a_run_of_five(is_eos, fault, perfect, prompts, expected, monkeypatch):
    text = expected(prompts[:1], replace(GREEDY, max_tokens=12))[0]
    stops = [i for i in range(9) if text.index(text[i]) == i][-4:]  # where the token comes for the first time
    cases = [(stop, cap) for stop in stops for cap in {stop, stop + 1, stop + 2, 12} if cap > 0]

    def check() -> Problems:
        found = []
        for stop in stops:
            caps = [c for s, c in cases if s == stop]
            if is_eos:
                monkeypatch.setattr(perfect, "eos_token_ids", (text[stop],))
            ids = () if is_eos else (text[stop],)
            params = [replace(GREEDY, max_tokens=c, ignore_eos=not is_eos, stop_token_ids=ids) for c in caps]
            outputs = perfect.generate(prompts[:1] * len(caps), params, progress=False)
            for cap, output in zip(caps, outputs, strict=True):
                want = (text[: min(stop + 1, cap)], "stop" if stop < cap else "length")
                given = (output.outputs[0].token_ids, output.outputs[0].finish_reason)
                if given != want:
                    found.append(f"stop at {stop}, cap {cap}: {given}, not {want}")
        return found

    expect(check, fault, monkeypatch)


# ------------------------------------------------------------------ 18: a head of another model


def _what_fits(original: Any) -> Any:
    """A loader that copies what fits."""

    def fill(view: Any, tensor: Any, name: str) -> None:
        cut = torch.zeros_like(view)
        part = tuple(slice(min(a, b)) for a, b in zip(view.shape, tensor.shape, strict=False))
        if view.dim() == tensor.dim():
            cut[part] = tensor[part].to(view.dtype)
        view.copy_(cut)

    return fill


@faulty(loader_takes_what_fits=wrap(loader_module, "_fill", _what_fits))
def test_class_18_a_head_with_tensors_of_another_width_is_refused(fault, tmp_path, monkeypatch):
    names = write_pair(tmp_path)
    taps = {"eagle_aux_hidden_state_layer_ids": [0, 1]}
    change_config(tmp_path / "draft", eagle_config=taps)  # two taps, but fc.weight was made for three

    def check() -> Problems:
        try:
            LLM(**names, device="cpu", speculative=SpeculativeConfig(2, 2, 4))
        except CheckpointError as error:
            return [] if all(s in str(error) for s in ("fc.weight", "[16, 32]", "[16, 48]")) else [str(error)]
        return ["it was loaded"]

    expect(check, fault, monkeypatch)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_size": 32}, r"hidden_size is 32.*16"),
        ({"vocab_size": 50}, r"vocab_size is 50.*48"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 4]}}, r"0\.\.3.*\[0, 1, 4\]"),
    ],
)
def test_class_18_a_head_of_another_model_is_refused(fields, message, tmp_path):
    names = write_pair(tmp_path)
    change_config(tmp_path / "draft", **fields)
    with pytest.raises(ConfigError, match=message):
        LLM(**names, device="cpu", speculative=SpeculativeConfig(2, 2, 4))


def test_class_18_a_head_that_never_helps_is_reported_once(prompts, caplog):
    llm = make_llm((2, 1, 3), max_batch=3)
    assert llm.runner.drafter is not None
    spoil(llm.runner.drafter.head)
    with caplog.at_level(logging.WARNING, "treedraft"):
        llm.generate(prompts, replace(GREEDY, max_tokens=MIN_ROUNDS // 3), progress=False)
        assert not caplog.records, "fewer than MIN_ROUNDS rounds say nothing"
        llm.generate(prompts, GREEDY, progress=False)
        llm.generate(prompts, GREEDY, progress=False)
    assert ["no use" in r.getMessage() for r in caplog.records] == [True]


def test_class_18_a_good_head_or_none_is_not_reported(tree64, plain64, prompts, caplog):
    cut = replace(GREEDY, max_tokens=2)  # every round is cut after its first token: no sign of a bad head
    with caplog.at_level(logging.WARNING, "treedraft"):
        for llm in (tree64, plain64):
            llm.generate(prompts, cut, progress=False)
        while tree64.engine.scheduler.acceptance.num_rounds < MIN_ROUNDS:
            tree64.generate(prompts, replace(GREEDY, max_tokens=50), progress=False)
            tree64.generate(prompts * 2, cut, progress=False)
    assert plain64.engine.scheduler.acceptance.num_rounds == 0
    assert not caplog.records
