"""Tokens per second: transformers' generate, ours without and with speculation, in turn in one process."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from rich.console import Group, RenderableType
from rich.table import Table

from treedraft.errors import ConfigError, RequestError
from treedraft.types import SamplingParams

if TYPE_CHECKING:
    from treedraft.cli.options import EngineOptions
    from treedraft.cli.prompts import PromptLine
    from treedraft.config import SpeculativeConfig

WARM_UP_TOKENS = 32  # a CPU records a round after 16 of its kind
PLAIN, SPECULATIVE, AUTO = "treedraft", "treedraft, tree", "treedraft, auto"


@dataclass(frozen=True)
class LatencySettings:
    """What is measured."""

    batches: tuple[int, ...] = (1, 4)
    max_tokens: int = 128  # generated for every prompt, past the end of text too
    prompt_tokens: int = 24  # every prompt is cut to this length, so that no engine pads
    num_prompts: int = 8  # at least; as many as the batch where that is larger
    repetitions: int = 5  # each engine once in every repetition
    compare: tuple[str, ...] = ()
    temperatures: tuple[float, ...] = (0.0,)
    with_auto: bool = False  # also with a tree chosen round by round


class Contestant(Protocol):
    """An engine under measurement."""

    name: str

    def run(self, prompts: list[list[int]], max_tokens: int, temperature: float) -> list[list[int]]:
        """Generate exactly `max_tokens` tokens for prompts of one length, all at once."""


class OurEngine:
    """treedraft, with or without speculation."""

    def __init__(self, name: str, llm: Any):
        self.name, self.llm = name, llm
        self.num_rounds = 0

    def run(self, prompts: list[list[int]], max_tokens: int, temperature: float) -> list[list[int]]:
        many = [
            SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=i, ignore_eos=True)
            for i in range(len(prompts))
        ]
        outputs = self.llm.generate(prompts, many, progress=False)
        self.num_rounds = sum(o.metrics.num_rounds for o in outputs)
        return [list(o.outputs[0].token_ids) for o in outputs]


class Transformers:
    """transformers' generate on the same checkpoint, device and dtype. Greedy."""

    name = "transformers"

    def __init__(self, folder: str, device: str, dtype: str):
        import torch
        from transformers import AutoModelForCausalLM, GenerationConfig

        self._torch = torch
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).to(device).eval()
        self._device = device
        self._config = GenerationConfig

    def run(self, prompts: list[list[int]], max_tokens: int, temperature: float) -> list[list[int]]:
        ids = self._torch.tensor(prompts, device=self._device)
        config = self._config(
            do_sample=False, max_new_tokens=max_tokens, eos_token_id=None, pad_token_id=0, use_cache=True
        )
        with self._torch.inference_mode():
            out = self._model.generate(ids, attention_mask=self._torch.ones_like(ids), generation_config=config)
        return out[:, ids.shape[1] :].tolist()


@dataclass(frozen=True)
class LatencyRow:
    """One engine at one batch size and temperature."""

    engine: str
    batch: int
    temperature: float
    tokens_per_s: float  # median over repetitions; all generated tokens over the wall time, prefill included
    all_tokens_per_s: tuple[float, ...]
    tokens_per_round: float | None  # with speculation only; the prefill's token not counted
    same_tokens: float  # share of tokens equal to treedraft without speculation, up to each text's first difference


@dataclass(frozen=True)
class LatencyResult:
    """What `bench latency` found."""

    settings: LatencySettings
    engine: dict[str, Any]
    speculative: dict[str, Any]
    rows: tuple[LatencyRow, ...]

    def ratio(self, row: LatencyRow, name: str) -> float | None:
        """The row's speed over that of engine `name` at the same batch size and temperature."""
        key = (name, row.batch, row.temperature)
        others = [r for r in self.rows if (r.engine, r.batch, r.temperature) == key]
        return row.tokens_per_s / others[0].tokens_per_s if others else None

    def as_json(self) -> dict[str, Any]:
        """The result as JSON values."""
        rows = [
            asdict(row)
            | {"over_transformers": self.ratio(row, Transformers.name), "over_no_speculation": self.ratio(row, PLAIN)}
            for row in self.rows
        ]
        return asdict(self) | {"rows": rows}

    def render(self) -> RenderableType:
        """The result as a table."""
        table = Table(box=None)
        for i, name in enumerate(
            ("engine", "batch", "T", "tokens/s", "vs transformers", "vs no tree", "tokens a round", "same tokens")
        ):
            table.add_column(name, justify="left" if i == 0 else "right")
        for row in self.rows:
            ratios = (self.ratio(row, Transformers.name), self.ratio(row, PLAIN))
            table.add_row(
                *(row.engine, str(row.batch), f"{row.temperature:g}", f"{row.tokens_per_s:.0f}"),
                *("-" if r is None else f"{r:.2f}x" for r in ratios),
                *("-" if row.tokens_per_round is None else f"{row.tokens_per_round:.2f}", f"{row.same_tokens:.1%}"),
            )
        s = self.settings
        return Group(
            f"{s.num_prompts} prompts or a batch of {s.prompt_tokens} tokens, {s.max_tokens} tokens each; median of "
            f"{s.repetitions} interleaved repetitions, prefill included",
            table,
        )


