"""Documents in, tokens out; windows of tokens for training.

A corpus folder holds one document a line, `{"src": ..., "text": ...}`, as `<domain>*.jsonl` files or inside `*.tar.xz`
archives of such files, and `heldout.json` (domain -> sources kept out of training) beside them or in an archive.
"""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from treedraft.errors import CheckpointError, ConfigError

DOMAINS = ("story", "kid", "fiction", "code")
END_OF_TEXT = 0  # token id that ends every document
BATCH_DOCUMENTS = 64  # documents handed to the tokenizer at once


@dataclass(frozen=True)
class Corpus:
    """Tokens by domain, uint16, documents concatenated, each ended by END_OF_TEXT."""

    train: dict[str, np.ndarray]
    held_out: dict[str, np.ndarray]

    def save(self, path: Path) -> None:
        parts = {f"train.{k}": v for k, v in self.train.items()} | {
            f"held_out.{k}": v for k, v in self.held_out.items()
        }
        with open(path, "wb") as file:
            np.savez(file, **parts)  # type: ignore[arg-type]

    @classmethod
    def load(cls, path: Path) -> Corpus:
        with np.load(path) as parts:
            split: dict[str, dict[str, np.ndarray]] = {"train": {}, "held_out": {}}
            for name in parts.files:
                kind, domain = name.split(".")
                split[kind][domain] = parts[name]
        return cls(**split)

    def num_train_tokens(self) -> int:
        return sum(map(len, self.train.values()))


def encode_corpus(folder: Path, tokenizer_file: Path) -> Corpus:
    """Encode every document under `folder`. Raises CheckpointError when files are missing or not as described."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    if tokenizer.get_vocab_size() > 2**16:
        raise ConfigError(f"tokens are kept in 16 bits; {tokenizer_file} has {tokenizer.get_vocab_size()} entries")
    held_sources = {domain: set(sources) for domain, sources in read_held_out(folder).items()}
    train: dict[str, list[np.ndarray]] = {}
    held: dict[str, list[np.ndarray]] = {}
    for domain, documents in _read_by_domain(folder):
        for batch in _batches(documents, BATCH_DOCUMENTS):
            encodings = tokenizer.encode_batch_fast([d["text"] for d in batch])
            for document, encoding in zip(batch, encodings, strict=True):
                tokens = np.array([*encoding.ids, END_OF_TEXT], dtype=np.uint16)
                kind = held if document["src"] in held_sources.get(domain, ()) else train
                kind.setdefault(domain, []).append(tokens)
    if not train:
        raise CheckpointError(f"{folder} holds no documents: expected *.jsonl files or *.tar.xz archives of them")
    return Corpus(*({k: np.concatenate(v) for k, v in kind.items()} for kind in (train, held)))


def read_held_out(folder: Path) -> dict[str, list[str]]:
    """Sources kept out of training, by domain."""
    for name, file in _files(folder):
        if name == "heldout.json":
            return json.load(file)
    raise CheckpointError(f"{folder} has no heldout.json, neither as a file nor in an archive")


def _read_by_domain(folder: Path) -> Iterator[tuple[str, Iterator[dict[str, str]]]]:
    for name, file in _files(folder):
        if name.endswith(".jsonl"):
            yield name.removesuffix(".jsonl").split("_")[0], (json.loads(line) for line in file if line.strip())


def _files(folder: Path) -> Iterator[tuple[str, IO[Any]]]:
    """Every .jsonl and .json file of the folder, then of its archives. A name seen before is skipped."""
    seen = set()
    for path in sorted(folder.glob("*.json*")):
        seen.add(path.name)
        with open(path, encoding="utf-8") as file:
            yield path.name, file
    for path in sorted(folder.glob("*.tar.xz")):
        with tarfile.open(path, "r:xz") as archive:
            for member in archive:
                raw, name = archive.extractfile(member), Path(member.name).name
                if raw is not None and name not in seen:
                    seen.add(name)
                    yield name, io.TextIOWrapper(raw, encoding="utf-8")


def _batches(items: Iterable[dict[str, str]], size: int) -> Iterator[list[dict[str, str]]]:
    batch: list[dict[str, str]] = []
    for item in items:
        batch.append(item)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch


class Windows:
    """Draws windows of tokens at random, domains by weight. Tokens live on `device`."""

    def __init__(self, tokens: dict[str, np.ndarray], weights: dict[str, float], device: torch.device, seed: int):
        domains = [d for d in tokens if weights.get(d, 0.0) > 0]
        if not domains:
            raise ConfigError(f"no domain of {sorted(tokens)} has a positive weight in {weights}")
        self.tokens = torch.cat([torch.from_numpy(tokens[d].astype(np.int32)) for d in domains]).to(device)
        self.lengths = torch.tensor([len(tokens[d]) for d in domains], device=device)
        self.starts = self.lengths.cumsum(0) - self.lengths
        self.weights = torch.tensor([weights[d] for d in domains], dtype=torch.float64, device=device)
        self.generator = torch.Generator(device).manual_seed(seed)
        self.device = device

    def draw(self, rows: int, length: int) -> Tensor:
        """[rows, length] int64, each row consecutive tokens of one domain."""
        if int(self.lengths.min()) < length:
            raise ConfigError(
                f"a window of {length} tokens is longer than a domain of {int(self.lengths.min())} tokens"
            )
        domain = torch.multinomial(self.weights, rows, replacement=True, generator=self.generator)
        share = torch.rand(rows, generator=self.generator, device=self.device, dtype=torch.float64)
        offset = self.starts[domain] + (share * (self.lengths[domain] - length + 1)).long()
        return self.tokens[offset[:, None] + torch.arange(length, device=self.device)].long()
