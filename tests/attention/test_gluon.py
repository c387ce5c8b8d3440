"""What the gluon backend refuses, and its shapes on the meta device. Its kernel is tested in tests/gpu."""

import pytest
import torch

from treedraft.attention import gluon, make_backend
from treedraft.errors import ConfigError, InvariantError
from treedraft.types import TreeRows


def pretend(monkeypatch, capability):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)


def test_make_backend_without_a_gpu_raises(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="there is no CUDA device"):
        make_backend("gluon")


def test_make_backend_on_another_gpu_raises(monkeypatch):
    pretend(monkeypatch, (10, 0))
    with pytest.raises(ConfigError, match=r"compute capability 9\.0 .* 10\.0"):
        make_backend("gluon")


@pytest.mark.parametrize("found", ["none", "3.9.0", "3.60.0"])
def test_make_backend_with_another_triton_raises(monkeypatch, found):
    pretend(monkeypatch, (9, 0))
    monkeypatch.setattr(gluon, "_installed_triton", lambda: found)
    with pytest.raises(ConfigError, match=f"needs Triton 3.6.x.*installed: {found}"):
        make_backend("gluon")


def test_make_backend_with_its_triton_is_made(monkeypatch):
    pretend(monkeypatch, (9, 0))
    monkeypatch.setattr(gluon, "_installed_triton", lambda: "3.6.0")
    assert isinstance(make_backend("gluon"), gluon.GluonTreeAttention)


@pytest.fixture
def backend(monkeypatch):
    monkeypatch.setattr(gluon, "_check_device", lambda: None)
    return gluon.GluonTreeAttention()


def rows(page_columns=3):
    def meta(*shape, dtype=torch.int64):
        return torch.empty(*shape, dtype=dtype, device="meta")

    return TreeRows(meta(2, page_columns, dtype=torch.int32), meta(2), meta(2, 8, 1), tree_len=8, max_kv_len=100)


def test_run_mla_on_meta_gives_shapes(backend):
    plan = backend.plan(rows(), 64)
    q = torch.empty(2, 8, 16, 576, dtype=torch.bfloat16, device="meta")
    out, lse = backend.run_mla_with_lse(plan, torch.empty(640, 576, device="meta"), q, 512, 0.1)
    assert out.shape == (2, 8, 16, 512) and out.dtype == torch.bfloat16
    assert lse.shape == (2, 8, 16) and lse.dtype == torch.float32


def test_run_mla_of_other_sizes_raises(backend):
    q = torch.empty(2, 8, 16, 320, dtype=torch.bfloat16, device="meta")
    with pytest.raises(InvariantError, match="latent 512"):
        backend.run_mla(backend.plan(rows(), 64), torch.empty(640, 320, device="meta"), q, 256, 0.1)


def test_plan_of_an_unknown_page_size_raises(backend):
    with pytest.raises(InvariantError, match="page_size 48"):
        backend.plan(rows(), 48)
