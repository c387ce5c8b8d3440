"""Gumbel noise keyed by (request, position, token): the same on every device, in any batch, tree or round.

Bits are Philox4x32-10 (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011).
"""

from __future__ import annotations

import torch
from torch import Tensor

_MASK32 = 0xFFFFFFFF
_MASK64 = 0xFFFFFFFFFFFFFFFF
PHILOX_M0, PHILOX_M1 = 0xD2511F53, 0xCD9E8D57  # multipliers of words 0 and 2
PHILOX_W0, PHILOX_W1 = 0x9E3779B9, 0xBB67AE85  # added to the key's words after each round
PHILOX_ROUNDS = 10
STREAM_TOKEN = 0x7EE  # last counter word: keeps token noise apart from any other use of a request's key


def noise_key(seed: int, choice: int) -> int:
    """Return the 64-bit noise key of one choice of a request, as a signed integer (an int64 tensor holds it).

    `seed`: any integer, taken modulo 2^64. `choice`: index of the choice, >= 0. Host integers only.
    Two rounds of the splitmix64 finaliser (Steele et al., OOPSLA 2014).
    """
    key = _splitmix64(_splitmix64(seed & _MASK64) ^ (choice & _MASK64))
    return key - (1 << 64) if key >> 63 else key


def _splitmix64(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & _MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    return x ^ (x >> 31)


def _philox(word0: Tensor, keys: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    c0 = word0
    c1 = positions & _MASK32
    c2 = (positions >> 32) & _MASK32
    c3 = torch.full_like(c1, STREAM_TOKEN)
    k0 = keys & _MASK32
    k1 = (keys >> 32) & _MASK32
    for i in range(PHILOX_ROUNDS):
        p0, p1 = c0 * PHILOX_M0, c2 * PHILOX_M1
        a0 = (k0 + i * PHILOX_W0) & _MASK32
        a1 = (k1 + i * PHILOX_W1) & _MASK32
        c0 = ((p1 >> 32) ^ c1 ^ a0) & _MASK32
        c2 = ((p0 >> 32) ^ c3 ^ a1) & _MASK32
        c1, c3 = p1, p0
    return c0, c1 & _MASK32, c2, c3 & _MASK32


def philox_bits(keys: Tensor, positions: Tensor, num_tokens: int) -> Tensor:
    """Return 32 random bits for every token id below `num_tokens`: int64 [..., V], values 0 .. 2^32 - 1.

    `keys`, `positions`: int64 [...], broadcast with each other.
    """
    blocks = torch.arange((num_tokens + 3) // 4, device=keys.device)
    words = _philox(blocks, keys[..., None], positions[..., None])
    return torch.stack(words, -1).flatten(-2)[..., :num_tokens]


def gumbel(keys: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """Return Gumbel(0, 1) noise float32 [B, D, V] for `keys` int64 [B] at `positions` int64 [B, D]."""
    bits = philox_bits(keys[:, None], positions, vocab_size)
    return _gumbel_of_bits(bits)


def gumbel_at(keys: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
    """Return the same noise at chosen tokens: float32 [B, D, M] for `token_ids` int64 [B, D, M]."""
    words = _philox(token_ids >> 2, keys[:, None, None], positions[:, :, None])
    bits = torch.stack(words, -1).gather(-1, (token_ids & 3)[..., None]).squeeze(-1)
    return _gumbel_of_bits(bits)


def _gumbel_of_bits(bits: Tensor) -> Tensor:
    u = bits.double().add_(0.5).mul_(2.0**-32)
    return u.log_().neg_().log_().neg_().float()
