"""Random weights in a checkpoint's place: a model of any size from its config.json alone, for measurements.

Text from such a model means nothing. Its times do: every tensor has its shape and dtype, and routers spread rows over
the experts.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

SEED = 20_261


@torch.no_grad()
def fill_random(views: Iterable[tuple[str, Tensor]], seed: int = SEED) -> None:
    """Fill the views [..., in] of a checkpoint, where they are: on a GPU no weight ever passes through the host.

    Matrices are normal with standard deviation in^-0.5. A normed row then gives a row of numbers of about 1, and each
    layer adds less than a few to the residual stream: over 27 layers bfloat16 stays far from its largest number, and
    from losing what a layer adds. Norms are ones, biases zeros. The maps of a smaller draft vocabulary, `d2t` and
    `t2d`, name every n-th token of the target's.
    """
    generator: torch.Generator | None = None
    by_name = dict(views)
    for name, view in by_name.items():
        if view.is_floating_point() and view.dim() >= 2:
            generator = generator or torch.Generator(view.device).manual_seed(seed)
            view.normal_(0.0, view.shape[-1] ** -0.5, generator=generator)
        elif view.is_floating_point():
            view.fill_(0.0 if name.endswith("bias") else 1.0)
    if "d2t" in by_name:
        _spread_vocab(by_name["d2t"], by_name["t2d"])


def dummy_head_tensors(draft_vocab_size: int, vocab_size: int) -> frozenset[str]:
    """Names, among those that a head's checkpoint may or may not hold, that a head without a checkpoint has."""
    return frozenset() if draft_vocab_size == vocab_size else frozenset({"lm_head.weight", "d2t", "t2d"})


def _spread_vocab(d2t: Tensor, t2d: Tensor) -> None:
    """d2t: [Vd] int64, target id - draft id; t2d: [V] bool, whether the head knows the token."""
    ids = torch.arange(len(d2t), device=d2t.device)
    target_ids = ids * (len(t2d) // len(d2t))
    d2t.copy_(target_ids - ids)
    t2d.zero_()[target_ids] = True
