"""What a round costs: its time by part, launches, the device's idle time, and a verify of N nodes beside one of 1.

Sequences are stood up without a prompt: pages owned, `context` committed positions of random KV, random roots and
random recycled states, so that routers spread the rows over the experts as text would. Each timed run begins there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Group, RenderableType
from rich.table import Table
from torch import Tensor

from treedraft.attention import backend_named, make_backend
from treedraft.bench.parts import (
    DeviceEvent,
    device_events,
    host_parts,
    idle_share,
    label_by_order,
    sum_parts,
    without_overlap,
)
from treedraft.bench.timing import Ceilings, captured, measure_ceilings, time_runs
from treedraft.bench.trees import random_draft_tree
from treedraft.errors import ConfigError
from treedraft.kv.allocator import NUM_RESERVED_PAGES, PageAllocator
from treedraft.kv.manager import KVManager
from treedraft.models.config import ModelConfig
from treedraft.runner.batch import gather_decode, pack_decode
from treedraft.runner.drafter import EagleDrafter, chain_bits
from treedraft.runner.runner import Runner
from treedraft.types import DecodeRow, DraftTree, PrefillRow, SamplingParams

if TYPE_CHECKING:
    from treedraft.cli.options import EngineOptions
    from treedraft.config import SpeculativeConfig
    from treedraft.llm import LLM

PLAIN, TREE = "no speculation", "tree"
PROFILED_ROUNDS = 8
SLACK = 512  # positions beyond the context: for trees, and for the rounds that are measured


@dataclass(frozen=True)
class RoundSettings:
    """What is measured."""

    batches: tuple[int, ...] = (1, 8, 64)
    context: int = 1024  # committed positions of each sequence
    nodes: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)  # of the verifies that are compared; () for none
    temperature: float = 0.0
    repetitions: int = 20
    loop_rounds: int = 60  # rounds of the engine's loop; 0 leaves it out
    parts: bool = True


@dataclass(frozen=True)
class RoundRow:
    """One engine at one batch size. Times are of the device, but for loop_ms."""

    engine: str
    batch: int
    round_ms: float  # median; one replay, or on a CPU one eager round
    best_ms: float
    busy_ms: float | None  # time in which any of its kernels ran
    launches: int | None  # kernels, copies and fills of a round
    idle_within: float | None  # 1 - busy_ms / round_ms
    loop_ms: float | None  # wall time of a round in the engine's loop
    idle_between: float | None  # 1 - round_ms / loop_ms
    idle_timeline: float | None  # of some rounds of the loop, from the profiler's timeline, which slows the host
    tokens_per_s: float | None  # of the loop
    tokens_per_round: float | None  # by sequence
    floor_ms: float | None  # to read the active weights and the context's KV once, at the copy's bandwidth
    roofline: float | None  # floor_ms / round_ms; None for trees: their floor is not this one
    roofline_loop: float | None  # floor_ms / loop_ms
    parts_us: dict[
        str, float
    ]  # "step/kind" -> microseconds; of the replay's kernels where they match the eager round's
    parts_of: str  # "replay", "eager" or "host"
    top_kernels: tuple[tuple[str, int, float], ...]  # name, how many, microseconds in all


@dataclass(frozen=True)
class VerifyRow:
    """A verify of N nodes: forward and logits, captured."""

    batch: int
    nodes: int
    ms: float
    over_one: float  # times that of a verify of 1 node


@dataclass(frozen=True)
class RoundResult:
    """What `bench round` found."""

    settings: RoundSettings
    engine: dict[str, Any]
    speculative: dict[str, Any] | None
    ceilings: Ceilings
    active_bytes: dict[str, int]  # by batch size: weights that one token of each sequence needs
    start_s: dict[str, float]  # to load and capture, by engine
    rows: tuple[RoundRow, ...]
    verifies: tuple[VerifyRow, ...]

    def as_json(self) -> dict[str, Any]:
        """The result as JSON values."""
        return asdict(self)

    def render(self) -> RenderableType:
        """The result as tables."""
        rounds = Table(box=None)
        names = ("engine", "batch", "round ms", "launches", "idle in", "loop ms", "idle between", "timeline", "tok/s")
        for i, name in enumerate((*names, "tok/round", "floor ms", "roofline", "in loop")):
            rounds.add_column(name, justify="left" if i == 0 else "right")
        for r in self.rows:
            rounds.add_row(
                *(r.engine, str(r.batch), f"{r.round_ms:.3f}", _text(r.launches, "d"), _text(r.idle_within, ".1%")),
                *(_text(r.loop_ms, ".3f"), _text(r.idle_between, ".1%"), _text(r.idle_timeline, ".1%")),
                _text(r.tokens_per_s, ".0f"),
                *(_text(r.tokens_per_round, ".2f"), _text(r.floor_ms, ".3f"), _text(r.roofline, ".2f")),
                _text(r.roofline_loop, ".2f"),
            )
        return Group(
            f"context {self.settings.context}, copy {self.ceilings.copy_bytes_per_s / 1e12:.2f} TB/s",
            *(rounds, self._parts_table(), self._verify_table()),
        )

    def _parts_table(self) -> Table:
        rows = [r for r in self.rows if r.parts_us]
        table = Table(box=None)
        table.add_column("microseconds of")
        for r in rows:
            table.add_column(f"{r.engine}, {r.batch} ({r.parts_of})", justify="right")
        for part in sorted({part for r in rows for part in r.parts_us}):
            table.add_row(part, *(_text(r.parts_us.get(part), ".0f") for r in rows))
        return table

    def _verify_table(self) -> Table:
        batches = sorted({v.batch for v in self.verifies})
        table = Table(box=None)
        table.add_column("verify of N nodes, ms", justify="right")
        for batch in batches:
            table.add_column(f"batch {batch} (to N = 1)", justify="right")
        cells = {(v.batch, v.nodes): f"{v.ms:.3f} ({v.over_one:.2f})" for v in self.verifies}
        for nodes in sorted({v.nodes for v in self.verifies}):
            table.add_row(str(nodes), *(cells.get((batch, nodes), "-") for batch in batches))
        return table


def _text(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


# ------------------------------------------------------------------ sequences without prompts


@dataclass(frozen=True)
class Stand:
    """Running sequences that no prompt made, and the device state they began with."""

    rows: tuple[DecodeRow, ...]
    kv_lens: Tensor
    roots: Tensor
    draft_hidden: Tensor

    def put_back(self, runner: Runner) -> None:
        """Return the device state to where it was; the KV that rounds wrote lies beyond it."""
        state = runner.state
        state.kv_lens.copy_(self.kv_lens)
        state.roots.copy_(self.roots)
        state.draft_hidden.copy_(self.draft_hidden)


@contextmanager
@torch.inference_mode()
def standing(llm: LLM, batch: int, context: int, temperature: float = 0.0, seed: int = 0) -> Iterator[Stand]:
    """Stand up `batch` sequences of `context` committed positions. The engine must be idle, and is again afterwards.

    Raise ConfigError when the pools or the context limit are too small.
    """
    runner, config = llm.runner, llm.config
    logical_len = runner.pages.width * config.page_size
    num_pages = runner.target.pool.num_pages
    kv = KVManager(PageAllocator(num_pages), config.page_size, runner.pages.width)
    needed = batch * runner.pages.width
    if batch > config.max_batch or needed + NUM_RESERVED_PAGES > num_pages or context + len(runner.chain) > logical_len:
        raise ConfigError(
            f"{batch} sequences of {context} positions need max_batch of at least {batch} (it is {config.max_batch}), "
            f"{needed} pages (there are {num_pages - NUM_RESERVED_PAGES}) and room for {context + len(runner.chain)} "
            f"positions in a sequence (there is for {logical_len})"
        )
    generator = torch.Generator(runner.device).manual_seed(seed)
    state, vocab_size = runner.state, llm.vocab_size
    pools = [runner.target.pool, *([runner.drafter.pool] if isinstance(runner.drafter, EagleDrafter) else [])]
    for pool in pools:
        pool.data[:, NUM_RESERVED_PAGES * config.page_size :].normal_(generator=generator)
    sampling = SamplingParams(temperature=temperature, seed=seed, max_tokens=1)
    rows = []
    for slot in range(batch):
        update = kv.reserve(slot, logical_len)
        assert update is not None
        runner.pages.apply((update,))
        state.install(PrefillRow(slot, slot, (0,), noise_key=seed + slot, sampling=sampling, stop_token_ids=()))
        nodes = 1 if config.speculative is None else config.speculative.num_draft_tokens
        rows.append(DecodeRow(slot, slot, context, nodes, sampling, is_exact=True))
    state.kv_lens[:batch] = context
    state.roots[:batch] = torch.randint(0, vocab_size, (batch,), generator=generator, device=runner.device)
    state.draft_hidden.normal_(generator=generator)
    stand = Stand(tuple(rows), state.kv_lens.clone(), state.roots.clone(), state.draft_hidden.clone())
    try:
        yield stand
    finally:
        for slot in range(batch):
            runner.pages.clear(slot)
        state.kv_lens.zero_()


# ------------------------------------------------------------------ measuring


def run_rounds(
    engine: EngineOptions,
    speculative: SpeculativeConfig | None,
    settings: RoundSettings,
    note: Callable[[str], None] = lambda text: None,
) -> RoundResult:
    """Measure rounds without speculation, then with the tree. Each engine is dropped before the next is loaded."""
    engine = replace(engine, max_batch=max(settings.batches), max_context=settings.context + SLACK)
    rows: list[RoundRow] = []
    verifies: list[VerifyRow] = []
    start_s: dict[str, float] = {}
    active: dict[str, int] = {}
    ceilings: Ceilings | None = None
    for name, tree in ((PLAIN, None), (TREE, speculative)):
        if name == TREE and tree is None:
            continue
        started = time.perf_counter()
        llm = engine.load(tree)
        start_s[name] = time.perf_counter() - started
        for text in llm.notes:
            note(text)
        if tree is not None and llm.config.speculative is None:
            note("no draft head: rounds with a tree are left out")
            continue
        if ceilings is None:
            ceilings = measure_ceilings(llm.runner.device)
        for batch in settings.batches:
            active[str(batch)] = active_bytes(llm.runner.target.model, batch)
            rows.append(measure_round(llm, name, batch, settings, ceilings))
            note(f"{name}, batch {batch}: {rows[-1].round_ms:.3f} ms a round")
            if name == PLAIN and settings.nodes:
                verifies += measure_verifies(llm, batch, settings)
                note(f"verifies at batch {batch} done")
        del llm
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    assert ceilings is not None
    spec = None if speculative is None else asdict(speculative)
    return RoundResult(settings, asdict(engine), spec, ceilings, active, start_s, tuple(rows), tuple(verifies))


@torch.inference_mode()
def measure_round(llm: LLM, name: str, batch: int, settings: RoundSettings, ceilings: Ceilings) -> RoundRow:
    """Time one engine's rounds at one batch size."""
    runner, is_gpu = llm.runner, llm.runner.device.type == "cuda"
    busy_us = launches = None
    parts: dict[tuple[str, str], float] = {}
    parts_of, events = "host", []
    with standing(llm, batch, settings.context, settings.temperature) as stand:
        run, eager = round_of(runner, stand.rows)

        def put_back() -> None:
            stand.put_back(runner)

        for _ in range(2):
            put_back()
            run()
        timed = time_runs(run, runner.device, settings.repetitions, before=put_back, flush_bytes=1 << 20)
        if is_gpu and settings.parts:
            put_back()
            events = without_overlap(device_events(run))
            busy_us, launches = sum(e.duration_us for e in events), len(events)
            put_back()
            eager()
            put_back()
            by_part = without_overlap(device_events(eager, runner.backends))
            labelled = label_by_order(events, by_part)
            parts_of = "eager" if labelled is None else "replay"
            parts = sum_parts(by_part if labelled is None else labelled)
        elif settings.parts:
            put_back()
            parts = host_parts(eager, runner.backends)
        put_back()
    loop = _loop(llm, batch, settings) if settings.loop_rounds else None
    floor_s = None
    if llm.config.speculative is None:
        itemsize = runner.target.pool.data.itemsize
        kv = batch * settings.context * llm.runner.target.pool.data.shape[2] * len(runner.target.pool.data) * itemsize
        floor_s = (active_bytes(runner.target.model, batch) + kv) / ceilings.copy_bytes_per_s
    round_ms = timed.median_s * 1e3
    return RoundRow(
        engine=name,
        batch=batch,
        round_ms=round_ms,
        best_ms=timed.best_s * 1e3,
        busy_ms=None if busy_us is None else busy_us / 1e3,
        launches=launches,
        idle_within=None if busy_us is None else 1 - busy_us / 1e3 / round_ms,
        loop_ms=None if loop is None else loop.round_ms,
        idle_between=None if loop is None else 1 - round_ms / loop.round_ms,
        idle_timeline=None if loop is None else loop.idle,
        tokens_per_s=None if loop is None else loop.tokens_per_s,
        tokens_per_round=None if loop is None else loop.tokens_per_round,
        floor_ms=None if floor_s is None else floor_s * 1e3,
        roofline=None if floor_s is None else floor_s * 1e3 / round_ms,
        roofline_loop=None if floor_s is None or loop is None else floor_s * 1e3 / loop.round_ms,
        parts_us={"/".join(part): us for part, us in sorted(parts.items())},
        parts_of=parts_of,
        top_kernels=_top(events),
    )


