"""Train the demo model and its draft head: python -m treedraft.demo.train --corpus FOLDER --out FOLDER

Steps: encode the corpus, train the target (or take one: --target), draw the target's own texts, train the head, export
both in the Hugging Face layout, measure on held-out documents. Each step's result is kept in --out and reused.

    OUT/tokens.npz        encoded corpus
    OUT/target/           target, bfloat16 (with --target it stays where it is)
    OUT/draft/            head, bfloat16, layout of the hub's Eagle3DeepseekV2ForCausalLM
    OUT/metrics.json      figures for the model card
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from treedraft.config import SpeculativeConfig
from treedraft.demo.recipe.corpus import Corpus, Windows, encode_corpus
from treedraft.demo.recipe.evaluate import agreement, held_out_loss, measure_acceptance, read_prompts, write_texts
from treedraft.demo.recipe.head import HeadRecipe, MixedRows, grow_from, head_fields, new_head, train_head
from treedraft.demo.recipe.samples import SampleSet, draw_samples
from treedraft.demo.recipe.target import TARGET_FIELDS, TargetRecipe, load_target, new_target, train_target
from treedraft.errors import ConfigError
from treedraft.models.draft.eagle3 import load_head
from treedraft.weights.loader import read_config, save_checkpoint

MAX_POSITIONS = 1024
SHARD_BYTES = 14 * 2**20
DEMO = Path(__file__).resolve().parent
# The target sees short texts of few words often enough; the head is to serve every domain equally well.
TARGET_WEIGHTS = {"story": 4.0, "kid": 3.0, "fiction": 1.0, "code": 1.0}  # times its number of tokens
HEAD_WEIGHTS = {"story": 0.2, "kid": 0.25, "fiction": 0.3, "code": 0.25}
SHAPES = tuple(SpeculativeConfig(*s) for s in ((3, 1, 4), (5, 1, 6), (5, 4, 16), (5, 4, 32), (7, 8, 48)))
TEMPERATURES = (0.0, 0.8, 1.0)


@dataclass(frozen=True)
class SampleRecipe:
    """How the target's own texts are drawn."""

    texts: tuple[tuple[str, int], ...] = (("0.0", 12288), ("0.8", 24576), ("1.0", 28672))  # by temperature
    length: int = 392  # tokens, prompt included
    min_prompt: int = 16
    max_prompt: int = 72
    batch_rows: int = 8192
    seed: int = 2


@dataclass(frozen=True)
class EvaluationRecipe:
    """How much is measured."""

    max_tokens: int = 128  # continuation of each prompt
    prompts: int = 1000  # at most
    windows: int = 100  # held-out windows of a domain
    window_length: int = 257


