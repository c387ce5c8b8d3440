"""The draft tree while it grows: the pool of all candidates, and the frontier of K rows that is forwarded next.

Levels, pool and draft rows for K = 2, S = 3 (L = kv_len):

    level 1     a0 a1           pool 0..1    both are forwarded to make level 2: draft rows 0, 1
    level 2     b0 b1 b2 b3     pool 2..5    the best two are forwarded to make level 3: draft rows 2, 3
    level 3     c0 c1 c2 c3     pool 6..9    never forwarded

Frontier row j of level l is draft row (l - 1) * K + j: logical slot L + (l - 1) * K + j, rope position L + l - 1,
ancestor bit (l - 1) * K + j. Its K children are K neighbours in the pool, in the order of its children.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_CHUNK = 64  # scores compared at once by stable_topk


@dataclass(frozen=True)
class CandidatePool:
    """Every candidate so far, in the order of their making: M = K + (levels - 1) * K * K. Level by level."""

    token_ids: tuple[Tensor, ...]  # [B, K], then [B, K * K] a level; int64, target vocabulary
    scores: tuple[Tensor, ...]  # as token_ids, float32: cumulative, never above the parent's. NaN, -inf: no candidate
    frontiers: tuple[Tensor, ...]  # [B, K] int64 for every level but the first: pool indices of the parents

    @property
    def topk(self) -> int:
        """K."""
        return self.token_ids[0].shape[1]

    @property
    def num_levels(self) -> int:
        """Levels made so far."""
        return len(self.token_ids)

    @property
    def size(self) -> int:
        """M."""
        return self.topk + (self.num_levels - 1) * self.topk**2


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
    scores: float32 [..., n], 1 <= k <= n.

    A long row is cut into chunks of 64. The k best lie in the k chunks that are first by (maximum descending, index
    ascending): a chunk elsewhere has k elements before its best one, one in each of these. Only they are sorted.
    """
    scores = torch.nan_to_num(scores.float(), nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    n = scores.shape[-1]
    if n <= _CHUNK * max(k, 4):
        values, indices = scores.sort(dim=-1, descending=True, stable=True)
        return values[..., :k], indices[..., :k]
    if n % _CHUNK:
        scores = torch.nn.functional.pad(scores, (0, _CHUNK - n % _CHUNK), value=-torch.inf)
    chunks = scores.unflatten(-1, (-1, _CHUNK))
    # In ascending order, so that position in the gathered chunks orders ties as index does.
    best = chunks.amax(-1).sort(dim=-1, descending=True, stable=True).indices[..., :k].sort(dim=-1).values
    gathered = chunks.gather(-2, best[..., None].expand(*best.shape, _CHUNK)).flatten(-2)
    values, position = gathered.sort(dim=-1, descending=True, stable=True)
    values, position = values[..., :k], position[..., :k]
    return values, best.gather(-1, position // _CHUNK) * _CHUNK + position % _CHUNK


def own_bits(start: int, count: int, words: int, device: torch.device) -> Tensor:
    """Return int64 [count, words]: row j has bit `start + j` set alone. Bit 63 of a word is the sign bit."""
    index = torch.arange(start, start + count, device=device)
    if words == 1:
        return torch.bitwise_left_shift(1, index)[:, None]
    word = torch.arange(words, device=device)
    return torch.where((index >> 6)[:, None] == word, torch.bitwise_left_shift(1, index & 63)[:, None], 0)


def first_level(token_ids: Tensor, scores: Tensor, words: int) -> tuple[CandidatePool, Frontier]:
    """Start a tree from the K candidates of level 1, which come from the last draft extension.

    token_ids int64 [B, K], scores float32 [B, K] descending, as `stable_topk` gives them.
    """
    batch, topk = token_ids.shape
    index = torch.arange(topk, device=token_ids.device).expand(batch, topk)
    bits = own_bits(0, topk, words, token_ids.device).expand(batch, topk, words)
    return CandidatePool((token_ids,), (scores,), ()), Frontier(index, token_ids, scores, bits)


def last_level(pool: CandidatePool, frontier: Frontier, child_ids: Tensor, child_logps: Tensor) -> CandidatePool:
    """Add the K children of each frontier row to the pool: all K * K join (EAGLE-2, section 4).

    child_ids int64 [B, K, K], child_logps float32 [B, K, K]: the child's own log-probability.
    """
    parent_scores = frontier.scores[..., None]
    # A child never outranks its parent, whatever its log-probability was rounded to: so parents are always selected.
    scores = torch.minimum(parent_scores + child_logps, parent_scores)
    return CandidatePool(
        (*pool.token_ids, child_ids.flatten(1)),
        (*pool.scores, scores.flatten(1)),
        (*pool.frontiers, frontier.pool_index),
    )


def next_level(
    pool: CandidatePool, frontier: Frontier, child_ids: Tensor, child_logps: Tensor, level: int
) -> tuple[CandidatePool, Frontier, Tensor]:
    """Add level `level` >= 2 to the pool and make its K best the next frontier.

    child_ids int64 [B, K, K], child_logps float32 [B, K, K]. Also returns parent_rows int64 [B, K]: which of the K
    forwarded rows each new frontier row descends from, and so whose recycled hidden state it takes.
    """
    topk, words = pool.topk, frontier.ancestor_bits.shape[-1]
    grown = last_level(pool, frontier, child_ids, child_logps)
    scores, best = stable_topk(grown.scores[-1], topk)
    parent_rows = best // topk
    bits = frontier.ancestor_bits.gather(1, parent_rows[..., None].expand(-1, -1, words))
    bits = bits | own_bits((level - 1) * topk, topk, words, best.device)
    token_ids = grown.token_ids[-1].gather(1, best)
    return grown, Frontier(best + pool.size, token_ids, scores, bits), parent_rows
