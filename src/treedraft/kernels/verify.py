"""The walk down the verified tree, and what the device keeps of a round: one launch each.

The twins are `treedraft.speculative.verify.walk` and `treedraft.runner.operators.TorchOperators`, to the last bit.
"""

# mypy: disable-error-code="no-untyped-def"
# (Triton reads the annotations of a kernel: tl.constexpr or none.)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from treedraft.types import Accepted, DraftTree


def walk_triton(tree: DraftTree, sampled: Tensor, max_path: int, node_has_nan: Tensor) -> tuple[Accepted, Tensor]:
    """Descend from the root while a child carries the token sampled at its parent, as `walk`.

    sampled int64 [B, N], node_has_nan bool [B, N]. Also return whether a node of the path has a NaN, bool [B].
    """
    batch, num_nodes = sampled.shape
    num_accepted = torch.empty(batch, dtype=torch.int64, device=sampled.device)
    columns, token_ids, ranks = torch.empty((3, batch, max_path), dtype=torch.int64, device=sampled.device).unbind()
    has_nan = torch.empty(batch, dtype=torch.bool, device=sampled.device)
    if not sampled.is_meta:
        _walk_kernel[(batch,)](
            tree.parents.contiguous(),
            tree.token_ids.contiguous(),
            sampled.contiguous(),
            node_has_nan.contiguous(),
            num_accepted,
            columns,
            token_ids,
            ranks,
            has_nan,
            num_nodes,
            max_path,
            PAD_NODES=triton.next_power_of_2(num_nodes),
            num_warps=1 if num_nodes <= 64 else 4,
        )
    return Accepted(num_accepted, columns, token_ids, ranks), has_nan


