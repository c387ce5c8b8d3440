"""The engine on a GPU: same rules as on the CPU, and no host wait inside a round."""

from dataclasses import asdict

import pytest
import torch

from treedraft import LLM, SamplingParams, SpeculativeConfig
from treedraft.bench.equality import Equality, Point
from treedraft.debug.differences import gaps_at

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def make_llm(**options):
    return LLM("demo", device="cuda", max_context=512, **options)


def test_generate_float32_differences_are_explained(demo_prompts):
    def make(**options):
        return make_llm(dtype="float32", **options)

    plain = make(speculative=None)
    equality = Equality(make, [plain.encode(p) for p in demo_prompts[:6]], gaps_at)
    for point in (
        Point(5, 4, 16, page_size=16, batch=5, sampling="greedy", num_tokens=48),
        Point(3, 2, 5, page_size=3, batch=2, sampling="t0.7 top_p min_p", num_tokens=48),
        Point(7, 8, 70, page_size=1, batch=2, sampling="t1.0 penalties", num_tokens=48),
    ):
        result = equality.run(point)
        for d in result["differences"]:
            assert min(d["top_two"], d["filter_edge"], d["router"]) < 1e-4, (asdict(point), d)


def test_generate_float64_equals_the_cpu(demo_prompts, plain64):
    llm = make_llm(dtype="float64")
    for temperature in (0.0, 1.0):
        params = SamplingParams(temperature=temperature, max_tokens=40, seed=7, ignore_eos=True)
        expected = plain64.generate(demo_prompts[:4], params, progress=False)
        given = llm.generate(demo_prompts[:4], params, progress=False)
        assert [o.outputs[0].token_ids for o in given] == [o.outputs[0].token_ids for o in expected]


@pytest.mark.parametrize("params", [SamplingParams(temperature=0), SamplingParams(temperature=0.9, top_p=0.9)])
def test_launch_of_a_round_does_not_wait_for_the_device(demo_prompts, params):
    llm = make_llm(dtype="bfloat16", speculative=SpeculativeConfig(4, 4, 12))
    launch, num_rounds = llm.runner._launch_round, 0

    def watched(rows, shape):
        nonlocal num_rounds
        num_rounds += 1
        if num_rounds < 3:  # tables and kernels are made at first use
            return launch(rows, shape)
        torch.cuda.set_sync_debug_mode("error")
        try:
            return launch(rows, shape)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    llm.runner._launch_round = watched
    llm.generate(demo_prompts[:3], params, progress=False)
    assert num_rounds > 5
