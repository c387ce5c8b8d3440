"""Held-out figures: loss, agreement of the unrolled head, and acceptance of drafted trees.

Acceptance needs no decoding loop. The text under a noise key does not depend on drafts, so it is drawn once; then every
position of it is probed as the root of a tree, all at once, and rounds are chained afterwards on the host.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from treedraft.attention.dense import DenseAttend
from treedraft.config import SpeculativeConfig
from treedraft.demo.recipe.attend import TreeProbe
from treedraft.demo.recipe.samples import continue_prompts
from treedraft.demo.recipe.unroll import unroll
from treedraft.models.deepseek import DeepseekModel
from treedraft.models.draft.eagle3 import Eagle3MlaHead
from treedraft.speculative.noise import gumbel, noise_key
from treedraft.speculative.sampling import draft_scores

REPEAT_LEN = 8  # a round is repetitive when its root ends an 8-gram that the text already held


@dataclass(frozen=True)
class Acceptance:
    """Tokens a round under one tree shape and temperature, over prompts of one domain (or all)."""

    domain: str
    temperature: float
    shape: tuple[int, int, int]
    accept_length: float  # generated tokens / rounds
    standard_error: float  # over prompts
    accept_length_fresh: float  # over rounds that are not repetitive
    accepted_per_depth: tuple[float, ...]
    num_prompts: int
    num_rounds: int


@dataclass(frozen=True)
class Text:
    """Texts that the target wrote under noise keys. One row a prompt."""

    token_ids: Tensor  # [B, L] int64
    prompt_lens: tuple[int, ...]
    domains: tuple[str, ...]
    temperature: float
    keys: Tensor  # [B] int64

    def rows(self, at: slice) -> Text:
        return Text(self.token_ids[at], self.prompt_lens[at], self.domains[at], self.temperature, self.keys[at])


@dataclass(frozen=True)
class Prompt:
    """What a text begins with."""

    domain: str
    token_ids: tuple[int, ...]


def read_prompts(path: Path, tokenizer_file: Path) -> list[Prompt]:
    """Read JSON lines of `domain` and `prompt`."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    return [Prompt(line["domain"], tuple(tokenizer.encode(line["prompt"]).ids)) for line in lines]


def write_texts(
    target: DeepseekModel, prompts: list[Prompt], max_tokens: int, temperature: float, dtype: torch.dtype
) -> Text:
    """Let the target continue prompts by at least `max_tokens`, under the noise of seeds 0, 1, 2, ..."""
    device = target.embedding.device
    keys = torch.tensor([noise_key(i, 0) for i in range(len(prompts))], device=device)
    lens = torch.tensor([len(p.token_ids) for p in prompts], device=device)
    padded = torch.zeros(len(prompts), int(lens.max()), dtype=torch.int64)
    for row, prompt in zip(padded, prompts, strict=True):
        row[: len(prompt.token_ids)] = torch.tensor(prompt.token_ids)

    def noise(position: int) -> Tensor:
        at = torch.full((len(keys), 1), position, device=device)
        return gumbel(keys, at, target.config.vocab_size)[:, 0]

    length = padded.shape[1] + max_tokens
    token_ids = continue_prompts(
        target, padded.to(device), lens, length, temperature, noise if temperature > 0 else None, dtype
    )
    return Text(token_ids, tuple(lens.tolist()), tuple(p.domain for p in prompts), temperature, keys)


