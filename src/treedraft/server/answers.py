"""Increments in, JSON out: one class for each form of answer, each filled increment by increment."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import Any, Protocol

from treedraft.engine.request import Request, metrics_of
from treedraft.server.async_engine import Generation, Increment
from treedraft.server.reply.count import num_reasoning_tokens
from treedraft.server.reply.parser import Call, Delta, ReplyForm, ReplyParser
from treedraft.server.scores import by_token_id, echoed, finite, from_position, ranked
from treedraft.server.tokens import TokenTexts


@dataclass
class Part:
    """One choice so far."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[dict[int, float]] = field(default_factory=list)
    finish_reason: str | None = None
    num_token_chars: int = 0  # of the texts of its tokens, for text_offset

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def add(self, increment: Increment) -> None:
        self.texts.append(increment.text)
        self.token_ids += increment.token_ids
        self.logprobs += increment.logprobs
        self.top_logprobs += increment.top_logprobs
        self.finish_reason = increment.finish_reason


class Answer(Protocol):
    """A form of answer. `add` is called with each increment, before `chunk` of it."""

    request_id: str

    def add(self, increment: Increment) -> None: ...

    def first_chunks(self) -> list[dict[str, Any]]:
        """What a stream begins with."""

    def chunk(self, increment: Increment) -> dict[str, Any] | None:
        """What a stream sends for one increment; None: nothing."""

    def last_chunks(self) -> list[dict[str, Any]]:
        """What a stream ends with."""

    def whole(self) -> Any:
        """The answer that is no stream."""


class _Base:
    def __init__(self, request_id: str, generation: Generation, tokens: TokenTexts):
        self.request_id = request_id
        self.requests = generation.requests
        self.tokens = tokens
        self.parts = [Part() for _ in generation.requests]

    def add(self, increment: Increment) -> None:
        self.parts[increment.index].add(increment)


class _OpenAI(_Base):
    """What chats and completions have in common."""

    object_name: str
    chunk_name: str

    def __init__(
        self, request_id: str, generation: Generation, tokens: TokenTexts, model: str, include_usage: bool = False
    ):
        super().__init__(request_id, generation, tokens)
        self.model = model
        self.include_usage = include_usage
        self.created = int(time.time())

    def _envelope(self, object_name: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.request_id,
            "object": object_name,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }

    def _chunk(self, choices: list[dict[str, Any]], trace: dict[str, Any] | None = None) -> dict[str, Any]:
        usage = {"usage": None} if self.include_usage else {}
        traced = {} if trace is None else {"treedraft": trace}
        return self._envelope(self.chunk_name, choices) | usage | traced

    def first_chunks(self) -> list[dict[str, Any]]:
        return []

    def last_chunks(self) -> list[dict[str, Any]]:
        if not self.include_usage:
            return []
        return [self._envelope(self.chunk_name, []) | self._figures()]

    def _figures(self) -> dict[str, Any]:
        return {"usage": usage_of(self.requests), "metrics": speculation_of(self.requests)}


