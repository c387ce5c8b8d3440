"""Choosing the next round's tree: against brute force, and over simulated acceptance with known best shapes."""

from __future__ import annotations

import random

import pytest

from treedraft.config import SpeculativeConfig, offered_shapes
from treedraft.engine.shapes import ShapeChooser, choose_shape
from treedraft.errors import ConfigError

LARGEST = SpeculativeConfig(5, 4, 32, auto=True)
SHAPES = offered_shapes(LARGEST)


def test_offered_shapes_halve_nodes_then_steps_and_end_without_a_tree() -> None:
    sizes = [s and (s.num_steps, s.topk, s.num_draft_tokens) for s in SHAPES]
    assert sizes == [(5, 4, 32), (5, 4, 16), (3, 4, 8), (2, 4, 4), None]
    assert offered_shapes(SpeculativeConfig(5, 4, 32)) == (SpeculativeConfig(5, 4, 32),)


@pytest.mark.parametrize("steps", [1, 2, 5, 8])
@pytest.mark.parametrize("topk", [1, 2, 10])
@pytest.mark.parametrize("nodes", [2, 3, 5, 16, 64])
def test_offered_shapes_are_valid_and_inside_the_first(steps: int, topk: int, nodes: int) -> None:
    largest = SpeculativeConfig(steps, topk, nodes, auto=True)
    try:
        largest.check()
    except ConfigError:
        return
    *trees, last = offered_shapes(largest)
    assert last is None and trees[0] == largest and len(set(trees)) == len(trees)
    for tree in trees:
        tree.check()
        assert tree.num_steps <= steps and tree.num_draft_tokens <= nodes and tree.topk == topk


def test_choose_shape_equals_brute_force() -> None:
    rng = random.Random(0)
    for _ in range(500):
        count = rng.randint(1, 6)
        times = [rng.choice((0.5, 1.0, 1.5, 2.0)) for _ in range(count)]
        accepted = [rng.choice((0.0, 0.5, 1.0, 2.0)) for _ in range(count)]
        best, best_rate = 0, -1.0
        for i in range(count):
            if (1 + accepted[i]) / times[i] > best_rate:
                best, best_rate = i, (1 + accepted[i]) / times[i]
        assert choose_shape(times, accepted) == best


class Simulated:
    """Rounds over text whose drafts are right with a probability by depth; a smaller tree holds the path's node of
    depth d with another. Per round the depth reached is drawn once, and each shape sees its own prefix of the path."""

    def __init__(self, right: float, held: list[float], seed: int = 0):
        """right: probability that a draft on the path is right; held: by shape, that its tree holds the path's node."""
        self.right, self.held, self.rng = right, held, random.Random(seed)

    def round(self) -> tuple[int, ...]:
        luck = [self.rng.random() for _ in range(5)]
        accepted = []
        for shape, held in zip(SHAPES, self.held, strict=True):
            depth = 0
            while shape is not None and depth < shape.num_steps and luck[depth] < self.right * held:
                depth += 1
            accepted.append(depth)
        return tuple(accepted)

    def mean(self, shape: int, rounds: int = 4000) -> float:
        copy = Simulated(self.right, self.held, seed=99)
        return sum(copy.round()[shape] for _ in range(rounds)) / rounds


def drive(chooser: ShapeChooser, text: Simulated, batch: int, rounds: int) -> list[int]:
    """Choose, and count for every sequence what the round of the chosen shape can tell: cut to its own tree."""
    chosen = []
    for _ in range(rounds):
        shape = chooser.choose(batch)
        chosen.append(shape)
        rounds = [text.round() for _ in range(batch)]
        chooser.count(shape, [tuple(min(a, accepted[shape]) for a in accepted) for accepted in rounds])
    return chosen


HELD = [1.0, 0.95, 0.85, 0.75, 0.0]
TIMES = {
    "draft and verify cheap": [1.3, 1.25, 1.2, 1.1, 1.0],
    "nodes dear": [6.0, 3.4, 1.7, 1.3, 1.0],
    "everything dear": [9.0, 7.0, 5.0, 4.0, 1.0],
}


@pytest.mark.parametrize("right", [0.05, 0.5, 0.9])
@pytest.mark.parametrize("name", TIMES)
@pytest.mark.parametrize("batch", [1, 8])
def test_chooser_settles_on_the_shape_that_brute_force_finds(right: float, name: str, batch: int) -> None:
    text = Simulated(right, HELD)
    times = TIMES[name]
    means = [text.mean(i) for i in range(len(SHAPES))]
    rates = [(1 + mean) / t for mean, t in zip(means, times)]
    chosen = drive(ShapeChooser(SHAPES, {1: times, 8: times}), text, batch, 600)[100:]
    achieved = sum(1 + means[i] for i in chosen) / sum(times[i] for i in chosen)
    assert achieved > 0.95 * max(rates)  # probes, and shapes that are nearly as good


