"""The draft tree while it grows: the pool of all candidates, and the frontier of K rows that is forwarded next.

Levels, draft rows and bits, for K = 2, S = 3 (L = kv_len):

    level 1        a0   a1            pool 0..1       rows of the forward that makes level 2: bits 0, 1
    level 2      b0 b1 b2 b3          pool 2..5       the best two are forwarded for level 3: bits 2, 3
    level 3      c0 c1 c2 c3          pool 6..9       never forwarded

Frontier row j of level l (the candidates of level l, forwarded to make level l + 1) is draft row (l - 1) * K + j:
logical slot L + (l - 1) * K + j, rope position L + l - 1, ancestor bit (l - 1) * K + j.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class CandidatePool:
    """Every candidate so far, M = K + (levels - 1) * K * K of them, in the order of their making."""

    token_ids: Tensor  # [B, M] int64, target vocabulary
    scores: Tensor  # [B, M] float32: cumulative; never above the parent's. NaN or -inf: not a candidate
    parents: Tensor  # [B, M] int64: pool index of the parent, -1 = the root
    topk: int  # K


@dataclass(frozen=True)
class Frontier:
    """The K candidates of one level that the draft model forwards next."""

    pool_index: Tensor  # [B, K] int64
    token_ids: Tensor  # [B, K] int64
    scores: Tensor  # [B, K] float32, descending; NaN became -inf
    ancestor_bits: Tensor  # [B, K, words] int64 over draft rows: the row itself and its ancestors


def num_words(num_draft_tokens: int, topk: int, num_steps: int) -> int:
    """Return how many 64-bit words the ancestor bits of tree nodes and of draft rows need."""
    return (max(num_draft_tokens, topk * (num_steps - 1), 1) + 63) // 64


def stable_topk(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k best of the last dimension by (score descending, index ascending): values float32, indices int64.

    The same on every device, which `torch.topk` is not when scores tie. NaN counts as -inf, -0.0 as 0.0.
    scores: float32 [..., n], n < 2^31, k <= n.

    Each score and its index become one integer, so that no two are equal:

        63 ............ 32 | 31 ......... 0
        score, order kept  | n - 1 - index
    """
    n = scores.shape[-1]
    values = torch.nan_to_num(scores.float(), nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf).add_(0.0)
    bits = values.view(torch.int32)
    ordered = (bits >> 31).bitwise_and_(0x7FFFFFFF).bitwise_xor_(bits)  # IEEE order as integer order
    composite = ordered.to(torch.int64).mul_(1 << 32).add_(torch.arange(n - 1, -1, -1, device=scores.device))
    best = composite.topk(k, dim=-1).values
    indices = (n - 1) - (best & 0xFFFFFFFF)
    return values.gather(-1, indices), indices


def own_bits(start: int, count: int, words: int, device: torch.device) -> Tensor:
    """Return int64 [count, words]: row j has bit `start + j` set alone. Bit 63 of a word is the sign bit."""
    index = torch.arange(start, start + count, device=device)
    if words == 1:
        return torch.bitwise_left_shift(1, index)[:, None]
    word = torch.arange(words, device=device)
    return torch.where((index >> 6)[:, None] == word, torch.bitwise_left_shift(1, index & 63)[:, None], 0)


def first_level(token_ids: Tensor, scores: Tensor, words: int) -> tuple[CandidatePool, Frontier]:
    """Start a tree from the K candidates of level 1, which come from the last draft extension.

    token_ids int64 [B, K], scores float32 [B, K] descending.
    """
    batch, topk = token_ids.shape
    index = torch.arange(topk, device=token_ids.device).expand(batch, topk)
    pool = CandidatePool(token_ids, scores, torch.full_like(token_ids, -1), topk)
    bits = own_bits(0, topk, words, token_ids.device).expand(batch, topk, words)
    return pool, Frontier(index, token_ids, scores, bits)


def last_level(pool: CandidatePool, frontier: Frontier, child_ids: Tensor, child_logps: Tensor) -> CandidatePool:
    """Add the K children of each frontier row to the pool: all K * K join (EAGLE-2, section 4.1).

    child_ids int64 [B, K, K], child_logps float32 [B, K, K]: the child's own log-probability.
    """
    topk = pool.topk
    parent_scores = frontier.scores[..., None]
    # A child never outranks its parent, whatever its log-probability was rounded to: parents are always selected.
    scores = torch.minimum(parent_scores + child_logps, parent_scores).flatten(1)
    parents = frontier.pool_index.repeat_interleave(topk, dim=1)
    return CandidatePool(
        torch.cat((pool.token_ids, child_ids.flatten(1)), 1),
        torch.cat((pool.scores, scores), 1),
        torch.cat((pool.parents, parents), 1),
        topk,
    )


def next_level(
    pool: CandidatePool, frontier: Frontier, child_ids: Tensor, child_logps: Tensor, level: int
) -> tuple[CandidatePool, Frontier, Tensor]:
    """Add level `level` >= 2 to the pool and make its K best the next frontier.

    child_ids int64 [B, K, K], child_logps float32 [B, K, K]. Also returns parent_rows int64 [B, K]: which of the K
    forwarded rows each new frontier row descends from, and so whose recycled hidden state it takes.
    """
    topk = pool.topk
    start = pool.token_ids.shape[1]
    grown = last_level(pool, frontier, child_ids, child_logps)
    scores, best = stable_topk(grown.scores[:, start:], topk)
    parent_rows = best // topk
    words = frontier.ancestor_bits.shape[-1]
    bits = frontier.ancestor_bits.gather(1, parent_rows[..., None].expand(-1, -1, words))
    bits = bits | own_bits((level - 1) * topk, topk, words, best.device)
    return grown, Frontier(best + start, child_ids.flatten(1).gather(1, best), scores, bits), parent_rows