@torch.inference_mode()
def accepted_depths(
    target: DeepseekModel,
    head: Eagle3MlaHead,
    taps: tuple[int, ...],
    text: Text,
    shape: SpeculativeConfig,
) -> Tensor:
    """Depth to which each position's tree follows the text: [B, L - 1 - num_steps] int64, entry i for root i + 1.

    Children are ranked by `draft_scores`, as when serving.
    """
    token_ids, num_steps, topk = text.token_ids, shape.num_steps, shape.topk
    rows = token_ids.shape[1] - 1 - num_steps
    positions = torch.arange(token_ids.shape[1], device=token_ids.device).expand_as(token_ids)
    features = target(token_ids, positions, DenseAttend(), taps).features
    probe = TreeProbe()
    hidden = head(head.fuse(features[:, :rows]), token_ids[:, 1 : rows + 1], positions[:, :rows], probe)[:, :, None]

    def children(hidden: Tensor, level: int) -> tuple[Tensor, Tensor, Tensor]:
        logits = head.logits(hidden)  # [B, N, 1 or K, Vd]
        temperature = torch.full((logits[..., 0, 0].numel(),), text.temperature, device=logits.device)
        noise = None
        if text.temperature > 0:
            noise = gumbel(text.keys, positions[:, 1 + level : 1 + level + rows], target.config.vocab_size)
            noise = noise if head.draft_to_target is None else noise[..., head.draft_to_target]
            noise = noise.flatten(0, 1)
        scores = draft_scores(logits.flatten(0, 1), temperature, noise).view_as(logits)
        best, ids = scores.topk(topk, -1)
        ids = head.target_ids(ids)
        return best, ids, ids == token_ids[:, 1 + level : 1 + level + rows, None, None]

    best, ids, on_path = (x[:, :, 0] for x in children(hidden, 1))  # [B, N, K]
    pool_scores, pool_path, pool_depth = [best], [on_path], [torch.ones_like(ids)]
    own = torch.arange(topk, device=token_ids.device).expand_as(ids)
    ancestors, hidden = own[..., None], hidden.expand(-1, -1, topk, -1)
    for level in range(2, num_steps + 1):
        probe.ancestors = ancestors
        at = (positions[:, :rows, None] + level - 1).expand_as(ids)
        hidden = head(hidden, ids, at, probe)
        child_scores, child_ids, child_path = children(hidden, level)
        scores = (best[..., None] + child_scores).flatten(2)
        path = (on_path[..., None] & child_path).flatten(2)
        pool_scores.append(scores)
        pool_path.append(path)
        pool_depth.append(torch.full_like(path, level, dtype=torch.int64))
        best, chosen = scores.topk(topk, -1)
        ids, on_path, parents = child_ids.flatten(2).gather(2, chosen), path.gather(2, chosen), chosen // topk
        hidden = hidden.gather(2, parents[..., None].expand(-1, -1, -1, hidden.shape[-1]))
        ancestors = ancestors.gather(2, parents[..., None].expand(-1, -1, -1, ancestors.shape[-1]))
        ancestors = torch.cat([ancestors, own[..., None]], -1)
    scores, path, depth = (torch.cat(x, 2) for x in (pool_scores, pool_path, pool_depth))
    selected = scores.topk(min(shape.num_draft_tokens - 1, scores.shape[2]), -1).indices
    return (depth * path).gather(2, selected).amax(-1)


def chain_rounds(text: Text, depths: Tensor, num_steps: int, shape: SpeculativeConfig) -> list[Acceptance]:
    """Walk rounds over each text, root after root, and average by domain and over all."""
    per_prompt: list[tuple[str, list[int], list[bool]]] = []
    for tokens, row_depths, domain, prompt_len in zip(
        text.token_ids.tolist(), depths.tolist(), text.domains, text.prompt_lens, strict=True
    ):
        repeats = repeated_roots(tokens)
        root, accepted, repetitive = prompt_len, [], []
        while root - 1 < len(row_depths):
            accepted.append(row_depths[root - 1])
            repetitive.append(repeats[root])
            root += accepted[-1] + 1
        per_prompt.append((domain, accepted, repetitive))
    groups = {d: [p for p in per_prompt if p[0] == d] for d in sorted(set(text.domains))} | {"all": per_prompt}
    return [_summarise(domain, text.temperature, shape, num_steps, prompts) for domain, prompts in groups.items()]


