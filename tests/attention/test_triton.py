"""What the Triton backends do without a GPU: refuse, or say on the meta device what they would take."""

import pytest
import torch

from treedraft.attention import BACKENDS, Needs, check_backend, choose_backend, make_backend
from treedraft.config import EngineConfig
from treedraft.errors import ConfigError
from treedraft.runner.build import lay_out
from treedraft.types import TreeRows

NAMES = ["triton", "triton-deterministic"]


def rows_on(device: str, batch: int = 3, num_rows: int = 8) -> TreeRows:
    return TreeRows(
        torch.ones(batch, 40, dtype=torch.int32, device=device),
        torch.zeros(batch, dtype=torch.int64, device=device),
        torch.zeros(batch, num_rows, 1, dtype=torch.int64, device=device),
        tree_len=num_rows,
        max_kv_len=600,
    )


@pytest.mark.parametrize("name", NAMES)
def test_plan_on_a_cpu_without_the_interpreter_raises(name, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ConfigError, match="on the CPU use torch"):
        make_backend(name).plan(rows_on("cpu"), 16)
    needs = Needs("verify", "cpu", "float32", 16, (64, 32), has_trees=True)
    with pytest.raises(ConfigError, match="it runs on cuda, not on cpu"):
        check_backend(name, needs)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert "cpu" in BACKENDS[name].device_types
    check_backend(name, needs)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("heads", [16, 128])
def test_run_on_the_meta_device_gives_shapes(name, heads):
    backend = make_backend(name)
    plan = backend.plan(rows_on("meta"), 16)
    q = torch.empty(3, 8, heads, 576, dtype=torch.bfloat16, device="meta")
    kv = torch.empty(640, 576, dtype=torch.bfloat16, device="meta")
    out, lse = backend.run_mla_with_lse(plan, kv, q, 512, 0.1)
    assert out.shape == (3, 8, heads, 512) and out.dtype == torch.bfloat16
    assert lse.shape == (3, 8, heads) and lse.dtype == torch.float32
    k, v = (torch.empty(640, 8, width, dtype=torch.bfloat16, device="meta") for width in (128, 64))
    assert backend.run_gqa(plan, k, v, q[..., :128], 0.1).shape == (3, 8, heads, 64)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"device": "cuda"}, ("triton", "triton")),
        ({"device": "cuda", "dtype": "float64"}, ("torch", "torch")),
        ({"device": "cuda", "deterministic": True}, ("triton-deterministic", "triton")),
        ({"device": "cuda", "attention_backend": "torch"}, ("torch", "torch")),
        ({"device": "cpu"}, ("torch", "torch")),
    ],
)
def test_lay_out_auto_is_the_fastest_backend_that_fits(options, expected):
    config = lay_out(EngineConfig(**options).resolve(has_cuda=True)).config
    assert (config.attention_backend, config.draft_attention_backend) == expected


@pytest.mark.parametrize(
    ("page_size", "is_there", "expected"), [(64, True, "gluon"), (64, False, "triton"), (3, True, "triton")]
)
def test_choose_backend_takes_gluon_where_device_and_sizes_fit(page_size, is_there, expected, monkeypatch):
    monkeypatch.setattr("treedraft.attention.gluon.is_available", lambda: is_there)
    assert choose_backend(Needs("verify", "cuda", "bfloat16", page_size, (512, 64), has_trees=True)) == expected


def test_deterministic_refuses_what_is_not_invariant():
    with pytest.raises(ConfigError, match="on the CPU use dtype float64"):
        EngineConfig(device="cpu", deterministic=True).resolve(has_cuda=True)
    with pytest.raises(ConfigError, match="may be: triton-deterministic"):
        check_backend("triton", Needs("verify", "cuda", "bfloat16", 16, (64, 32), True, is_deterministic=True))
    with pytest.raises(ConfigError, match="takes float32, bfloat16, not float64"):
        choose_backend(Needs("verify", "cuda", "float64", 16, (64, 32), True, is_deterministic=True))


def test_flashmla_refuses_other_widths_and_pages():
    with pytest.raises(ConfigError, match="page sizes 64, not 16.*latent 512"):
        check_backend("flashmla", Needs("verify", "cuda", "bfloat16", 16, (64, 32), has_trees=True))
    check_backend("flashmla", Needs("verify", "cuda", "bfloat16", 64, (512, 64), has_trees=True))
