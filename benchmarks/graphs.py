"""Time of a round, captured and not, by batch size: the demo model on a GPU.

Usage: python benchmarks/graphs.py OUT.json
"""

import json
import statistics
import sys
import time

import torch

from treedraft import LLM, SamplingParams, SpeculativeConfig


def measure(llm: LLM, batch: int, params: SamplingParams) -> dict[str, float]:
    """Median and best wall time of a launched and collected round, and of the whole generation by round."""
    prompt = llm.encode("Once upon a time there was a")
    launch = llm.runner._launch_round
    times: list[float] = []

    def timed(rows, shape):  # type: ignore[no-untyped-def]
        torch.cuda.synchronize()
        started = time.perf_counter()
        out = launch(rows, shape)
        torch.cuda.synchronize()
        if len(rows) == batch:
            times.append(time.perf_counter() - started)
        return out

    llm.generate([prompt] * batch, params, progress=False)
    started = time.perf_counter()
    [*outputs] = llm.generate([prompt] * batch, params, progress=False)
    elapsed = time.perf_counter() - started
    llm.runner._launch_round = timed  # type: ignore[method-assign]
    llm.generate([prompt] * batch, params, progress=False)
    del llm.runner._launch_round
    num_rounds = max(o.metrics.num_rounds for o in outputs)
    return {
        "round_ms": statistics.median(times) * 1e3,
        "best_round_ms": min(times) * 1e3,
        "loop_ms_a_round": elapsed / num_rounds * 1e3,
        "tokens_a_s": sum(o.metrics.num_generated_tokens for o in outputs) / elapsed,
    }


def main() -> None:
    results = []
    settings = {
        "greedy": SamplingParams(temperature=0, max_tokens=72, ignore_eos=True),
        "t1": SamplingParams(temperature=1, seed=1, max_tokens=72, ignore_eos=True),
        "t0.8 top_p": SamplingParams(temperature=0.8, top_p=0.9, seed=1, max_tokens=72, ignore_eos=True),
    }
    for cuda_graph in ("off", "on"):
        for speculative in (SpeculativeConfig(), None):
            started = time.perf_counter()
            llm = LLM(
                "demo", device="cuda", dtype="bfloat16", max_context=512, cuda_graph=cuda_graph, speculative=speculative
            )
            start_s = time.perf_counter() - started
            for name, params in settings.items():
                for batch in (1, 8):
                    if speculative is None and name != "greedy":
                        continue
                    result = measure(llm, batch, params)
                    tree = None if speculative is None else [5, 4, 16]
                    about = {"cuda_graph": cuda_graph, "tree": tree, "sampling": name, "batch": batch}
                    results.append(about | {k: round(v, 3) for k, v in result.items()} | {"start_s": round(start_s, 1)})
                    print(results[-1], flush=True)
    with open(sys.argv[1], "w", encoding="utf-8") as out:
        json.dump(
            {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "rounds": results}, out, indent=1
        )


if __name__ == "__main__":
    main()
