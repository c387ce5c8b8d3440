"""A tiny server for the explorer page: OpenAI's stream with the trace extension, from recorded or hand-made rounds."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from treedraft.server.pages import explorer_html

Chunk = tuple[str, dict[str, Any] | None]  # text, the treedraft field


class ExplorerServer:
    """Answers every prompt with `streams[prompt]`, or with an error in OpenAI's form; keeps the bodies it got."""

    def __init__(self, streams: dict[str, list[Chunk]], cut: str = ""):
        """cut: the prompt whose stream ends without usage and [DONE]."""
        self.streams, self.cut = streams, cut
        self.bodies: list[dict[str, Any]] = []
        self.authorizations: list[str | None] = []
        self.url = ""

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/", lambda request: HTMLResponse(explorer_html())),
                Route("/v1/models", lambda request: JSONResponse({"data": [{"id": "demo"}]})),
                Route("/v1/completions", self._completions, methods=["POST"]),
                Route("/v1/chat/completions", self._completions, methods=["POST"]),
            ]
        )

    async def _completions(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        self.authorizations.append(request.headers.get("authorization"))
        is_chat = "messages" in body
        prompt = body["messages"][-1]["content"] if is_chat else body["prompt"]
        if prompt not in self.streams:
            return JSONResponse({"error": {"message": f"no such prompt: {prompt}"}}, status_code=400)
        return StreamingResponse(
            self._events(self.streams[prompt], is_chat, prompt == self.cut), media_type="text/event-stream"
        )

    def _events(self, chunks: list[Chunk], is_chat: bool, is_cut: bool) -> Iterator[bytes]:
        for text, extension in chunks:
            choice = {"index": 0, "delta": {"content": text}} if is_chat else {"index": 0, "text": text}
            data = {"choices": [choice]} | ({"treedraft": extension} if extension is not None else {})
            raw = f"data: {json.dumps(data, ensure_ascii=False)}\n\n".encode()
            yield raw[:20]  # a network may cut anywhere, inside a character too
            yield raw[20:-5]
            yield raw[-5:]
        if is_cut:
            return
        num_tokens = sum(len(extension["depths"]) for _, extension in chunks if extension)
        yield f"data: {json.dumps({'choices': [], 'usage': {'completion_tokens': num_tokens}})}\n\n".encode()
        yield b"data: [DONE]\n\n"


@contextmanager
def serving(app: Any) -> Iterator[str]:
    """Run an ASGI app on a free port of this machine; yields its URL."""
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning", lifespan="off"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    end = time.monotonic() + 10
    while not server.started:
        assert thread.is_alive() and time.monotonic() < end, "the test's server did not start"
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(10)
