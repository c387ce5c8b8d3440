"""Which tree the next round has: the shape that gives most tokens a second, from measured times and acceptance."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from treedraft.config import SpeculativeConfig

WARM_UP_ROWS = 64  # sequences' rounds of the largest shape before anything is chosen
MEMORY_ROWS = 100  # a sequence's round counts e times less after so many more
PROBE_EVERY = 32  # rounds after which a larger shape is used once, since smaller ones say nothing about it
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
    hence each of these is used now and then, the slower the more rarely.
    """

    def __init__(self, shapes: Sequence[SpeculativeConfig | None], times_s: Mapping[int, Sequence[float]]) -> None:
        """times_s: by batch size, seconds of a round of each shape."""
        self.shapes = tuple(shapes)
        self.times_s = {size: tuple(times_s[size]) for size in sorted(times_s)}
        self._weights = [0.0] * len(self.shapes)
        self._sums = [0.0] * len(self.shapes)
        self._rounds_since = [0] * len(self.shapes)  # since one of this shape or of a larger one
        self._num_counted = 0  # sequences' rounds of the largest shape

    def choose(self, batch: int) -> int:
        """Return the index of the shape for a round of `batch` sequences."""
        times_s = self._times_of(batch)
        best = choose_shape(times_s, self.accepted) if self._num_counted >= WARM_UP_ROWS else 0
        due = (i for i in range(best) if self._rounds_since[i] >= self._probe_interval(times_s, i, best))
        shape = next(due, best)
        self._rounds_since = [since + 1 if i < shape else 0 for i, since in enumerate(self._rounds_since)]
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

    @property
    def accepted(self) -> list[float]:
        """Estimated drafts accepted in a sequence's round, by shape."""
        return [total / weight if weight else 0.0 for total, weight in zip(self._sums, self._weights, strict=True)]

    def _times_of(self, batch: int) -> tuple[float, ...]:
        sizes = [size for size in self.times_s if size >= batch]
        return self.times_s[sizes[0] if sizes else max(self.times_s)]

    def _probe_interval(self, times_s: Sequence[float], shape: int, best: int) -> int:
        """Rounds between two of a larger shape than the best, so many that these add at most PROBE_COST to the time."""
        extra = times_s[shape] / times_s[best] - 1
        return max(PROBE_EVERY, math.ceil(extra / PROBE_COST))
