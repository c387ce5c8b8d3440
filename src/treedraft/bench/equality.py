"""Is the text the same with and without speculation? A covering array of configurations, run and written down.

Every pair of values of any two parameters occurs in at least one point (a pairwise covering array), so a fault that
needs two settings to meet is met. Results are appended point by point, so an interrupted run goes on where it stopped.
"""

from __future__ import annotations

import itertools
import json
import random
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from treedraft.config import SpeculativeConfig, max_tree_nodes
from treedraft.types import RequestOutput, SamplingParams

PARAMETERS: dict[str, tuple[Any, ...]] = {
    "num_steps": (1, 2, 3, 5, 7),
    "topk": (1, 2, 4, 8, 10),
    "num_draft_tokens": (2, 5, 16, 33, 64, 70),
    "page_size": (1, 2, 3, 16, 64),
    "batch": (1, 2, 5),
    "sampling": ("greedy", "t0.7 top_p min_p", "t1.0 penalties", "t1.0 n=3"),
}

SAMPLING: dict[str, SamplingParams] = {
    "greedy": SamplingParams(temperature=0),
    "t0.7 top_p min_p": SamplingParams(temperature=0.7, top_p=0.9, min_p=0.02, seed=11),
    "t1.0 penalties": SamplingParams(
        temperature=1.0, repetition_penalty=1.2, presence_penalty=0.3, frequency_penalty=0.2, top_k=200, seed=12
    ),
    "t1.0 n=3": SamplingParams(temperature=1.0, n=3, seed=13),
}


@dataclass(frozen=True)
class Point:
    """One configuration of the array."""

    num_steps: int
    topk: int
    num_draft_tokens: int
    page_size: int
    batch: int
    sampling: str
    num_tokens: int = 64

    @property
    def speculative(self) -> SpeculativeConfig:
        return SpeculativeConfig(self.num_steps, self.topk, self.num_draft_tokens)


@dataclass(frozen=True)
class Difference:
    """Where one choice's token ids first differ."""

    prompt: int
    choice: int
    position: int  # index in the output
    expected: int | None
    given: int | None


def is_valid(values: dict[str, Any]) -> bool:
    """Whether the (partial) values allow a tree."""
    if not {"num_steps", "topk", "num_draft_tokens"} <= set(values):
        return True
    return values["num_draft_tokens"] <= max_tree_nodes(values["num_steps"], values["topk"])


def covering_array(
    parameters: dict[str, tuple[Any, ...]] = PARAMETERS,
    valid: Callable[[dict[str, Any]], bool] = is_valid,
    seed: int = 0,
    candidates: int = 300,
) -> list[dict[str, Any]]:
    """Choose points until every possible pair of values has occurred, greedily among random candidates."""
    rng = random.Random(seed)
    names = list(parameters)

    def pairs_of(point: dict[str, Any]) -> set[tuple[Any, ...]]:
        return {(a, point[a], b, point[b]) for a, b in itertools.combinations(names, 2)}

    every = [dict(zip(names, values, strict=True)) for values in itertools.product(*parameters.values())]
    every = [point for point in every if valid(point)]
    missing = set().union(*(pairs_of(point) for point in every))
    points = []
    while missing:
        chosen = max(rng.sample(every, min(candidates, len(every))), key=lambda p: len(pairs_of(p) & missing))
        if not pairs_of(chosen) & missing:
            chosen = next(p for p in every if pairs_of(p) & missing)
        missing -= pairs_of(chosen)
        points.append(chosen)
    return points


