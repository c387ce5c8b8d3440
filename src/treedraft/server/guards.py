"""What stands before the routes: the key, the size of bodies; and errors in OpenAI's form."""

from __future__ import annotations

import json
import secrets
from typing import Any

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

OPEN_PATHS = ("/", "/health", "/ready")  # probes have no key


def error_body(message: str, kind: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """OpenAI's form of an error."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_response(
    status: int,
    message: str,
    kind: str,
    param: str | None = None,
    code: str | None = None,
    headers: dict[str, str] | None = None,
) -> Response:
    """An error response; what it quotes may be no Unicode, so everything but ASCII is escaped."""
    body = json.dumps(error_body(message, kind, param, code), ensure_ascii=True)
    return Response(body, status, headers, media_type="application/json")


class KeyCheck:
    """Lets through who sends `Authorization: Bearer KEY`; 401 for the others."""

    def __init__(self, app: ASGIApp, api_key: str):
        self._app = app
        self._expected = f"Bearer {api_key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            return await self._app(scope, receive, send)
        given = dict(scope["headers"]).get(b"authorization", b"")
        if secrets.compare_digest(given, self._expected):
            return await self._app(scope, receive, send)
        message = "this server needs its API key: send the header Authorization: Bearer KEY"
        response = error_response(401, message, "authentication_error", code="invalid_api_key")
        await response(scope, receive, send)


class BodyLimit:
    """Answers 413 to a body of more than `max_bytes`, announced or not, without reading on."""

    def __init__(self, app: ASGIApp, max_bytes: int):
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        announced = dict(scope["headers"]).get(b"content-length", b"0")
        if announced.isdigit() and len(announced) < 20 and int(announced) <= self._max_bytes:
            return await self._with_limit(scope, receive, send)
        await self._refuse(scope, receive, send)

    async def _with_limit(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read the whole body first, so that a refusal finds nothing half done."""
        parts: list[bytes] = []
        size, is_last = 0, False
        while not is_last:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > self._max_bytes:
                return await self._refuse(scope, receive, send)
            is_last = not message.get("more_body", False)
        body: list[Message] = [{"type": "http.request", "body": b"".join(parts), "more_body": False}]

        async def replay() -> Message:
            return body.pop() if body else await receive()

        await self._app(scope, replay, send)

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        message = f"a body may have {self._max_bytes} bytes at most"
        response = error_response(413, message, "invalid_request_error", code="body_too_large")
        response.headers["connection"] = "close"  # the rest of the body is not read
        await response(scope, receive, send)
