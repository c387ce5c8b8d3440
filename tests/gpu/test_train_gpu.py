"""The recipe of the demo model on a GPU: its functions can be traced whole, as torch.compile needs them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from demo.test_train import FIELDS, SMALL_HEAD, build
from treedraft.demo import train as recipe
from treedraft.demo.recipe.corpus import Windows
from treedraft.demo.recipe.head import MixedRows, head_fields, new_head

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def test_train_head_functions_trace_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_with = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **options: compile_with(f, **(options | {"backend": "eager"})))
    settings = replace(SMALL_HEAD, is_compiled=True, mix=(("corpus", 1.0),))
    target = build()[0].cuda()
    head = new_head(settings, target, head_fields(settings, FIELDS), 64).cuda()
    tokens = np.random.default_rng(0).integers(1, 40, 4000).astype(np.uint16)
    rows = MixedRows(settings, Windows({"code": tokens}, {"code": 1.0}, torch.device("cuda"), 0), [])
    lines: list[Any] = []
    assert recipe.train_head(head, target, rows, settings, lines.append)["steps"] == settings.max_steps
