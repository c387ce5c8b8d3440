"""A tree's growth and selection, one program for each sequence, one launch for each step.

The twins are `treedraft.speculative.tree.next_level`, `treedraft.speculative.select.select` and
`treedraft.speculative.sampling.path_tokens`, to the last bit.
"""

# mypy: disable-error-code="no-untyped-def"
# (Triton reads the annotations of a kernel: tl.constexpr or none.)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from treedraft.kernels.order import NO_KEY, index_of, keys_of, number_of, ordered_bits, ordered_of
from treedraft.speculative.tree import CandidatePool, Frontier
from treedraft.types import DraftTree


def next_level_triton(
    pool: CandidatePool, frontier: Frontier, child_ids: Tensor, child_logps: Tensor, level: int
) -> tuple[CandidatePool, Frontier, Tensor]:
    """Add level `level` >= 2 to the pool and make its K best the next frontier. Arguments as of `next_level`."""
    batch, topk, words = frontier.ancestor_bits.shape
    device = child_ids.device
    child_ids, child_logps = child_ids.contiguous(), child_logps.contiguous()
    level_scores = torch.empty((batch, topk * topk), dtype=torch.float32, device=device)
    pool_index, token_ids, parent_rows = torch.empty((3, batch, topk), dtype=torch.int64, device=device).unbind()
    scores = torch.empty((batch, topk), dtype=torch.float32, device=device)
    bits = torch.empty((batch, topk, words), dtype=torch.int64, device=device)
    if not device.type == "meta":
        _next_level_kernel[(batch,)](
            frontier.scores.contiguous(),
            frontier.ancestor_bits.contiguous(),
            child_ids,
            child_logps,
            level_scores,
            pool_index,
            token_ids,
            scores,
            parent_rows,
            bits,
            pool.size,
            (level - 1) * topk,
            words,
            TOPK=topk,
            PAD_K=triton.next_power_of_2(topk),
            PAD_CHILDREN=triton.next_power_of_2(topk * topk),
            PAD_WORDS=triton.next_power_of_2(words),
            num_warps=1,
        )
    grown = CandidatePool(
        (*pool.token_ids, child_ids.flatten(1)), (*pool.scores, level_scores), (*pool.frontiers, frontier.pool_index)
    )
    return grown, Frontier(pool_index, token_ids, scores, bits), parent_rows


@triton.jit
def _rank_key(scores, index):
    """Keys of (score descending, index ascending); NaN counts as -inf."""
    return keys_of(ordered_bits(tl.where(scores == scores, scores, float("-inf"))), index)