class ChatAnswer(_OpenAI):
    object_name, chunk_name = "chat.completion", "chat.completion.chunk"

    def __init__(self, *args: Any, form: ReplyForm = ReplyForm(), **options: Any):  # noqa: B008  frozen
        """form: what the texts are read as."""
        super().__init__(*args, **options)
        self.form = form
        self.replies = [ReplyParser(form) for _ in self.parts]
        self._delta = Delta()

    def add(self, increment: Increment) -> None:
        super().add(increment)
        self._delta = self.replies[increment.index].push(increment.text, increment.finish_reason is not None)

    def first_chunks(self) -> list[dict[str, Any]]:
        delta = {"role": "assistant", "content": ""}
        return [
            self._chunk([{"index": i, "delta": delta, "logprobs": None, "finish_reason": None}])
            for i in range(len(self.parts))
        ]

    def chunk(self, increment: Increment) -> dict[str, Any] | None:
        logprobs, delta = self._logprobs(increment), self._delta
        if delta.is_empty and logprobs is None and increment.trace is None and increment.finish_reason is None:
            return None  # all of it is held back
        choice = {
            "index": increment.index,
            "delta": _delta_as_json(delta),
            "logprobs": logprobs,
            "finish_reason": self._finish_reason(increment.index),
        }
        return self._chunk([choice], increment.trace)

    def whole(self) -> dict[str, Any]:
        choices = [
            {
                "index": i,
                "message": self._message(self.replies[i]),
                "logprobs": self._logprobs(part),
                "finish_reason": self._finish_reason(i),
            }
            for i, part in enumerate(self.parts)
        ]
        return self._envelope(self.object_name, choices) | self._figures() | self._prompt_logprobs()

    def _message(self, reply: ReplyParser) -> dict[str, Any]:
        content = None if reply.calls and not reply.content else reply.content
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if self.form.reasoning is not None:
            message["reasoning_content"] = reply.reasoning or None
        if reply.calls:
            message["tool_calls"] = [_call_as_json(call) for call in reply.calls]
        return message

    def _finish_reason(self, index: int) -> str | None:
        reason = self.parts[index].finish_reason
        return "tool_calls" if reason == "stop" and self.replies[index].calls else reason

    def _figures(self) -> dict[str, Any]:
        figures = super()._figures()
        if self.form.reasoning is not None:
            pairs = zip(self.requests, self.replies, strict=True)
            counts = (num_reasoning_tokens(r, reply, self.form.reasoning) for r, reply in pairs)
            figures["usage"]["completion_tokens_details"] = {"reasoning_tokens": sum(counts)}
        return figures

    def _prompt_logprobs(self) -> dict[str, Any]:
        num_top = self.requests[0].params.prompt_logprobs
        return {} if num_top is None else {"prompt_logprobs": by_token_id(self.requests[0], num_top, self.tokens)}

    def _logprobs(self, of: Part | Increment) -> dict[str, Any] | None:
        if self.requests[0].params.logprobs is None:
            return None
        entries = [
            self._entry(token_id, logprob) | {"top_logprobs": [self._entry(*pair) for pair in ranked(top)]}
            for token_id, logprob, top in zip(of.token_ids, of.logprobs, of.top_logprobs, strict=True)
        ]
        return {"content": entries, "refusal": None}

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self.tokens.text(token_id),
            "logprob": finite(logprob),
            "bytes": self.tokens.bytes(token_id),
        }


class CompletionAnswer(_OpenAI):
    object_name = chunk_name = "text_completion"

    def __init__(
        self, *args: Any, echoes: list[str] | None = None, num_prompt_logprobs: int | None = None, **options: Any
    ):
        """echoes: for each choice the text of its prompt, which comes first.

        num_prompt_logprobs: best tokens in the answer's `prompt_logprobs`; None: the field is left out.
        """
        super().__init__(*args, **options)
        self.echoes = echoes
        self.num_prompt_logprobs = num_prompt_logprobs
        # Texts of prompts that come with log-probabilities, which are known once the first token is.
        self._late_echoes = dict(enumerate(echoes)) if echoes and self.requests[0].params.logprobs is not None else {}

    def first_chunks(self) -> list[dict[str, Any]]:
        echoes = [] if self._late_echoes else self.echoes or []
        return [self._chunk([self._choice(i, text, None, None)]) for i, text in enumerate(echoes)]

    def chunk(self, increment: Increment) -> dict[str, Any]:
        index, text = increment.index, increment.text
        with_prompt = index in self._late_echoes
        text = self._late_echoes.pop(index, "") + text
        logprobs = self._logprobs(increment, index, with_prompt)
        return self._chunk([self._choice(index, text, logprobs, increment.finish_reason)], increment.trace)

    def whole(self) -> dict[str, Any]:
        choices = []
        for i, part in enumerate(self.parts):
            text = (self.echoes[i] if self.echoes else "") + part.text
            logprobs = self._logprobs(part, i, bool(self._late_echoes))
            choices.append(self._choice(i, text, logprobs, part.finish_reason))
            if self.num_prompt_logprobs is not None:
                scores = by_token_id(self.requests[i], self.num_prompt_logprobs, self.tokens)
                choices[-1]["prompt_logprobs"] = scores
        return self._envelope(self.object_name, choices) | self._figures()

    @staticmethod
    def _choice(index: int, text: str, logprobs: Any, finish_reason: str | None) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}

    def _logprobs(self, of: Part | Increment, index: int, with_prompt: bool) -> dict[str, Any] | None:
        num_top = self.requests[index].params.logprobs
        if num_top is None:
            return None
        form: dict[str, list[Any]] = {
            "tokens": [self.tokens.text(t) for t in of.token_ids],
            "token_logprobs": [finite(x) for x in of.logprobs],
            "top_logprobs": [{self.tokens.text(t): finite(x) for t, x in ranked(top)} for top in of.top_logprobs],
        }
        if with_prompt:
            prompt = echoed(self.requests[index], num_top, self.tokens)
            form = {name: prompt[name] + values for name, values in form.items()}
        return form | {"text_offset": self._offsets(self.parts[index], form["tokens"])}

    @staticmethod
    def _offsets(part: Part, texts: list[str]) -> list[int]:
        offsets = []
        for text in texts:
            offsets.append(part.num_token_chars)
            part.num_token_chars += len(text)
        return offsets


