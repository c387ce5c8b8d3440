"""Training-time test (EAGLE-3, section 3.2): the head runs on its own states, as it will when it drafts.

Index i of every step pairs the target's feature at i with the tokens that follow it: step j takes token i + 1 + j at
position id i + j and predicts token i + 2 + j. Its keys: step 0's rows 0..i, and its own index in steps 1..j.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from treedraft.demo.recipe.attend import FirstStepAttend, LaterStepAttend, attend_unrolled
from treedraft.models.draft.eagle3 import Eagle3MlaHead

State = tuple[Tensor, Tensor, Tensor]  # hidden [B, N, H], keys [B, N, h, d], values [B, N, h, dv] of one step


def first_step(head: Eagle3MlaHead, features: Tensor, token_ids: Tensor, positions: Tensor) -> State:
    """Run step 0 from the target's features [B, N, F]."""
    attend = FirstStepAttend()
    hidden = head(head.fuse(features), token_ids, positions, attend)
    return hidden, attend.keys, attend.values


def later_step(
    head: Eagle3MlaHead,
    hidden: Tensor,
    token_ids: Tensor,
    positions: Tensor,
    prefix: tuple[Tensor, Tensor],
    own: tuple[Tensor, Tensor],
    taken: Tensor,
    is_this: Tensor,
    core: Callable[..., Tensor] = attend_unrolled,
) -> State:
    """Run a later step from the head's own state. See LaterStepAttend. One graph serves all later steps."""
    attend = LaterStepAttend(prefix, own, taken, is_this, core)
    hidden = head(hidden, token_ids, positions, attend)
    return hidden, attend.keys, attend.values


def unroll(
    head: Eagle3MlaHead,
    features: Tensor,
    token_ids: Tensor,
    num_steps: int,
    first: Callable[..., State] = first_step,
    later: Callable[..., State] = later_step,
) -> Iterator[Tensor]:
    """Yield the recycled state [B, N, H] of each step; N = T - num_steps - 1 for token_ids [B, T], features [B, T, F].

    `first`, `later`: the functions above, or compiled forms of them.
    """
    rows, num_later = token_ids.shape[1] - num_steps - 1, num_steps - 1
    positions = torch.arange(token_ids.shape[1], device=token_ids.device).expand_as(token_ids)
    hidden, *prefix = first(head, features[:, :rows], token_ids[:, 1 : 1 + rows], positions[:, :rows])
    yield hidden
    steps = torch.arange(num_later, device=token_ids.device)
    empty = [torch.zeros_like(x) for x in prefix]
    taken: list[tuple[Tensor, Tensor]] = []
    for step in range(1, num_steps):
        own = tuple(torch.stack([t[i] for t in taken] + [empty[i]] * (num_later - len(taken))) for i in range(2))
        at = slice(1 + step, 1 + step + rows)
        where = positions[:, step : step + rows]
        hidden, keys, values = later(
            head, hidden, token_ids[:, at], where, tuple(prefix), own, steps < step - 1, steps == step - 1
        )
        taken.append((keys, values))
        yield hidden
