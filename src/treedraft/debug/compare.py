"""Is the text with speculation the text without? `run_check` compares, `CheckReport` says so."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from treedraft.bench.results import json_safe
from treedraft.debug.differences import NEAR, Gaps, gaps_at
from treedraft.errors import RequestError
from treedraft.speculative.noise import noise_key

if TYPE_CHECKING:
    from treedraft.config import SpeculativeConfig
    from treedraft.llm import LLM
    from treedraft.types import Choice, RequestOutput, SamplingParams


@dataclass(frozen=True)
class Difference:
    """The first position at which a choice's two texts part."""

    prompt_index: int
    choice_index: int
    position: int  # index among the generated tokens
    plain_token_id: int | None  # None: that text ends here
    speculative_token_id: int | None
    gaps: Gaps


@dataclass(frozen=True)
class CheckReport:
    """What a comparison with and without speculation found."""

    num_prompts: int
    num_choices: int
    num_tokens: int  # generated without speculation
    differences: tuple[Difference, ...]
    num_rounds: int
    accept_length: float  # tokens a round, over all prompts
    accepted_per_depth: tuple[float, ...]
    plain_tokens_per_s: float
    speculative_tokens_per_s: float
    info: dict[str, Any]  # of the engine: model, device, dtype, ...

    @property
    def verdict(self) -> str:
        """ "equal", "explained" (every difference starts at a near-tie) or "different"."""
        if not self.differences:
            return "equal"
        return "explained" if all(d.gaps.is_explained for d in self.differences) else "different"

    def as_json(self) -> dict[str, Any]:
        """The report as JSON values."""
        values: dict[str, Any] = json_safe(self) | {"verdict": self.verdict}
        for difference, record in zip(self.differences, values["differences"]):
            record["is_explained"] = difference.gaps.is_explained
        return values

    def render(self) -> RenderableType:
        """The report for a terminal."""
        share = Table.grid(padding=(0, 2))
        share.add_column(justify="right")
        for depth, rate in enumerate(self.accepted_per_depth, start=1):
            share.add_row(f"depth {depth}", f"{rate:6.1%}", bar(rate))
        parts: list[RenderableType] = [
            f"{self.num_prompts} prompts, {self.num_tokens} tokens, {self.num_rounds} rounds: "
            f"{self.accept_length:.2f} tokens a round",
            f"{self.plain_tokens_per_s:.0f} tokens/s without speculation, {self.speculative_tokens_per_s:.0f} with",
            Text("accepted drafts, share of rounds", style="dim"),
            share,
        ]
        if self.differences:
            table = Table(box=None)
            for name in (
                *("prompt", "choice", "position", "token without", "token with"),
                *("top-two gap", "filter gap", "router gap", "explained"),
            ):
                table.add_column(name, justify="right")
            for d in self.differences:
                table.add_row(
                    *(str(x) for x in (d.prompt_index, d.choice_index, d.position)),
                    *("end" if t is None else str(t) for t in (d.plain_token_id, d.speculative_token_id)),
                    *(f"{gap:.1e}" for gap in (d.gaps.top_two, d.gaps.filter_edge, d.gaps.router)),
                    *("yes" if d.gaps.is_explained else "no"),
                )
            parts.append(table)
        texts = {
            "equal": Text("EQUAL: every token is the same with and without speculation", style="bold green"),
            "explained": Text(f"EXPLAINED: every difference starts at a gap below {NEAR:g}", style="bold yellow"),
            "different": Text("DIFFERENT: the texts part where the model was not in doubt", style="bold red"),
        }
        return Group(*parts, texts[self.verdict])


def bar(share: float, width: int = 30) -> Text:
    """A horizontal bar for a share in [0, 1]."""
    return Text("█" * round(share * width), style="green")


