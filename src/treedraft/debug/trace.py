"""One round of speculation as host values, for looking at: `llm.generate(..., trace=rounds)` appends these."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass


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
    draft_probs: tuple[float, ...]  # the draft's own probability of the node given its parent; 1 for the root
    sampled: tuple[int, ...]  # the target's token at each node
    accepted_columns: tuple[int, ...]  # the walk, root first
    emitted_token_ids: tuple[int, ...]  # accepted drafts and the bonus token, cut at a stop or at max_tokens

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