def test_chooser_never_costs_much_beside_no_tree() -> None:
    times = TIMES["everything dear"]
    chosen = drive(ShapeChooser(SHAPES, {8: times}), Simulated(0.3, HELD), 8, 3000)
    assert chosen[:9] == [0] * 8 + [4]  # the largest until 64 sequences' rounds are counted
    spent = sum(times[i] for i in chosen[9:])
    assert spent < 1.02 * len(chosen[9:])
    assert set(chosen[9:]) == {0, 1, 2, 3, 4}


def test_chooser_follows_text_that_changes() -> None:
    chooser = ShapeChooser(SHAPES, {1: TIMES["nodes dear"]})
    before = drive(chooser, Simulated(0.02, HELD), 1, 400)[300:]
    assert before.count(4) > 90
    text = Simulated(0.95, HELD)
    rates = [(1 + text.mean(i)) / t for i, t in enumerate(TIMES["nodes dear"])]
    after = drive(chooser, text, 1, 12000)[10000:]
    assert rates[max(set(after), key=after.count)] > 0.95 * max(rates)


def test_chooser_asks_for_the_largest_now_and_then() -> None:
    chosen = drive(ShapeChooser(SHAPES, {1: TIMES["draft and verify cheap"]}), Simulated(0.02, HELD), 1, 400)[80:]
    probes = [i for i, shape in enumerate(chosen) if shape == 0]
    assert len(probes) > 2
    # The largest takes 1.3 of no tree's time: 0.005 of the time is one such round in 60.
    assert all(60 < b - a < 64 for a, b in zip(probes, probes[1:]))


def test_chooser_takes_the_times_of_the_bucket() -> None:
    cheap, dear = TIMES["draft and verify cheap"], TIMES["everything dear"]
    chooser = ShapeChooser(SHAPES, {8: dear, 1: cheap, 4: cheap})
    chooser.count(0, [(3, 3, 2, 1, 0)] * 64)
    assert [chooser.choose(batch) for batch in (1, 3, 5, 9)] == [1, 1, 4, 4]


def test_count_of_a_step_is_that_of_its_rounds_one_by_one() -> None:
    one, many = (ShapeChooser(SHAPES, {1: [1.0] * 5}) for _ in range(2))
    for shape, accepted in ((0, (5, 4, 2, 1, 0)), (1, (3, 3, 2, 1, 0)), (0, (0, 0, 0, 0, 0))):
        for _ in range(7):
            one.count(shape, [accepted])
        many.count(shape, [accepted] * 7)
    assert many.accepted == pytest.approx(one.accepted, rel=1e-12)
    many.count(0, [(5, 5, 3, 2, 0), (0, 1, 0, 0, 0)])
    one.count(0, [(2.5, 3, 1.5, 1, 0)] * 2)
    assert many.accepted == pytest.approx(one.accepted, rel=1e-12)


def test_count_ignores_shapes_that_the_round_says_nothing_about() -> None:
    chooser = ShapeChooser(SHAPES, {1: [1.0] * 5})
    chooser.count(2, [(3, 3, 3, 2, 0)])
    assert chooser.accepted == [0, 0, 3, 2, 0]
    chooser.count(4, [(0, 0, 0, 0, 0)])
    assert chooser.accepted == [0, 0, 3, 2, 0]
    chooser.count(0, [(5, 4, 3, 2, 0)])
    assert chooser.accepted[:2] == [5, 4]


def test_time_mends_trees_that_looked_dear_at_start() -> None:
    """Another process ran while they were timed: without correction there would be no tree for good."""
    true = (17.6e-3, 13.4e-3, 9.6e-3, 7.1e-3, 4.5e-3)  # of the demo on a CPU, one sequence
    wrong = (*(2.2 * t for t in true[:4]), true[4])
    text = Simulated(0.9, HELD)
    means = [text.mean(i) for i in range(5)]
    best = max((1 + mean) / t for mean, t in zip(means, true, strict=True))
    assert choose_shape(wrong, means) == 4
    for is_timed in (False, True):
        chooser, chosen = ShapeChooser(SHAPES, {1: wrong, 8: wrong}), []
        for _ in range(8000):
            shape = drive(chooser, text, 1, 1)[0]
            if is_timed:
                chooser.time(1, shape, true[shape] * text.rng.choice([1.0, 1.0, 3.0]))  # a busy machine only adds
            chosen.append(shape)
        last = chosen[-1000:]
        achieved = sum(1 + means[i] for i in last) / sum(true[i] for i in last)
        assert (achieved > 0.93 * best) if is_timed else (achieved < 0.75 * best)
    assert chooser.times_s[8] == wrong


def test_time_keeps_the_least_of_the_size_that_stands_for_the_batch() -> None:
    chooser = ShapeChooser(SHAPES, {1: (5.0,) * 5, 4: (9.0,) * 5})
    for batch, seconds in ((3, 8.0), (2, 8.5), (40, 7.0), (1, 6.0)):
        chooser.time(batch, 2, seconds)
    assert chooser.times_s == {1: (5.0,) * 5, 4: (9.0, 9.0, 7.0, 9.0, 9.0)}
