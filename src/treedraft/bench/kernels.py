"""Attention kernels at chosen shapes: time beside the device's floor, and error against a float64 oracle.

Every backend of `attention.BACKENDS` that can serve a shape is measured, and beside them kernels of other projects on
chains of the same size (bench.peers). All see the same random pages; what no row may see is NaN.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.console import Group, RenderableType
from rich.table import Table
from torch import Tensor

from treedraft.attention import BACKENDS, Needs, check_backend, make_backend
from treedraft.attention.reference import unpack_bits
from treedraft.bench.peers import PEERS, Peer
from treedraft.bench.timing import Ceilings, Timed, captured, measure_ceilings, time_runs
from treedraft.bench.trees import CHAIN, TREE, random_draft_tree
from treedraft.errors import ConfigError
from treedraft.kv.allocator import NUM_RESERVED_PAGES, TRASH_PAGE
from treedraft.kv.page_table import slots_of

SCALE = 192**-0.5
EDGE_LENS = (0, 1, 63, 64, 65)
SPARE_PAGES = 3  # owned by nobody, full of NaN
MATERIALISING = ("treedraft.attention.reference", "treedraft.attention.packed_torch")  # hold all scores in float32
ORACLE_BYTES = 1 << 30  # of one sequence's float64 scores: more rows are sampled
ORACLE_SEQUENCES = 3
MAX_ERROR, RMS_ERROR, LSE_ERROR = 4e-3, 2e-3, 1e-4  # what a bfloat16 kernel must stay below
SLOW_S = 0.02  # a run that takes longer is repeated fewer times
SLOW_REPETITIONS = 5


@dataclass(frozen=True)
class KernelSettings:
    """The grid."""

    heads: tuple[int, ...] = (16, 128)
    tokens: tuple[int, ...] = (1, 4, 8, 16, 32, 64)  # nodes of each sequence's tree
    batches: tuple[int, ...] = (1, 16, 64)
    lengths: tuple[int, ...] = (1024, 8192, 32768, 131072)  # committed positions
    kinds: tuple[str, ...] = (CHAIN, TREE)
    backends: tuple[str, ...] = ()  # (): all that can
    compare: tuple[str, ...] = ()  # names of bench.peers
    ragged: bool = False  # lengths up to the one named, among them 0, 1, 63, 64 and 65; else all of that length
    page_size: int = 64
    latent: int = 512
    rope: int = 64
    repetitions: int = 20
    budget_s: float | None = None  # what is left of the grid after that is not measured, and says so
    max_bytes: int = 16 << 30  # of float32 scores that a materialising backend may take


@dataclass(frozen=True)
class Shape:
    """One point of the grid."""

    heads: int
    tokens: int
    batch: int
    length: int
    kind: str


@dataclass(frozen=True)
class Case:
    """A shape's inputs on the device."""

    shape: Shape
    kv: Tensor  # [slots, latent + rope] bfloat16
    q: Tensor  # [B, R, h, latent + rope] bfloat16
    page_table: Tensor  # [B, W] int32
    lens: tuple[int, ...]  # committed positions of each sequence
    kv_lens: Tensor  # [B] int64: the same
    tail_slots: Tensor  # [B, R] int64
    ancestor_bits: Tensor  # [B, R, words] int64
    page_size: int
    latent: int


@dataclass(frozen=True)
class KernelRow:
    """One kernel at one shape; `skipped` says why there are no figures."""

    kernel: str
    heads: int
    tokens: int
    batch: int
    length: int
    kind: str
    skipped: str | None = None
    us: float | None = None  # median of graph replays, L2 cold
    best_us: float | None = None
    plan_us: float | None = None  # prefix and tree plan, once a forward, for all its layers
    tflops: float | None = None
    gbps: float | None = None
    floor_us: float | None = None
    roofline: float | None = None  # floor_us / us
    bound: str | None = None  # "memory" or "compute": which gives the floor
    max_error: float | None = None  # of all sampled rows the largest max |o - ref| / max |ref|
    rms_error: float | None = None  # RMS(o - ref) / RMS(ref)
    lse_error: float | None = None  # largest |lse - ref|
    rounding: float | None = (
        None  # max_error of the reference itself, rounded to the output's dtype: no kernel has less
    )
    is_finite: bool | None = None  # every element of the output
    is_accurate: bool | None = None