@triton.jit
def _walk_kernel(
    parents,  # [B, N] int64
    tokens,  # [B, N] int64
    sampled,  # [B, N] int64
    node_has_nan,  # [B, N] bool
    num_accepted,  # [B] int64
    columns,  # [B, P] int64
    token_ids,  # [B, P] int64
    ranks,  # [B, P] int64
    has_nan,  # [B] bool
    num_nodes,
    max_path,
    PAD_NODES: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    node = tl.arange(0, PAD_NODES)
    is_node = node < num_nodes
    at = b * num_nodes
    parent = tl.load(parents + at + node, mask=is_node, other=-2).to(tl.int32)
    token = tl.load(tokens + at + node, mask=is_node, other=-1)
    current = tl.zeros([], tl.int32)
    wish = tl.load(sampled + at)
    is_spoilt = tl.load(node_has_nan + at).to(tl.int32)
    is_walking = tl.full([], 1, tl.int32)
    accepted = tl.zeros([], tl.int32)
    tl.store(columns + b * max_path, tl.zeros([], tl.int64))
    tl.store(token_ids + b * max_path, wish)
    tl.store(ranks + b * max_path, tl.zeros([], tl.int64))
    for step in range(1, max_path):
        # The lowest of the children that carry the token.
        child = tl.min(tl.where((parent == current) & (token == wish), node, PAD_NODES), axis=0)
        is_walking = is_walking * (child < PAD_NODES).to(tl.int32)
        rank = tl.sum(((parent == current) & (node < child)).to(tl.int32), axis=0) * is_walking
        current = tl.where(is_walking > 0, child, current)
        accepted += is_walking
        wish = tl.load(sampled + at + current)
        is_spoilt = is_spoilt | tl.load(node_has_nan + at + current).to(tl.int32)
        tl.store(columns + b * max_path + step, tl.where(is_walking > 0, current, step).to(tl.int64))
        tl.store(token_ids + b * max_path + step, tl.where(is_walking > 0, wish, -1))
        tl.store(ranks + b * max_path + step, rank.to(tl.int64))
    tl.store(num_accepted + b, accepted.to(tl.int64))
    tl.store(has_nan + b, is_spoilt != 0)


def advance_triton(
    slots: Tensor,
    kv_lens: Tensor,
    roots: Tensor,
    accepted: Accepted,
    overflow: Tensor,
    state_kv_lens: Tensor,
    state_roots: Tensor,
    output_counts: Tensor | None,
) -> None:
    """Store the new length and root of each slot; count its tokens. A void round (overflow[-1] > 0) changes nothing.

    slots, kv_lens, roots int64 [B], of the round's start; overflow int64 [7]; state_kv_lens, state_roots int64
    [slots]; output_counts int32 [slots, V], None where nobody counts.
    """
    batch, max_path = accepted.token_ids.shape
    if slots.is_meta:
        return
    _advance_kernel[(batch,)](
        slots.contiguous(),
        kv_lens.contiguous(),
        roots.contiguous(),
        accepted.num_accepted,
        accepted.token_ids.contiguous(),
        overflow,
        state_kv_lens,
        state_roots,
        state_roots if output_counts is None else output_counts,
        max_path,
        len(overflow) - 1,
        0 if output_counts is None else output_counts.shape[1],
        COUNTS=output_counts is not None,
        PAD_PATH=triton.next_power_of_2(max_path),
        num_warps=1,
    )


@triton.jit
def _advance_kernel(
    slots,  # [B] int64, and so are kv_lens, roots and num_accepted
    kv_lens,
    roots,
    num_accepted,
    token_ids,  # [B, P] int64
    overflow,  # [7] int64
    state_kv_lens,  # [slots] int64
    state_roots,  # [slots] int64
    output_counts,  # [slots, V] int32
    max_path,
    last_of_overflow,
    vocab_size,
    COUNTS: tl.constexpr,
    PAD_PATH: tl.constexpr,
):
    b = tl.program_id(0)
    slot = tl.load(slots + b)
    is_void = tl.load(overflow + last_of_overflow) > 0
    accepted = tl.load(num_accepted + b)
    bonus = tl.load(token_ids + b * max_path + accepted)
    kv_len = tl.load(kv_lens + b)
    tl.store(state_kv_lens + slot, tl.where(is_void, kv_len, kv_len + accepted + 1))
    tl.store(state_roots + slot, tl.where(is_void, tl.load(roots + b), bonus))
    if COUNTS:
        step = tl.arange(0, PAD_PATH)
        token = tl.load(token_ids + b * max_path + step, mask=step < max_path, other=-1)
        token = tl.where(is_void, -1, token)
        tl.atomic_add(output_counts + slot * vocab_size + token, 1, mask=token >= 0)


def keep_hidden_triton(
    draft_hidden: Tensor, slots: Tensor, hidden: Tensor, num_accepted: Tensor, overflow: Tensor
) -> None:
    """Store each sequence's state at its last accepted row by slot, unless the round is void (overflow[-1] > 0).

    draft_hidden [slots, H]; slots int64 [B]; hidden [B, P, H] of the same dtype; num_accepted int64 [B].
    """
    batch, rows, size = hidden.shape
    if hidden.is_meta or not size:
        return
    block = min(1024, triton.next_power_of_2(size))
    _keep_hidden_kernel[(batch, triton.cdiv(size, block))](
        draft_hidden,
        slots.contiguous(),
        hidden.contiguous(),
        num_accepted,
        overflow,
        rows,
        size,
        len(overflow) - 1,
        BLOCK=block,
        num_warps=1,
    )


@triton.jit
def _keep_hidden_kernel(
    draft_hidden,  # [slots, H]
    slots,  # [B] int64
    hidden,  # [B, P, H]
    num_accepted,  # [B] int64
    overflow,  # [7] int64
    rows,
    size,
    last_of_overflow,
    BLOCK: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + b)
    row = b * rows + tl.load(num_accepted + b)
    if tl.load(overflow + last_of_overflow) <= 0:
        values = tl.load(hidden + row * size + column, mask=column < size)
        tl.store(draft_hidden + slot * size + column, values, mask=column < size)
