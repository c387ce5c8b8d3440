"""Tree attention in plain loops, and random cases for it. Everything that no row may see is NaN."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from treedraft.types import TreeRows


@dataclass(frozen=True)
class Case:
    rows: TreeRows
    page_size: int
    visible: list[list[list[int]]]  # [B][R] physical slots that the row sees
    num_slots: int


def make_case(
    kv_lens: list[int],
    ancestors: list[list[list[int]]],
    tree_len: int,
    page_size: int,
    seed: int,
    slack: int = 0,
    words: int | None = None,
) -> Case:
    """Lay sequences out on shuffled pages. ancestors: [B][R] tree slots that the row sees. slack: of max_kv_len."""
    generator = torch.Generator().manual_seed(seed)
    max_kv_len = max(kv_lens) + slack
    width = -(-(max_kv_len + tree_len) // page_size)
    owned = [-(-(kv_len + tree_len) // page_size) for kv_len in kv_lens]
    num_pages = sum(owned) + 2 + 3
    pages = (torch.randperm(num_pages - 2, generator=generator) + 2).tolist()
    table = torch.ones(len(kv_lens), width, dtype=torch.int32)  # unowned: the trash page
    for b, count in enumerate(owned):
        table[b, :count] = torch.tensor([pages.pop() for _ in range(count)])
    words = words or -(-tree_len // 64)
    bits = torch.zeros(len(kv_lens), len(ancestors[0]), words, dtype=torch.int64)
    visible = []
    for b, kv_len in enumerate(kv_lens):
        visible.append([])
        for r, nodes in enumerate(ancestors[b]):
            for node in nodes:
                word = 1 << node % 64
                bits[b, r, node // 64] |= word if word < 2**63 else word - 2**64
            logical = list(range(kv_len)) + [kv_len + node for node in sorted(nodes)]
            visible[b].append([int(table[b, p // page_size]) * page_size + p % page_size for p in logical])
    rows = TreeRows(table, torch.tensor(kv_lens), bits, tree_len, max_kv_len)
    return Case(rows, page_size, visible, num_pages * page_size)


def random_tree(num_nodes: int, generator: torch.Generator) -> list[list[int]]:
    """Ancestors-or-self of each node of a random tree, root first."""
    paths = [[0]]
    for node in range(1, num_nodes):
        parent = int(torch.randint(0, node, (1,), generator=generator))
        paths.append([*paths[parent], node])
    return paths


def random_cache(case: Case, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """[num_slots, *shape]: numbers where some row looks, zeros on the zero page, NaN everywhere else."""
    values = torch.randn(case.num_slots, *shape, generator=generator, dtype=torch.float64).to(dtype)
    seen = {slot for sequence in case.visible for row in sequence for slot in row}
    hidden = torch.tensor([slot not in seen for slot in range(case.num_slots)])
    values[hidden] = torch.nan
    values[: case.page_size] = 0
    return values


def attend(case: Case, k: Tensor, v: Tensor, q: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """k [slots, hk, d], v [slots, hk, dv], q [B, R, h, d] -> (out [B, R, h, dv], lse [B, R, h]), all float64."""
    k, v, q = k.double(), v.double(), q.double()
    batch, num_rows, num_heads, _ = q.shape
    out = torch.zeros(batch, num_rows, num_heads, v.shape[-1], dtype=torch.float64)
    lse = torch.full((batch, num_rows, num_heads), -math.inf, dtype=torch.float64)
    for b in range(batch):
        for r in range(num_rows):
            for head in range(num_heads):
                kv_head = head * k.shape[1] // num_heads
                slots = case.visible[b][r]
                if not slots:
                    continue
                scores = scale * (k[slots, kv_head] @ q[b, r, head])
                lse[b, r, head] = scores.logsumexp(0)
                out[b, r, head] = (scores - lse[b, r, head]).exp() @ v[slots, kv_head]
    return out, lse
