"""Captured rounds of several tree shapes: the same tokens whichever comes next, and times that make sense."""

import random

import pytest
import torch

from treedraft import LLM, SamplingParams, SpeculativeConfig

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
AUTO = SpeculativeConfig(4, 3, 16, auto=True)
PARAMS = [
    SamplingParams(temperature=0, max_tokens=40, ignore_eos=True),
    SamplingParams(temperature=0.9, top_p=0.8, seed=3, max_tokens=23, ignore_eos=True),
    SamplingParams(temperature=1, repetition_penalty=1.3, presence_penalty=0.4, seed=5, max_tokens=31, ignore_eos=True),
]


class RandomChooser:
    def __init__(self):
        self.rng, self.chosen, self.counted = random.Random(1), set(), []

    def choose(self, batch):
        shape = self.rng.randrange(5)
        self.chosen.add(shape)
        return shape

    def count(self, shape, accepted_by_shape):
        self.counted += [(shape, accepted) for accepted in accepted_by_shape]

    def time(self, batch, shape, seconds):
        pass


def make_llm(**options):
    return LLM("demo", device="cuda", max_batch=4, max_context=256, page_size=3, **options)


def test_random_shapes_captured_give_the_tokens_of_no_speculation():
    prompts = [[5, 9, 300, 41], [7, 7, 7], [1000, 2, 88, 17, 6]]
    plain = make_llm(dtype="float64", speculative=None).generate(prompts, PARAMS, progress=False)
    llm = make_llm(dtype="float64", speculative=AUTO)
    chooser = llm.engine.scheduler.chooser = RandomChooser()
    given = llm.generate(prompts, PARAMS, progress=False)
    assert [o.outputs[0].token_ids for o in given] == [o.outputs[0].token_ids for o in plain]
    assert chooser.chosen == set(range(5))
    assert all(len(counts) == 5 for _, counts in chooser.counted)


def test_auto_is_about_as_fast_as_the_best_shape():
    llm = make_llm(dtype="bfloat16", speculative=AUTO)
    times = llm.engine.scheduler.chooser.times_s
    assert set(times) == {1, 2, 4}
    for by_shape in times.values():
        assert by_shape[-1] < by_shape[0], "no tree is faster than the largest"
        assert all(1e-5 < seconds < 0.1 for seconds in by_shape)
    llm.generate([[1, 2, 3]] * 4, SamplingParams(temperature=0, max_tokens=64, ignore_eos=True), progress=False)
    accepted = llm.engine.scheduler.chooser.accepted
    assert accepted == sorted(accepted, reverse=True) and accepted[-1] == 0
