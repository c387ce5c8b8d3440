"""Bodies made from the server's own OpenAPI document, where schemathesis is installed."""

from __future__ import annotations

import pytest

from live_server import live_server
from treedraft import LLM


@pytest.mark.slow
def test_bodies_from_the_openapi_document_never_give_500() -> None:
    schemathesis = pytest.importorskip("schemathesis")
    hypothesis = pytest.importorskip("hypothesis")
    llm = LLM("demo", device="cpu", max_context=24)  # most bodies set no limit, so an answer takes what there is
    with live_server(llm) as live:
        check(live, schemathesis, hypothesis)


def check(live, schemathesis, hypothesis) -> None:
    schema = schemathesis.openapi.from_url(f"{live.url}/openapi.json")
    answered = 0
    for result in schema.get_all_operations():
        operation = result.ok()

        @hypothesis.settings(max_examples=200, deadline=None, suppress_health_check=list(hypothesis.HealthCheck))
        @hypothesis.given(case=operation.as_strategy())
        def run(case) -> None:
            nonlocal answered
            response = case.call(timeout=30)
            assert response.status_code < 500, (case.body, response.text)
            answered += response.status_code == 200

        run()
    assert answered > 50
    assert live.http.get("/health").status_code == 200
