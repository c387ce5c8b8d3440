"""One live server with the demo model in float64, whose texts are those of LLM.generate, strictly."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from live_server import Live, live_server
from treedraft import LLM


@pytest.fixture(scope="session")
def served_llm() -> LLM:
    return LLM("demo", dtype="float64", device="cpu", max_batch=4, max_context=512, capture="off")


@pytest.fixture(scope="module")
def live(served_llm: LLM) -> Iterator[Live]:
    with live_server(served_llm) as server:
        yield server


@pytest.fixture(autouse=True)
def nothing_is_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "live" in request.fixturenames:
        request.getfixturevalue("live").wait_until_idle()
