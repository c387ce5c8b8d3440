"""Fixtures of tests that need a GPU."""

from __future__ import annotations

import pytest

from padded_cases import PaddedDemo


@pytest.fixture(scope="module")
def padded_demo(tmp_path_factory: pytest.TempPathFactory, demo_prompts: list[str]) -> PaddedDemo:
    return PaddedDemo(tmp_path_factory.mktemp("padded"), demo_prompts[:4])