class GenerateAnswer(_Base):
    """SGLang's form: a stream repeats the whole text so far."""

    def __init__(
        self,
        request_id: str,
        generation: Generation,
        tokens: TokenTexts,
        is_list: bool,
        logprob_start: int = -1,
    ):
        """logprob_start: the prompt's first token in `input_token_logprobs`; -1: none is."""
        super().__init__(request_id, generation, tokens)
        self.is_list, self.logprob_start = is_list, logprob_start
        self.arrived_s = generation.arrived_s

    def first_chunks(self) -> list[dict[str, Any]]:
        return []

    def last_chunks(self) -> list[dict[str, Any]]:
        return []

    def chunk(self, increment: Increment) -> dict[str, Any]:
        return self._one(increment.index)

    def whole(self) -> Any:
        every = [self._one(i) for i in range(len(self.parts))]
        return every if self.is_list else every[0]

    def _one(self, index: int) -> dict[str, Any]:
        request, part = self.requests[index], self.parts[index]
        reason = part.finish_reason
        about: dict[str, Any] = {
            "id": self.request_id,
            "finish_reason": None if reason is None else {"type": reason},
            "prompt_tokens": len(request.prompt_token_ids),
            "completion_tokens": len(part.token_ids),
            "cached_tokens": num_cached(request),
            "spec_verify_ct": request.num_rounds,
            "e2e_latency": time.perf_counter() - self.arrived_s,
        }
        if request.params.logprobs is not None:
            pairs = zip(part.logprobs, part.token_ids, strict=True)
            about["output_token_logprobs"] = [[finite(x), t, self.tokens.text(t)] for x, t in pairs]
            about["output_top_logprobs"] = [
                [[finite(x), t, self.tokens.text(t)] for t, x in ranked(top)] for top in part.top_logprobs
            ]
        if self.logprob_start >= 0 and reason is not None:  # once: they may be longer than all else
            about |= from_position(request, self.logprob_start, self.tokens)
        return {"index": index, "text": part.text, "output_ids": part.token_ids, "meta_info": about}


def _delta_as_json(delta: Delta) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if delta.reasoning:
        fields["reasoning_content"] = delta.reasoning
    if delta.content:
        fields["content"] = delta.content
    if delta.calls:
        fields["tool_calls"] = [{"index": piece.index} | _call_as_json(piece) for piece in delta.calls]
    return fields


def _call_as_json(call: Call) -> dict[str, Any]:
    """A call, or a piece of one, which has neither id nor name."""
    if call.name is None:
        return {"function": {"arguments": call.arguments}}
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def usage_of(requests: tuple[Request, ...]) -> dict[str, Any]:
    """OpenAI's usage. A prompt counts once, whatever the number of its choices."""
    prompt = sum(len(r.prompt_token_ids) for r in requests if r.choice_index == 0)
    completion = sum(len(r.output_token_ids) for r in requests)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(num_cached(r) for r in requests if r.choice_index == 0)},
    }


def num_cached(request: Request) -> int:
    """Prompt tokens whose KV was in the prefix cache when the request was admitted."""
    return request.num_cached_tokens


def speculation_of(requests: tuple[Request, ...]) -> dict[str, Any]:
    """Extension: how finished requests were speculated; accept_length counts the bonus token, null without a round."""
    metrics = metrics_of(list(requests))
    accept_length = metrics.accept_length
    return {
        "rounds": metrics.num_rounds,
        "accept_length": None if math.isnan(accept_length) else accept_length,
        "accepted_per_depth": list(metrics.accepted_per_depth),
    }
