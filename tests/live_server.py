"""A real server, uvicorn in a thread, for tests that speak HTTP to it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Thread
from typing import Any

import httpx
from openai import OpenAI

from treedraft import LLM
from treedraft.server.async_engine import STEP_TIMEOUT_S, AsyncEngine
from treedraft.server.serve import make_server
from treedraft.server.service import ServerSettings, Service


@dataclass
class Live:
    url: str
    llm: LLM
    engine: AsyncEngine
    service: Service
    openai: OpenAI
    http: httpx.Client

    def wait_until_idle(self, timeout_s: float = 10) -> None:
        """Wait until no request is left anywhere, then check every page and slot."""
        end_s = time.monotonic() + timeout_s
        while self.engine.num_unfinished or not self.llm.engine.is_idle or self.service.generations:
            assert time.monotonic() < end_s, (self.engine.num_unfinished, self.service.generations)
            time.sleep(0.01)
        self.llm.engine.scheduler.check_integrity()
        assert self.llm.engine.scheduler.kv.num_owned == 0


@contextmanager
def live_server(
    llm: LLM, max_waiting: int = 256, step_timeout_s: float = STEP_TIMEOUT_S, **settings: Any
) -> Iterator[Live]:
    """Serve `llm` on a free port until the block ends."""
    server = make_server(
        llm,
        ServerSettings(**settings),
        port=0,
        max_waiting=max_waiting,
        log_level="critical",
        step_timeout_s=step_timeout_s,
    )
    runner = llm.engine.runner
    thread = Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    key = settings.get("api_key", "none")
    try:
        with httpx.Client(base_url=url, timeout=60) as http, OpenAI(base_url=f"{url}/v1", api_key=key) as client:
            service = server.config.app.state.service  # type: ignore[union-attr]
            yield Live(url, llm, server.engine, service, client.with_options(max_retries=0), http)
    finally:
        server.should_exit = True
        thread.join(30)
        llm.engine.reset()
        llm.engine.runner = runner._runner  # as it was before the server watched it
