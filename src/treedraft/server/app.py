"""The HTTP application: its routes, and what errors become."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import HTMLResponse, JSONResponse, Response

from treedraft import __version__
from treedraft.errors import RequestError
from treedraft.llm import LLM
from treedraft.server.answers import ChatAnswer, CompletionAnswer, GenerateAnswer
from treedraft.server.async_engine import AsyncEngine, QueueFull, Unavailable
from treedraft.server.guards import BodyLimit, KeyCheck, error_response
from treedraft.server.pages import explorer_html
from treedraft.server.protocol import (
    AbortBody,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    GenerateBody,
    TokenizeBody,
)
from treedraft.server.service import CLIENT_GONE, ModelNotFound, ServerSettings, Service, TimedOut
from treedraft.server.sse import ClientGone

logger = logging.getLogger(__name__)

RETRY_AFTER_S = 1


def create_app(llm: LLM, engine: AsyncEngine, settings: ServerSettings) -> FastAPI:
    """Return the application. Its lifespan starts the engine's thread and ends it."""
    service = Service(llm, engine, settings)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        engine.start()
        try:
            yield
        finally:
            await engine.stop()
            service.close()

    app = FastAPI(title="treedraft", version=__version__, lifespan=lifespan)
    app.state.service = service
    _add_generation(app, service)
    _add_text(app, service)
    _add_facts(app, service)
    _add_errors(app)
    app.add_middleware(BodyLimit, max_bytes=settings.max_body_bytes)
    if settings.api_key is not None:
        app.add_middleware(KeyCheck, api_key=settings.api_key)  # added last: it comes first
    return app


# ---------------------------------------------------------------------- generation


def _add_generation(app: FastAPI, service: Service) -> None:
    engine, name = service.engine, service.settings.model_name

    @app.post("/v1/chat/completions")
    async def chat(body: ChatBody, request: Request) -> Response:
        engine.check_open()
        service.check_model(body.model)

        await service.compile(request, body.structured())
        requests, form = await service.in_thread(service.make_chat, body)
        return await service.respond(
            request,
            service.new_id(request, "chatcmpl"),
            requests,
            lambda request_id, g: ChatAnswer(request_id, g, service.tokens, name, body.include_usage, form=form),
            body.stream,
            body.treedraft.trace,
        )

    @app.post("/v1/completions")
    async def completions(body: CompletionBody, request: Request) -> Response:
        engine.check_open()
        service.check_model(body.model)
        await service.compile(request, body.structured())
        requests, prompts = await service.in_thread(service.make_requests, body.prompts, body.params())
        echoes = None
        if body.echo:
            texts = [p if isinstance(p, str) else service.llm.decode(p) for p in body.prompts]
            echoes = [text for text in texts for _ in range(body.n)]
        return await service.respond(
            request,
            service.new_id(request, "cmpl"),
            requests,
            lambda request_id, g: CompletionAnswer(
                request_id,
                g,
                service.tokens,
                name,
                body.include_usage,
                echoes=echoes,
                num_prompt_logprobs=body.prompt_logprobs,
            ),
            body.stream,
            body.treedraft.trace,
        )

    @app.post("/generate")
    async def generate(body: GenerateBody, request: Request) -> Response:
        engine.check_open()
        await service.compile(request, body.sampling_params.structured())
        requests, _ = await service.in_thread(service.make_requests, body.prompts, body.params())
        is_list = body.is_batch or body.sampling_params.n > 1
        return await service.respond(
            request,
            service.new_id(request, "gen"),
            requests,
            lambda request_id, g: GenerateAnswer(request_id, g, service.tokens, is_list, body.logprob_start_len),
            body.stream,
        )

    @app.post("/abort")
    @app.post("/abort_request", include_in_schema=False)
    async def abort(body: AbortBody) -> Response:
        request_id = body.request_id or body.rid or ""
        generation = service.generations.get(request_id)
        if generation is None:
            return error_response(404, f"no unfinished request {request_id!r}", "invalid_request_error", "request_id")
        engine.abort(generation)
        return JSONResponse({"aborted": request_id})


# ---------------------------------------------------------------------- text


