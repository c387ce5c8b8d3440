"""Gumbel noise keyed by (request, position, token): bit for bit the same on every device, in any batch or tree.

    bits  = philox(key, position, token)         32 bits; Philox4x32-10 (Salmon et al., "Parallel Random Numbers: As
                                                 Easy as 1, 2, 3", SC 2011)
    noise = -log(-log((bits + 0.5) / 2^32))      in float64, rounded once to float32

The logarithm is our own. Those of math libraries differ in the last bit of a float64, which moves the float32 after
two of them about once in 10^8 numbers. Ours is table entries, additions and products, in one order, and IEEE 754
leaves no choice in any of these; nothing here may be contracted to a fused multiply-add.
"""

from __future__ import annotations

import functools
from decimal import Decimal, localcontext

import torch
from torch import Tensor

from treedraft.speculative.bits import bits_of

_MASK32 = 0xFFFFFFFF
_MASK64 = 0xFFFFFFFFFFFFFFFF
PHILOX_M0, PHILOX_M1 = 0xD2511F53, 0xCD9E8D57  # multipliers of counter words 0 and 2
PHILOX_W0, PHILOX_W1 = 0x9E3779B9, 0xBB67AE85  # added to the key's words after each round
PHILOX_ROUNDS = 10
STREAM_TOKEN = 0x7EE  # counter word 3: keeps token noise apart from any other use of a request's key

LOG_CELL_BITS = 11  # cells of the logarithm's table per power of two: 2^11
LOG_SHIFT = 52 - LOG_CELL_BITS
LOG_MIN_EXPONENT, LOG_MAX_EXPONENT = -34, 5  # arguments are 2^-33 .. 1 - 2^-33, then 2^-33 .. 22.9
LOG_FIRST_CELL = (1023 + LOG_MIN_EXPONENT) << LOG_CELL_BITS


def noise_key(seed: int, choice: int) -> int:
    """Return the 64-bit noise key of one choice of a request, as a signed integer (an int64 tensor holds it).

    seed: any integer, taken modulo 2^64. choice: index of the choice, >= 0. Host integers only.
    Two rounds of the splitmix64 finaliser (Steele et al., "Fast Splittable Pseudorandom Number Generators", 2014).
    """
    key = _splitmix64(_splitmix64(seed & _MASK64) ^ (choice & _MASK64))
    return key - (1 << 64) if key >> 63 else key


