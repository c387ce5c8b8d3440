"""Packed lists in plain loops, and random forwards of a drafting or verifying round to build them for."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import Tensor

GUARD = -7777  # no slot


@dataclass(frozen=True)
class Case:
    """One forward, drawn at random. Lists of host integers, and the same as tensors."""

    max_batch: int
    num_rows: int
    num_steps: int
    max_context: int
    page_size: int
    kv_lens: list[int]
    pages: list[list[int]]  # [B][W]
    paths: list[list[list[int]]]  # [B][R] tree slots of a row's ancestors and itself, ascending
    tree_len: int
    is_draft: bool

    @property
    def batch(self) -> int:
        return len(self.kv_lens)

    def slot(self, b: int, position: int) -> int:
        return self.pages[b][position // self.page_size] * self.page_size + position % self.page_size

    def expected(self) -> list[list[int]]:
        """The slots of each row (b, r): prefix, then ancestors."""
        return [
            [self.slot(b, p) for p in range(kv_len)] + [self.slot(b, kv_len + node) for node in path]
            for b, kv_len in enumerate(self.kv_lens)
            for path in self.paths[b]
        ]

    def tensors(self) -> dict[str, Tensor | int]:
        """The arguments of `build_packed` that describe the forward."""
        words = -(-self.tree_len // 64)
        bits = [[[0] * words for _ in rows] for rows in self.paths]
        for b, rows in enumerate(self.paths):
            for r, path in enumerate(rows):
                for node in path:
                    bits[b][r][node // 64] |= 1 << node % 64
        signed = [[[w - 2**64 if w >= 2**63 else w for w in row] for row in rows] for rows in bits]
        tail = [[self.slot(b, kv_len + j) for j in range(self.tree_len)] for b, kv_len in enumerate(self.kv_lens)]
        return {
            "page_table": torch.tensor(self.pages, dtype=torch.int32),
            "prefix_lens": torch.tensor(self.kv_lens),
            "tail_slots": torch.tensor(tail),
            "ancestor_bits": torch.tensor(signed),
            "tree_len": self.tree_len,
            "max_len": max(self.kv_lens) + self.tree_len,
            "page_size": self.page_size,
        }


def random_case(rng: random.Random) -> Case:
    """A draft level or a verification. A third are full batches at the context limit, with the longest paths."""
    is_full, is_draft = rng.random() < 1 / 3, rng.random() < 0.5
    max_batch, topk, num_steps = rng.randint(1, 5), rng.randint(1, 8), rng.randint(1, 6)
    page_size, max_context = rng.choice((1, 2, 3, 16, 64)), rng.choice((1, 2, 7, 16, 33))
    batch = max_batch if is_full else rng.randint(1, max_batch)
    kv_lens = [max_context if is_full else rng.randint(0, max_context) for _ in range(batch)]
    if is_draft:
        level = num_steps - 1 if is_full else rng.randint(1, max(1, num_steps - 1))
        level = max(level, 1)
        paths = [_draft_paths(topk, level, rng) for _ in range(batch)]
        num_rows, tree_len = topk, topk * level
    else:
        num_rows = rng.randint(1, rng.choice((4, 16, 70)))
        paths = [_tree_paths(num_rows, num_steps, is_full, rng) for _ in range(batch)]
        tree_len = num_rows
    width = -(-(max_context + tree_len) // page_size)
    pages = list(range(2, 2 + batch * width))
    rng.shuffle(pages)
    rows = [pages[b * width : (b + 1) * width] for b in range(batch)]
    return Case(max_batch, num_rows, num_steps, max_context, page_size, kv_lens, rows, paths, tree_len, is_draft)


def _draft_paths(topk: int, level: int, rng: random.Random) -> list[list[int]]:
    """Frontier rows of a level: a row's parent is any row of the level before, so branches change parents."""
    paths = [[j] for j in range(topk)]
    for depth in range(1, level):
        paths = [[*paths[rng.randrange(topk)], depth * topk + j] for j in range(topk)]
    return paths


def _tree_paths(num_nodes: int, num_steps: int, is_deep: bool, rng: random.Random) -> list[list[int]]:
    """Nodes of a tree at most num_steps deep, root first; a deep one is a chain with siblings below its last node."""
    paths = [[0]]
    for node in range(1, num_nodes):
        parents = [p for p in paths if len(p) <= num_steps]
        deepest = max(parents, key=len)
        paths.append([*(deepest if is_deep else rng.choice(parents)), node])
    return paths