def _add_text(app: FastAPI, service: Service) -> None:
    llm = service.llm

    @app.post("/tokenize")
    async def tokenize(body: TokenizeBody) -> Response:
        service.check_model(body.model)
        if body.messages is not None:
            messages, tools = ([x.as_template_input() for x in each] for each in (body.messages, body.tools))
            token_ids = await service.in_thread(service.chat_prompt, messages, tools, body.chat_template_kwargs)
        else:
            token_ids = await service.in_thread(llm.encode, body.prompt)
        return JSONResponse({"tokens": token_ids, "count": len(token_ids), "max_model_len": llm.config.max_context})

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeBody) -> Response:
        service.check_model(body.model)
        bad = [t for t in body.tokens if not 0 <= t < llm.vocab_size]
        if bad:
            raise RequestError(f"token ids must be in 0..{llm.vocab_size - 1}; got {bad[0]}")
        return JSONResponse({"prompt": await service.in_thread(llm.decode, body.tokens)})


# ---------------------------------------------------------------------- facts


def _add_facts(app: FastAPI, service: Service) -> None:
    llm, engine, name = service.llm, service.engine, service.settings.model_name
    started = int(time.time())

    @app.get("/", include_in_schema=False)
    async def explorer() -> Response:
        return HTMLResponse(explorer_html())

    @app.get("/v1/models")
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [_model_card()]})

    @app.get("/v1/models/{model:path}")
    async def model(model: str) -> Response:
        service.check_model(model)
        return JSONResponse(_model_card())

    def _model_card() -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": started,
            "owned_by": "treedraft",
            "max_model_len": llm.config.max_context,
        }

    @app.get("/health")
    async def health() -> Response:
        """200 while the engine's thread lives."""
        if engine.error is not None:
            return error_response(503, f"the engine is dead: {engine.error}", "server_error")
        return Response(status_code=200)

    @app.get("/ready")
    async def ready() -> Response:
        """200 while new requests are taken; 503 from SIGTERM on."""
        engine.check_open()
        return Response(status_code=200)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(engine.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/version")
    async def version() -> Response:
        return JSONResponse({"version": __version__})

    @app.get("/server_info")
    @app.get("/get_server_info", include_in_schema=False)
    async def server_info() -> Response:
        info = llm.info()
        facts = asdict(info.pop("config"))
        return JSONResponse(
            {
                "model_path": llm.config.model,
                "served_model_name": name,
                "version": __version__,
                "config": facts,
                **info,
                "internal_states": [{"avg_spec_accept_length": engine.metrics.mean_accept_length()}],
            }
        )

    @app.get("/get_model_info", include_in_schema=False)
    async def model_info() -> Response:
        return JSONResponse({"model_path": llm.config.model, "is_generation": True})


# ---------------------------------------------------------------------- errors


def _add_errors(app: FastAPI) -> None:
    bad = "invalid_request_error"

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        message = first["msg"].removeprefix("Value error, ")
        where = ".".join(str(x) for x in first["loc"] if x != "body")
        return error_response(400, f"{where}: {message}" if where else message, bad, where or None)

    @app.exception_handler(RequestError)
    async def refused(_: Request, error: RequestError) -> Response:
        return error_response(400, str(error), bad)

    @app.exception_handler(ModelNotFound)
    async def no_model(_: Request, error: ModelNotFound) -> Response:
        return error_response(404, str(error), bad, "model", "model_not_found")

    @app.exception_handler(QueueFull)
    async def full(_: Request, error: QueueFull) -> Response:
        return error_response(429, str(error), "rate_limit_error", headers={"Retry-After": str(RETRY_AFTER_S)})

    @app.exception_handler(Unavailable)
    async def unavailable(_: Request, error: Unavailable) -> Response:
        return error_response(503, str(error), "server_error")

    @app.exception_handler(TimedOut)
    async def timed_out(_: Request, error: TimedOut) -> Response:
        return error_response(504, str(error), "timeout_error")

    @app.exception_handler(ClientGone)
    async def gone(_: Request, error: ClientGone) -> Response:
        return Response(status_code=CLIENT_GONE)

    @app.exception_handler(HTTPException)
    async def http(_: Request, error: HTTPException) -> Response:
        headers = dict(error.headers) if error.headers else None
        return error_response(error.status_code, str(error.detail), bad, headers=headers)

    @app.exception_handler(Exception)
    async def bug(_: Request, error: Exception) -> Response:
        logger.error("a request failed by a bug", exc_info=error)
        return error_response(500, f"{type(error).__name__}: {error}", "server_error")