def _summarise(
    domain: str, temperature: float, shape: SpeculativeConfig, num_steps: int, prompts: list[Any]
) -> Acceptance:
    accepted = np.concatenate([p[1] for p in prompts])
    fresh = accepted[~np.concatenate([p[2] for p in prompts]).astype(bool)]
    by_prompt = np.array([np.mean(p[1]) + 1 for p in prompts])
    return Acceptance(
        domain=domain,
        temperature=temperature,
        shape=(shape.num_steps, shape.topk, shape.num_draft_tokens),
        accept_length=float(accepted.mean() + 1),
        standard_error=float(by_prompt.std(ddof=1) / math.sqrt(len(prompts))) if len(prompts) > 1 else float("nan"),
        accept_length_fresh=float(fresh.mean() + 1) if len(fresh) else float("nan"),
        accepted_per_depth=tuple(float((accepted >= d).mean()) for d in range(1, num_steps + 1)),
        num_prompts=len(prompts),
        num_rounds=len(accepted),
    )


def repeated_roots(tokens: list[int]) -> list[bool]:
    """For each position: whether the REPEAT_LEN tokens that end there occurred earlier in the text."""
    seen: set[tuple[int, ...]] = set()
    repeats = []
    for end in range(len(tokens)):
        gram = tuple(tokens[max(0, end + 1 - REPEAT_LEN) : end + 1])
        repeats.append(len(gram) == REPEAT_LEN and gram in seen)
        seen.add(gram)
    return repeats


def measure_acceptance(
    target: DeepseekModel,
    head: Eagle3MlaHead,
    taps: tuple[int, ...],
    texts: list[Text],
    shapes: list[SpeculativeConfig],
    rows_at_once: int = 16,
) -> list[dict[str, Any]]:
    """Acceptance of every shape on every text, by domain and over all, as plain dicts."""
    results = []
    for text in texts:
        for shape in shapes:
            parts = []
            for first in range(0, len(text.keys), rows_at_once):
                part = text.rows(slice(first, first + rows_at_once))
                parts.append(accepted_depths(target, head, taps, part, shape))
            results += [asdict(a) for a in chain_rounds(text, torch.cat(parts).cpu(), shape.num_steps, shape)]
    return results


@torch.inference_mode()
def held_out_loss(
    target: DeepseekModel, held_out: dict[str, np.ndarray], length: int, windows: int
) -> dict[str, float]:
    """Nats a token of the target, by domain, over up to `windows` consecutive windows."""
    losses = {}
    for domain, tokens in held_out.items():
        token_ids = _windows(target, tokens, length + 1, windows)
        output = target(token_ids[:, :-1], _positions(token_ids[:, :-1]), DenseAttend())
        logits = target.logits(output.hidden).float()
        losses[domain] = float(F.cross_entropy(logits.flatten(0, 1), token_ids[:, 1:].flatten()))
    return losses


@torch.inference_mode()
def agreement(
    target: DeepseekModel,
    head: Eagle3MlaHead,
    taps: tuple[int, ...],
    held_out: dict[str, np.ndarray],
    num_steps: int,
    length: int,
    windows: int,
) -> dict[str, list[float]]:
    """Share of held-out positions where head and target have the same best token, by domain and unrolled step."""
    shares: dict[str, list[float]] = defaultdict(list)
    for domain, tokens in held_out.items():
        token_ids = _windows(target, tokens, length, windows)
        rows = token_ids.shape[1] - num_steps - 1
        output = target(token_ids, _positions(token_ids), DenseAttend(), taps)
        best = target.logits(output.hidden).argmax(-1)
        for step, hidden in enumerate(unroll(head, output.features, token_ids, num_steps)):
            draft = head.target_ids(head.logits(hidden).argmax(-1))
            shares[domain].append(float((draft == best[:, 1 + step : 1 + step + rows]).float().mean()))
    return dict(shares)


def _windows(target: DeepseekModel, tokens: np.ndarray, length: int, windows: int) -> Tensor:
    count = min(windows, len(tokens) // length)
    device = next(target.parameters()).device
    return torch.from_numpy(tokens[: count * length].astype(np.int64).reshape(count, length)).to(device)


def _positions(token_ids: Tensor) -> Tensor:
    return torch.arange(token_ids.shape[1], device=token_ids.device).expand_as(token_ids)
