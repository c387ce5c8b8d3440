"""A recorded round as the JSON that a traced stream carries and the tree explorer draws."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from treedraft.debug.trace import RoundTrace

SMALLEST_PROB = 1e-30  # JSON has no -inf


def round_as_json(trace: RoundTrace, decode: Callable[[int], str]) -> dict[str, Any]:
    """Turn one round into JSON values. Inert nodes are left out, so node indices are not the trace's columns.

    Lists have one entry a node, root first, parents before children:

    tokens, texts, parents (-1 for the root), depths;
    draft_logps: the draft's log-probability of the node given its parent, as it ranked (noise included);
    target_ids, target_texts: the target's own token at the node;
    target_probs: the target's raw probability of the node given its parent, null for the root and where not recorded.

    Beside them: kv_len, the root's position; accepted, the path as node indices, root first; emitted and emitted_texts,
    the tokens that the round gave; emitted_depths, the depth at which each was accepted, 0 for the bonus token.
    """
    live = [column for column in range(len(trace.token_ids)) if trace.is_live(column)]
    node_of = {column: node for node, column in enumerate(live)} | {-1: -1}
    token_ids, target_ids = ([x[column] for column in live] for x in (trace.token_ids, trace.sampled))
    return {
        "kv_len": trace.kv_len,
        "tokens": token_ids,
        "texts": [decode(t) for t in token_ids],
        "parents": [node_of[trace.parents[column]] for column in live],
        "depths": [trace.depths[column] for column in live],
        "draft_logps": [math.log(max(trace.draft_probs[column], SMALLEST_PROB)) for column in live],
        "target_ids": target_ids,
        "target_texts": [decode(t) for t in target_ids],
        "target_probs": [_target_prob(trace, column) for column in live],
        "accepted": [node_of[column] for column in trace.accepted_columns],
        "emitted": list(trace.emitted_token_ids),
        "emitted_texts": [decode(t) for t in trace.emitted_token_ids],
        "emitted_depths": list(trace.emitted_depths),
    }


def chunk_as_json(
    rounds: Sequence[RoundTrace], decode: Callable[[int], str], first_token_ids: Sequence[int] = ()
) -> dict[str, Any]:
    """The `treedraft` field of one chunk: its rounds, and the depth of each of its tokens.

    first_token_ids: the prefill's token, where the chunk carries it; no round emitted it, its depth is 0.
    """
    rows = [round_as_json(each, decode) for each in rounds]
    return {
        "rounds": rows,
        "depths": [0] * len(first_token_ids) + [depth for row in rows for depth in row["emitted_depths"]],
    }


def _target_prob(trace: RoundTrace, column: int) -> float | None:
    is_known = bool(trace.target_probs) and trace.parents[column] >= 0
    return trace.target_probs[column] if is_known else None
