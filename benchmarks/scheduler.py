"""Time of the scheduler alone, a step at a time, without a model: python benchmarks/scheduler.py [flags as in --help]

A step is `schedule` and `commit`, in CPU time of this process; what the device would have said is made in between and
not counted, nor is the text of the tokens (--text: it is). Each round accepts 0 to 5 drafts. Two loads:

    decode  all sequences run to the end of the measurement: every step is a round of each, and nothing else
    serve   requests arrive as others end, half of their prompts begin like earlier ones, and the pool holds all of
            them, or with --pool a share. Steps with a prompt's chunk, or in which a request ended, are told apart.
"""

import argparse
import gc
import random
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from treedraft.bench.results import write_result
from treedraft.config import EngineConfig, SpeculativeConfig, max_logical_len, offered_shapes
from treedraft.engine.request import Request
from treedraft.engine.scheduler import Scheduler
from treedraft.engine.shapes import ShapeChooser
from treedraft.engine.text import TextStream
from treedraft.kv.allocator import NUM_RESERVED_PAGES, PageAllocator
from treedraft.kv.manager import KVManager
from treedraft.kv.prefix import PrefixCache
from treedraft.types import RowResult, SamplingParams, StepPlan, StepResult
from treedraft.weights.loader import METADATA_FILES, resolve_folder
from treedraft.weights.tokenizer import load_tokenizer

MAX_CONTEXT, PAGE_SIZE = 4096, 64
TOKENS_EACH = 1400  # of prompt and output, about, for a full pool


@dataclass(frozen=True)
class Step:
    """One measured step."""

    cpu_s: float
    num_rounds: int
    is_decode_only: bool  # no prompt entered and no request ended


class Load:
    """Requests that come and go, and a scheduler that never runs out of them."""

    def __init__(self, args: argparse.Namespace, min_output: int, max_output: int, pool: float) -> None:
        self.rng, self.tree, self.num_requests = random.Random(0), SpeculativeConfig(auto=args.auto), 0
        self.lengths, self.num_running = (min_output, max_output), args.requests
        self.tokenizer = load_tokenizer(resolve_folder("demo", files=METADATA_FILES)) if args.text else None
        config = EngineConfig(
            max_batch=args.requests,
            max_context=MAX_CONTEXT,
            page_size=PAGE_SIZE,
            speculative=self.tree,
            chunked_prefill=args.chunk,
        )
        width = -(-max_logical_len(MAX_CONTEXT, self.tree, 0) // PAGE_SIZE)
        self.num_pages = max(width, int(pool * args.requests / PAGE_SIZE))
        allocator = PageAllocator(self.num_pages + NUM_RESERVED_PAGES)
        kv = KVManager(allocator, PAGE_SIZE, width, PrefixCache(PAGE_SIZE))
        shapes = offered_shapes(self.tree)
        self.by_shape = tuple(range(len(shapes)))[::-1] if args.auto else ()  # accepted drafts, by shape
        chooser = ShapeChooser(shapes, {args.requests: [1.0] * len(shapes)}) if args.auto else None
        self.scheduler = Scheduler(config, kv, chooser)
        self.prefixes = [self.tokens(700) for _ in range(8)]

    def tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self.rng.choices(range(1, 4000), k=count))

    def arrive(self) -> None:
        prefix = self.rng.choice(self.prefixes)[: self.rng.choice([0, 700])]
        prompt = prefix + self.tokens(self.rng.randrange(100, 1000))
        params = SamplingParams(max_tokens=self.rng.randint(*self.lengths))
        text, max_len = TextStream(self.tokenizer, ()), len(prompt) + params.max_tokens
        self.scheduler.add(Request(self.num_requests, prompt, params, 0, 0, frozenset({0}), max_len, text))
        self.num_requests += 1

    def step(self) -> Step:
        """Run one step, with as many requests there as may run and a few that wait."""
        while len(self.scheduler.by_id) < self.num_running + 16:
            self.arrive()
        began_s = time.process_time()
        plan = self.scheduler.schedule()
        cpu_s = time.process_time() - began_s
        result = self.answer(plan)
        began_s = time.process_time()
        changed = self.scheduler.commit(result)
        cpu_s += time.process_time() - began_s
        has_ended = any(request.is_finished for request in changed)
        return Step(cpu_s, len(plan.decodes), not (plan.prefills or has_ended))

    def answer(self, plan: StepPlan) -> StepResult:
        """What a device could have said."""
        counts = [(r.request_id, True, self.rng.randint(1, self.tree.max_path)) for r in plan.decodes]
        counts += [(r.request_id, False, int(r.next_token is None)) for r in plan.prefills]
        said = ((i, is_round, self.tokens(count)) for i, is_round, count in counts)
        return StepResult(tuple(RowResult(*row, False, None, None, plan.shape, self.by_shape) for row in said))


def milliseconds(steps: list[Step]) -> dict[str, float] | None:
    """Quantiles of the steps' times."""
    if len(steps) < 2:
        return None
    times = [step.cpu_s * 1e3 for step in steps]
    p = statistics.quantiles(times, n=100)
    return {"median": p[49], "mean": statistics.fmean(times), "p90": p[89], "p99": p[98], "max": max(times)}


def measure_decode(args: argparse.Namespace) -> dict[str, Any]:
    """Steps in which every sequence has a round, and nothing else happens."""
    load = Load(args, MAX_CONTEXT, MAX_CONTEXT, pool=MAX_CONTEXT)
    while len(load.scheduler.running) < args.requests or load.scheduler.waiting[0].slot >= 0:
        load.step()
    longest = MAX_CONTEXT - 1700 - load.tree.max_path  # behind the longest prompt
    steps = [load.step() for _ in range(min(args.steps, longest // load.tree.max_path))]
    steps = [step for step in steps if step.is_decode_only and step.num_rounds == args.requests]
    return {"num_steps": len(steps), "step_ms": milliseconds(steps)}


def measure_serve(args: argparse.Namespace) -> dict[str, Any]:
    """Steps while requests come and go."""
    load = Load(args, 50, 400, pool=args.pool * TOKENS_EACH)
    steps: list[Step] = []
    while len(steps) < args.steps:
        step = load.step()
        if len(load.scheduler.running) >= args.requests * 0.75 or args.pool < 1:
            steps.append(step)
    scheduler = load.scheduler
    return {
        "num_pages": load.num_pages,
        "rounds_per_step": statistics.fmean(step.num_rounds for step in steps),
        "step_ms": milliseconds(steps),
        "decode_only_step_ms": milliseconds([step for step in steps if step.is_decode_only]),
        "other_step_ms": milliseconds([step for step in steps if not step.is_decode_only]),
        "num_requests": load.num_requests,
        "num_preemptions": scheduler.num_preemptions,
        "cached_share_of_prompts": scheduler.num_cached_tokens / scheduler.num_prompt_tokens,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=256, help="sequences that run together")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--pool", type=float, default=1.0, help="share of what all requests need together")
    parser.add_argument("--chunk", type=int, default=4096)
    parser.add_argument("--auto", action="store_true", help="the tree's shape is chosen round by round")
    parser.add_argument("--text", action="store_true", help="decode the tokens, with the demo's tokenizer")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    args = parser.parse_args()
    settings = {name: value for name, value in vars(args).items() if name != "out"} | {"page_size": PAGE_SIZE}
    gc.collect()
    gc.freeze()  # as the server does
    data = {"settings": settings, "decode": measure_decode(args), "serve": measure_serve(args)}
    print(write_result(args.out, "scheduler", data))
    print(data)


if __name__ == "__main__":
    main()
