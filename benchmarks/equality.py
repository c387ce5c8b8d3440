"""Text with and without speculation over a covering array: python benchmarks/equality.py [flags as in --help]

float64 on the CPU must be strictly equal. In float32 every difference is listed with its gaps (ARCHITECTURE.md,
"Exactness"). In bfloat16 the share of choices that differ is reported. A run that was interrupted goes on.
"""

import argparse
import json
from importlib.resources import files
from pathlib import Path

import torch

from treedraft import LLM
from treedraft.bench.equality import Equality, array_points, run_resumable
from treedraft.bench.results import write_result
from treedraft.debug.differences import gaps_at


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float64", choices=["float64", "float32", "bfloat16"])
    parser.add_argument("--num-points", type=int, default=None, help="the first points of the array; default all")
    parser.add_argument("--num-long", type=int, default=10, help="points with 256 tokens instead of 64")
    parser.add_argument("--progress", type=Path, default=None, help="points done so far, one JSON object a line")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--threads", type=int, default=None)
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)

    def make_llm(**options: object) -> LLM:
        return LLM("demo", device=args.device, dtype=args.dtype, max_context=1024, **options)

    plain = make_llm(speculative=None)
    lines = (files("treedraft") / "demo" / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    prompts = [plain.encode(json.loads(line)["prompt"]) for line in lines[::17]]
    equality = Equality(make_llm, prompts, explain=None if args.dtype == "float64" else gaps_at)
    points = array_points(args.num_long)[: args.num_points]
    progress = args.progress or args.out / f"equality-{args.device}-{args.dtype}.partial.jsonl"
    progress.parent.mkdir(parents=True, exist_ok=True)
    results = run_resumable(equality, points, progress, lambda line: print(line, flush=True))
    found = [d for r in results for d in r["differences"]]
    num_choices = sum(r["num_choices"] for r in results)
    near = [d for d in found if min(d.get(k, 0) for k in ("top_two", "filter_edge", "router")) < 1e-4]
    summary = {
        "device": args.device,
        "dtype": args.dtype,
        "num_points": len(results),
        "num_choices": num_choices,
        "num_tokens": sum(r["num_tokens_out"] for r in results),
        "num_differences": len(found),
        "num_unexplained": 0 if args.dtype == "float64" and not found else len(found) - len(near),
        "share_of_choices_that_differ": len(found) / num_choices,
        "median_top_two_gap_at_difference": sorted(d.get("top_two", 0.0) for d in found)[len(found) // 2]
        if found
        else None,
    }
    print(json.dumps(summary, indent=1))
    file = write_result(args.out, f"equality-{args.device}-{args.dtype}", summary | {"points": results})
    progress.unlink(missing_ok=True)
    print(file)


if __name__ == "__main__":
    main()