@dataclass(frozen=True)
class KernelResult:
    """What `bench kernels` found."""

    settings: KernelSettings
    ceilings: Ceilings
    rows: tuple[KernelRow, ...]
    seconds: float

    def as_json(self) -> dict[str, Any]:
        """The result as JSON values."""
        return asdict(self)

    def render(self) -> RenderableType:
        """The result as a table: a line for each shape and kernel."""
        table = Table(box=None)
        for i, name in enumerate(("heads", "batch", "L", "tokens", "kind", "kernel")):
            table.add_column(name, justify="left" if i > 3 else "right")
        for name in (
            "us",
            "floor",
            "roofline",
            "TFLOP/s",
            "GB/s",
            "plan us",
            "max err",
            "rounding",
            "rms err",
            "lse err",
        ):
            table.add_column(name, justify="right")
        for r in self.rows:
            key = (str(r.heads), str(r.batch), _short(r.length), str(r.tokens), r.kind, r.kernel)
            if r.skipped is not None:
                table.add_row(*key, f"[dim]{r.skipped}[/dim]")
                continue
            mark = "" if r.is_accurate else " [red]![/red]"
            table.add_row(
                *key,
                *(_text(r.us, ".1f"), _text(r.floor_us, ".1f"), _text(r.roofline, ".2f")),
                *(_text(r.tflops, ".0f"), _text(r.gbps, ".0f"), _text(r.plan_us, ".1f")),
                *(_text(r.max_error, ".1e") + mark, _text(r.rounding, ".1e")),
                *(_text(r.rms_error, ".1e"), _text(r.lse_error, ".1e")),
            )
        c = self.ceilings
        product = "-" if c.matmul_flop_per_s is None else f"{c.matmul_flop_per_s / 1e12:.0f} TFLOP/s"
        return Group(
            f"ceilings of this run: copy {c.copy_bytes_per_s / 1e12:.2f} TB/s, bf16 product {product}; "
            f"{self.seconds:.0f} s in all",
            table,
        )


def _short(length: int) -> str:
    return f"{length // 1024}k" if length % 1024 == 0 else str(length)


