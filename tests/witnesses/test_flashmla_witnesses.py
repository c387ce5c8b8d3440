"""Witnesses of fixes around FlashMLA, whose package is a stand-in here: what is launched, and in which order."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from treedraft.attention import flashmla
from treedraft.types import TreeRows


class Launches(TorchDispatchMode):
    """Names of operators that launch something, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "view" not in str(func):
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_fill_comes_right_before_the_attention_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it FlashMLA starts while our kernel before it still writes the queries."""
    heads = 2
    q, kv = torch.randn(1, 3, heads, 576), torch.randn(4 * 64, 576)
    launches, before = Launches(), []

    def attend(q: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        before.append(launches.names[-1])
        return torch.zeros(*q.shape[:3], 512), torch.zeros(len(q), heads, q.shape[1])

    package = SimpleNamespace(
        get_mla_decoding_metadata=lambda *a, **k: (torch.zeros(1), torch.zeros(1)),
        get_mla_metadata=lambda: (SimpleNamespace(), None),
        flash_mla_with_kvcache=attend,
    )
    tail = SimpleNamespace(attend_tail_triton=lambda q, kv, pages, bits, tree_len, out, lse, *rest: (out, lse))
    monkeypatch.setattr(flashmla, "_package", lambda: package)
    monkeypatch.setitem(sys.modules, "treedraft.kernels.tree_tail", tail)
    rows = TreeRows(torch.tensor([[2, 3]], dtype=torch.int32), torch.tensor([70]), torch.ones(1, 3, 1).long(), 3, 100)
    backend = flashmla.FlashMlaAttention()
    plan = backend.plan(rows, 64)
    with launches:
        backend.run_mla(plan, kv, q, 512, 0.1)
    assert len(before) == 1 and "zero_" in before[0], before
