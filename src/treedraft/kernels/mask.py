"""A grammar's masks over logits, in place: the twin of `treedraft.speculative.sampling.mask_tokens`."""

# mypy: disable-error-code="no-untyped-def"
# (Triton reads the annotations of a kernel: tl.constexpr or none.)

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096  # tokens of a program


def mask_tokens_triton(logits: Tensor, masks: Tensor, token_ids: Tensor | None = None) -> Tensor:
    """Set the logits [B, N, V], contiguous, to -inf where masks [B, N, words] int32 forbid the token; returns them.

    token_ids int64 [V]: of the columns, None: the columns themselves.
    """
    batch, nodes, vocab = logits.shape
    if not logits.is_meta:
        _mask_kernel[(batch * nodes, triton.cdiv(vocab, BLOCK))](
            logits,
            masks.contiguous(),
            masks if token_ids is None else token_ids,
            vocab,
            masks.shape[-1],
            HAS_IDS=token_ids is not None,
            BLOCK=BLOCK,
            num_warps=4,
        )
    return logits


@triton.jit
def _mask_kernel(
    logits,  # [B * N, V]
    masks,  # [B * N, words] int32
    token_ids,  # [V] int64
    vocab,
    words,
    HAS_IDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_inside = column < vocab
    token = column
    if HAS_IDS:
        token = tl.load(token_ids + column, mask=is_inside, other=0).to(tl.int32)
    word = tl.load(masks + row * words + (token >> 5), mask=is_inside, other=-1)
    is_forbidden = ((word >> (token & 31)) & 1) == 0
    tl.store(logits + row * vocab + column, float("-inf"), mask=is_inside & is_forbidden)
