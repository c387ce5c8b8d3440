"""A mixture of experts for few rows in two launches: every chosen expert's weights are read once, whoever chose it.

A pair is (row, one of its experts). Pairs of one expert are gathered by each program itself, from the router's choice:
no sort, no list in memory, nothing read by the host. The grid is fixed by the number of rows; programs that find no
pairs end at once.

    slots of the grid:   few pairs   one a pair; the first pair of an expert works for all of them
                         else        one an expert
                         and one for each shared expert, which every row chose
    row blocks:          16 or 32 pairs of an expert each

A pair's result depends on its row and its expert alone: a program walks a whole sum in order, see kernels.linear.
"""

# mypy: disable-error-code="no-untyped-def"
# (Triton reads the annotations of a kernel: tl.constexpr or none.)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from treedraft.kernels.chain import chained, join
from treedraft.kernels.linear import Tile


def tiles_of(num_rows: int, dtype: torch.dtype) -> tuple[Tile, Tile]:
    """Tiles of both products, as measured (benchmarks/notes.md); the first has block_n columns of gate and of up."""
    if dtype == torch.float32:
        return Tile(32, 32, 4, 2), Tile(32, 32, 4, 2)
    block_m = 16 if num_rows <= 32 else 32
    return Tile(64, 64, 4, 4, block_m), Tile(128, 64, 4, 4, block_m)


SEARCHED_PAIRS = 256  # at once, by a program that looks for its expert's


def experts_triton(
    x: Tensor,
    indices: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    hidden: Tensor,
    parts: Tensor,
    tiles: tuple[Tile, Tile] | None = None,
) -> None:
    """Run every row's experts. Twin: models.moe.MoE.gathered, before its sum.

    x: [T, H] bfloat16 or float32; indices [T, k] int32 and weights [T, k] float32 of the router; gate_up [E, H, 2 * S],
    down [E, S, H], the shared experts last. Written: hidden [T, k + shared, S] in x's dtype, and parts
    [T, k + shared, H] float32, weighted: a row's output is the sum of its parts.
    """
    (num_rows, topk), num_each = indices.shape, parts.shape[1]
    num_shared = num_each - topk
    num_experts, size = gate_up.shape[0] - num_shared, down.shape[1]
    first, second = tiles or tiles_of(num_rows, x.dtype)
    num_pairs = num_rows * topk
    is_by_expert = num_pairs > num_experts
    num_slots = num_experts if is_by_expert else num_pairs
    common = {
        "TOPK": topk,
        "NUM_EACH": num_each,
        "NUM_EXPERTS": num_experts,
        "IS_BY_EXPERT": is_by_expert,
        "PAIRS": min(triton.next_power_of_2(num_pairs), SEARCHED_PAIRS),
        **chained(x),
    }
    _gate_up_kernel[(triton.cdiv(num_rows, first.block_m), triton.cdiv(size, first.block_n), num_slots + num_shared)](
        x,
        indices,
        gate_up,
        hidden,
        num_rows,
        num_slots,
        x.shape[1],
        size,
        x.stride(0),
        ROWS=first.block_m,
        BLOCK_N=first.block_n,
        BLOCK_K=first.block_k,
        IS_EVEN=x.shape[1] % first.block_k == 0,
        num_warps=first.num_warps,
        num_stages=first.num_stages,
        **common,
    )
    _down_kernel[
        (triton.cdiv(num_rows, second.block_m), triton.cdiv(x.shape[1], second.block_n), num_slots + num_shared)
    ](
        hidden,
        indices,
        weights,
        down,
        parts,
        num_rows,
        num_slots,
        size,
        x.shape[1],
        ROWS=second.block_m,
        BLOCK_N=second.block_n,
        BLOCK_K=second.block_k,
        IS_EVEN=size % second.block_k == 0,
        num_warps=second.num_warps,
        num_stages=second.num_stages,
        **common,
    )


