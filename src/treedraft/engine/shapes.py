"""Which tree the next round has: the shape that gives most tokens a second, from measured times and acceptance."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from treedraft.config import SpeculativeConfig

WARM_UP_ROWS = 64  # sequences' rounds of the largest shape before anything is chosen
MEMORY_ROWS = 100  # a sequence's round counts e times less after so many more
PROBE_EVERY = 32  # rounds after which a larger shape is used once, since smaller ones say nothing about it
TIME_EVERY = 256  # rounds after which a smaller one is used once: its acceptance is known, its time may have changed
PROBE_COST = 0.005  # share of the time that such rounds of one shape may add: where they are slow they are rarer


def choose_shape(times_s: Sequence[float], accepted: Sequence[float]) -> int:
    """Return the index of the shape with most tokens a second, the first of several.

    times_s: seconds of a round; accepted: drafts accepted in a round of a sequence, on average. A round gives one token
    more than it accepts.
    """
    rates = [(1 + drafts) / seconds for drafts, seconds in zip(accepted, times_s, strict=True)]
    return rates.index(max(rates))


class ShapeChooser:
    """Chooses round by round among `shapes`, the largest first, None (no tree) for one token a round.

    Each shape is inside the one before. The estimate of what a shape accepts is a mean over past rounds, recent ones
    weighing more. A round of a larger tree tells exactly what a smaller one inside it would have accepted
    (speculative.shapes), so no model of acceptance by depth is needed: such a model, with a share for each depth,
    cannot tell a small tree from a large one of as many levels. About shapes larger than its own a round tells nothing;
    hence each of these is used now and then, the slower the more rarely; and smaller ones, for their time alone.
    """

    def __init__(self, shapes: Sequence[SpeculativeConfig | None], times_s: Mapping[int, Sequence[float]]) -> None:
        """times_s: by batch size, seconds of a round of each shape."""
        self.shapes = tuple(shapes)
        self.times_s = {size: tuple(times_s[size]) for size in sorted(times_s)}
        self._weights = [0.0] * len(self.shapes)
        self._sums = [0.0] * len(self.shapes)
        self._rounds_since = [0] * len(self.shapes)  # since one that told what is to be known of this shape
        self._num_counted = 0  # sequences' rounds of the largest shape

    def choose(self, batch: int) -> int:
        """Return the index of the shape for a round of `batch` sequences."""
        times_s = self.times_s[self._size_for(batch)]
        best = choose_shape(times_s, self.accepted) if self._num_counted >= WARM_UP_ROWS else 0
        others = (i for i in range(len(self.shapes)) if i != best)
        due = (i for i in others if self._rounds_since[i] >= self._probe_interval(times_s, i, best))
        shape = next(due, best)
        for i, since in enumerate(self._rounds_since):
            is_seen = i == shape or shape < i < best  # a larger round tells of those between it and the best, too
            self._rounds_since[i] = 0 if is_seen else since + 1
        return shape

    def count(self, shape: int, accepted_by_shape: Sequence[Sequence[int]]) -> None:
        """Record a step's rounds: of which shape they were, and for each sequence what each shape would have accepted.

        Rounds of one step weigh alike, together what one after another would.
        """
        num_rows = len(accepted_by_shape)
        self._num_counted += num_rows * (shape == 0)
        keep = (1 - 1 / MEMORY_ROWS) ** num_rows
        weight = MEMORY_ROWS * (1 - keep)  # 1 + k + k^2 + ..., num_rows terms
        for index, accepted in enumerate(zip(*accepted_by_shape, strict=True)):
            if index >= shape:  # inside the rounds' own
                self._weights[index] = self._weights[index] * keep + weight
                self._sums[index] = self._sums[index] * keep + weight * sum(accepted) / num_rows

    def time(self, batch: int, shape: int, seconds: float) -> None:
        """Record what a step with a round of `batch` sequences took.

        The least counts: prompts beside the round, and whatever else the machine does, only add. So a time that was
        measured too long at start does not stay, though a shape that is not used is only timed when it is tried.
        """
        size = self._size_for(batch)
        times_s = list(self.times_s[size])
        times_s[shape] = min(times_s[shape], seconds)
        self.times_s[size] = tuple(times_s)

    @property
    def accepted(self) -> list[float]:
        """Estimated drafts accepted in a sequence's round, by shape."""
        return [total / weight if weight else 0.0 for total, weight in zip(self._sums, self._weights, strict=True)]

    def _size_for(self, batch: int) -> int:
        """The measured size that a round of `batch` sequences is taken for."""
        return next((size for size in self.times_s if size >= batch), max(self.times_s))

    def _probe_interval(self, times_s: Sequence[float], shape: int, best: int) -> int:
        """Rounds between two of a shape that is not the best. Larger ones add at most PROBE_COST each to the time."""
        if shape > best:
            return TIME_EVERY
        extra = times_s[shape] / times_s[best] - 1
        return max(PROBE_EVERY, math.ceil(extra / PROBE_COST))
