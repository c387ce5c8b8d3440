"""What routes are made of: bodies become requests, increments become answers."""

from __future__ import annotations

import asyncio
import secrets
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from treedraft.engine.request import Request as EngineRequest
from treedraft.engine.text import TextStream
from treedraft.errors import RequestError
from treedraft.server.answers import Answer
from treedraft.server.async_engine import AsyncEngine, Generation, Increment, QueueFull
from treedraft.server.guards import error_body, error_response
from treedraft.server.protocol import ChatBody
from treedraft.server.reply.formats import LISTED, call_format, reasoning_format
from treedraft.server.reply.parser import ReplyForm
from treedraft.server.sse import DONE, ClientGone, EventStream, event, while_connected
from treedraft.server.tokens import TokenTexts, with_marks
from treedraft.types import SamplingParams, StructuredOutput

if TYPE_CHECKING:
    from treedraft.llm import LLM

_T = TypeVar("_T")

CLIENT_GONE = 499  # nobody reads it; logs of other servers call it so


@dataclass(frozen=True)
class ServerSettings:
    """What a user may choose about the server itself."""

    model_name: str = "demo"  # the name that clients give and get
    api_key: str | None = None  # None: everyone is let in
    max_body_bytes: int = 4 * 2**20  # larger bodies get 413
    request_timeout_s: float = 600.0  # from arrival to the end; then the request is aborted
    tool_call_parser: str | None = None  # how the model writes calls, see server.reply.formats; None: no tools
    reasoning_parser: str | None = None  # how the model writes thoughts; None: they are content


class ModelNotFound(Exception):
    """The body names another model."""


class TimedOut(Exception):
    """The request's time is over before it could be submitted."""