@triton.jit
def _find_pairs(
    indices,
    slot,
    row_block,
    num_rows,
    num_slots,
    TOPK: tl.constexpr,
    NUM_EACH: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    IS_BY_EXPERT: tl.constexpr,
    PAIRS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Return (expert, pairs [ROWS] as row * NUM_EACH + place, how many of them there are)."""
    rank = row_block * ROWS + tl.arange(0, ROWS)
    shared = slot - num_slots
    if shared >= 0:
        expert = NUM_EXPERTS + shared
        pair = rank * NUM_EACH + TOPK + shared
        count = num_rows - row_block * ROWS
    else:
        if IS_BY_EXPERT:
            expert = slot
        else:
            expert = tl.load(indices + slot)
        found = tl.zeros([ROWS], tl.int32)
        count = 0
        num_before = 0  # pairs of the expert that belong to earlier slots
        for start in range(0, num_rows * TOPK, PAIRS):
            place = start + tl.arange(0, PAIRS)
            chosen = tl.load(indices + place, mask=place < num_rows * TOPK, other=-1)
            is_own = (chosen == expert).to(tl.int32)
            before = count + tl.cumsum(is_own, 0) - is_own
            is_ranked = (before[None, :] == rank[:, None]) & (is_own[None, :] == 1)
            found += tl.sum(tl.where(is_ranked, place[None, :], 0), 1)
            count += tl.sum(is_own, 0)
            num_before += tl.sum(tl.where(place < slot, is_own, 0), 0)
        pair = found // TOPK * NUM_EACH + found % TOPK
        count -= row_block * ROWS
        if not IS_BY_EXPERT:
            count = tl.where(num_before > 0, 0, count)  # an earlier slot works for this expert
    return expert.to(tl.int64), pair.to(tl.int64), count


@triton.jit(do_not_specialize=["num_rows", "num_slots"])
def _gate_up_kernel(
    x,  # [T, H]
    indices,  # [T, k] int32
    weight,  # [E, H, 2 * S]
    hidden,  # [T, NUM_EACH, S]
    num_rows,
    num_slots,
    width,  # H
    size,  # S
    x_row,
    TOPK: tl.constexpr,
    NUM_EACH: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    IS_BY_EXPERT: tl.constexpr,
    PAIRS: tl.constexpr,  # that are searched at once
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    IS_EVEN: tl.constexpr,
    IS_CHAINED: tl.constexpr,
):
    join(IS_CHAINED)
    expert, pair, count = _find_pairs(
        indices,
        tl.program_id(2),
        tl.program_id(0),
        num_rows,
        num_slots,
        TOPK,
        NUM_EACH,
        NUM_EXPERTS,
        IS_BY_EXPERT,
        PAIRS,
        ROWS,
    )
    if count > 0:
        column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        k = tl.arange(0, BLOCK_K)
        is_pair, is_column = (tl.arange(0, ROWS) < count)[:, None], (column < size)[None, :]
        x_tile = x + (pair // NUM_EACH)[:, None] * x_row + k[None, :]
        gate_tile = weight + expert * width * 2 * size + k[:, None] * 2 * size + column[None, :]
        gate = tl.zeros([ROWS, BLOCK_N], tl.float32)
        up = tl.zeros([ROWS, BLOCK_N], tl.float32)
        for start in range(0, width, BLOCK_K):
            if IS_EVEN:
                is_x, is_weight = is_pair, is_column
            else:
                is_inside = start + k < width
                is_x, is_weight = is_pair & is_inside[None, :], is_column & is_inside[:, None]
            rows = tl.load(x_tile + start, mask=is_x, other=0.0)
            gates = tl.load(gate_tile, mask=is_weight, other=0.0)
            ups = tl.load(gate_tile + size, mask=is_weight, other=0.0)
            gate = tl.dot(rows, gates, gate, input_precision="ieee")
            up = tl.dot(rows, ups, up, input_precision="ieee")
            gate_tile += BLOCK_K * 2 * size
        result = gate * tl.sigmoid(gate) * up
        tl.store(
            hidden + pair[:, None] * size + column[None, :],
            result.to(hidden.dtype.element_ty),
            mask=is_pair & is_column,
        )


@triton.jit(do_not_specialize=["num_rows", "num_slots"])
def _down_kernel(
    hidden,  # [T, NUM_EACH, S]
    indices,  # [T, k] int32
    scales,  # [T, k] float32
    weight,  # [E, S, H]
    parts,  # [T, NUM_EACH, H] float32
    num_rows,
    num_slots,
    size,  # S
    width,  # H
    TOPK: tl.constexpr,
    NUM_EACH: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    IS_BY_EXPERT: tl.constexpr,
    PAIRS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    IS_EVEN: tl.constexpr,
    IS_CHAINED: tl.constexpr,
):
    join(IS_CHAINED)
    expert, pair, count = _find_pairs(
        indices,
        tl.program_id(2),
        tl.program_id(0),
        num_rows,
        num_slots,
        TOPK,
        NUM_EACH,
        NUM_EXPERTS,
        IS_BY_EXPERT,
        PAIRS,
        ROWS,
    )
    if count > 0:
        column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        k = tl.arange(0, BLOCK_K)
        is_own = tl.arange(0, ROWS) < count
        is_pair, is_column = is_own[:, None], (column < width)[None, :]
        hidden_tile = hidden + pair[:, None] * size + k[None, :]
        weight_tile = weight + expert * width * size + k[:, None] * width + column[None, :]
        total = tl.zeros([ROWS, BLOCK_N], tl.float32)
        for start in range(0, size, BLOCK_K):
            if IS_EVEN:
                is_hidden, is_weight = is_pair, is_column
            else:
                is_inside = start + k < size
                is_hidden, is_weight = is_pair & is_inside[None, :], is_column & is_inside[:, None]
            rows = tl.load(hidden_tile + start, mask=is_hidden, other=0.0)
            downs = tl.load(weight_tile, mask=is_weight, other=0.0)
            total = tl.dot(rows, downs, total, input_precision="ieee")
            weight_tile += BLOCK_K * width
        place = pair % NUM_EACH
        is_routed = is_own & (place < TOPK)
        scale = tl.load(scales + pair // NUM_EACH * TOPK + place, mask=is_routed, other=1.0)
        tl.store(parts + pair[:, None] * width + column[None, :], total * scale[:, None], mask=is_pair & is_column)
