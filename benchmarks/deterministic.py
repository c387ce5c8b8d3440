"""--deterministic on a GPU in bfloat16: texts in other batches, trees, chunks and pools, and what the mode costs.

Usage: python benchmarks/deterministic.py [--part equality | cost] [--num-prompts N] [--max-tokens N] [--out FOLDER]

equality: every prompt alone and without speculation, at temperature 0 and 0.8; then in each of SETTINGS, and once
in the usual mode, to see how many texts differ where nothing is done about it. cost: tokens per second of both modes,
in turn.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from importlib.resources import files
from pathlib import Path
from typing import Any

from treedraft import LLM, SamplingParams, SpeculativeConfig
from treedraft.bench.results import write_result

WIDE, CHAIN, LARGE = SpeculativeConfig(5, 4, 16), SpeculativeConfig(3, 1, 4), SpeculativeConfig(7, 8, 48)
SETTINGS: tuple[dict[str, Any], ...] = (
    {"speculative": None, "max_batch": 64},
    {"speculative": WIDE, "max_batch": 1},
    {"speculative": WIDE, "max_batch": 64},
    {"speculative": CHAIN, "max_batch": 8},
    {"speculative": LARGE, "max_batch": 32},
    {"speculative": WIDE, "max_batch": 16, "chunked_prefill": 24},
    {"speculative": WIDE, "max_batch": 32, "kv_memory_bytes": 2 << 20},  # preempts
    {"speculative": LARGE, "max_batch": 24, "prefix_cache": False, "page_size": 64},
)
TEMPERATURES = (0.0, 0.8)


def make(is_deterministic: bool = True, **options: Any) -> LLM:
    graph = "on" if options["max_batch"] <= 8 else "off"  # a batch of 64 has 40 graphs to capture
    settings = {"cuda_graph": graph, "max_context": 512} | options
    return LLM("demo", device="cuda", dtype="bfloat16", deterministic=is_deterministic, **settings)


def prompts_of(llm: LLM, number: int) -> list[list[int]]:
    """The held-out prompts, then each of them cut to its half, a third, ..."""
    lines = (files("treedraft") / "demo" / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    whole = [llm.encode(json.loads(line)["prompt"]) for line in lines]
    return [whole[i % len(whole)][: max(2, len(whole[i % len(whole)]) // (1 + i // len(whole)))] for i in range(number)]


def texts(llm: LLM, prompts: list[list[int]], max_tokens: int) -> tuple[list[tuple[int, ...]], int]:
    """Every prompt's tokens at each temperature, and how often a request was preempted."""
    params = [
        SamplingParams(temperature=t, top_p=0.9 if t else 1.0, seed=i, max_tokens=max_tokens, ignore_eos=True)
        for t in TEMPERATURES
        for i in range(len(prompts))
    ]
    outputs = llm.generate(prompts * len(TEMPERATURES), params, progress=False)
    return [o.outputs[0].token_ids for o in outputs], llm.engine.scheduler.num_preemptions


def equality(number: int, max_tokens: int) -> dict[str, Any]:
    llm = make(speculative=None, max_batch=1)
    prompts = prompts_of(llm, number)
    wanted, _ = texts(llm, prompts, max_tokens)
    rows = []
    for options in (*SETTINGS, {"is_deterministic": False, "speculative": WIDE, "max_batch": 64}):
        del llm
        llm = make(**options)
        started = time.perf_counter()
        given, num_preempted = texts(llm, prompts, max_tokens)
        rows.append(
            {key: str(value) for key, value in options.items()}
            | {"texts": len(given), "equal": sum(a == b for a, b in zip(given, wanted, strict=True))}
            | {"preemptions": num_preempted, "seconds": round(time.perf_counter() - started, 1)}
        )
        print(rows[-1], flush=True)
    return {"num_prompts": number, "max_tokens": max_tokens, "temperatures": TEMPERATURES, "settings": rows}


def cost(batches: list[int], max_tokens: int) -> dict[str, Any]:
    rows = []
    for max_batch in batches:
        for speculative in (None, WIDE):
            modes = {
                mode: make(mode, speculative=speculative, max_batch=max_batch, cuda_graph="on", prefix_cache=False)
                for mode in (False, True)
            }
            prompts = prompts_of(modes[True], max_batch)
            params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
            speeds: dict[bool, list[float]] = {False: [], True: []}
            for repetition in range(6):
                for mode, llm in modes.items():
                    started = time.perf_counter()
                    llm.generate(prompts, params, progress=False)
                    if repetition:  # the first compiles
                        speeds[mode].append(max_batch * max_tokens / (time.perf_counter() - started))
            usual, exact = (statistics.median(speeds[mode]) for mode in (False, True))
            rows.append(
                {"batch": max_batch, "tree": str(speculative), "usual_tokens_per_s": usual}
                | {"deterministic_tokens_per_s": exact, "cost": usual / exact, "all": speeds}
            )
            print(rows[-1], flush=True)
    return {"max_tokens": max_tokens, "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", choices=["equality", "cost"], default="equality")
    parser.add_argument("--num-prompts", type=int, default=200)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 8, 64], help="of the part cost")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    args = parser.parse_args()
    found = (
        equality(args.num_prompts, args.max_tokens) if args.part == "equality" else cost(args.batches, args.max_tokens)
    )
    print(write_result(args.out, f"deterministic-{args.part}", found))


if __name__ == "__main__":
    main()