class Service:
    """What routes need: requests made from bodies, and answers made from increments."""

    def __init__(self, llm: LLM, engine: AsyncEngine, settings: ServerSettings):
        self.llm = llm
        self.engine = engine
        self.settings = settings
        self.tokens = TokenTexts(llm.tokenizer)
        self.calls = call_format(settings.tool_call_parser)
        self.reasoning = reasoning_format(settings.reasoning_parser)
        marks = self.calls.marks if self.calls is not None else ()
        if self.reasoning is not None:
            marks += (self.reasoning.begin, self.reasoning.end, *self.reasoning.ends_before)
        self._chat_tokenizer = with_marks(llm.tokenizer, marks)
        self.generations: dict[str, Generation] = {}  # being answered, by the id that clients know
        # One thread: long prompts do not stop the event loop, and request numbers are given out one by one.
        self._encoder = ThreadPoolExecutor(1, thread_name_prefix="treedraft-encoder")
        # Another one: a grammar may take seconds, and no prompt waits for that of another request.
        self._compiler = ThreadPoolExecutor(1, thread_name_prefix="treedraft-compiler")
        self._num_compiling = 0  # requests whose grammars are compiled, or wait for it

    async def in_thread(self, function: Callable[..., _T], *arguments: Any) -> _T:
        """Run tokenizer work beside the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._encoder, function, *arguments)

    async def compile(self, request: Request, structured: StructuredOutput | None) -> None:
        """Compile what a request will need, beside the event loop, while its client stays and its time is not over.

        Raises RequestError, QueueFull, ClientGone or TimedOut; what has not begun by then is not compiled.
        """
        if structured is None or self.llm.grammars.find(structured) is not None:
            return
        if self._num_compiling >= self.engine.max_unfinished:
            raise QueueFull(f"{self._num_compiling} requests wait for their grammars: try again later")
        compile_now = self.llm.grammars.compile
        self._num_compiling += 1
        try:
            async with asyncio.timeout(self.settings.request_timeout_s):
                compiling = asyncio.get_running_loop().run_in_executor(self._compiler, compile_now, structured)
                await while_connected(request.receive, compiling)
        except TimeoutError as error:
            raise TimedOut(self._timeout_message) from error
        finally:
            self._num_compiling -= 1

    def check_model(self, name: str | None) -> None:
        if name is not None and name != self.settings.model_name:
            raise ModelNotFound(f"this server has the model {self.settings.model_name!r}, not {name!r}")

    def make_requests(
        self, prompts: Sequence[str | list[int]], params: SamplingParams
    ) -> tuple[list[EngineRequest], list[list[int]]]:
        """Return the checked requests of every choice, and each prompt's token ids. Raises RequestError."""
        requests, every = [], []
        for prompt in prompts:
            token_ids = self.llm.encode(prompt) if isinstance(prompt, str) else prompt
            seed = params.seed if params.seed is not None else secrets.randbits(63)  # fresh for each request
            requests += self.llm._requests(token_ids, replace(params, seed=seed))
            every.append(token_ids)
        return requests, every

    def chat_prompt(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        variables: dict[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of a conversation; variables: of the template. Raises RequestError."""
        if not getattr(self.llm.tokenizer, "chat_template", None):
            raise RequestError("this checkpoint has no chat template; use /v1/completions with a prompt of your own")
        return self.llm._encode_chat(messages, tools, variables)

    def make_chat(self, body: ChatBody) -> tuple[list[EngineRequest], ReplyForm]:
        """Return the checked requests of a chat, and what their texts are read as. Raises RequestError."""
        assert self.llm.config.max_context is not None
        if body.offered_tools and self.calls is None and not body.must_call:
            raise RequestError("tools need a server that was started with --tool-call-parser")
        absent_content = "" if self.calls is None else self.calls.absent_content
        tools = [tool.as_template_input() for tool in body.offered_tools]
        prompt = self.chat_prompt(body.conversation(absent_content), tools, body.chat_template_kwargs)
        form, params = self._reply_form(body, prompt), body.params(self.llm.config.max_context)
        requests, _ = self.make_requests([prompt], params)
        for request in requests:
            request.text = TextStream(self._chat_tokenizer, params.stop)
        return requests, form

    def _reply_form(self, body: ChatBody, prompt: list[int]) -> ReplyForm:
        tools = body.argument_schemas
        if body.must_call:
            return ReplyForm(calls=LISTED, tools=tools, max_calls=body.max_calls)
        if body.structured() is not None:  # from its first character on: there are neither thoughts nor calls
            return ReplyForm()
        return ReplyForm(
            reasoning=self.reasoning,
            is_thinking=self.reasoning is not None and self._ends_with(prompt, self.reasoning.begin),
            calls=self.calls if tools else None,
            tools=tools,
            max_calls=body.max_calls,
        )

    def _ends_with(self, prompt: list[int], mark: str) -> bool:
        """Whether the template wrote the mark itself."""
        assert self.llm.tokenizer is not None  # it has a chat template
        text = self.llm.tokenizer.decode(prompt[-2 * len(mark) :], skip_special_tokens=False)
        return text.rstrip().endswith(mark)

    # ------------------------------------------------------------------ answering

    def new_id(self, request: Request, prefix: str) -> str:
        """The client's X-Request-Id where it is one, not in use; else a new one."""
        given = request.headers.get("x-request-id", "")
        is_usable = 0 < len(given) <= 64 and given.isascii() and given.isprintable() and given not in self.generations
        return given if is_usable else f"{prefix}-{uuid.uuid4().hex}"

    async def respond(
        self,
        request: Request,
        request_id: str,
        requests: list[EngineRequest],
        make: Callable[[str, Generation], Answer],
        is_stream: bool,
        is_traced: bool = False,
    ) -> Response:
        """Submit, and answer as a stream or at once. The requests end when the client goes or the time is over."""
        generation = self.engine.submit(requests, is_traced)
        self.generations[request_id] = generation
        answer = make(request_id, generation)
        if is_stream:
            return EventStream(self._events(generation, answer), lambda: self._end(request_id, generation))
        try:
            return await while_connected(request.receive, self._whole(generation, answer))
        except ClientGone:
            return Response(status_code=CLIENT_GONE)
        finally:
            self._end(request_id, generation)

    def _end(self, request_id: str, generation: Generation) -> None:
        self.engine.abort(generation)
        self.generations.pop(request_id, None)

    async def _whole(self, generation: Generation, answer: Answer) -> Response:
        try:
            async for increment in generation.increments(self.settings.request_timeout_s):
                if increment.finish_reason == "error":
                    return error_response(*_failure(increment))
                answer.add(increment)
        except TimeoutError:
            return error_response(504, self._timeout_message, "timeout_error")
        return JSONResponse(answer.whole())

    async def _events(self, generation: Generation, answer: Answer) -> AsyncGenerator[bytes, None]:
        """Chunks, then DONE; an error is an event of its own, since the status was sent long ago."""
        for chunk in answer.first_chunks():
            yield event(chunk)
        try:
            async for increment in generation.increments(self.settings.request_timeout_s):
                if increment.finish_reason == "error":
                    yield event(error_body(*_failure(increment)[1:]))
                    break
                answer.add(increment)
                is_traced = increment.trace is not None  # with rounds whose text may still be held back
                if increment.text or increment.logprobs or increment.finish_reason or is_traced:
                    made = answer.chunk(increment)
                    if made is not None:
                        yield event(made)
            else:
                for chunk in answer.last_chunks():
                    yield event(chunk)
        except TimeoutError:
            yield event(error_body(self._timeout_message, "timeout_error"))
        yield DONE

    @property
    def _timeout_message(self) -> str:
        return f"not finished within {self.settings.request_timeout_s:g} s, and aborted"

    def close(self) -> None:
        for executor in (self._encoder, self._compiler):
            executor.shutdown(wait=False, cancel_futures=True)


def _failure(increment: Increment) -> tuple[int, str, str]:
    """Status, message and type of a request that ended with an error."""
    status, kind = (400, "invalid_request_error") if increment.is_at_fault else (500, "server_error")
    return status, increment.error or "unknown", kind
