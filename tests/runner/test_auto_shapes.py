"""Rounds whose tree shape changes from one to the next: the text stays the same, strictly, in float64."""

from __future__ import annotations

import random

import pytest
import torch

from treedraft import LLM, SamplingParams, SpeculativeConfig
from treedraft.config import offered_shapes
from treedraft.kv.allocator import NUM_RESERVED_PAGES

AUTO = SpeculativeConfig(4, 3, 16, auto=True)
PARAMS = [
    SamplingParams(temperature=0, max_tokens=40, ignore_eos=True),
    SamplingParams(temperature=0.9, top_p=0.8, seed=3, max_tokens=23, ignore_eos=True),
    SamplingParams(temperature=1, repetition_penalty=1.3, presence_penalty=0.4, seed=5, max_tokens=31, ignore_eos=True),
]


class RandomChooser:
    """Any shape, each round another."""

    def __init__(self, num_shapes, seed):
        self.num_shapes, self.rng = num_shapes, random.Random(seed)
        self.chosen, self.counted = [], []

    def choose(self, batch):
        self.chosen.append(self.rng.randrange(self.num_shapes))
        return self.chosen[-1]

    def count(self, shape, accepted_by_shape):
        self.counted += [(shape, accepted) for accepted in accepted_by_shape]

    def time(self, batch, shape, seconds):
        pass


def make_auto(seed=None, **options):
    """The demo with the shapes of AUTO; seed: chosen at random."""
    options = {"dtype": "float64", "device": "cpu", "max_batch": 4, "max_context": 256, "page_size": 3} | options
    llm = LLM("demo", speculative=AUTO, **options)
    if seed is not None:
        llm.engine.scheduler.chooser = RandomChooser(len(offered_shapes(AUTO)), seed)
    return llm


def tokens_of(llm, prompts, params=PARAMS):
    return [o.outputs[0].token_ids for o in llm.generate(prompts, params, progress=False)]


@pytest.fixture(scope="module")
def prompts(plain64, demo_prompts):
    return [plain64.encode(p)[: 7 + 4 * i] for i, p in enumerate(demo_prompts[:3])]


@pytest.fixture(scope="module")
def expected(plain64, prompts):
    return tokens_of(plain64, prompts)


@pytest.mark.parametrize(
    "options",
    [
        {"capture": "off"},
        {"capture": "on"},
        {"cuda_graph": "eager"},
        {"cuda_graph": "eager", "max_pending": 1},
        {"attention_backend": "packed-torch", "capture": "off"},
        {"attention_backend": "packed-torch-merged", "capture": "off"},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_generate_with_a_random_shape_each_round_gives_the_same_tokens(prompts, expected, options):
    llm = make_auto(seed=1, **options)
    assert tokens_of(llm, prompts) == expected
    chooser = llm.engine.scheduler.chooser
    assert set(chooser.chosen) == set(range(5))
    llm.engine.scheduler.check_integrity()
    accepted = [max(counts) for shape, counts in chooser.counted if shape < 4]
    assert sum(accepted) / len(accepted) > 0.5, "the trees must be of use, or the test shows nothing"


def test_counts_by_shape_agree_with_the_rounds_own_acceptance(prompts):
    llm = make_auto(seed=2, capture="off")
    shapes = offered_shapes(AUTO)
    own = []
    llm.runner.observer = lambda rows, batch, result: own.extend(result.accepted.num_accepted.tolist())
    tokens_of(llm, prompts)
    counted = llm.engine.scheduler.chooser.counted
    for (shape, counts), accepted in zip(counted, own, strict=False):
        assert counts[shape] == accepted
        for inner, count in zip(shapes[shape:], counts[shape:], strict=True):
            assert count <= (0 if inner is None else inner.num_steps) and count <= accepted


def test_draft_rows_have_no_holes_after_rounds_without_a_tree(prompts):
    """The head's KV of every committed position is what rounds with trees leave there."""
    pools = []
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    for shape in (0, 4):  # the largest tree; none
        llm = make_auto(capture="off")
        llm.engine.scheduler.chooser = Fixed(shape)
        with torch.inference_mode():
            request = llm._requests(prompts[0], params)[0]
            llm.engine.scheduler.add(request)
            while len(request.output_token_ids) < 16:
                llm.engine.step()
            row = llm.runner.pages.rows(torch.tensor([request.slot]))
            position = torch.arange(len(prompts[0]) + 14)
            slots = row[0, position // 3].long() * 3 + position % 3
            assert (row[0, position // 3] >= NUM_RESERVED_PAGES).all()
            pools.append(llm.runner.drafter.pool.data[0, slots].clone())
        llm.engine.reset()
    assert torch.allclose(*pools, atol=1e-9)


class Fixed:
    def __init__(self, shape):
        self.shape = shape

    def choose(self, batch):
        return self.shape

    def count(self, shape, accepted_by_shape):
        pass

    def time(self, batch, shape, seconds):
        pass


def test_auto_measures_every_shape_and_generates_the_same_tokens(prompts, expected):
    llm = make_auto(capture="off")
    chooser = llm.engine.scheduler.chooser
    assert set(chooser.times_s) == {1, 2, 3, 4} and all(len(t) == 5 and min(t) > 0 for t in chooser.times_s.values())
    assert any("tree shapes, ms a round at batch 1 and 4: (4, 3, 16) " in note for note in llm.notes)
    state = llm.runner.state
    assert not state.kv_lens.any() and not state.roots.any() and not state.draft_hidden.any()
    assert tokens_of(llm, prompts) == expected


def test_outputs_of_smaller_shapes_share_the_largest_ones_memory():
    graphs = make_auto(cuda_graph="eager").runner.graphs
    begins = {shape: outputs.hidden.data_ptr() for shape, outputs in graphs._outputs_of.items()}
    assert set(begins) == set(range(5)) and set(begins.values()) == {graphs.outputs.hidden.data_ptr()}
    assert [graphs._outputs_of[i].sampled.shape[1] for i in range(5)] == [16, 8, 4, 2, 1]


def test_without_auto_there_is_one_shape():
    llm = LLM("demo", device="cpu", max_batch=1, max_context=64)
    assert llm.runner.smaller == () and llm.runner.shape_limits is None and llm.engine.scheduler.chooser is None
