"""From a node's logits to its token: penalties -> bias -> min_tokens -> / T -> top-k -> top-p -> min-p -> argmax.

A grammar's mask comes first, which is the same as behind the bias (`mask_tokens`).

Everything is per node of a tree; prefill and plain decode are trees of one node. A row of `process` depends on its
own logits, its own path and its sequence's settings alone, never on its neighbours: that is what makes the text the
same with and without speculation.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from treedraft.speculative.bits import bits_of
from treedraft.types import DraftTree

STAGES = frozenset({"penalties", "bias", "min_tokens", "noise", "top_k", "top_p", "min_p"})
GRAMMAR = "grammar"  # a stage before all of them, whose masks a round gets at its seam: see `mask_tokens`
MAX_STOP_IDS = 16  # columns of SamplingRows.stop_ids
MASS_ONE = 1 << 32  # fixed-point mass of the most likely token
_NEVER = 1 << 62  # a mass that no row reaches


@dataclass(frozen=True)
class SamplingRows:
    """The sampling settings of B sequences, one row each, and what the host knows of them.

    `stages` names the stages that any row uses: an absent stage is skipped, a present one is switched by each row's
    value, so naming a stage that no row uses changes nothing.
    """

    temperature: Tensor  # [B] float32, 0: greedy
    top_k: Tensor  # [B] int64, <= 0: off
    top_p: Tensor  # [B] float32, >= 1: off
    min_p: Tensor  # [B] float32, 0: off
    repetition_penalty: Tensor  # [B] float32, 1: off
    presence_penalty: Tensor  # [B] float32, 0: off
    frequency_penalty: Tensor  # [B] float32, 0: off
    noise_key: Tensor  # [B] int64
    prompt_lens: Tensor  # [B] int64
    min_tokens: Tensor  # [B] int64
    stop_ids: Tensor  # [B, 16] int64, ids masked while fewer than min_tokens are generated; unused entries -1
    prompt_seen: Tensor  # [B, V] bool: the token occurs in the prompt
    output_counts: Tensor  # [B, V] int32: occurrences in the output so far, the root included
    logit_bias: Tensor  # [B, V] float32
    stages: frozenset[str]  # of STAGES, and GRAMMAR

    def part(self, rows: slice) -> SamplingRows:
        """Return the settings of some of the sequences. A table that no stage reads is empty and stays so."""
        tensors = {f.name: getattr(self, f.name)[rows] for f in fields(self) if f.name != "stages"}
        return SamplingRows(**tensors, stages=self.stages)


def path_tokens(tree: DraftTree, max_depth: int | None = None) -> Tensor:
    """Return the tokens of each node's path, the node included, the root left out: int64 [B, N, max_depth].

    Column d - 1 is the ancestor of depth d; -1 below the node itself. The root is already in the row's counts.
    max_depth: at least the tree's greatest depth, num_steps; None: N - 1, which no depth exceeds.
    """
    num_nodes = tree.token_ids.shape[1]
    width = num_nodes - 1 if max_depth is None else max_depth
    node = torch.arange(num_nodes, device=tree.token_ids.device)
    is_on_path = (tree.ancestor_bits[:, :, node >> 6] >> (node & 63)) & 1  # [B, N, N]
    # Everything off the path, and the root, goes to a spare last column.
    column = torch.where((is_on_path > 0) & (node > 0), tree.depths[:, None] - 1, width)
    paths = tree.token_ids.new_full((*column.shape[:2], width + 1), -1)
    return paths.scatter_(2, column, tree.token_ids[:, None].expand_as(column))[..., :width]


def mask_tokens(logits: Tensor, masks: Tensor, token_ids: Tensor | None = None) -> Tensor:
    """Return the logits with every token that a mask forbids at -inf. May overwrite them.

    logits [B, N, V] float32 or float64; masks int32 [B, N, words]: bit v & 31 of word v >> 5 is token v.
    token_ids int64 [V]: of the logits' columns, where these are a draft's; None: the columns themselves.

    Before penalties and bias, where the order of the other settings has it behind them: neither makes anything of -inf
    but -inf, nor looks at another token's logit.
    """
    ids = torch.arange(logits.shape[-1], device=masks.device) if token_ids is None else token_ids
    is_allowed = (masks.index_select(-1, ids >> 5) >> (ids & 31).int()).bitwise_and_(1)
    return logits.masked_fill_(is_allowed == 0, -torch.inf)


def process(logits: Tensor, rows: SamplingRows, paths: Tensor, depths: Tensor, kv_lens: Tensor) -> Tensor:
    """Return z: the logits of each node after every sampling setting, filtered tokens at -inf.

    logits [B, N, V] float32 or float64; paths int64 [B, N, D] from `path_tokens`; depths int64 [B, N]; kv_lens int64
    [B]: the root's position. Never changes `logits` in place; returns it as is when there is nothing to do.

    Repetition penalty r: of tokens in prompt or output, a positive logit is divided by r, any other multiplied. Then
    frequency * count + presence * (count > 0) is subtracted, over the output. A node's output is the sequence's and
    the node's own path.

    top-k keeps the k most likely tokens; top-p the smallest set of most likely tokens whose mass reaches top_p of what
    top-k left. Both order tokens by z - max z as it rounds in the dtype of z, and equal ones by id. A token's mass is
    fixed-point, floor(exp(z - max z) * 2^32), so that no order of summation matters. min-p keeps the tokens with
    z - max z >= log(min_p). None of them ever drops the most likely token.
    """
    z = logits
    if "penalties" in rows.stages:
        z = _penalize(z, paths, rows)
    if "bias" in rows.stages:
        z = z + rows.logit_bias[:, None]
    if "min_tokens" in rows.stages:
        z = _mask_stops(z, depths, kv_lens, rows)
    if "noise" in rows.stages:
        z = z / torch.where(rows.temperature > 0, rows.temperature, 1.0)[:, None, None]
    filters = rows.stages & {"top_k", "top_p", "min_p"}
    if filters:
        z = torch.where(_keep(z, rows, filters), z, -torch.inf)
    return z


def _penalize(logits: Tensor, paths: Tensor, rows: SamplingRows) -> Tensor:
    """Apply the penalties of the rows' counts to every node, then set right the few tokens on each node's path."""
    repetition = rows.repetition_penalty.to(logits.dtype)[:, None, None]
    frequency = rows.frequency_penalty.to(logits.dtype)[:, None, None]
    presence = rows.presence_penalty.to(logits.dtype)[:, None, None]

    def penalized(x: Tensor, counts: Tensor, seen: Tensor) -> Tensor:
        factor = torch.where(seen, repetition, 1.0)
        offset = frequency * counts + presence * (counts > 0)
        return x.clamp(min=0) / factor + x.clamp(max=0) * factor - offset

    counts = rows.output_counts[:, None]
    z = penalized(logits, counts, rows.prompt_seen[:, None] | (counts > 0))
    if paths.shape[-1] == 0:
        return z
    # At most D tokens a node. Padding (-1) becomes token 0 with its own right count, so that it writes a right value.
    tokens = paths.clamp(min=0)
    on_path = (paths[..., None, :] == tokens[..., :, None]).sum(-1)
    batch, nodes, depth = tokens.shape
    flat = tokens.flatten(1)
    counts_at = rows.output_counts.gather(1, flat).view(batch, nodes, depth) + on_path
    seen_at = rows.prompt_seen.gather(1, flat).view(batch, nodes, depth) | (counts_at > 0)
    return z.scatter_(-1, tokens, penalized(logits.gather(-1, tokens), counts_at, seen_at))


def _mask_stops(z: Tensor, depths: Tensor, kv_lens: Tensor, rows: SamplingRows) -> Tensor:
    """Set stop ids to -inf at nodes whose sampled token comes before output index min_tokens."""
    output_index = kv_lens[:, None] + depths + 1 - rows.prompt_lens[:, None]
    too_early = output_index < rows.min_tokens[:, None]
    stop_ids = rows.stop_ids[:, None].expand(-1, z.shape[1], -1)
    bound = torch.where(too_early[..., None] & (stop_ids >= 0), -torch.inf, torch.inf).to(z.dtype)
    return z.scatter_reduce(-1, stop_ids.clamp(min=0), bound, "amin")


def _keep(z: Tensor, rows: SamplingRows, filters: frozenset[str]) -> Tensor:
    """Return bool [B, N, V]: the tokens that top-k, then top-p, then min-p leave."""
    below_max = z - z.amax(-1, keepdim=True)
    keep = None
    if "top_k" in filters:
        target = torch.where(rows.top_k > 0, rows.top_k, _NEVER)[:, None, None].repeat(1, z.shape[1], 1)
        keep = _first_until(below_max, torch.ones_like(z, dtype=torch.int64), target)
    if "top_p" in filters:
        # Logits that top-k dropped have no mass; where top-p is off they come last and are dropped again.
        left = below_max if keep is None else torch.where(keep, below_max, -torch.inf)
        mass = left.exp().mul_(MASS_ONE).to(torch.int64)
        top_p = rows.top_p.double()[:, None, None]
        target = (mass.sum(-1, keepdim=True) * top_p).ceil_().to(torch.int64)
        first = _first_until(left, mass, torch.where(top_p < 1, target, _NEVER))
        keep = first if keep is None else first.bitwise_and_(keep)
    if "min_p" in filters:
        likely = below_max >= rows.min_p.to(z.dtype).log()[:, None, None]
        keep = likely if keep is None else likely.bitwise_and_(keep)
    assert keep is not None
    return keep


def _first_until(below_max: Tensor, mass: Tensor, target: Tensor) -> Tensor:
    """Return bool [..., V]: the shortest run of (below_max descending, token id ascending) whose mass reaches target.

    below_max [..., V]: z - max z, never positive; mass int64 [..., V] >= 0, the same where below_max is the same;
    target int64 [..., 1] >= 1. All tokens where the mass falls short of it.

    A radix selection instead of a sort (1.8 ms -> 0.7 ms at 16 x 4096 on one core). Without its sign, below_max is a
    number whose bits, read as an integer, count up from the most likely token. Its digits are taken from the top; in
    each pass a histogram of mass over one digit tells in which bucket the target is reached:

        bits  | 11 | 10 | 10 |         bucket = 2, then 0, then 5:  the threshold is 2.0.5

    Histograms of integers are exact, hence the same on any device and in any order of summation.
    """
    integer = torch.int32 if below_max.dtype == torch.float32 else torch.int64
    key = bits_of(below_max) & torch.iinfo(integer).max
    digit = torch.empty_like(key)  # work space: fresh memory for each pass would cost more than the arithmetic
    index = torch.empty_like(mass)
    prefix = torch.zeros_like(target, dtype=integer)
    rest = target
    shift, width = torch.iinfo(integer).bits - 1, 11
    while shift > 0:
        # Digits are moved up by one: buckets 0 and size - 1 collect what lies before and after the prefix.
        shift -= width
        size = (1 << width) + 2
        torch.bitwise_right_shift(key, shift, out=digit)
        index.copy_(digit.sub_((prefix << width) - 1).clamp_(0, size - 1))
        histogram = mass.new_zeros((*mass.shape[:-1], size)).scatter_add_(-1, index, mass)
        histogram[..., 0] = 0
        sums = histogram.cumsum(-1)
        bucket = torch.searchsorted(sums, rest).clamp_(1, size - 2)
        reached = histogram.gather(-1, bucket)
        rest = rest - sums.gather(-1, bucket) + reached
        prefix = (prefix << width) | (bucket - 1).to(integer)
        width = min(10, shift)
    # Of the tokens at the threshold, all of one mass, the first ones by id until the rest is reached.
    is_tie = key == prefix
    torch.cumsum(index.copy_(is_tie), -1, out=index)  # of bools it would make a wide copy first
    each = (reached // index[..., -1:].clamp(min=1)).clamp_(min=1)
    return (key < prefix).bitwise_or_(is_tie.bitwise_and_(index <= (rest + each - 1) // each))


def sample(z: Tensor, noise: Tensor | None, depths: Tensor, temperature: Tensor) -> Tensor:
    """Return the token at every node: argmax of z + noise where T > 0, argmax of z where T = 0; int64 [B, N].

    z [B, N, V]; noise float32 [B, D, V]: row d is the noise of position kv_len + 1 + d, that of tokens sampled at
    depth d; None when no row has T > 0. Ties go to the lowest id; ids are in range even if z holds NaN.
    """
    if noise is None:
        return _argmax(z)
    batch, num_depths, vocab = noise.shape
    noise = noise * (temperature > 0)[:, None, None]
    row = depths + torch.arange(0, batch * num_depths, num_depths, device=z.device)[:, None]
    return _argmax(noise.view(-1, vocab).index_select(0, row.flatten()).view(batch, -1, vocab) + z)


def _argmax(z: Tensor) -> Tensor:
    """Return the first index of the largest element of each row [..., V]; NaN counts as the largest.

    By chunks, since maxima are vectorised on the CPU and argmax is not: 57 -> 24 us at 16 x 4096.
    """
    if z.shape[-1] % 64 or z.shape[-1] <= 256 or z.numel() < 5 * z.shape[-1]:
        return z.argmax(-1)
    chunks = z.unflatten(-1, (-1, 64))
    best = chunks.amax(-1).argmax(-1, keepdim=True)
    within = chunks.gather(-2, best[..., None].expand(*best.shape, 64)).squeeze(-2).argmax(-1)
    return best.squeeze(-1) * 64 + within


# Scores are sharpened before the softmax, since the target says its best token: a draft's first choice is right more
# often than its probability says. It keeps the order of a node's children and changes which nodes a tree is spent on.
# Tree (5, 4, 16), tokens a round (benchmarks/notes.md): T = 0: 1 -> 4.55, 1.5 -> 4.80, 2 -> 4.85, 3 -> 4.85;
# T = 1, the noise included: 1 -> 3.04, 1.2 -> 3.08, 1.5 -> 3.08.
GREEDY_SHARPNESS = 2.0
SAMPLED_SHARPNESS = 1.2


def draft_scores(draft_logits: Tensor, temperature: Tensor, noise: Tensor | None) -> Tensor:
    """Return the scores that rank a node's children: float32 [B, R, Vd].

    log_softmax of sharpness * logits where T = 0, of sharpness * (logits / T + noise) where T > 0: the noise that the
    target will use at the position of the token to be sampled. draft_logits float32 [B, R, Vd]; temperature [B]; noise
    float32 [B, Vd] or [B, 1, Vd], over the draft's vocabulary, one vector for all rows of a sequence; None: plain
    ranking, log_softmax(logits) where T > 0.
    """
    is_warm = temperature > 0
    if noise is None:
        return (draft_logits * torch.where(is_warm, 1.0, GREEDY_SHARPNESS)[:, None, None]).log_softmax(-1)
    scale = torch.where(is_warm, SAMPLED_SHARPNESS / temperature, GREEDY_SHARPNESS)[:, None, None]
    noise = noise.reshape(noise.shape[0], 1, -1) * (is_warm * SAMPLED_SHARPNESS)[:, None, None]
    return (draft_logits * scale).add_(noise).log_softmax(-1)
