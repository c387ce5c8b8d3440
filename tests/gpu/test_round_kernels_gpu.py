"""A round's kernels on a GPU: against their torch twins at the sizes of real vocabularies, and in the engine."""

from __future__ import annotations

import pytest
import torch

from graph_cases import PARAMS, run
from round_kernel_cases import *  # noqa: F403
from round_kernel_cases import (
    FILTERED,
    TORCH,
    TRITON,
    check_children,
    check_tokens,
    generator,
    keys_of,
    random_logits,
    random_tree,
    rows_of,
)
from treedraft import LLM, SpeculativeConfig
from treedraft.speculative.noise import gumbel
from treedraft.speculative.sampling import STAGES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
VOCABULARIES = [102_400, 129_280]


@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_gpu_noise_equals_the_torch_twin_on_the_cpu(vocab):
    keys, positions = keys_of(2), torch.tensor([[3, 1 << 20], [9, 1 << 40]], device="cuda")
    assert torch.equal(TRITON.noise(keys, positions, vocab).cpu(), gumbel(keys.cpu(), positions.cpu(), vocab))


@pytest.mark.parametrize("batch", [1, 64])
@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_gpu_best_children_of_whole_vocabularies(vocab, batch):
    logits = random_logits(generator(vocab), batch, 8, vocab)
    temperature = torch.where(torch.arange(batch) % 3 > 0, 0.8, 0.0)
    noise = TRITON.noise(keys_of(batch), torch.full((batch, 1), 77, device="cuda"), vocab)[:, 0]
    check_children(logits, temperature, None, None, 8)
    check_children(logits, temperature, noise, None, 8)


@pytest.mark.parametrize("stages", [frozenset(), frozenset({"noise"}), FILTERED, STAGES], ids=len)
@pytest.mark.parametrize(("vocab", "batch"), [(102_400, 4), (129_280, 64)])
def test_gpu_sample_of_whole_vocabularies(vocab, batch, stages):
    """Logits of a language model's kind, and flat ones, where filters cut through ties of thousands of tokens."""
    tree = random_tree(batch, 16, 1)
    for scale in (3.0, 0.01):
        logits = torch.randn(batch, 16, vocab, device="cuda", generator=torch.Generator("cuda").manual_seed(1)) * scale
        logits[:, :, 5:9] += 12 * scale
        check_tokens(logits, rows_of(batch, vocab, 1, stages), tree)
    check_tokens(logits.bfloat16().float(), rows_of(batch, vocab, 2, stages), tree)


def test_gpu_sample_and_children_repeat_to_the_last_bit():
    """Histograms are added up in any order."""
    logits = random_logits(generator(0), 16, 16, 102_400).cuda()
    rows, tree = rows_of(16, 102_400, 5, FILTERED), random_tree(16, 16, 1)
    noise = TRITON.noise(rows.noise_key, torch.arange(96, device="cuda").view(16, 6), 102_400)
    kv_lens = torch.arange(16, device="cuda")
    paths = tree.token_ids[..., None][..., :0]

    def once():
        tokens = TRITON.sample(logits.clone(), rows, paths, tree.depths, kv_lens, noise)[0]
        return tokens, *TRITON.best_children(logits, rows.temperature, noise[:, 0], None, 4)

    first = once()
    for _ in range(20):
        assert all(torch.equal(a, b) for a, b in zip(first, once(), strict=True))


def make_llm(monkeypatch, operators, **options):
    monkeypatch.setattr("treedraft.runner.build.make_operators", lambda device, dtype: operators)
    options = {"dtype": "float32", "page_size": 3, "max_batch": 4, "max_context": 96} | options
    return LLM("demo", device="cuda", **options)


@pytest.mark.parametrize("cuda_graph", ["on", "off"])
def test_generate_with_kernels_equals_torch_in_float32(demo_prompts, monkeypatch, cuda_graph):
    results = []
    for operators in (TORCH, TRITON):
        llm = make_llm(monkeypatch, operators, cuda_graph=cuda_graph, speculative=SpeculativeConfig(5, 4, 16))
        prompts = [llm.encode(p)[: 5 + 4 * i] for i, p in enumerate(demo_prompts[: len(PARAMS)])]
        results.append(run(llm, prompts, PARAMS))
    (expected, expected_rounds), (given, rounds) = results
    assert given == expected
    # A draft whose score ties to a last bit may differ; rounds do where one such node was accepted.
    assert {i: len(r) for i, r in rounds.items()} == {i: len(r) for i, r in expected_rounds.items()}


def test_generate_in_parts_equals_whole(demo_prompts, monkeypatch):
    """Logits of one sequence at a time."""
    results = []
    for num_bytes in (1 << 28, 1):
        monkeypatch.setattr("treedraft.runner.operators.LOGITS_BYTES", num_bytes)
        llm = make_llm(monkeypatch, TRITON, speculative=SpeculativeConfig(3, 2, 6))
        results.append(run(llm, [llm.encode(p)[:12] for p in demo_prompts[: len(PARAMS)]], PARAMS)[0])
    assert results[0] == results[1]
