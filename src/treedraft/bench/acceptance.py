"""Tokens a round by draft head, tree shape, temperature and domain, with standard errors over prompts."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.table import Table

from treedraft.bench.results import json_safe
from treedraft.config import SpeculativeConfig
from treedraft.debug.trace import RoundTrace, live_rounds, recording
from treedraft.errors import InvariantError
from treedraft.types import SamplingParams

if TYPE_CHECKING:
    from treedraft.cli.options import EngineOptions
    from treedraft.cli.prompts import PromptLine
    from treedraft.types import RequestOutput

DEFAULT_SHAPES = tuple(
    SpeculativeConfig(num_steps=s, topk=k, num_draft_tokens=n)
    for s, k, n in ((3, 1, 4), (5, 1, 6), (5, 4, 16), (5, 4, 32), (7, 8, 48))
)
NGRAM = 8  # a small model at temperature 0 falls into repetition, which any draft predicts: see `fresh`


@dataclass(frozen=True)
class PromptAcceptance:
    """One prompt's rounds. `fresh`: rounds whose root does not end an 8-gram already seen in that sequence."""

    domain: str
    num_tokens: int  # emitted by rounds: the prefill's token not counted
    num_rounds: int
    num_fresh_tokens: int
    num_fresh_rounds: int
    accepted_at_depth: tuple[int, ...]  # rounds in which the draft at depth 1, 2, ... was accepted


@dataclass(frozen=True)
class Mean:
    """A mean over prompts with its standard error; NaN where there is too little."""

    mean: float
    standard_error: float
    num_prompts: int


@dataclass(frozen=True)
class AcceptanceRow:
    """One setting in one domain ("all": over every prompt)."""

    head: str
    num_steps: int
    topk: int
    num_draft_tokens: int
    temperature: float
    shared_noise: bool
    domain: str
    accept_length: Mean  # mean over prompts of tokens / rounds
    fresh_accept_length: Mean
    pooled_accept_length: float  # all tokens / all rounds
    pooled_fresh_accept_length: float
    fresh_share: float  # share of rounds that are fresh
    accepted_per_depth: tuple[float, ...]


@dataclass(frozen=True)
class AcceptanceResult:
    """What `bench acceptance` found."""

    engine: dict[str, Any]
    max_tokens: int
    num_prompts: int
    rows: tuple[AcceptanceRow, ...]

    def as_json(self) -> dict[str, Any]:
        """The result as JSON values (NaN as null)."""
        return json_safe(self)

    def render(self) -> RenderableType:
        """One line for each setting, one column for each domain: mean ± standard error, fresh rounds in brackets."""
        domains = list(dict.fromkeys(row.domain for row in self.rows))
        table = Table("head", "steps, topk, nodes", "T", "noise", box=None)
        for domain in domains:
            table.add_column(domain, justify="right")
        cells: dict[tuple[Any, ...], dict[str, AcceptanceRow]] = {}
        for row in self.rows:
            key = (row.head, (row.num_steps, row.topk, row.num_draft_tokens), row.temperature, row.shared_noise)
            cells.setdefault(key, {})[row.domain] = row
        for (head, shape, temperature, noise), by_domain in cells.items():
            table.add_row(
                *(head, ", ".join(map(str, shape)), f"{temperature:g}"),
                "-" if temperature == 0 else "shared" if noise else "none",
                *(_cell(by_domain[domain]) for domain in domains),
            )
        return Group(
            f"tokens a round, mean over prompts ± standard error, {self.num_prompts} prompts, {self.max_tokens} tokens "
            f"each; in brackets: over rounds whose root does not end an {NGRAM}-gram already seen",
            table,
        )


def run_acceptance(
    engine: EngineOptions,
    heads: Sequence[str | None],
    shapes: Sequence[SpeculativeConfig],
    temperatures: Sequence[float],
    noises: Sequence[bool],
    prompts: Sequence[PromptLine],
    limit: int | None,
    max_tokens: int,
    note: Callable[[str], None] = lambda text: None,
) -> AcceptanceResult:
    """Generate for every prompt in every setting. At temperature 0 the noise has no effect and runs once."""
    chosen = limit_by_domain(prompts, limit)
    rows: list[AcceptanceRow] = []
    for head in heads:
        for shape in shapes:
            for shared_noise in noises:
                config = replace(shape, shared_noise=shared_noise)
                llm = replace(engine, draft=head).load(config)
                num_before = 0  # requests that this engine has numbered
                for temperature in temperatures:
                    if temperature == 0 and shared_noise != noises[0]:
                        continue
                    params = SamplingParams(max_tokens=max_tokens, temperature=temperature)
                    rounds: list[RoundTrace] = []
                    with recording(llm, rounds):
                        outputs = llm.generate([p.prompt for p in chosen], params, progress=False)
                    found = [
                        measure_prompt(line.domain, output, mine)
                        for line, output, mine in zip(chosen, outputs, by_request(rounds, num_before, len(chosen)))
                    ]
                    num_before += len(chosen)
                    rows += _rows(head or engine.draft or engine.model, config, temperature, found)
                    last = rows[-1]
                    note(
                        f"{last.head} ({config.num_steps}, {config.topk}, {config.num_draft_tokens}) T={temperature:g} "
                        f"noise {'shared' if shared_noise else 'none'}: {_cell(last)}"
                    )
                del llm
    return AcceptanceResult(asdict(engine), max_tokens, len(chosen), tuple(rows))


