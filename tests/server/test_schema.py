"""Bodies made from the server's own OpenAPI document, where schemathesis is installed."""

from __future__ import annotations

from collections import Counter

import pytest

from live_server import live_server
from treedraft import LLM

NUM_EXAMPLES = 1700  # of each of six operations


@pytest.mark.slow
def test_bodies_from_the_openapi_document_never_give_500() -> None:
    schemathesis = pytest.importorskip("schemathesis")
    hypothesis = pytest.importorskip("hypothesis")
    llm = LLM("demo", device="cpu", max_context=24)  # most bodies set no limit, so an answer takes what there is
    with live_server(llm) as live:
        check(live, schemathesis, hypothesis)


def check(live, schemathesis, hypothesis) -> None:
    """10,000 bodies, and what there is without one. `-s` prints the counts for benchmarks/notes.md."""
    schema = schemathesis.openapi.from_url(f"{live.url}/openapi.json")
    counts: Counter[int] = Counter()
    num_bodies = 0
    for result in schema.get_all_operations():
        operation = result.ok()

        @hypothesis.settings(
            max_examples=NUM_EXAMPLES, deadline=None, suppress_health_check=list(hypothesis.HealthCheck)
        )
        @hypothesis.given(case=operation.as_strategy())
        def run(case) -> None:
            nonlocal num_bodies
            response = case.call(timeout=300)
            assert response.status_code < 500, (case.body, response.text)
            counts[response.status_code] += 1
            num_bodies += case.method == "POST"

        run()
    print(f"{num_bodies} bodies, answers {dict(counts)}")
    assert num_bodies > 9000 and counts[200] > 50
    assert live.http.get("/health").status_code == 200
