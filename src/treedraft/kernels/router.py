"""Residual sum, norm, router and its top-k in one launch, for few rows of a mixture of experts."""

# mypy: disable-error-code="no-untyped-def"
# (Triton reads the annotations of a kernel: tl.constexpr or none.)

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from treedraft.kernels.chain import chained, join
from treedraft.kernels.norm import load_sum

EXPERTS = 4  # logits that a program computes
CHUNK = 2048  # columns of the hidden state that it holds at once


@dataclass(frozen=True)
class Choice:
    """How experts are chosen from the logits: the fields of models.config.MoeConfig that the router reads."""

    is_sigmoid: bool  # DeepSeek-V3's router; else V2's softmax
    topk: int
    num_groups: int
    topk_groups: int
    norm_topk_prob: bool
    scale: float


def norm_route_triton(
    delta: Tensor,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    router_weight: Tensor,
    bias: Tensor | None,
    choice: Choice,
    arrivals: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (normed [T, H], sum [T, H], indices [T, k] int32, weights [T, k] float32).

    delta, residual, norm_weight, eps: as of kernels.norm.add_rms_norm_triton, rows [T, ...]; router_weight [E, H];
    bias: [E] float32 or None; arrivals: int32 zeros of at least T elements, zeros again afterwards, not shared with a
    launch that may run at the same time. Twin: models.layers.RMSNorm.add, then models.moe.Router. Of equal scores the
    lower expert is chosen; a row with NaN chooses distinct experts, and its weights are NaN.
    """
    (num_rows, size), num_experts = residual.shape, router_weight.shape[0]
    num_parts = delta.shape[1] if delta.dim() == 3 else 1
    device = residual.device
    normed, total = torch.empty_like(residual), torch.empty_like(residual)
    logits = torch.empty((num_rows, num_experts), dtype=torch.float32, device=device)
    indices = torch.empty((num_rows, choice.topk), dtype=torch.int32, device=device)
    weights = torch.empty((num_rows, choice.topk), dtype=torch.float32, device=device)
    chunk = min(CHUNK, triton.next_power_of_2(size))
    rows = delta.reshape(-1, size)
    _norm_route_kernel[(triton.cdiv(num_experts, EXPERTS), num_rows)](
        rows,
        residual.contiguous(),
        norm_weight,
        router_weight,
        router_weight if bias is None else bias,
        arrivals,
        normed,
        total,
        logits,
        indices,
        weights,
        rows.stride(0),
        size,
        num_experts,
        eps,
        choice.scale,
        PARTS=num_parts,
        CHUNK=chunk,
        EXPERTS=EXPERTS,
        IS_SIGMOID=choice.is_sigmoid,
        HAS_BIAS=bias is not None,
        TOPK=choice.topk,
        GROUPS=choice.num_groups,
        GROUPS_2=triton.next_power_of_2(choice.num_groups),
        GROUP_SIZE=num_experts // choice.num_groups,
        GROUP_SIZE_2=triton.next_power_of_2(num_experts // choice.num_groups),
        TOPK_GROUPS=choice.topk_groups,
        IS_NORMED=choice.norm_topk_prob,
        **chained(rows),
        num_warps=8 if chunk >= 1024 else 4,
    )
    return normed, total, indices, weights


@triton.jit
def _norm_route_kernel(
    delta,  # [T * P, H]
    residual,  # [T, H]
    norm_weight,  # [H]
    router_weight,  # [E, H]
    bias,  # [E]
    arrivals,  # [T] int32
    normed,  # [T, H]
    total,  # [T, H]
    logits,  # [T, E] float32
    indices,  # [T, k] int32
    weights,  # [T, k] float32
    delta_row,
    size,
    num_experts,
    eps,
    scale,
    PARTS: tl.constexpr,
    CHUNK: tl.constexpr,
    EXPERTS: tl.constexpr,
    IS_SIGMOID: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    TOPK: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUPS_2: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    GROUP_SIZE_2: tl.constexpr,
    TOPK_GROUPS: tl.constexpr,
    IS_NORMED: tl.constexpr,
    IS_CHAINED: tl.constexpr,
):
    """A program computes EXPERTS logits of a row, norm included; the last of the row to finish chooses."""
    row = tl.program_id(1).to(tl.int64)
    dtype: tl.constexpr = norm_weight.dtype.element_ty
    expert = tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS)
    first = tl.arange(0, CHUNK)
    is_first = (expert < num_experts)[:, None] & (first < size)[None, :]
    # Constants, loaded while the kernel before this one ends.
    first_experts = tl.load(router_weight + expert[:, None] * size + first[None, :], mask=is_first, other=0.0)
    first_scale = tl.load(norm_weight + first, mask=first < size, other=0.0).to(tl.float32)
    join(IS_CHAINED)
    squares = tl.zeros([CHUNK], tl.float32)
    for start in range(0, size, CHUNK):
        column = start + tl.arange(0, CHUNK)
        x = load_sum(delta, residual, row, column, column < size, delta_row, size, dtype, True, PARTS)
        squares += x * x
    inverse = tl.rsqrt(tl.sum(squares, 0) / size + eps)
    products = tl.zeros([EXPERTS, CHUNK], tl.float32)
    for start in range(0, size, CHUNK):
        column = start + first
        mask = column < size
        x = load_sum(delta, residual, row, column, mask, delta_row, size, dtype, True, PARTS)
        norm_scale, of_experts = first_scale, first_experts
        if start > 0:
            norm_scale = tl.load(norm_weight + column, mask=mask, other=0.0).to(tl.float32)
            is_inside = (expert < num_experts)[:, None] & mask[None, :]
            pointers = router_weight + expert[:, None] * size + column[None, :]
            of_experts = tl.load(pointers, mask=is_inside, other=0.0)
        y = (x * inverse * norm_scale).to(dtype)
        if tl.program_id(0) == 0:
            tl.store(total + row * size + column, x.to(dtype), mask=mask)
            tl.store(normed + row * size + column, y, mask=mask)
        products += of_experts.to(tl.float32) * y.to(tl.float32)[None, :]
    tl.store(logits + row * num_experts + expert, tl.sum(products, 1), mask=expert < num_experts)
    tl.debug_barrier()  # every thread's logits come before the arrival below
    arrived = tl.atomic_add(arrivals + row, 1, sem="acq_rel")
    if arrived == tl.num_programs(0) - 1:
        tl.store(arrivals + row, 0)
        _choose(
            logits + row * num_experts,
            bias,
            indices + row * TOPK,
            weights + row * TOPK,
            scale,
            IS_SIGMOID,
            HAS_BIAS,
            TOPK,
            GROUPS,
            GROUPS_2,
            GROUP_SIZE,
            GROUP_SIZE_2,
            TOPK_GROUPS,
            IS_NORMED,
        )


@triton.jit
def _choose(
    logits,  # [E] of one row
    bias,
    indices,  # [k]
    weights,  # [k]
    scale,
    IS_SIGMOID: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    TOPK: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUPS_2: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    GROUP_SIZE_2: tl.constexpr,
    TOPK_GROUPS: tl.constexpr,
    IS_NORMED: tl.constexpr,
):
    """The best TOPK experts of one row, as models.moe.SoftmaxRouter and SigmoidRouter choose them."""
    NONE: tl.constexpr = -3.0e38  # a choice of last resort: masked groups and NaN
    group, member = tl.arange(0, GROUPS_2)[:, None], tl.arange(0, GROUP_SIZE_2)[None, :]
    expert = group * GROUP_SIZE + member
    is_expert = (group < GROUPS) & (member < GROUP_SIZE)
    # .cg: other multiprocessors wrote them, this one's first cache may not know.
    logit = tl.load(logits + expert, mask=is_expert, other=float("-inf"), cache_modifier=".cg")
    if IS_SIGMOID:
        scores = tl.sigmoid(logit)
    else:
        largest = tl.max(tl.max(logit, 1), 0)
        powers = tl.exp(logit - largest)
        scores = powers / tl.sum(tl.sum(powers, 1), 0)
    choice = scores
    if HAS_BIAS:
        choice += tl.load(bias + expert, mask=is_expert, other=0.0)
    choice = tl.where(choice == choice, choice, NONE)
    choice = tl.where(is_expert, choice, float("-inf"))
    if TOPK_GROUPS < GROUPS:
        best = tl.max(choice, 1)
        if IS_SIGMOID:  # the sum of a group's two best
            first = tl.min(tl.where(choice == best[:, None], member, GROUP_SIZE_2), 1)
            best += tl.max(tl.where(member == first[:, None], float("-inf"), choice), 1)
        group_number = tl.arange(0, GROUPS_2)
        best = tl.where(group_number < GROUPS, tl.maximum(best, NONE), float("-inf"))
        is_kept = group_number < 0
        for _ in tl.static_range(TOPK_GROUPS):
            left = tl.where(is_kept, float("-inf"), best)
            taken = tl.min(tl.where(left == tl.max(left, 0), group_number, GROUPS_2), 0)
            is_kept = is_kept | (group_number == taken)
        choice = tl.where(is_kept[:, None] | (choice == float("-inf")), choice, NONE)
    # An expert's place is the number of better ones; of equal ones the lower comes first.
    flat_choice, flat_score = (
        tl.reshape(choice, [GROUPS_2 * GROUP_SIZE_2]),
        tl.reshape(scores, [GROUPS_2 * GROUP_SIZE_2]),
    )
    number = tl.reshape(tl.where(is_expert, expert, GROUPS * GROUP_SIZE), [GROUPS_2 * GROUP_SIZE_2])
    mine, other = flat_choice[:, None], flat_choice[None, :]
    is_better = (other > mine) | ((other == mine) & (number[None, :] < number[:, None]))
    place = tl.sum(is_better.to(tl.int32), 1)
    is_chosen = (place < TOPK) & (number < GROUPS * GROUP_SIZE)
    weight = flat_score
    if IS_NORMED:
        weight = weight / (tl.sum(tl.where(is_chosen, flat_score, 0.0), 0) + 1e-20)
    tl.store(indices + place, number, mask=is_chosen)
    tl.store(weights + place, weight * scale, mask=is_chosen)
