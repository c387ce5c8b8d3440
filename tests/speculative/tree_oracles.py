"""Trees grown and selected in plain Python."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from treedraft.speculative import tree
from treedraft.types import DraftTree


@dataclass
class Candidate:
    token: int
    score: float
    parent: int  # pool index, -1 = root
    level: int


def clean(score: float) -> float:
    return -math.inf if math.isnan(score) else score


def best_first(scores: list[float]) -> list[int]:
    return sorted(range(len(scores)), key=lambda i: (-clean(scores[i]), i))


def grow(
    children: list[list[list[tuple[int, float]]]],
) -> tuple[list[Candidate], list[list[int]], list[list[set[int]]]]:
    """children[level - 1][row] = the row's (token, logp). Returns pool, frontiers and their bits by level."""
    topk = len(children[0][0])
    pool = [Candidate(t, s, -1, 1) for t, s in children[0][0]]
    frontiers = [list(range(topk))]
    bits = [[{j} for j in range(topk)]]
    for level in range(2, len(children) + 1):
        start = len(pool)
        for row, parent in enumerate(frontiers[-1]):
            for t, logp in children[level - 1][row]:
                score = float(torch.tensor(clean(pool[parent].score)) + torch.tensor(logp))  # float32, as the engine
                pool.append(Candidate(t, min(clean(score), clean(pool[parent].score)), parent, level))
        order = best_first([c.score for c in pool[start:]])[:topk]
        bits.append([bits[-1][i // topk] | {(level - 1) * topk + j} for j, i in enumerate(order)])
        frontiers.append([start + i for i in order])
    return pool, frontiers, bits


def selected(pool: list[Candidate], num_draft_tokens: int, limit: int) -> list[tuple[int, int, int, set[int], float]]:
    """(token, parent column, depth, ancestor columns, score) of nodes 1 .. N-1."""
    order = best_first([c.score for c in pool])[: num_draft_tokens - 1]
    kept = sorted(i for rank, i in enumerate(order) if clean(pool[i].score) > -math.inf and rank + 1 < limit)
    column = {-1: 0} | {i: c + 1 for c, i in enumerate(kept)}
    ancestors: dict[int, set[int]] = {-1: {0}}
    nodes = []
    for i in kept:
        ancestors[i] = ancestors[pool[i].parent] | {column[i]}
        nodes.append((pool[i].token, column[pool[i].parent], pool[i].level, ancestors[i], pool[i].score))
    for c in range(len(kept) + 1, num_draft_tokens):
        nodes.append((-1, 0, 1, {0, c}, -math.inf))
    return nodes


def to_set(words: Tensor) -> set[int]:
    return {64 * w + b for w, word in enumerate(words.tolist()) for b in range(64) if (word >> b) & 1}


def grow_both(
    ids: list[Tensor], logps: list[Tensor], words: int
) -> tuple[tree.CandidatePool, list[tree.Frontier], list[Tensor], list[list[Candidate]], list, list]:
    """Grow a batch with the engine and each sequence with the oracle. ids[l], logps[l]: [B, K, K] ([B, K] first)."""
    pool, frontier = tree.first_level(ids[0], logps[0], words)
    frontiers, parent_rows = [frontier], []
    for level in range(2, len(ids) + 1):
        pool, frontier, rows = tree.next_level(pool, frontier, ids[level - 1], logps[level - 1], level)
        frontiers.append(frontier)
        parent_rows.append(rows)
    plain = []
    for b in range(ids[0].shape[0]):
        children = [[list(zip(ids[0][b].tolist(), logps[0][b].tolist()))]]
        for i, s in zip(ids[1:], logps[1:]):
            children.append([list(zip(i[b, r].tolist(), s[b, r].tolist())) for r in range(i.shape[1])])
        plain.append(grow(children))
    return pool, frontiers, parent_rows, [p[0] for p in plain], [p[1] for p in plain], [p[2] for p in plain]


def random_levels(
    batch: int, topk: int, num_steps: int, seed: int, values: Tensor | None = None
) -> tuple[list[Tensor], list[Tensor]]:
    """Children of every level: distinct tokens and descending log-probabilities, from `values` if given (ties)."""
    generator = torch.Generator().manual_seed(seed)
    ids, logps = [], []
    for level in range(num_steps):
        shape = (batch, topk) if level == 0 else (batch, topk, topk)
        tokens = torch.rand((*shape[:-1], 64), generator=generator).argsort(-1)[..., :topk]
        if values is None:
            s = -torch.rand(shape, generator=generator) * 3
        else:
            s = values[torch.randint(len(values), shape, generator=generator)]
        ids.append(tokens)
        logps.append(s.sort(-1, descending=True).values)
    return ids, logps


def assert_equals_oracle(result: DraftTree, b: int, root: int, nodes: list) -> None:
    assert result.token_ids[b].tolist() == [root] + [n[0] for n in nodes]
    assert result.parents[b].tolist() == [-1] + [n[1] for n in nodes]
    assert result.depths[b].tolist() == [0] + [n[2] for n in nodes]
    assert [to_set(w) for w in result.ancestor_bits[b]] == [{0}] + [n[3] for n in nodes]
    assert result.scores[b].tolist() == [0.0] + [n[4] for n in nodes]
