"""One round of speculation as host values, for looking at: `with recording(llm, rounds): llm.generate(...)`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from treedraft.runner.batch import DecodeBatch
    from treedraft.runner.round import RoundTensors
    from treedraft.types import DecodeRow, DraftTree


@dataclass(frozen=True)
class RoundTrace:
    """The tree that one sequence verified in one round, and what became of it.

    Tuples have one entry a node, N in all, column order: root first, parents before children.

        column    0     1     2     3            parents  -1  0  0  1
        token     root  a     b     c            depths    0  1  1  2
        root ── a ── c
             └─ b
    """

    slot: int
    request_id: int | str  # as the engine names it; the choices of one prompt have ids of their own
    kv_len: int  # position of the root; a node is at position kv_len + depth
    token_ids: tuple[int, ...]  # -1: inert node
    parents: tuple[int, ...]  # column of the parent; -1 for the root
    depths: tuple[int, ...]
    scores: tuple[float, ...]  # ranking score (cumulative; with shared noise it includes the noise); 0 for the root
    draft_probs: tuple[float, ...]  # the draft's probability of the node given its parent, noise included; root: 1
    sampled: tuple[int, ...]  # the target's token at each node
    accepted_columns: tuple[int, ...]  # the walk, root first
    emitted_token_ids: tuple[
        int, ...
    ]  # accepted drafts, then the bonus token; `live_rounds` cuts them at the text's end
    target_probs: tuple[float, ...] = ()  # the target's raw probability of the node given its parent; root: 1

    @property
    def num_accepted(self) -> int:
        """Drafts accepted; the bonus token is not counted."""
        return len(self.accepted_columns) - 1

    @property
    def bonus_token_id(self) -> int:
        """The target's token at the walk's last node."""
        return self.sampled[self.accepted_columns[-1]]

    @property
    def emitted_depths(self) -> tuple[int, ...]:
        """Of each emitted token: the depth at which its draft was accepted; 0 for the bonus token."""
        return tuple(d if d <= self.num_accepted else 0 for d in range(1, len(self.emitted_token_ids) + 1))

    def is_live(self, column: int) -> bool:
        """Whether the node holds a draft (or is the root), not padding."""
        return self.token_ids[column] >= 0


class RoundSink(Protocol):
    """What takes rounds: a list, or anything with its `append`."""

    def append(self, item: RoundTrace, /) -> None: ...


class LiveTrace(list[RoundTrace]):
    """A trace that hands each round to `on_round` as it is appended, and keeps it."""

    def __init__(self, on_round: Callable[[RoundTrace], None]) -> None:
        super().__init__()
        self._on_round = on_round

    def append(self, item: RoundTrace) -> None:
        super().append(item)
        self._on_round(item)

    def extend(self, items: Iterable[RoundTrace]) -> None:
        for item in items:
            self.append(item)


@contextmanager
def recording(llm: Any, trace: list[RoundTrace]) -> Iterator[list[RoundTrace]]:
    """Append every round that `llm` runs inside to `trace`. Each round then syncs."""
    llm.runner.observer = Recorder(trace)
    try:
        yield trace
    finally:
        llm.runner.observer = None


@dataclass(frozen=True)
class Recorder:
    """An observer for the runner that appends every sequence's round to `trace`. Syncs.

    logits: the target's (`llm.runner.target.model.logits`), to record its probabilities too; None leaves them out.
    """

    trace: RoundSink
    logits: Callable[[Tensor], Tensor] | None = None

    def __call__(self, rows: tuple[DecodeRow, ...], batch: DecodeBatch, result: RoundTensors) -> None:
        kv_lens = batch.kv_lens.tolist()
        tree, accepted = result.tree, result.accepted
        columns = (tree.token_ids, tree.parents, tree.depths, tree.scores, result.sampled)
        token_ids, parents, depths, scores, sampled = (x.tolist() for x in columns)
        num_accepted, paths, emitted = (
            x.tolist() for x in (accepted.num_accepted, accepted.columns, accepted.token_ids)
        )
        target_probs = None if self.logits is None else _target_probs(self.logits(result.hidden), tree).tolist()
        for b, row in enumerate(rows):
            length = num_accepted[b] + 1
            self.trace.append(
                RoundTrace(
                    slot=row.slot,
                    request_id=row.request_id,
                    kv_len=kv_lens[b],
                    token_ids=tuple(token_ids[b]),
                    parents=tuple(parents[b]),
                    depths=tuple(depths[b]),
                    scores=tuple(scores[b]),
                    draft_probs=_draft_probs(token_ids[b], parents[b], scores[b]),
                    sampled=tuple(sampled[b]),
                    accepted_columns=tuple(paths[b][:length]),
                    emitted_token_ids=tuple(emitted[b][:length]),
                    target_probs=() if target_probs is None else tuple(target_probs[b]),
                )
            )


def _draft_probs(token_ids: Sequence[int], parents: Sequence[int], scores: Sequence[float]) -> tuple[float, ...]:
    """A node's score is its parent's plus the logarithm of its own probability. Inert nodes: 0."""
    return tuple(
        1.0 if p < 0 else math.exp(min(s - scores[p], 0.0)) if t >= 0 else 0.0
        for t, p, s in zip(token_ids, parents, scores, strict=True)
    )


def _target_probs(logits: Tensor, tree: DraftTree) -> Tensor:
    """Probability of each node's token by the logits [B, N, V] at its parent. [B, N]; root: 1, inert nodes: 0."""
    log_probs = logits - logits.logsumexp(-1, keepdim=True)
    batch = torch.arange(len(tree.parents), device=tree.parents.device)[:, None]
    probs = log_probs[batch, tree.parents.clamp(min=0), tree.token_ids.clamp(min=0)].exp()
    return probs.masked_fill(tree.token_ids < 0, 0.0).masked_fill(tree.parents < 0, 1.0)


def live_rounds(
    rounds: Iterable[RoundTrace], prompt_token_ids: Sequence[int], token_ids: Sequence[int]
) -> list[RoundTrace]:
    """One text's rounds with their tokens cut where the text ended; rounds launched after its end are left out."""
    end = len(prompt_token_ids) + len(token_ids)
    cut = []
    for each in rounds:
        num_wanted = end - each.kv_len - 1  # the root is at kv_len
        if num_wanted > 0:
            cut.append(replace(each, emitted_token_ids=each.emitted_token_ids[:num_wanted]))
    return cut
