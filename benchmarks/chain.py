"""A chain of drafts with shared noise, without, and what rejection sampling would accept: python benchmarks/chain.py

For each depth reached: the share of drafts that were accepted, beside sum_v min(p(v), q(v)), the acceptance that
rejection sampling reaches for a draft sampled from q (Leviathan et al., arXiv 2211.17192, section 3.1), p being the
target's and q the head's distribution at the same place. Rejection sampling gives up reproducible text for it.
"""

import argparse
import json
from importlib.resources import files
from pathlib import Path

import torch

from treedraft import LLM, SamplingParams, SpeculativeConfig
from treedraft.bench.results import write_result


def measure(llm: LLM, prompts: list[str], temperature: float, max_tokens: int) -> list[dict[str, float]]:
    """Acceptance and overlap at each depth, over the rounds that reached it."""
    head, num_steps = llm.runner.drafter.head, llm.config.speculative.num_steps
    drafts: list[torch.Tensor] = []
    plain_logits = head.logits

    def logits(hidden: torch.Tensor) -> torch.Tensor:
        drafts.append(plain_logits(hidden))
        return drafts[-1]

    reached, accepted, overlap = [0] * num_steps, [0] * num_steps, [0.0] * num_steps

    def observe(rows, batch, result):
        levels = drafts[-num_steps:]
        drafts.clear()
        num_accepted = result.accepted.num_accepted.tolist()
        for depth in range(num_steps):
            p = (llm.runner.target.model.logits(result.hidden[:, depth]) / temperature).softmax(-1)
            q = (levels[depth][:, 0] / temperature).softmax(-1)
            common = torch.minimum(p, q).sum(-1).tolist()
            for b, m in enumerate(num_accepted):
                if m >= depth:
                    reached[depth] += 1
                    accepted[depth] += m > depth
                    overlap[depth] += common[b]

    head.logits, llm.runner.observer = logits, observe
    try:
        params = SamplingParams(temperature=temperature, max_tokens=max_tokens, ignore_eos=True)
        llm.generate(prompts, params, progress=False)
    finally:
        del head.logits
        llm.runner.observer = None
    return [
        {"depth": d + 1, "rounds": n, "accepted": a / n, "rejection_sampling": o / n}
        for d, (n, a, o) in enumerate(zip(reached, accepted, overlap, strict=True))
        if n
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--max-batch", type=int, default=8)
    parser.add_argument("--num-prompts", type=int, default=96)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    args = parser.parse_args()
    lines = (files("treedraft") / "demo" / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    prompts = [json.loads(line)["prompt"] for line in lines][:: max(1, len(lines) // args.num_prompts)]
    results = []
    for shared_noise in (True, False):
        shape = SpeculativeConfig(5, 1, 6, shared_noise=shared_noise)
        llm = LLM("demo", device=args.device, dtype="float32", speculative=shape, max_batch=args.max_batch)
        for temperature in (0.8, 1.0):
            depths = measure(llm, prompts, temperature, args.max_tokens)
            results.append({"temperature": temperature, "shared_noise": shared_noise, "depths": depths})
            for d in depths:
                print(
                    f"T={temperature} noise {'shared' if shared_noise else 'none  '} depth {d['depth']}: accepted "
                    f"{d['accepted']:.3f}, rejection sampling {d['rejection_sampling']:.3f} ({d['rounds']} rounds)"
                )
    print(write_result(args.out, "chain", {"num_prompts": len(prompts), "results": results}))


if __name__ == "__main__":
    main()