def train(
    corpus_folder: Path,
    out: Path,
    target_folder: Path | None,
    tokenizer_file: Path,
    device: torch.device,
    target_recipe: TargetRecipe,
    sample_recipe: SampleRecipe,
    head_recipe: HeadRecipe,
    evaluation: EvaluationRecipe,
    start_folder: Path | None = None,
    log: Callable[[str], None] = print,
    target_fields: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Run every step; return the metrics of OUT/metrics.json. target_fields: where the target differs from the demo."""
    out.mkdir(parents=True, exist_ok=True)
    clock = _Clock(log)
    corpus = prepare_corpus(corpus_folder, out, tokenizer_file)
    metrics: dict[str, Any] = {"corpus_tokens": {k: len(v) for k, v in corpus.train.items()}}
    clock.lap(f"corpus of {corpus.num_train_tokens() / 1e6:.1f} M tokens")
    if target_folder is None:
        target_folder = out / "target"
        model_fields = TARGET_FIELDS | (target_fields or {})
        metrics["target"] = make_target(corpus, target_folder, target_recipe, device, log, model_fields)
        clock.lap("target")
    samples = make_samples(corpus, target_folder, sample_recipe, device)
    metrics["samples"] = {str(s.temperature): s.token_ids.numel() for s in samples}
    clock.lap(f"{sum(metrics['samples'].values()) / 1e6:.1f} M tokens of samples")
    metrics["head"] = make_head(corpus, samples, target_folder, out / "draft", head_recipe, device, log, start_folder)
    clock.lap("head")
    metrics |= evaluate(corpus, target_folder, out / "draft", tokenizer_file, head_recipe.num_steps, evaluation, device)
    clock.lap("evaluation")
    metrics["seconds"] = clock.laps
    metrics["device"] = torch.cuda.get_device_name() if device.type == "cuda" else device.type
    (out / "metrics.json").write_text(json.dumps(metrics, indent=1) + "\n", encoding="utf-8")
    return metrics


def prepare_corpus(folder: Path, out: Path, tokenizer_file: Path) -> Corpus:
    """Encode the corpus, or take what an earlier run encoded."""
    cached = out / "tokens.npz"
    if cached.exists():
        return Corpus.load(cached)
    corpus = encode_corpus(folder, tokenizer_file)
    corpus.save(cached)
    return corpus


def make_target(
    corpus: Corpus,
    folder: Path,
    recipe: TargetRecipe,
    device: torch.device,
    log: Callable[[str], None],
    model_fields: dict[str, Any],
) -> dict[str, Any]:
    """Train a target with that config.json and write it to `folder`."""
    model = new_target(model_fields, MAX_POSITIONS, recipe.seed, device)
    weights = {d: TARGET_WEIGHTS.get(d, 1.0) * len(tokens) for d, tokens in corpus.train.items()}
    result = train_target(model, Windows(corpus.train, weights, device, recipe.seed), recipe, log)
    save_checkpoint(folder, model.checkpoint(), model_fields, torch.bfloat16, SHARD_BYTES)
    return result | {"recipe": asdict(recipe), "parameters": sum(p.numel() for p in model.parameters())}


def make_samples(corpus: Corpus, target_folder: Path, recipe: SampleRecipe, device: torch.device) -> list[SampleSet]:
    """Let the target continue openings of paragraphs of the training corpus."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = load_target(target_folder, MAX_POSITIONS, dtype, device)
    windows = Windows(corpus.train, HEAD_WEIGHTS, device, recipe.seed)
    return draw_samples(
        model,
        windows.draw,
        {float(temperature): count for temperature, count in recipe.texts},
        recipe.length,
        (recipe.min_prompt, recipe.max_prompt),
        recipe.batch_rows,
        dtype,
        recipe.seed,
    )


def make_head(
    corpus: Corpus,
    samples: list[SampleSet],
    target_folder: Path,
    folder: Path,
    recipe: HeadRecipe,
    device: torch.device,
    log: Callable[[str], None],
    start_folder: Path | None = None,
) -> dict[str, Any]:
    """Train a head, from noise or from a smaller head in `start_folder`, and write it to `folder`."""
    target = load_target(target_folder, MAX_POSITIONS, torch.float32, device)
    config = head_fields(recipe, read_config(target_folder))
    head = new_head(recipe, target, config, MAX_POSITIONS)
    if start_folder is not None:
        grow_from(head, load_head(start_folder, target, torch.float32, device))
    rows = MixedRows(recipe, Windows(corpus.train, HEAD_WEIGHTS, device, recipe.seed), samples)
    result = train_head(head, target, rows, recipe, log)
    save_checkpoint(folder, head.checkpoint(), config, torch.bfloat16, SHARD_BYTES)
    return result | {"recipe": asdict(recipe), "parameters": sum(p.numel() for p in head.parameters())}


def evaluate(
    corpus: Corpus,
    target_folder: Path,
    head_folder: Path,
    tokenizer_file: Path,
    num_steps: int,
    recipe: EvaluationRecipe,
    device: torch.device,
    shapes: tuple[SpeculativeConfig, ...] = SHAPES,
) -> dict[str, Any]:
    """Measure exported checkpoints, in float32, on held-out documents."""
    target = load_target(target_folder, MAX_POSITIONS, torch.float32, device)
    head = load_head(head_folder, target, torch.float32, device)
    prompts = read_prompts(DEMO / "prompts.jsonl", tokenizer_file)
    prompts = prompts[:: max(1, len(prompts) // recipe.prompts)]
    texts = [write_texts(target, prompts, recipe.max_tokens, t, torch.float32) for t in TEMPERATURES]
    windows = recipe.windows, recipe.window_length
    return {
        "held_out_loss": held_out_loss(target, corpus.held_out, recipe.window_length - 1, recipe.windows),
        "agreement": agreement(target, head, head.taps, corpus.held_out, num_steps, windows[1], windows[0]),
        "acceptance": measure_acceptance(target, head, head.taps, texts, list(shapes)),
    }


class _Clock:
    """Says how long each step took."""

    def __init__(self, log: Callable[[str], None]):
        self.log, self.last = log, time.monotonic()
        self.laps: dict[str, float] = {}

    def lap(self, name: str) -> None:
        now = time.monotonic()
        self.laps[name], self.last = round(now - self.last, 1), now
        self.log(f"{name}: {self.laps[name]} s")


def override(recipe: Any, settings: list[str]) -> Any:
    """Return a recipe with `name=value` settings applied, values as JSON. Raises ConfigError for an unknown name."""
    known = {f.name for f in fields(recipe)}
    values = {}
    for setting in settings:
        name, _, value = setting.partition("=")
        if name not in known:
            raise ConfigError(f"{type(recipe).__name__} has no setting {name!r}; it has {', '.join(sorted(known))}")
        parsed = json.loads(value)
        values[name] = (
            tuple(tuple(v) if isinstance(v, list) else v for v in parsed) if isinstance(parsed, list) else parsed
        )
    return replace(recipe, **values)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Train the demo model and its draft head.")
    parser.add_argument("--corpus", type=Path, required=True, help="folder of .jsonl files or .tar.xz archives")
    parser.add_argument("--out", type=Path, required=True, help="folder for all that the training makes")
    parser.add_argument("--target", type=Path, help="a trained target to take instead of training one")
    parser.add_argument(
        "--target-config", type=Path, help="JSON of the fields in which the target differs from the demo"
    )
    parser.add_argument("--start-head", type=Path, help="a smaller head of the same target to start from")
    parser.add_argument("--tokenizer", type=Path, default=DEMO / "model" / "tokenizer.json")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    for name in ("target", "sample", "head", "evaluation"):
        parser.add_argument(
            f"--{name}-set", nargs="*", default=[], metavar="NAME=VALUE", help=f"{name} recipe settings"
        )
    given = parser.parse_args(arguments)
    torch.set_float32_matmul_precision("high")
    train(
        given.corpus,
        given.out,
        given.target,
        given.tokenizer,
        torch.device(given.device),
        override(TargetRecipe(), given.target_set),
        override(SampleRecipe(), given.sample_set),
        override(HeadRecipe(), given.head_set),
        override(EvaluationRecipe(), given.evaluation_set),
        given.start_head,
        lambda line: print(line, flush=True),
        None if given.target_config is None else json.loads(given.target_config.read_text(encoding="utf-8")),
    )


if __name__ == "__main__":
    main()