def run_latency(
    engine: EngineOptions,
    speculative: SpeculativeConfig,
    prompts: Sequence[PromptLine],
    settings: LatencySettings,
    note: Callable[[str], None] = lambda text: None,
) -> LatencyResult:
    """Load every engine, warm each up, then run them in turn.

    Raises:
        ConfigError: an engine to compare with that is not known.
        RequestError: too few prompts of the length asked for.
    """
    unknown = [name for name in settings.compare if name != "transformers"]
    if unknown:
        raise ConfigError(f"--compare knows transformers; got {unknown[0]!r}")
    # Without the prefix cache: every repetition prefills its prompts.
    engine = replace(engine, max_batch=max(engine.max_batch, *settings.batches), prefix_cache=False)
    plain = engine.load(None)
    contestants: list[Contestant] = [OurEngine(PLAIN, plain), OurEngine(SPECULATIVE, engine.load(speculative))]
    if settings.with_auto:
        contestants.append(OurEngine(AUTO, engine.load(replace(speculative, auto=True))))
    if "transformers" in settings.compare:
        from treedraft.weights.loader import resolve_folder

        folder = str(resolve_folder(engine.model))
        contestants.insert(0, Transformers(folder, plain.config.device, plain.config.dtype))
    token_ids = [plain.encode(p.prompt) if isinstance(p.prompt, str) else p.prompt for p in prompts]
    chosen = {
        batch: choose_prompts(token_ids, replace(settings, num_prompts=max(settings.num_prompts, batch)))
        for batch in settings.batches
    }
    rows = measure(contestants, chosen, settings, note)
    return LatencyResult(settings, asdict(engine), asdict(speculative), rows)


def choose_prompts(token_ids: list[list[int]], settings: LatencySettings) -> list[list[int]]:
    """Spread `num_prompts` evenly over the prompts that are long enough, cut to one length."""
    long_enough = [ids[: settings.prompt_tokens] for ids in token_ids if len(ids) >= settings.prompt_tokens]
    if len(long_enough) < settings.num_prompts:
        raise RequestError(
            f"{settings.num_prompts} prompts of at least {settings.prompt_tokens} tokens are needed; "
            f"the file has {len(long_enough)}"
        )
    return [long_enough[i * len(long_enough) // settings.num_prompts] for i in range(settings.num_prompts)]


def measure(
    contestants: Sequence[Contestant],
    prompts: Mapping[int, list[list[int]]],
    settings: LatencySettings,
    note: Callable[[str], None],
) -> tuple[LatencyRow, ...]:
    """Time every contestant at every batch size and temperature, interleaved; prompts: by batch size.

    One row each, in order of temperature and batch size. transformers runs greedily alone.
    """
    speeds: dict[tuple[str, int, float], list[float]] = {}
    texts: dict[tuple[str, int, float], list[list[int]]] = {}
    rounds: dict[tuple[str, int, float], int] = {}
    points = [(temperature, batch) for temperature in settings.temperatures for batch in settings.batches]
    for batch in settings.batches:
        for contestant in contestants:
            contestant.run(prompts[batch][:batch], min(WARM_UP_TOKENS, settings.max_tokens), settings.temperatures[0])

    def able(temperature: float) -> list[Contestant]:
        return [c for c in contestants if temperature == 0 or c.name != Transformers.name]

    for repetition in range(settings.repetitions):
        for temperature, batch in points:
            for contestant in able(temperature):
                key = (contestant.name, batch, temperature)
                outputs: list[list[int]] = []
                num_rounds = 0
                begin = time.perf_counter()
                for start in range(0, len(prompts[batch]), batch):
                    part = prompts[batch][start : start + batch]
                    outputs += contestant.run(part, settings.max_tokens, temperature)
                    num_rounds += getattr(contestant, "num_rounds", 0)
                seconds = time.perf_counter() - begin
                speeds.setdefault(key, []).append(sum(map(len, outputs)) / seconds)
                texts[key], rounds[key] = outputs, num_rounds
        note(f"repetition {repetition + 1} of {settings.repetitions} done")
    rows = []
    for temperature, batch in points:
        for contestant in able(temperature):
            key = (contestant.name, batch, temperature)
            emitted = sum(map(len, texts[key])) - len(prompts[batch])
            has_rounds = contestant.name in (SPECULATIVE, AUTO) and rounds[key]
            rows.append(
                LatencyRow(
                    engine=contestant.name,
                    batch=batch,
                    temperature=temperature,
                    tokens_per_s=statistics.median(speeds[key]),
                    all_tokens_per_s=tuple(speeds[key]),
                    tokens_per_round=emitted / rounds[key] if has_rounds else None,
                    same_tokens=_share_of_same(texts[key], texts[PLAIN, batch, temperature]),
                )
            )
    return tuple(rows)


def _share_of_same(texts: list[list[int]], others: list[list[int]]) -> float:
    from treedraft.debug.compare import first_difference

    same = total = 0
    for a, b in zip(texts, others, strict=True):
        position = first_difference(a, b)
        same += len(a) if position is None else position
        total += max(len(a), len(b))
    return same / total if total else 1.0
