"""Drafts ranked with the target's noise, without it, and with another key's: python benchmarks/noise.py

The text must be the same in all three; tokens a round differ. Also under top-p and under penalties, which change the
target's choice but not the ranking. Means over prompts with standard errors.
"""

import argparse
import json
import statistics
from dataclasses import asdict, replace
from importlib.resources import files
from pathlib import Path

from treedraft import LLM, SamplingParams, SpeculativeConfig
from treedraft.bench.results import write_result

SETTINGS = {
    "plain": SamplingParams(),
    "top_p 0.9": SamplingParams(top_p=0.9),
    "penalties": SamplingParams(repetition_penalty=1.1, presence_penalty=0.2, frequency_penalty=0.1),
}


class OtherKey:
    """A drafter whose ranking noise belongs to another position: as good as a wrong key."""

    def __init__(self, drafter):
        self.drafter = drafter

    def propose(self, batch, rows, noise, root_masks):
        return self.drafter.propose(batch, rows, None if noise is None else noise.roll(1, dims=-1), root_masks)

    def __getattr__(self, name):
        return getattr(self.drafter, name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--max-batch", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--num-prompts", type=int, default=96)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    args = parser.parse_args()
    lines = (files("treedraft") / "demo" / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    prompts = [json.loads(line)["prompt"] for line in lines][:: max(1, len(lines) // args.num_prompts)]
    shape = SpeculativeConfig(5, 4, 16)

    def load(shared_noise: bool) -> LLM:
        tree = replace(shape, shared_noise=shared_noise)
        return LLM("demo", device=args.device, dtype="float32", speculative=tree, max_batch=args.max_batch)

    engines = {"shared": load(True), "none": load(False), "wrong key": load(True)}
    engines["wrong key"].runner.drafter = OtherKey(engines["wrong key"].runner.drafter)
    results = []
    for name, params in SETTINGS.items():
        for temperature in (0.8, 1.0):
            texts = {}
            for noise, llm in engines.items():
                many = [
                    replace(params, temperature=temperature, max_tokens=args.max_tokens, ignore_eos=True, seed=i)
                    for i in range(len(prompts))
                ]
                outputs = llm.generate(prompts, many, progress=False)
                lengths = [o.metrics.accept_length for o in outputs]
                texts[noise] = [o.outputs[0].token_ids for o in outputs]
                same = sum(a == b for a, b in zip(texts[noise], texts["shared"], strict=True))
                results.append(
                    {
                        "setting": name,
                        "temperature": temperature,
                        "noise": noise,
                        "accept_length": statistics.mean(lengths),
                        "standard_error": statistics.stdev(lengths) / len(lengths) ** 0.5,
                        "same_text_as_shared": same,
                        "num_prompts": len(prompts),
                    }
                )
                r = results[-1]
                length = f"{r['accept_length']:.2f} ± {r['standard_error']:.2f}"
                same_text = f"same text {same} of {len(prompts)}"
                print(f"T={temperature} {name:10s} noise {noise:9s}: {length}, {same_text}", flush=True)
    print(write_result(args.out, "noise", {"shape": asdict(shape), "results": results}))


if __name__ == "__main__":
    main()