def _splitmix64(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & _MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    return x ^ (x >> 31)


def philox_bits(keys: Tensor, positions: Tensor, num_tokens: int) -> Tensor:
    """Return 32 random bits for every token id below `num_tokens`: int64 [..., V], values 0 .. 2^32 - 1.

    keys, positions: int64 [...], broadcast with each other.
    Token v is word v & 3 of counter (v >> 2, position low, position high, STREAM_TOKEN) under (key low, key high).
    """
    blocks = torch.arange((num_tokens + 3) // 4, device=keys.device)
    return torch.stack(_philox(blocks, keys[..., None], positions[..., None]), -1).flatten(-2)[..., :num_tokens]


def gumbel(keys: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """Return Gumbel(0, 1) noise float32 [B, D, V] of keys int64 [B] at positions int64 [B, D]."""
    return _gumbel_of_bits(philox_bits(keys[:, None], positions, vocab_size))


def gumbel_at(keys: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
    """Return the same noise at chosen tokens: float32 [B, D, M] for token_ids int64 [B, D, M]."""
    words = torch.stack(_philox(token_ids >> 2, keys[:, None, None], positions[:, :, None]), -1)
    return _gumbel_of_bits(words.gather(-1, (token_ids & 3)[..., None]).squeeze(-1))


def _philox(word0: Tensor, keys: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the four words of each counter, int64 in 0 .. 2^32 - 1; arguments broadcast with each other.

    One round:  c0, c1, c2, c3 = high(c2 * M1) ^ c1 ^ k0, low(c2 * M1), high(c0 * M0) ^ c3 ^ k1, low(c0 * M0)

    c0 and c2 are the rows of one tensor, so are c1 and c3: half the operations (430 -> 190 us at 6 x 4096, 2 cores).
    Products exceed an int64 and wrap, which keeps their 64 bits; c1 and c3 carry the high half until the last mask.
    """
    device = keys.device
    shape = torch.broadcast_shapes(word0.shape, keys.shape, positions.shape)
    ones = [1] * len(shape)
    rounds = torch.arange(PHILOX_ROUNDS, device=device).view(PHILOX_ROUNDS, *[1] * keys.dim())
    key_low = (keys & _MASK32) + rounds * PHILOX_W0
    key_high = ((keys >> 32) & _MASK32) + rounds * PHILOX_W1
    round_keys = torch.stack((key_low, key_high), 1).bitwise_and_(_MASK32)
    multipliers = (torch.arange(2, device=device) * (PHILOX_M1 - PHILOX_M0) + PHILOX_M0).view(2, *ones)

    even = torch.empty((2, *shape), dtype=torch.int64, device=device)  # c0, c2
    c0, c2 = even.unbind()
    c0.copy_(word0)
    c2.copy_((positions >> 32).bitwise_and_(_MASK32))
    high = torch.empty_like(even)
    high0, high2 = high.unbind()
    odd = torch.empty_like(even)  # low halves of the products: next c3, c1
    spare = torch.empty_like(even)
    odd[1] = positions & _MASK32
    odd[0] = STREAM_TOKEN
    halves, spare_halves = odd.unbind(), spare.unbind()
    for round_key in round_keys.unbind():
        torch.mul(even, multipliers, out=spare)
        torch.bitwise_right_shift(spare, 32, out=high)
        torch.bitwise_xor(high2, halves[1], out=c0)
        torch.bitwise_xor(high0, halves[0], out=c2)
        even.bitwise_xor_(round_key).bitwise_and_(_MASK32)
        odd, spare, halves, spare_halves = spare, odd, spare_halves, halves
    odd.bitwise_and_(_MASK32)
    return c0, halves[1], c2, halves[0]


def _gumbel_of_bits(bits: Tensor) -> Tensor:
    u = bits.to(torch.float64).add_(0.5).mul_(2.0**-32)
    return _neg_log(_neg_log(u)).to(torch.float32)


def _neg_log(x: Tensor) -> Tensor:
    """Return -log(x) of float64 x in [2^-34, 2^6), within 2^-50 relative for x < 1 of at most 34 bits.

    x lies in a cell with inverse ~ 1 / x: r = x * inverse - 1 is below 2^-11.4 in magnitude, so four terms of log1p
    are enough. Around 1 the inverse is exactly 1, hence no cancellation; inverses have 14 bits, so that r is exact.
    """
    inverses, logs = log_tables(x.device)
    cell = (bits_of(x) >> LOG_SHIFT).sub_(LOG_FIRST_CELL).flatten()
    r = inverses.index_select(0, cell).view_as(x).mul_(x).sub_(1.0)
    series = (r * 0.25).sub_(1 / 3).mul_(r).add_(0.5).mul_(r).sub_(1.0).mul_(r)
    return series.add_(logs.index_select(0, cell).view_as(x))


@functools.cache
def log_pairs(device: torch.device) -> Tensor:
    """Return the two tables of `log_tables` side by side: float64 [cells, 2]. A constant, kept per device."""
    with torch.inference_mode(False):
        return torch.stack(log_tables(device), -1)


@functools.cache
def log_tables(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return, for every cell of the argument, an inverse and the inverse's logarithm: float64 [cells] each.

    A constant, kept per device; the first call makes it in about 0.2 s. Logarithms come from exact decimal arithmetic:
    a math library's would differ from machine to machine.
    """
    size = 1 << LOG_CELL_BITS
    inverses: list[float] = []
    logs: list[float] = []
    with localcontext() as context:
        context.prec = 40
        log_2 = Decimal(2).ln()
        # m = 1 + (cell + 1/2) / size; inverse = 1 / m to 14 bits. The cells on either side of 1 get exactly 1.
        mantissas = [round(16384 * 2 * size / (2 * size + 2 * cell + 1)) / 16384 for cell in range(size)]
        mantissas[0], mantissas[-1] = 1.0, 0.5
        mantissa_logs = [Decimal(m).ln() for m in mantissas]
        for exponent in range(LOG_MIN_EXPONENT, LOG_MAX_EXPONENT + 1):
            shift = exponent * log_2
            inverses.extend(m * 2.0**-exponent for m in mantissas)
            logs.extend(float(log_m - shift) for log_m in mantissa_logs)
    with torch.inference_mode(False):
        return (
            torch.tensor(inverses, dtype=torch.float64, device=device),
            torch.tensor(logs, dtype=torch.float64, device=device),
        )