def round_of(runner: Runner, rows: tuple[DecodeRow, ...]) -> tuple[Callable[[], object], Callable[[], object]]:
    """Return the round of these rows as it runs in service, and the same round eagerly: device work only on a GPU."""

    def made_anew() -> object:
        batch = pack_decode(rows, runner.state, runner.pages, runner.page_size, runner.target.attention, runner.chain)
        return runner.run_round(batch, runner.state.sampling_rows(batch.slots, tuple(r.sampling for r in rows)))

    graphs = runner.graphs
    if graphs is None:
        return made_anew, made_anew
    from treedraft.runner.state import stages_of

    program = graphs.pick(len(rows), stages_of(tuple(r.sampling for r in rows)))
    graphs.write_inputs(program, rows)

    def replay() -> None:
        for step in program.steps:
            step()

    return replay, lambda: graphs.round(program.inputs, program.stages)


@dataclass(frozen=True)
class Loop:
    """The engine's loop over full batches."""

    round_ms: float
    tokens_per_s: float
    tokens_per_round: float  # by sequence
    idle: float | None  # share of the device's time between the first and the last kernel of some rounds, profiled


def _loop(llm: LLM, batch: int, settings: RoundSettings) -> Loop:
    """Run the engine, prompts of `context` tokens, and time rounds in which every sequence decodes."""
    generator = torch.Generator().manual_seed(0)
    max_tokens = SLACK - 64
    prompts = torch.randint(0, llm.vocab_size, (batch, settings.context), generator=generator).tolist()
    engine = llm.engine
    try:
        for number, prompt in enumerate(prompts):
            params = SamplingParams(
                temperature=settings.temperature, seed=number, max_tokens=max_tokens, ignore_eos=True
            )
            for request in llm._requests(prompt, params):
                engine.scheduler.add(request)
        while len(engine.scheduler.running) < batch:
            engine.step()
        for _ in range(8):
            engine.step()
        running = list(engine.scheduler.running)
        before = sum(len(r.output_token_ids) for r in running)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        started = time.perf_counter()
        steps = 0
        while steps < settings.loop_rounds and len(engine.scheduler.running) == batch:
            engine.step()
            steps += 1
        elapsed = time.perf_counter() - started
        emitted = sum(len(r.output_token_ids) for r in running) - before
        idle = None
        if llm.runner.device.type == "cuda":
            idle = idle_share(device_events(lambda: [engine.step() for _ in range(PROFILED_ROUNDS)]))
        return Loop(elapsed / steps * 1e3, emitted / elapsed, emitted / steps / batch, idle)
    finally:
        engine.reset()
        if torch.cuda.is_available():
            torch.cuda.synchronize()