def array_points(num_long: int = 10, seed: int = 0) -> list[Point]:
    """The whole array: 64 tokens a point, 256 on `num_long` of them, spread evenly."""
    points = [Point(**p) for p in covering_array(seed=seed)]
    step = max(1, len(points) // max(1, num_long))
    long = set(range(0, step * num_long, step)) if num_long else set()
    return [replace(p, num_tokens=256) if i in long else p for i, p in enumerate(points)]


def params_for(point: Point, prompt: int) -> SamplingParams:
    """The sampling of one prompt: prompts of a batch end at different times and have seeds of their own."""
    base = SAMPLING[point.sampling]
    seed = None if base.seed is None else base.seed + 100 * prompt
    num_tokens = max(1, point.num_tokens - 7 * prompt)
    return replace(base, max_tokens=num_tokens, seed=seed, ignore_eos=True)


def generate(llm: Any, prompts: list[list[int]], point: Point) -> list[RequestOutput]:
    """One more prompt than the batch holds, so that one enters while the others run."""
    chosen = prompts[: point.batch + 1]
    return llm.generate(chosen, [params_for(point, i) for i in range(len(chosen))], progress=False)


def differences(expected: list[RequestOutput], given: list[RequestOutput]) -> list[Difference]:
    """First differing position of each choice that differs."""
    found = []
    for p, (a, b) in enumerate(zip(expected, given, strict=True)):
        for c, (x, y) in enumerate(zip(a.outputs, b.outputs, strict=True)):
            if x.token_ids == y.token_ids:
                continue
            for i, (s, t) in enumerate(itertools.zip_longest(x.token_ids, y.token_ids)):
                if s != t:
                    found.append(Difference(p, c, i, s, t))
                    break
    return found


class Equality:
    """Runs points against one baseline without speculation, kept by sampling and length."""

    def __init__(self, make_llm: Callable[..., Any], prompts: list[list[int]], explain: Callable[..., Any] | None):
        self.make_llm, self.prompts, self.explain = make_llm, prompts, explain
        self._expected: dict[tuple[str, int], list[RequestOutput]] = {}
        self.plain = make_llm(speculative=None, page_size=16, max_batch=4)

    def expected(self, point: Point) -> list[RequestOutput]:
        key = (point.sampling, point.num_tokens)
        if key not in self._expected:
            most = replace(point, batch=max(PARAMETERS["batch"]))
            self._expected[key] = generate(self.plain, self.prompts, most)
        return self._expected[key][: point.batch + 1]

    def run(self, point: Point) -> dict[str, Any]:
        """Run one point; returns what is written down."""
        start = time.perf_counter()
        expected = self.expected(point)
        baseline_s = time.perf_counter() - start
        llm = self.make_llm(speculative=point.speculative, page_size=point.page_size, max_batch=point.batch)
        given = generate(llm, self.prompts, point)
        found = differences(expected, given)
        llm.engine.scheduler.check_integrity()
        rounds = sum(o.metrics.num_rounds for o in given)
        tokens = sum(len(c.token_ids) for o in given for c in o.outputs)
        choices = sum(len(o.outputs) for o in given)
        return {
            **asdict(point),
            "num_choices": choices,
            "num_tokens_out": tokens,
            "accept_length": (tokens - choices) / rounds,
            "differences": [
                {**asdict(d), **(self._why(point, expected, d) if self.explain is not None else {})} for d in found
            ],
            "seconds": round(time.perf_counter() - start - baseline_s, 2),
        }

    def _why(self, point: Point, expected: list[RequestOutput], d: Difference) -> dict[str, Any]:
        assert self.explain is not None
        output = expected[d.prompt]
        prefix = output.outputs[d.choice].token_ids[: d.position]
        params = params_for(point, d.prompt)
        return asdict(self.explain(self.plain, output.prompt_token_ids, prefix, params, d.choice))


def run_resumable(equality: Equality, points: Iterable[Point], path: Path, log: Callable[[str], None]) -> list[dict]:
    """Run the points that `path` (one JSON object a line) does not hold yet; returns all results."""
    done = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    keys = {tuple(d[k] for k in asdict(Point(1, 1, 1, 1, 1, "greedy"))) for d in done}
    for point in points:
        if tuple(asdict(point).values()) in keys:
            continue
        result = equality.run(point)
        done.append(result)
        with path.open("a") as file:
            file.write(json.dumps(result) + "\n")
        log(
            f"{len(done):3d} {point} accept {result['accept_length']:.2f} "
            f"differences {len(result['differences'])} {result['seconds']:.1f} s"
        )
    return done