def _text(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def run_kernels(
    settings: KernelSettings, device: torch.device, note: Callable[[str], None] = lambda text: None
) -> KernelResult:
    """Measure the grid. Raise ConfigError for an unknown backend, peer or kind."""
    _check(settings)
    started = time.perf_counter()
    ceilings = measure_ceilings(device)
    peers = [peer for name in settings.compare if (peer := _made(PEERS[name], device, note)) is not None]
    rows: list[KernelRow] = []
    with torch.inference_mode():
        for case in cases(settings, device):
            is_over = settings.budget_s is not None and time.perf_counter() - started > settings.budget_s
            for name in _able(settings, case.shape, device):
                run = _skip(case, name, "out of time") if is_over else measure_backend(name, case, settings, ceilings)
                rows.append(run)
            for peer in peers if case.shape.kind == CHAIN else ():
                run = _skip(case, peer.name, "out of time") if is_over else measure_peer(peer, case, settings, ceilings)
                rows.append(run)
            note(_line(rows[-1]) if rows else "no backend can serve this shape")
    return KernelResult(settings, ceilings, tuple(rows), time.perf_counter() - started)


def cases(settings: KernelSettings, device: torch.device) -> Iterator[Case]:
    """Yield the grid's cases. Those of one batch and length share their pool."""
    most = max(settings.tokens)
    width = settings.latent + settings.rope
    for length in settings.lengths:
        for batch in settings.batches:
            generator = torch.Generator(device).manual_seed(length + batch)
            table, num_slots = random_pages(batch, length + most, settings.page_size, device)
            pool = torch.empty(num_slots, width, dtype=torch.bfloat16, device=device)
            pool.normal_(generator=generator)
            lens = ragged_lens(batch, length) if settings.ragged else (length,) * batch
            kv_lens = torch.tensor(lens, device=device)
            for tokens in settings.tokens:
                tail_slots = slots_of(table, kv_lens[:, None] + torch.arange(tokens, device=device), settings.page_size)
                hide_unseen(pool, table, kv_lens, tail_slots, settings.page_size, generator)
                for heads in settings.heads:
                    q = torch.randn(
                        batch, tokens, heads, width, generator=generator, device=device, dtype=torch.bfloat16
                    )
                    for kind in settings.kinds if tokens > 1 else settings.kinds[:1]:
                        tree = random_draft_tree(batch, tokens, 2, device, kind)
                        yield Case(
                            shape=Shape(heads, tokens, batch, length, kind),
                            kv=pool,
                            q=q,
                            page_table=table,
                            lens=lens,
                            kv_lens=kv_lens,
                            tail_slots=tail_slots,
                            ancestor_bits=tree.ancestor_bits,
                            page_size=settings.page_size,
                            latent=settings.latent,
                        )
            del pool


def random_pages(batch: int, length: int, page_size: int, device: torch.device) -> tuple[Tensor, int]:
    """Return a page table [B, W] int32 of shuffled pages that hold `length` positions, and the pool's slots.

    The last column names the trash page; behind the owned pages come some that nobody owns.
    """
    owned = -(-length // page_size)
    generator = torch.Generator().manual_seed(batch * length)
    pages = torch.randperm(batch * owned + SPARE_PAGES, generator=generator)[: batch * owned] + NUM_RESERVED_PAGES
    table = torch.full((batch, owned + 1), TRASH_PAGE, dtype=torch.int32)
    table[:, :owned] = pages.view(batch, owned)
    return table.to(device), (batch * owned + SPARE_PAGES + NUM_RESERVED_PAGES) * page_size


def ragged_lens(batch: int, longest: int) -> tuple[int, ...]:
    """Lengths up to `longest`, which comes last; the edges first, then at random."""
    rng = random.Random(batch + longest)
    edges = [n for n in EDGE_LENS if n < longest][: batch - 1]
    return (*edges, *(rng.randint(0, longest) for _ in range(batch - 1 - len(edges))), longest)


def hide_unseen(
    pool: Tensor, table: Tensor, kv_lens: Tensor, tail_slots: Tensor, page_size: int, generator: torch.Generator
) -> None:
    """Fill what no row may see with NaN: pages of nobody, the trash page, slots behind the tree. Page 0 holds zeros.

    The tree's slots [B, R] are made anew: a call for fewer rows may have hidden some.
    """
    pages, owned = pool.view(-1, page_size, pool.shape[1]), table[:, :-1].long()
    is_owned = torch.zeros(len(pages), dtype=torch.bool, device=pool.device)
    is_owned[owned.flatten()] = True
    pages.masked_fill_(~is_owned[:, None, None], torch.nan)
    offsets = torch.arange(page_size, device=pool.device)
    slots = (owned[..., None] * page_size + offsets).flatten(1)
    is_behind = torch.arange(slots.shape[1], device=pool.device) >= (kv_lens + tail_slots.shape[1])[:, None]
    pool.index_fill_(0, slots[is_behind], torch.nan)
    fresh = torch.randn((tail_slots.numel(), pool.shape[1]), generator=generator, device=pool.device, dtype=pool.dtype)
    pool.index_copy_(0, tail_slots.flatten(), fresh)
    pages[0] = 0


# ------------------------------------------------------------------ measuring


def measure_backend(name: str, case: Case, settings: KernelSettings, ceilings: Ceilings) -> KernelRow:
    """Time one of our backends on a case and compare it with the oracle."""
    entry, shape, device = BACKENDS[name], case.shape, case.q.device
    if entry.module in MATERIALISING:
        num_bytes = 4 * shape.batch * (shape.length + shape.tokens) * (shape.tokens * shape.heads + 576)
        if num_bytes > settings.max_bytes:
            return _skip(case, name, f"too slow: {num_bytes / 2**30:.0f} GiB of float32 scores and keys")

    def plan() -> Any:
        prefix = backend.plan_prefix(case.page_table, case.kv_lens, shape.length, case.tail_slots, case.page_size)
        return backend.plan_tree(prefix, case.ancestor_bits, shape.tokens)

    try:
        backend = make_backend(name)
        planned = plan()
        out, lse = backend.run_mla_with_lse(planned, case.kv, case.q, case.latent, SCALE)
        timed = _time(lambda: backend.run_mla(planned, case.kv, case.q, case.latent, SCALE), device, settings)
        is_planned_there = entry.graph == "round" and entry.index_bits is None  # made without lists of its own
        planning = time_runs(captured(plan, device), device, 5, flush_bytes=1 << 20) if is_planned_there else None
    except torch.cuda.OutOfMemoryError as error:
        torch.cuda.empty_cache()
        return _skip(case, name, f"out of memory: {str(error).splitlines()[0][:80]}")
    except ConfigError as error:  # its package is not installed
        if name in settings.backends:
            raise
        return _skip(case, name, str(error))
    return _row(name, case, timed, planning, ceilings, out, lse)


def measure_peer(peer: Peer, case: Case, settings: KernelSettings, ceilings: Ceilings) -> KernelRow:
    """Time another project's kernel on a chain."""
    reason = peer.refuses(case.shape.heads, case.page_size, case.latent)
    if reason is not None:
        return _skip(case, peer.name, reason)
    run = peer.prepare(case.q, case.kv, case.page_table, case.kv_lens + case.shape.tokens, case.page_size, SCALE)
    out, lse = run()
    timed = _time(run, case.q.device, settings)
    return _row(peer.name, case, timed, None, ceilings, out, lse)


def _time(run: Callable[[], object], device: torch.device, settings: KernelSettings) -> Timed:
    replay = captured(run, device)
    first = time_runs(replay, device, 1)
    repetitions = settings.repetitions if first.median_s < SLOW_S else min(SLOW_REPETITIONS, settings.repetitions)
    return time_runs(replay, device, repetitions)


def _row(
    name: str, case: Case, timed: Timed, planning: Timed | None, ceilings: Ceilings, out: Tensor, lse: Tensor
) -> KernelRow:
    num_bytes, flop = work(case)
    floor_s = ceilings.floor_s(num_bytes, flop)
    is_memory = floor_s == num_bytes / ceilings.copy_bytes_per_s
    max_error, rms_error, lse_error, rounding = errors(case, out, lse)
    return KernelRow(
        kernel=name,
        **asdict(case.shape),
        us=timed.median_s * 1e6,
        best_us=timed.best_s * 1e6,
        plan_us=None if planning is None else planning.median_s * 1e6,
        tflops=flop / timed.median_s / 1e12,
        gbps=num_bytes / timed.median_s / 1e9,
        floor_us=floor_s * 1e6,
        roofline=floor_s / timed.median_s,
        bound="memory" if is_memory else "compute",
        max_error=max_error,
        rms_error=rms_error,
        lse_error=lse_error,
        rounding=rounding,
        is_finite=bool(out.isfinite().all()),
        is_accurate=bool(out.isfinite().all())
        and max_error <= MAX_ERROR
        and rms_error <= RMS_ERROR
        and lse_error <= LSE_ERROR,
    )


def work(case: Case) -> tuple[float, float]:
    """Bytes that must move, each once (KV, queries, outputs), and operations: of every visible pair of row and slot."""
    s, width = case.shape, case.kv.shape[1]
    visible = float(unpack_bits(case.ancestor_bits, s.tokens).sum()) + s.tokens * sum(case.lens)
    flop = 2 * (width + case.latent) * s.heads * visible
    rows = s.batch * s.tokens * s.heads
    slots = sum(case.lens) + s.batch * s.tokens
    return case.kv.itemsize * (slots * width + rows * (width + case.latent)), flop


# ------------------------------------------------------------------ the oracle


def errors(case: Case, out: Tensor, lse: Tensor) -> tuple[float, float, float, float]:
    """Compare out [B, R, h, latent] and lse [B, R, h] with float64 on the same inputs, on a sample of rows.

    Returns the largest max |o - ref| / max |ref| of a row, RMS(o - ref) / RMS(ref), the largest |lse - ref|, and the
    first of these for the reference rounded to out's dtype.
    """
    largest = rounding = lse_error = squares = reference_squares = 0.0
    sequences = {*sample(case.shape.batch, ORACLE_SEQUENCES), *(b for b, n in enumerate(case.lens) if n in EDGE_LENS)}
    for b in sorted(sequences):
        per_row = 8 * case.shape.heads * (case.shape.length + case.shape.tokens)
        rows = torch.tensor(sample(case.shape.tokens, max(1, ORACLE_BYTES // per_row)), device=out.device)
        expected, expected_lse = oracle(case, b, rows)
        difference = out[b, rows].double() - expected
        largest = _larger(largest, _relative(difference, expected))
        rounding = _larger(rounding, _relative(expected.to(out.dtype).double() - expected, expected))
        squares += float(difference.square().sum())
        reference_squares += float(expected.square().sum())
        lse_error = _larger(lse_error, float((lse[b, rows].double() - expected_lse).abs().max()))
    return largest, (squares / reference_squares) ** 0.5, lse_error, rounding


def _relative(difference: Tensor, expected: Tensor) -> float:
    """The largest, over rows, of the largest difference by the largest number expected."""
    return float((difference.abs().amax(-1) / expected.abs().amax(-1)).max())


def _larger(a: float, b: float) -> float:
    """The larger of two errors; NaN is larger than all."""
    return a if a != a or b <= a else b


def oracle(case: Case, b: int, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Attend rows [n] of sequence b in float64: out [n, h, latent], lse [n, h]."""
    s, length = case.shape, case.lens[b]
    positions = torch.arange(length + s.tokens, device=rows.device)[None]
    slots = slots_of(case.page_table[b : b + 1], positions, case.page_size)[0]
    keys = case.kv[slots].double()
    scores = torch.matmul(case.q[b, rows].double(), keys.t()).mul_(SCALE)  # [n, h, slots]
    is_hidden = unpack_bits(case.ancestor_bits[b, rows], s.tokens) == 0
    scores[..., length:].masked_fill_(is_hidden[:, None], -torch.inf)
    lse = scores.logsumexp(-1)
    return torch.matmul(scores.sub_(lse[..., None]).exp_(), keys[:, : case.latent]), lse


def sample(count: int, most: int) -> list[int]:
    """At most `most` of 0 .. count - 1, spread evenly, the last one always among them."""
    taken = min(count, most)
    return sorted({count - 1 - i * count // taken for i in range(taken)})


# ------------------------------------------------------------------ choosing


def _check(settings: KernelSettings) -> None:
    for given, known, flag in (
        (settings.backends, sorted(BACKENDS), "--backend"),
        (settings.compare, sorted(PEERS), "--compare"),
        (settings.kinds, [CHAIN, TREE], "--kind"),
    ):
        unknown = [name for name in given if name not in known]
        if unknown:
            raise ConfigError(f"{flag} knows {', '.join(known)}; got {unknown[0]!r}")


def _able(settings: KernelSettings, shape: Shape, device: torch.device) -> Sequence[str]:
    """Backends that can serve a shape, in the order of their registration."""
    needs = Needs(
        "verify", device.type, "bfloat16", settings.page_size, (settings.latent, settings.rope), shape.kind == TREE
    )
    able = []
    for name in settings.backends or BACKENDS:
        try:
            check_backend(name, needs)
        except ConfigError:
            continue
        able.append(name)
    return able


def _made(peer: Callable[[torch.device], Peer], device: torch.device, note: Callable[[str], None]) -> Peer | None:
    try:
        return peer(device)
    except (ImportError, OSError) as error:
        note(f"not compared: {error}")
        return None


def _skip(case: Case, name: str, reason: str) -> KernelRow:
    return KernelRow(kernel=name, **asdict(case.shape), skipped=reason)


def _line(row: KernelRow) -> str:
    shape = f"{row.heads} heads x {row.tokens} {row.kind}, batch {row.batch}, L {_short(row.length)}"
    return f"{shape}, {row.kernel}: " + (row.skipped or f"{row.us:.1f} us, {row.roofline:.2f} of the floor's rate")