@torch.inference_mode()
def measure_verifies(llm: LLM, batch: int, settings: RoundSettings) -> list[VerifyRow]:
    """Time the target's forward and logits over random trees of N nodes."""
    runner, config = llm.runner, llm.config
    backend = backend_named(config.attention_backend)
    if backend.graph != "round" or backend.index_bits is not None:
        return []  # it plans on the host, or in lists that a capture cannot make
    target = replace(runner.target, attention=make_backend(config.attention_backend))
    rows: list[VerifyRow] = []
    with standing(llm, batch, settings.context) as stand:
        slots = torch.arange(batch, device=runner.device)
        limits = torch.full_like(slots, max(settings.nodes))
        chain = chain_bits(max(settings.nodes), runner.device)
        one_ms: float | None = None
        for nodes in settings.nodes:
            tree = random_draft_tree(batch, nodes, llm.vocab_size, runner.device)

            def verify(tree: DraftTree = tree) -> Tensor:
                state = runner.state
                made = gather_decode(
                    slots, limits, settings.context, state, runner.pages, runner.page_size, target.attention, chain
                )
                output = target.verify(made, tree)
                return target.model.logits(output.hidden)

            run = captured(verify, runner.device)
            timed = time_runs(run, runner.device, settings.repetitions, flush_bytes=1 << 20)
            del run
            ms = timed.median_s * 1e3
            one_ms = ms if one_ms is None else one_ms
            rows.append(VerifyRow(batch, nodes, ms, ms / one_ms))
        stand.put_back(runner)
    return rows