def limit_by_domain(prompts: Sequence[PromptLine], limit: int | None) -> list[PromptLine]:
    """The first `limit` prompts of each domain."""
    counts: dict[str, int] = {}
    chosen = []
    for line in prompts:
        counts[line.domain] = counts.get(line.domain, 0) + 1
        if limit is None or counts[line.domain] <= limit:
            chosen.append(line)
    return chosen


def by_request(rounds: Sequence[RoundTrace], first_id: int, count: int) -> list[list[RoundTrace]]:
    """Rounds of each request, numbered from `first_id` by the engine."""
    split: list[list[RoundTrace]] = [[] for _ in range(count)]
    for each in rounds:
        split[int(each.request_id) - first_id].append(each)
    return split


def measure_prompt(domain: str, output: RequestOutput, rounds: Sequence[RoundTrace]) -> PromptAcceptance:
    """Count a prompt's tokens and rounds.

    Raises:
        InvariantError: the trace is not this request's.
    """
    sequence = [*output.prompt_token_ids, *output.outputs[0].token_ids]
    rounds = live_rounds(rounds, output.prompt_token_ids, output.outputs[0].token_ids)
    first_seen: dict[tuple[int, ...], int] = {}  # 8-gram -> index of its last token, at its first occurrence
    for end in range(NGRAM, len(sequence) + 1):
        first_seen.setdefault(tuple(sequence[end - NGRAM : end]), end - 1)
    depths = max((max(r.depths) for r in rounds), default=0)
    accepted = [0] * depths
    tokens = fresh_tokens = fresh_rounds = 0
    for each in rounds:
        root = each.kv_len
        if sequence[root] != each.token_ids[0]:
            raise InvariantError(f"a traced round's root at position {root} is not the sequence's token there")
        emitted = len(each.emitted_token_ids)
        tokens += emitted
        ngram = tuple(sequence[root - NGRAM + 1 : root + 1])
        if first_seen.get(ngram, root) >= root:
            fresh_tokens += emitted
            fresh_rounds += 1
        for depth in range(each.num_accepted):
            accepted[depth] += 1
    return PromptAcceptance(domain, tokens, len(rounds), fresh_tokens, fresh_rounds, tuple(accepted))


def mean_of(values: Sequence[float]) -> Mean:
    """Mean and standard error."""
    if not values:
        return Mean(math.nan, math.nan, 0)
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return Mean(statistics.fmean(values), error, len(values))


def _rows(
    head: str, config: SpeculativeConfig, temperature: float, found: Sequence[PromptAcceptance]
) -> list[AcceptanceRow]:
    domains = list(dict.fromkeys(x.domain for x in found if x.domain))
    rows = []
    for domain in [*(domains if len(domains) > 1 else ()), "all"]:
        mine = [x for x in found if domain in (x.domain, "all")]
        num_rounds, num_fresh = sum(x.num_rounds for x in mine), sum(x.num_fresh_rounds for x in mine)
        depths = max((len(x.accepted_at_depth) for x in mine), default=0)
        accepted = [sum(x.accepted_at_depth[d] for x in mine if d < len(x.accepted_at_depth)) for d in range(depths)]
        rows.append(
            AcceptanceRow(
                head=head,
                num_steps=config.num_steps,
                topk=config.topk,
                num_draft_tokens=config.num_draft_tokens,
                temperature=temperature,
                shared_noise=config.shared_noise,
                domain=domain,
                accept_length=mean_of([x.num_tokens / x.num_rounds for x in mine if x.num_rounds]),
                fresh_accept_length=mean_of(
                    [x.num_fresh_tokens / x.num_fresh_rounds for x in mine if x.num_fresh_rounds]
                ),
                pooled_accept_length=_ratio(sum(x.num_tokens for x in mine), num_rounds),
                pooled_fresh_accept_length=_ratio(sum(x.num_fresh_tokens for x in mine), num_fresh),
                fresh_share=_ratio(num_fresh, num_rounds),
                accepted_per_depth=tuple(_ratio(a, num_rounds) for a in accepted),
            )
        )
    return rows


def _ratio(a: float, b: float) -> float:
    return a / b if b else math.nan


def _cell(row: AcceptanceRow) -> str:
    return f"{row.accept_length.mean:.2f} ± {row.accept_length.standard_error:.2f} ({row.fresh_accept_length.mean:.2f})"
