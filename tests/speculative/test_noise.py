"""The noise against Philox and logarithms written out in plain Python."""

from __future__ import annotations

import math
import random
from decimal import Decimal, localcontext

import pytest
import torch

from treedraft.speculative import noise

MASK = 0xFFFFFFFF


def philox_oracle(counter: list[int], key: tuple[int, int]) -> list[int]:
    """Philox4x32-10 in host integers."""
    c, (k0, k1) = list(counter), key
    for _ in range(10):
        p0, p1 = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [(p1 >> 32) ^ c[1] ^ k0, p1 & MASK, (p0 >> 32) ^ c[3] ^ k1, p0 & MASK]
        k0, k1 = (k0 + 0x9E3779B9) & MASK, (k1 + 0xBB67AE85) & MASK
    return c


def bits_oracle(key: int, position: int, token: int) -> int:
    counter = [token >> 2, position & MASK, (position >> 32) & MASK, noise.STREAM_TOKEN]
    return philox_oracle(counter, (key & MASK, (key >> 32) & MASK))[token & 3]


def decimal_neg_log(x: float) -> Decimal:
    with localcontext() as context:
        context.prec = 40
        return -Decimal(x).ln()


def test_philox_oracle_random123_known_answers_match() -> None:
    # Known-answer vectors of Random123's kat_vectors, philox4x32 with 10 rounds.
    assert philox_oracle([0, 0, 0, 0], (0, 0)) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert philox_oracle([MASK] * 4, (MASK, MASK)) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]


@pytest.mark.parametrize("num_tokens", [1, 3, 4, 5, 64, 67])
def test_philox_bits_any_vocabulary_equals_oracle(num_tokens: int) -> None:
    keys = torch.tensor([0, -1, noise.noise_key(3, 1), 1 << 40])
    positions = torch.tensor([[0, 1], [2**32 - 1, 2**32], [2**33 + 7, 12], [2**62, 5]])
    bits = noise.philox_bits(keys[:, None], positions, num_tokens)
    assert bits.shape == (4, 2, num_tokens) and bits.dtype == torch.int64
    for b in range(4):
        for d in range(2):
            expected = [bits_oracle(int(keys[b]), int(positions[b, d]), v) for v in range(num_tokens)]
            assert bits[b, d].tolist() == expected


def test_noise_key_seeds_and_choices_are_distinct_signed_64_bits() -> None:
    keys = {noise.noise_key(seed, choice) for seed in range(-50, 50) for choice in range(8)}
    assert len(keys) == 800
    assert all(-(2**63) <= key < 2**63 for key in keys)
    assert min(keys) < 0 < max(keys)
    assert noise.noise_key(-1, 0) == noise.noise_key(2**64 - 1, 0)  # modulo 2^64, as SamplingParams allows both
    assert noise.noise_key(1, 0) == 6791897765849424158  # frozen: a seed's text must not change between versions


def test_neg_log_twice_random_and_extreme_bits_within_bounds_of_exact() -> None:
    rng = random.Random(0)
    one_over_e = int(2**32 / math.e)  # there the noise crosses 0
    bits = [0, 1, 2, 3, MASK, MASK - 1, MASK - 2, 1 << 31, (1 << 31) - 1]
    bits += [rng.randrange(1 << 32) >> rng.randrange(32) for _ in range(1000)]
    bits += [MASK - (rng.randrange(1 << 32) >> rng.randrange(32)) for _ in range(1000)]
    bits += range(one_over_e - 100, one_over_e + 100)
    u = (torch.tensor(bits).double() + 0.5) * 2.0**-32
    x = noise._neg_log(u)
    g = noise._neg_log(x)
    for u_i, x_i, g_i in zip(u.tolist(), x.tolist(), g.tolist()):
        exact = decimal_neg_log(u_i)
        assert abs(Decimal(x_i) - exact) <= exact * Decimal(2) ** -50
        exact = decimal_neg_log(x_i)
        # Where the noise crosses 0 a difference of 2^-53 in x is the bound, elsewhere the last bits of the result.
        assert abs(Decimal(g_i) - exact) <= abs(exact) * Decimal(2) ** -51 + Decimal(2) ** -52


def test_gumbel_a_million_numbers_equal_the_math_librarys() -> None:
    bits = noise.philox_bits(torch.tensor([7]), torch.tensor([9]), 1_000_000)
    ours = noise.gumbel(torch.tensor([7]), torch.tensor([[9]]), 1_000_000)
    theirs = ((bits.double() + 0.5) * 2.0**-32).log().neg().log().neg().float()
    assert ours.dtype == torch.float32 and ours.shape == (1, 1, 1_000_000)
    assert (ours[0] != theirs).sum() <= 1  # both logarithms are nearly exact: one in 10^8 may round otherwise
    # Gumbel(0, 1): mean 0.5772, variance pi^2 / 6; standard errors 0.0013 and 0.0034 (kurtosis 5.4).
    assert abs(ours.mean() - 0.57722) < 0.006 and abs(ours.var() - math.pi**2 / 6) < 0.016
    assert torch.isfinite(ours).all()


def test_gumbel_at_chosen_tokens_equals_gumbel() -> None:
    keys, positions = torch.tensor([5, -9]), torch.tensor([[0, 3, 2**35], [7, 8, 9]])
    full = noise.gumbel(keys, positions, 301)
    ids = torch.randint(301, (2, 3, 40), generator=torch.Generator().manual_seed(0))
    assert torch.equal(noise.gumbel_at(keys, positions, ids), full.gather(-1, ids))


def test_gumbel_other_rows_vocabulary_and_order_change_nothing() -> None:
    keys, positions = torch.tensor([5, -9, 6]), torch.tensor([[4, 3], [7, 8], [4, 3]])
    full = noise.gumbel(keys, positions, 200)
    assert torch.equal(noise.gumbel(keys[1:2], positions[1:2, 1:], 77)[0, 0], full[1, 1, :77])
    assert torch.equal(noise.gumbel(keys.flip(0), positions.flip(0), 200), full.flip(0))
    assert not torch.equal(full[0], full[2])  # another key
    assert not torch.equal(full[0, 0], full[0, 1])  # another position
