"""What surrounds FlashInfer's kernels: lists, plans and buffers, with the kernels' interface in plain torch."""

import sys
from dataclasses import replace
from pathlib import Path

import fake_flashinfer
import pytest
import torch

import treedraft
from graph_cases import PARAMS, run
from treedraft import LLM, SpeculativeConfig
from treedraft.attention import BACKENDS, make_backend
from treedraft.attention.reference import TorchTreeAttention
from treedraft.demo.padding import pad_checkpoint
from treedraft.errors import ConfigError
from treedraft.types import TreeRows

NAMES = ["flashinfer", "flashinfer-merged"]


@pytest.fixture
def fake(monkeypatch):
    monkeypatch.setattr("treedraft.attention.flashinfer._package", fake_flashinfer.package)
    for name in NAMES:
        able = replace(BACKENDS[name], devices=("cpu",), dtypes=("float64",))
        monkeypatch.setitem(BACKENDS, name, able)


def make_rows(page_size=4, lens=(0, 1, 9, 30), num_nodes=5):
    width = -(-(max(lens) + num_nodes) // page_size)
    pages = torch.randperm(len(lens) * width).view(len(lens), width).to(torch.int32) + 2
    parents = [0, 0, 0, 1, 3]
    bits = [0] * num_nodes
    for n in range(num_nodes):
        bits[n] = (bits[parents[n]] if n else 0) | 1 << n
    bits = torch.tensor(bits).view(1, -1, 1).expand(len(lens), -1, -1)
    return TreeRows(pages, torch.tensor(lens), bits, num_nodes, max(lens)), (len(lens) * width + 2) * page_size


@pytest.mark.parametrize("name", NAMES)
def test_run_mla_equals_torch(fake, name):
    rows, num_slots = make_rows()
    kv = torch.randn(num_slots, 576, dtype=torch.float64)
    q = torch.randn(len(rows.kv_lens), 5, 2, 576, dtype=torch.float64)
    backend, wanted = make_backend(name), TorchTreeAttention()
    given = backend.run_mla_with_lse(backend.plan(rows, 4), kv, q, 512, 0.1)
    expected = wanted.run_mla_with_lse(wanted.plan(rows, 4), kv, q, 512, 0.1)
    for x, y in zip(given, expected, strict=True):
        assert torch.allclose(x, y, atol=1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_run_gqa_equals_torch(fake, name):
    rows, num_slots = make_rows()
    k, v = torch.randn(2, num_slots, 2, 16, dtype=torch.float64)
    q = torch.randn(len(rows.kv_lens), 5, 4, 16, dtype=torch.float64)
    backend, wanted = make_backend(name), TorchTreeAttention()
    given = backend.run_gqa(backend.plan(rows, 4), k, v, q, 0.1)
    assert torch.allclose(given, wanted.run_gqa(wanted.plan(rows, 4), k, v, q, 0.1), atol=1e-6)


@pytest.fixture(scope="module")
def padded(tmp_path_factory):
    folder, demo = tmp_path_factory.mktemp("padded"), Path(treedraft.__file__).parent / "demo"
    return [str(pad_checkpoint(demo / part, folder / part)) for part in ("model", "draft")]


def make_llm(padded, backend, cuda_graph="off", **options):
    shape = SpeculativeConfig(3, 2, 6)
    options = {"page_size": 3, "max_batch": 3, "max_context": 64, "speculative": shape, "max_pending": 1} | options
    return LLM(*padded, device="cpu", dtype="float64", attention_backend=backend, cuda_graph=cuda_graph, **options)


@pytest.mark.parametrize("cuda_graph", ["off", "eager"])
@pytest.mark.parametrize("name", NAMES)
def test_generate_gives_the_trees_and_text_of_torch(fake, padded, demo_prompts, name, cuda_graph):
    params = [replace(p, max_tokens=6 + 2 * i) for i, p in enumerate(PARAMS[:4])]
    expected = run(make_llm(padded, "torch", max_pending=0), demo_prompts[:4], params)
    llm = make_llm(padded, name, cuda_graph)
    assert any("plan reads lengths on the host" in note for note in llm.notes)
    assert llm.config.max_pending == 0
    assert run(llm, demo_prompts[:4], params) == expected
    verify = llm.runner.target.attention
    launches = [launch for launch in verify._launches.values() if launch.part.key != "prefix"]
    assert launches and all(launch.wrapper.num_runs == 6 * launch.wrapper.num_plans for launch in launches)


def test_cuda_graph_auto_is_off_when_the_plan_is_on_the_host(fake, padded):
    llm = make_llm(padded, "flashinfer", "auto")
    assert llm.config.cuda_graph == "off" and llm.runner.graphs is None


def test_flashinfer_refuses_other_latents_at_start(fake):
    with pytest.raises(ConfigError, match="latent 512 [+] rope 64, not for 64 [+] 32"):
        LLM("demo", device="cpu", dtype="float64", attention_backend="flashinfer")


def test_make_backend_without_the_package_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(ConfigError, match="pip install 'treedraft"):
        make_backend("flashinfer")
