"""Fixtures that load the bundled model once."""

import json
from importlib.resources import files

import pytest
import torch

torch.set_num_threads(1)  # small tensors: a second thread gains little, and loses much beside another process


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--screenshot", metavar="FILE", help="where the tree explorer's test leaves its screenshot")


@pytest.fixture(scope="session")
def demo_prompts() -> list[str]:
    """The held-out prompts, one of each domain in turn."""
    lines = (files("treedraft") / "demo" / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    by_domain: dict[str, list[str]] = {}
    for record in map(json.loads, lines):
        by_domain.setdefault(record["domain"], []).append(record["prompt"])
    return [prompt for group in zip(*by_domain.values()) for prompt in group]


@pytest.fixture(scope="session")
def plain64():
    """The demo model in float64 without speculation, run eagerly: what every exact test compares with."""
    from treedraft import LLM

    return LLM("demo", dtype="float64", device="cpu", speculative=None, max_batch=4, max_context=512, capture="off")


@pytest.fixture(scope="session")
def tree64():
    """The demo model in float64 with the default tree, run eagerly: planted faults replace Python functions."""
    from treedraft import LLM

    return LLM("demo", dtype="float64", device="cpu", max_batch=4, max_context=512, capture="off")
