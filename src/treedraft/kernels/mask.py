"""A grammar's masks over logits, in place: the twin of `treedraft.speculative.sampling.mask_tokens`."""

# mypy: disable-error-code="no-untyped-def"
# (Triton reads the annotations of a kernel: tl.constexpr or none.)

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096  # tokens of a program


def mask_tokens_triton(logits: Tensor, masks: Tensor) -> Tensor:
    """Set the logits [B, N, V], contiguous, to -inf where masks [B, N, words] int32 forbid the token; returns them."""
    batch, nodes, vocab = logits.shape
    if not logits.is_meta:
        _mask_kernel[(batch * nodes, triton.cdiv(vocab, BLOCK))](
            logits, masks.contiguous(), vocab, masks.shape[-1], BLOCK=BLOCK, num_warps=4
        )
    return logits


@triton.jit
def _mask_kernel(
    logits,  # [B * N, V]
    masks,  # [B * N, words] int32
    vocab,
    words,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_inside = token < vocab
    word = tl.load(masks + row * words + (token >> 5), mask=is_inside, other=-1)
    is_forbidden = ((word >> (token & 31)) & 1) == 0
    tl.store(logits + row * vocab + token, float("-inf"), mask=is_inside & is_forbidden)