# ------------------------------------------------------------------ floors


def active_bytes(model: Any, batch: int) -> int:
    """Bytes of weights that one token of each of `batch` sequences needs, at least.

    All but the embedding's table and the experts, and of each layer's experts as many as `batch` rows reach on average
    when each takes k of E at random: E * (1 - (1 - k / E) ** batch).
    """
    config: ModelConfig = model.config
    itemsize = model.embedding.itemsize
    total = sum(p.numel() * p.element_size() for p in model.parameters())
    if not config.tie_word_embeddings:
        total -= model.embedding.numel() * itemsize
    moe = config.moe
    if moe is None:
        return total
    layers = config.num_hidden_layers - config.first_k_dense_replace
    expert = 3 * config.hidden_size * moe.intermediate_size * itemsize
    share = 1 - (1 - moe.num_experts_per_tok / moe.num_experts) ** batch
    return int(total - layers * moe.num_experts * expert * (1 - share))


def _top(events: list[DeviceEvent], count: int = 15) -> tuple[tuple[str, int, float], ...]:
    """The kernels that take most, with their numbers."""
    found: dict[str, tuple[int, float]] = {}
    for event in events:
        number, us = found.get(event.name, (0, 0.0))
        found[event.name] = number + 1, us + event.duration_us
    ranked = sorted(found.items(), key=lambda entry: -entry[1][1])[:count]
    return tuple((name[:120], number, us) for name, (number, us) in ranked)