def run_check(
    load: Callable[[SpeculativeConfig | None], LLM],
    prompts: Sequence[str | list[int]],
    params: SamplingParams,
    speculative: SpeculativeConfig,
    seed: int = 0,
    progress: bool = False,
) -> CheckReport:
    """Generate for `prompts` without and with speculation and compare.

    `load(None)` and `load(speculative)` build the engine; only one lives at a time, so a GPU need not hold two.
    Requests without a seed get the one that a fresh engine of that `seed` would give them.

    Raises:
        RequestError: a request failed in either run.
    """
    seeded = [
        params if params.seed is not None else replace(params, seed=noise_key(seed, number * params.n + 1))
        for number in range(len(prompts))
    ]
    llm = load(None)
    plain = llm.generate(list(prompts), seeded, progress=progress)
    del llm
    llm = load(speculative)
    speculated = llm.generate(list(prompts), seeded, progress=progress)
    info = llm.info()
    del llm
    for output in (*plain, *speculated):
        for choice in output.outputs:
            if choice.finish_reason == "error":
                raise RequestError(f"a request failed, so there is nothing to compare: {choice.error}")

    differences = []
    judge = None
    for index, (a, b) in enumerate(zip(plain, speculated, strict=True)):
        for choice, other in zip(a.outputs, b.outputs, strict=True):
            position = first_difference(choice.token_ids, other.token_ids)
            if position is None:
                continue
            judge = judge or load(None)
            differences.append(
                Difference(
                    prompt_index=index,
                    choice_index=choice.index,
                    position=position,
                    plain_token_id=_at(choice.token_ids, position),
                    speculative_token_id=_at(other.token_ids, position),
                    gaps=explain_difference(judge, a, choice, seeded[index], position),
                )
            )
    return _report(plain, speculated, tuple(differences), info)


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """The first index at which the sequences part (one may end there); None when they are equal."""
    for i, (x, y) in enumerate(zip(a, b)):
        if x != y:
            return i
    return None if len(a) == len(b) else min(len(a), len(b))


def explain_difference(llm: LLM, output: RequestOutput, choice: Choice, params: SamplingParams, position: int) -> Gaps:
    """How near to a tie the choice at `position` was, recomputed by `llm`; params.seed must be set."""
    return gaps_at(llm, output.prompt_token_ids, choice.token_ids[:position], params, choice.index)


def _at(token_ids: Sequence[int], position: int) -> int | None:
    return token_ids[position] if position < len(token_ids) else None


def _report(
    plain: Sequence[RequestOutput],
    speculated: Sequence[RequestOutput],
    differences: tuple[Difference, ...],
    info: dict[str, Any],
) -> CheckReport:
    num_rounds = sum(o.metrics.num_rounds for o in speculated)
    depths = max((len(o.metrics.accepted_per_depth) for o in speculated), default=0)
    accepted = [
        sum(m.accepted_per_depth[d] * m.num_rounds for o in speculated if d < len((m := o.metrics).accepted_per_depth))
        for d in range(depths)
    ]
    by_rounds = sum(o.metrics.accept_length * o.metrics.num_rounds for o in speculated if o.metrics.num_rounds)
    return CheckReport(
        num_prompts=len(plain),
        num_choices=sum(len(o.outputs) for o in plain),
        num_tokens=sum(len(c.token_ids) for o in plain for c in o.outputs),
        differences=differences,
        num_rounds=num_rounds,
        accept_length=by_rounds / num_rounds if num_rounds else math.nan,
        accepted_per_depth=tuple(x / num_rounds for x in accepted) if num_rounds else (),
        plain_tokens_per_s=_speed(plain),
        speculative_tokens_per_s=_speed(speculated),
        info=info,
    )


def _speed(outputs: Sequence[RequestOutput]) -> float:
    """Tokens of all requests over the longest request's time: they run together."""
    elapsed = max((o.metrics.elapsed_s for o in outputs), default=0.0)
    return sum(o.metrics.num_generated_tokens for o in outputs) / elapsed if elapsed else 0.0