@triton.jit
def _next_level_kernel(
    parent_scores,  # [B, K] float32
    parent_bits,  # [B, K, words] int64
    child_ids,  # [B, K, K] int64
    child_logps,  # [B, K, K] float32
    level_scores,  # [B, K * K] float32
    pool_index,  # [B, K] int64
    token_ids,  # [B, K] int64
    scores,  # [B, K] float32
    parent_rows,  # [B, K] int64
    bits,  # [B, K, words] int64
    pool_size,
    first_bit,
    words,
    TOPK: tl.constexpr,
    PAD_K: tl.constexpr,
    PAD_CHILDREN: tl.constexpr,
    PAD_WORDS: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    child = tl.arange(0, PAD_CHILDREN)
    is_child = child < TOPK * TOPK
    parent = tl.load(parent_scores + b * TOPK + child // TOPK, mask=is_child, other=0.0)
    logp = tl.load(child_logps + b * TOPK * TOPK + child, mask=is_child, other=0.0)
    # A child never outranks its parent, whatever its log-probability was rounded to. NaN stays NaN.
    own = parent + logp
    own = tl.where(own > parent, parent, own)
    tl.store(level_scores + b * TOPK * TOPK + child, own, mask=is_child)
    key = tl.where(is_child, _rank_key(own, child), NO_KEY)

    column = tl.arange(0, PAD_K)
    found = tl.full([PAD_K], NO_KEY, tl.int64)
    for k in tl.static_range(TOPK):
        best = tl.max(key, axis=0)
        found = tl.where(column == k, best, found)
        key = tl.where(key == best, NO_KEY, key)
    is_column = column < TOPK
    index = tl.where(is_column, index_of(found), 0)
    out = b * TOPK + column
    tl.store(pool_index + out, (index + pool_size).to(tl.int64), mask=is_column)
    tl.store(token_ids + out, tl.load(child_ids + b * TOPK * TOPK + index, mask=is_column, other=0), mask=is_column)
    tl.store(scores + out, number_of(ordered_of(found)), mask=is_column)
    row = index // TOPK
    tl.store(parent_rows + out, row.to(tl.int64), mask=is_column)

    word = tl.arange(0, PAD_WORDS)
    is_word = is_column[:, None] & (word < words)[None, :]
    inherited = tl.load(parent_bits + (b * TOPK + row)[:, None] * words + word[None, :], mask=is_word, other=0)
    bit = first_bit + column
    one = tl.full([PAD_K], 1, tl.int64) << (bit % 64).to(tl.int64)
    own_bit = tl.where((bit // 64)[:, None] == word[None, :], one[:, None], 0)
    tl.store(bits + out[:, None] * words + word[None, :], inherited | own_bit, mask=is_word)


def select_triton(
    pool: CandidatePool, root_ids: Tensor, num_draft_tokens: int, words: int, node_limits: Tensor
) -> DraftTree:
    """Return the tree of the N - 1 best candidates below the root. Arguments as of `select`."""
    batch, device = len(root_ids), root_ids.device
    scores, ids = torch.cat(pool.scores, 1), torch.cat(pool.token_ids, 1)
    frontiers = torch.cat(pool.frontiers, 1) if pool.frontiers else ids
    whole = torch.empty((3, batch, num_draft_tokens), dtype=torch.int64, device=device)
    tree = DraftTree(
        token_ids=whole[0],
        parents=whole[1],
        depths=whole[2],
        ancestor_bits=torch.empty((batch, num_draft_tokens, words), dtype=torch.int64, device=device),
        scores=torch.empty((batch, num_draft_tokens), dtype=torch.float32, device=device),
    )
    columns = torch.empty((batch, pool.size), dtype=torch.int32, device=device)  # of a candidate's node; work space
    if device.type != "meta":
        _select_kernel[(batch,)](
            scores,
            ids,
            frontiers,
            root_ids,
            node_limits,
            columns,
            tree.token_ids,
            tree.parents,
            tree.depths,
            tree.ancestor_bits,
            tree.scores,
            pool.size,
            frontiers.shape[1],
            num_draft_tokens,
            pool.num_levels,
            words,
            root_ids.stride(0),
            node_limits.stride(0),
            TOPK=pool.topk,
            PAD_POOL=triton.next_power_of_2(pool.size),
            PAD_NODES=triton.next_power_of_2(num_draft_tokens),
            PAD_WORDS=triton.next_power_of_2(words),
            num_warps=1 if pool.size <= 256 else 4,
        )
    return tree


@triton.jit
def _select_kernel(
    pool_scores,  # [B, M] float32
    pool_ids,  # [B, M] int64
    frontiers,  # [B, K * (levels - 1)] int64
    root_ids,  # [B] int64
    node_limits,  # [B] int64
    columns,  # [B, M] int32
    token_ids,  # [B, N] int64, and so are parents and depths
    parents,
    depths,
    bits,  # [B, N, words] int64
    scores,  # [B, N] float32
    pool_size,
    frontier_size,
    num_nodes,
    num_levels,
    words,
    root_stride,
    limit_stride,
    TOPK: tl.constexpr,
    PAD_POOL: tl.constexpr,
    PAD_NODES: tl.constexpr,
    PAD_WORDS: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, PAD_POOL)
    is_inside = index < pool_size
    score = tl.load(pool_scores + b * pool_size + index, mask=is_inside, other=float("-inf"))
    is_candidate = is_inside & (score > float("-inf"))  # neither -inf nor NaN
    key = tl.where(is_candidate, _rank_key(score, index), NO_KEY)
    limit = tl.minimum(tl.load(node_limits + b * limit_stride), num_nodes) - 1
    # The worst key that is kept. A pass finds the best below the last one.
    worst = tl.max(key, axis=0)
    for _ in range(1, limit.to(tl.int32)):
        worst = tl.max(tl.where(key < worst, key, NO_KEY), axis=0)
    is_kept = is_candidate & (key >= tl.where(limit > 0, worst, 0x7FFFFFFFFFFFFFFF))
    # Nodes are in the order of the pool, so that parents precede children: a node's column counts the kept up to it.
    column = tl.cumsum(is_kept.to(tl.int32), 0)
    tl.store(columns + b * pool_size + index, column, mask=is_inside)
    num_kept = tl.sum(is_kept.to(tl.int32), axis=0)

    node = tl.arange(0, PAD_NODES)
    is_node = node < num_nodes
    is_inert = node > num_kept
    of_node = b * num_nodes + node
    root = tl.load(root_ids + b * root_stride)
    is_default = is_node & ((node == 0) | is_inert)
    tl.store(token_ids + of_node, tl.where(node == 0, root, -1), mask=is_default)
    tl.store(parents + of_node, tl.where(node == 0, -1, 0).to(tl.int64), mask=is_default)
    tl.store(depths + of_node, tl.where(node == 0, 0, 1).to(tl.int64), mask=is_default)
    tl.store(scores + of_node, tl.where(node == 0, 0.0, float("-inf")), mask=is_default)

    tl.debug_barrier()  # columns were written by other threads
    of_candidate = b * num_nodes + column
    tl.store(token_ids + of_candidate, tl.load(pool_ids + b * pool_size + index, mask=is_kept, other=0), mask=is_kept)
    tl.store(scores + of_candidate, score, mask=is_kept)
    level = (index + (TOPK * TOPK - TOPK)) // (TOPK * TOPK) + 1
    tl.store(depths + of_candidate, level.to(tl.int64), mask=is_kept)
    has_parent = is_kept & (index >= TOPK)
    parent_index = tl.load(frontiers + b * frontier_size + (index - TOPK) // TOPK, mask=has_parent, other=0)
    parent = tl.load(columns + b * pool_size + parent_index, mask=has_parent, other=0)
    tl.store(parents + of_candidate, parent.to(tl.int64), mask=is_kept)

    tl.debug_barrier()  # and so were parents
    word = tl.arange(0, PAD_WORDS)
    ancestor = tl.where(is_node, node, 0)
    own = tl.zeros([PAD_NODES, PAD_WORDS], tl.int64)
    for _ in range(num_levels + 1):
        one = tl.full([PAD_NODES], 1, tl.int64) << (ancestor % 64).to(tl.int64)
        own |= tl.where((ancestor // 64)[:, None] == word[None, :], one[:, None], 0)
        up = tl.load(parents + b * num_nodes + ancestor, mask=is_node, other=0)
        ancestor = tl.maximum(up, 0).to(tl.int32)  # the root stays
    own |= tl.where(word == 0, 1, 0)[None, :].to(tl.int64)
    is_word = is_node[:, None] & (word < words)[None, :]
    tl.store(bits + of_node[:, None] * words + word[None, :], own, mask=is_word)


def path_tokens_triton(tree: DraftTree, max_depth: int | None = None) -> Tensor:
    """Return the tokens of each node's path: int64 [B, N, max_depth]. Arguments as of `path_tokens`."""
    batch, num_nodes = tree.token_ids.shape
    width = num_nodes - 1 if max_depth is None else max_depth
    paths = torch.empty((batch, num_nodes, width), dtype=torch.int64, device=tree.token_ids.device)
    if width and not paths.is_meta:
        _paths_kernel[(batch,)](
            tree.token_ids.contiguous(),
            tree.parents.contiguous(),
            tree.depths.contiguous(),
            paths,
            num_nodes,
            width,
            PAD_NODES=triton.next_power_of_2(num_nodes),
            PAD_DEPTH=triton.next_power_of_2(width),
            num_warps=4,
        )
    return paths


@triton.jit
def _paths_kernel(
    token_ids,  # [B, N] int64, and so are parents and depths
    parents,
    depths,
    paths,  # [B, N, D] int64
    num_nodes,
    width,
    PAD_NODES: tl.constexpr,
    PAD_DEPTH: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    node = tl.arange(0, PAD_NODES)
    is_node = node < num_nodes
    column = tl.arange(0, PAD_DEPTH)
    own = tl.full([PAD_NODES, PAD_DEPTH], -1, tl.int64)
    ancestor = tl.where(is_node, node, 0).to(tl.int64)
    for _ in range(width):
        at = b * num_nodes + ancestor
        token = tl.load(token_ids + at)
        depth = tl.load(depths + at)
        # The root, of depth 0, has no column.
        own = tl.where(column[None, :] == (depth - 1)[:, None], token[:, None], own)
        ancestor = tl.maximum(tl.load(parents + at), 0)
    is_column = is_node[:, None] & (column < width)[None, :]
    tl.store(paths + (b * num_nodes + node)[:, None] * width + column[None, :], own, mask=is_column)
