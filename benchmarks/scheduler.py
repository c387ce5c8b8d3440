"""Time of the scheduler alone, a step at a time, without a model: python benchmarks/scheduler.py [flags as in --help]

A step is `schedule` and `commit`, in CPU time of this process. Requests arrive as others end, half of their prompts
begin like earlier ones, each round accepts 0 to 5 drafts, and the pool holds all of them, or with --pool a share.
"""

import argparse
import random
import statistics
import time
from pathlib import Path

from treedraft.bench.results import write_result
from treedraft.config import EngineConfig, SpeculativeConfig, max_logical_len
from treedraft.engine.request import Request
from treedraft.engine.scheduler import Scheduler
from treedraft.engine.text import TextStream
from treedraft.kv.allocator import NUM_RESERVED_PAGES, PageAllocator
from treedraft.kv.manager import KVManager
from treedraft.kv.prefix import PrefixCache
from treedraft.types import RowResult, SamplingParams, StepPlan, StepResult

MAX_CONTEXT, PAGE_SIZE = 4096, 64


def answer(plan: StepPlan, rng: random.Random, max_path: int) -> StepResult:
    """What a device could have said."""
    rounds = [(r.request_id, True, rng.randrange(1, max_path + 1)) for r in plan.decodes]
    prefills = [(r.request_id, False, int(r.next_token is None)) for r in plan.prefills]
    return StepResult(
        tuple(
            RowResult(request_id, is_round, tuple(rng.randrange(1, 99) for _ in range(count)), False, None, None)
            for request_id, is_round, count in rounds + prefills
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=256, help="sequences that run together")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--pool", type=float, default=1.0, help="share of what all requests need together")
    parser.add_argument("--chunk", type=int, default=4096)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    args = parser.parse_args()
    rng = random.Random(0)
    tree = SpeculativeConfig()
    config = EngineConfig(
        max_batch=args.requests,
        max_context=MAX_CONTEXT,
        page_size=PAGE_SIZE,
        speculative=tree,
        chunked_prefill=args.chunk,
    )
    width = -(-max_logical_len(MAX_CONTEXT, tree, 0) // PAGE_SIZE)
    num_pages = max(width, int(args.requests * 1400 / PAGE_SIZE * args.pool))
    kv = KVManager(PageAllocator(num_pages + NUM_RESERVED_PAGES), PAGE_SIZE, width, PrefixCache(PAGE_SIZE))
    scheduler = Scheduler(config, kv)
    prefixes = [tuple(rng.randrange(1, 99) for _ in range(700)) for _ in range(8)]
    number = 0

    def arrive() -> None:
        nonlocal number
        prefix = rng.choice(prefixes)[: rng.choice([0, 700])]
        prompt = (*prefix, *(rng.randrange(1, 99) for _ in range(rng.randrange(100, 1000))))
        params = SamplingParams(max_tokens=rng.randrange(50, 400))
        max_len = len(prompt) + params.max_tokens
        scheduler.add(Request(number, prompt, params, 0, 0, frozenset({0}), max_len, TextStream(None, ())))
        number += 1

    times_s: list[float] = []
    rows: list[int] = []
    while len(times_s) < args.steps:
        while len(scheduler.by_id) < args.requests + 16:
            arrive()
        began_s = time.process_time()
        plan = scheduler.schedule()
        scheduled_s = time.process_time() - began_s
        result = answer(plan, rng, tree.max_path)
        began_s = time.process_time()
        scheduler.commit(result)
        if len(scheduler.running) >= args.requests * 0.75 or args.pool < 1:
            times_s.append(scheduled_s + time.process_time() - began_s)
            rows.append(len(plan.decodes))
    quantiles = statistics.quantiles(times_s, n=100)
    data = {
        "settings": {name: value for name, value in vars(args).items() if name != "out"},
        "page_size": PAGE_SIZE,
        "num_pages": num_pages,
        "rounds_per_step": statistics.mean(rows),
        "step_ms": {
            "median": statistics.median(times_s) * 1e3,
            "mean": statistics.mean(times_s) * 1e3,
            "p90": quantiles[89] * 1e3,
            "p99": quantiles[98] * 1e3,
            "max": max(times_s) * 1e3,
        },
        "num_requests": number,
        "num_preemptions": scheduler.num_preemptions,
        "cached_share_of_prompts": scheduler.num_cached_tokens / scheduler.num_prompt_tokens,
    }
    print(write_result(args.out, "scheduler", data))
    print(data)


if __name__ == "__main__":
    main()
