"""Random trees over paged caches on a GPU, and tree attention in float64 on the same inputs."""

import torch
from torch import Tensor

from treedraft.attention.reference import unpack_bits
from treedraft.kv.allocator import NUM_RESERVED_PAGES
from treedraft.kv.page_table import slots_of
from treedraft.types import TreeRows


def random_bits(batch: int, num_nodes: int, generator: torch.Generator) -> Tensor:
    """Ancestor bits [B, N, words] of random trees, root first."""
    is_ancestor = torch.zeros(batch, num_nodes, -(-num_nodes // 64) * 64, dtype=torch.bool)
    for b in range(batch):
        for n in range(num_nodes):
            if n:
                is_ancestor[b, n] = is_ancestor[b, int(torch.randint(0, n, (), generator=generator))]
            is_ancestor[b, n, n] = True
    weights = torch.tensor([1 << i if i < 63 else -(1 << 63) for i in range(64)])
    return (is_ancestor.unflatten(-1, (-1, 64)) * weights).sum(-1)


def make_rows(lens: list[int], num_nodes: int, page_size: int, seed: int, room: int = 0) -> tuple[TreeRows, int]:
    """Random trees on shuffled pages; columns that nobody owns name the trash page. Returns rows and slots."""
    generator = torch.Generator().manual_seed(seed)
    owned = torch.tensor([-(-(max(n, room) + num_nodes) // page_size) for n in lens])
    width = int(owned.max())
    order = torch.randperm(int(owned.sum()), generator=generator).to(torch.int32) + NUM_RESERVED_PAGES
    table = torch.ones(len(lens), width, dtype=torch.int32)
    for row, pages in zip(table, order.split(owned.tolist())):
        row[: len(pages)] = pages
    bits = random_bits(len(lens), num_nodes, generator).cuda()
    rows = TreeRows(table.cuda(), torch.tensor(lens).cuda(), bits, num_nodes, max(max(lens), room))
    return rows, (len(order) + NUM_RESERVED_PAGES) * page_size


def visible_slots(rows: TreeRows, page_size: int, b: int) -> tuple[Tensor, Tensor]:
    """Slots of a sequence's columns, and which of them each row sees: [C], [R, C]."""
    length = int(rows.kv_lens[b])
    columns = torch.arange(length + rows.tree_len, device="cuda")
    slots = slots_of(rows.page_table[b : b + 1], columns[None], page_size)[0]
    sees = unpack_bits(rows.ancestor_bits[b], rows.tree_len).bool()
    return slots, torch.cat((sees.new_ones(len(sees), length), sees), 1)


def poison(pool: Tensor, rows: TreeRows, page_size: int) -> None:
    """NaN in every slot that no row sees; zeros on the zero page."""
    seen = torch.zeros(len(pool), dtype=torch.bool, device="cuda")
    for b in range(len(rows.kv_lens)):
        slots, sees = visible_slots(rows, page_size, b)
        seen[slots[sees.any(0)]] = True
    pool[~seen] = torch.nan
    pool[:page_size] = 0


def oracle(rows: TreeRows, page_size: int, k: Tensor, v: Tensor, q: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """k [slots, hk, d], v [slots, hk, dv], q [B, R, h, d] -> out [B, R, h, dv], lse [B, R, h], float64."""
    outs, lses = [], []
    for b in range(len(q)):
        slots, sees = visible_slots(rows, page_size, b)
        keys, values = (x[slots].double().nan_to_num(0.0) for x in (k, v))
        grouped = q[b].double().unflatten(1, (k.shape[1], -1))
        scores = torch.einsum("rkgd,ckd->rkgc", grouped, keys) * scale
        scores = scores.masked_fill(~sees[:, None, None], -torch.inf)
        lse = scores.logsumexp(-1)
        probs = (scores - lse.masked_fill(lse == -torch.inf, 0)[..., None]).exp()
        outs.append(torch.einsum("rkgc,ckd->rkgd", probs, values).flatten(1, 2))
        lses.append(lse.flatten(1, 2))
    return torch.stack(outs), torch.stack(lses)


def check(out: Tensor, wanted: Tensor, max_error: float = 6e-3, rms: float = 2e-3) -> None:
    """Compare largest errors, over the largest value of a row, and root mean squares, over all.

    bfloat16: rounding the output alone gives up to 3.9e-3 (half a unit in the last of 8 bits) and 1.66e-3; rounding the
    weights adds up to 2e-3 in the worst of thousands of rows, whatever the kernel (simulated in float64, 2026-12).
    """
    assert out.isfinite().all()
    error, size = (out.double() - wanted).abs(), wanted.abs().amax(-1).clamp(min=1e-30)
    largest, mean = float((error.amax(-1) / size).max()), float(error.norm() / wanted.norm().clamp(min=1e-30))
    assert largest <= max_error and mean <= rms, f"largest {largest}, allowed {max_error}; mean {mean}, allowed {rms}"
