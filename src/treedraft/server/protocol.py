"""The bodies that the server reads. Every limit of a body is checked here; what the model limits, `LLM` checks.

A field set to null is as if it were absent. An unknown field is refused, as is what is known but not supported:
silence would let a client believe that its setting has an effect.
"""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from treedraft.errors import RequestError
from treedraft.server.reply.forced import NO_ARGUMENTS, forced_schema
from treedraft.server.structured import StructuredFields
from treedraft.types import SamplingParams, StructuredOutput

INT32_MAX = 2**31 - 1
MAX_CHOICES = 128  # choices of one body, over all its prompts
MAX_STOPS = 64
MAX_TOP_LOGPROBS = 20
MAX_DEPTH = 64  # of a tool's schema, and of the arguments of a call
MAX_TOOLS = 128  # of one body, or calls of one message
MIN_TEMPERATURE = 1e-3  # below, quotients of float32 logits lose what tells two tokens apart; 0 is greedy


def _encodable(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"the text is no Unicode: {error.reason} at character {error.start}") from error
    return text


Text = Annotated[str, Field(strict=True), AfterValidator(_encodable)]
Int = Annotated[int, Field(strict=True, ge=-INT32_MAX, le=INT32_MAX)]
Float = Annotated[float, Field(strict=True, ge=-1e6, le=1e6, allow_inf_nan=False)]
Bool = Annotated[bool, Field(strict=True)]
TemplateVariables = dict[Text, Text | Bool | Int | Float]  # of a chat template
TokenIds = Annotated[list[Int], Field(min_length=1)]


class Body(BaseModel):
    """A JSON object of known fields."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, data: Any) -> Any:
        return {k: v for k, v in data.items() if v is not None} if isinstance(data, dict) else data


class StreamOptions(Body):
    include_usage: Bool = False


class Speculative(Body):
    """Extension: how this request is speculated. The text is the same either way."""

    enabled: Bool = True
    num_draft_tokens: Annotated[Int, Field(ge=1)] | None = None  # nodes of each tree, at most the server's


class Tracing(Body):
    """Extension: what a stream carries beside its text, for the tree explorer."""

    trace: Bool = False  # each chunk's rounds, see server.pages.rounds


class _Sampling(Body, StructuredFields):
    """Fields that every kind of generation has."""

    temperature: Annotated[Float, Field(ge=0, le=100)] = 1.0
    top_p: Float = 1.0
    top_k: Int = 0
    min_p: Float = 0.0
    n: Annotated[Int, Field(ge=1, le=MAX_CHOICES)] = 1
    stop: Text | Annotated[list[Text], Field(max_length=MAX_STOPS)] = []
    stop_token_ids: Annotated[list[Int], Field(max_length=1024)] = []
    seed: Annotated[int, Field(strict=True, ge=-(2**63), lt=2**64)] | None = None
    presence_penalty: Float = 0.0
    frequency_penalty: Float = 0.0
    repetition_penalty: Annotated[Float, Field(ge=0.01, le=100)] = 1.0
    logit_bias: dict[int, Annotated[Float, Field(ge=-100, le=100)]] = {}
    ignore_eos: Bool = False
    min_tokens: Annotated[Int, Field(ge=0)] = 0
    skip_special_tokens: Literal[True] = True

    def sampling(
        self, max_tokens: int, logprobs: int | None, prompt_logprobs: int | None, speculative: Speculative
    ) -> SamplingParams:
        """Raises RequestError for a value out of its range."""
        if 0 < self.temperature < MIN_TEMPERATURE:
            raise RequestError(f"temperature must be 0, or at least {MIN_TEMPERATURE}; got {self.temperature!r}")
        if self.min_tokens > max_tokens:
            raise RequestError(f"min_tokens must be at most max_tokens, {max_tokens}; got {self.min_tokens}")
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            n=self.n,
            seed=self.seed,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=self.logit_bias,
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop),
            stop_token_ids=tuple(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
            min_tokens=self.min_tokens,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            num_draft_tokens=speculative.num_draft_tokens if speculative.enabled else 1,
            structured=self.structured(),
        )


# Known elsewhere, not supported here; and the values of it that ask for nothing.
_REFUSED: dict[str, tuple[Any, ...]] = {
    "functions": ([],),
    "function_call": ("none", "auto"),
    "guided_json": (),
    "guided_regex": (),
    "guided_grammar": (),
    "guided_choice": (),
    "suffix": ("",),
    "modalities": (["text"],),
    "audio": (),
    "reasoning_effort": (),
    "web_search_options": (),
    "best_of": (1,),
}


class _OpenAIBody(_Sampling):
    model: Text | None = None
    max_tokens: Annotated[Int, Field(ge=1)] | None = None
    stream: Bool = False
    stream_options: StreamOptions | None = None
    prompt_logprobs: Annotated[Int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    speculative: Speculative = Speculative()
    treedraft: Tracing = Tracing()
    # Read by services around a model, not by a model.
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        for name, harmless in _REFUSED.items():
            if data.get(name) is not None and data[name] not in harmless:
                remedy = "use structured_outputs" if name.startswith("guided_") else "leave it out"
                raise ValueError(f"{name} is not supported by this server; {remedy}")
        return {k: v for k, v in data.items() if k not in _REFUSED}

    @model_validator(mode="after")
    def _check_stream(self) -> _OpenAIBody:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options need stream: true")
        if self.prompt_logprobs is not None and self.stream:
            raise ValueError("prompt_logprobs need an answer that is no stream")
        return self

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionBody(_OpenAIBody):
    """POST /v1/completions."""

    prompt: (
        Text
        | TokenIds
        | Annotated[list[Text], Field(min_length=1, max_length=MAX_CHOICES)]
        | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_CHOICES)]
    )
    max_tokens: Annotated[Int, Field(ge=0)] | None = None  # 0: only what the prompt's tokens are worth
    logprobs: Annotated[Int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    echo: Bool = False

    @model_validator(mode="after")
    def _check(self) -> CompletionBody:
        if self.max_tokens == 0 and self.scored is None:
            raise ValueError("max_tokens must be at least 1, or 0 with prompt_logprobs, or with echo and logprobs")
        if len(self.prompts) * self.n > MAX_CHOICES:
            raise ValueError(f"prompts times n must be at most {MAX_CHOICES}; got {len(self.prompts)} x {self.n}")
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        is_one = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        return [self.prompt] if is_one else list(self.prompt)  # type: ignore[list-item, arg-type]

    @property
    def scored(self) -> int | None:
        """How many best tokens are wanted beside each prompt token's log-probability; None: neither."""
        wanted = [k for k in (self.prompt_logprobs, self.logprobs if self.echo else None) if k is not None]
        return max(wanted, default=None)

    def params(self) -> SamplingParams:
        max_tokens = 16 if self.max_tokens is None else self.max_tokens
        return self.sampling(max_tokens, self.logprobs, self.scored, self.speculative)


class TextPart(Body):
    type: Literal["text"]
    text: Text


_SURROGATE = re.compile("[\ud800-\udfff]")


def _is_plain(value: Any, depth: int = MAX_DEPTH) -> bool:
    """Whether a JSON value is no deeper than that, and its texts are Unicode: then a template can write it."""
    if isinstance(value, dict):
        return depth > 0 and all(_is_plain(x, depth - 1) for pair in value.items() for x in pair)
    if isinstance(value, list):
        return depth > 0 and all(_is_plain(x, depth - 1) for x in value)
    return not isinstance(value, str) or not _SURROGATE.search(value)


class CalledFunction(Body):
    name: Text
    arguments: Text = ""


class MessageCall(Body):
    """A call that the assistant made earlier."""

    id: Text | None = None
    type: Literal["function"] = "function"
    function: CalledFunction
    index: Int | None = None  # of a stream's call, as clients keep it

    def as_template_input(self) -> dict[str, Any]:
        """Arguments as an object, where they are one: templates that want text are given it by `LLM`."""
        arguments: Any = self.function.arguments or "{}"
        try:
            parsed = json.loads(arguments)
        except (ValueError, RecursionError):
            parsed = None
        if isinstance(parsed, dict) and _is_plain(parsed):  # else the model's own mistake, which it may see
            arguments = parsed
        about = {"id": self.id} if self.id is not None else {}
        return {**about, "type": "function", "function": {"name": self.function.name, "arguments": arguments}}


class Message(Body):
    """One message. Fields that a client's own library returned as null are ignored."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | list[TextPart] | None = None
    name: Text | None = None
    reasoning_content: Text | None = None  # what the assistant thought
    tool_calls: Annotated[list[MessageCall], Field(max_length=MAX_TOOLS)] = []
    tool_call_id: Text | None = None
    refusal: Text | None = None
    annotations: list[Any] = []

    @model_validator(mode="after")
    def _check(self) -> Message:
        if self.role != "assistant" and (self.tool_calls or self.reasoning_content is not None):
            raise ValueError("tool_calls and reasoning_content belong to messages of the assistant")
        if (self.role == "tool") != (self.tool_call_id is not None):
            raise ValueError("tool_call_id belongs to each message of role tool, and to no other")
        if self.content is None and not self.tool_calls:
            raise ValueError("a message needs content, or tool_calls")
        return self

    def as_template_input(self, absent_content: str | None = "") -> dict[str, Any]:
        """absent_content: stands for the content of a message of calls alone."""
        content = self.content
        if isinstance(content, list):
            content = "".join(part.text for part in content)
        message: dict[str, Any] = {"role": self.role, "content": absent_content if content is None else content}
        if self.tool_calls:
            message["tool_calls"] = [call.as_template_input() for call in self.tool_calls]
        named = {n: getattr(self, n) for n in ("name", "reasoning_content", "tool_call_id")}
        return message | {n: value for n, value in named.items() if value is not None}


class Function(Body):
    name: Annotated[Text, Field(pattern="^[A-Za-z0-9_.-]{1,64}$")]
    description: Text | None = None
    parameters: dict[str, Any] | None = None  # JSON schema of an object; None: there are none
    strict: Bool | None = None

    @model_validator(mode="after")
    def _check(self) -> Function:
        if self.parameters is not None and not _is_plain(self.parameters):
            raise ValueError(f"parameters must be a JSON schema of Unicode text, at most {MAX_DEPTH} levels deep")
        kind = (self.parameters or {}).get("type", "object")
        if kind != "object":  # no form of a call could hold anything else
            raise ValueError(f"parameters must be the schema of an object; got type {kind!r}")
        return self


class Tool(Body):
    type: Literal["function"]
    function: Function

    def as_template_input(self) -> dict[str, Any]:
        fields = {name: getattr(self.function, name) for name in ("name", "description", "parameters", "strict")}
        return {"type": self.type, "function": {name: v for name, v in fields.items() if v is not None}}


class NamedFunction(Body):
    name: Text


class NamedTool(Body):
    type: Literal["function"] = "function"
    function: NamedFunction


class ChatBody(_OpenAIBody):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=4096)]
    max_completion_tokens: Annotated[Int, Field(ge=1)] | None = None
    logprobs: Bool = False
    top_logprobs: Annotated[Int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] = []
    tool_choice: Literal["none", "auto", "required"] | NamedTool = "auto"
    parallel_tool_calls: Bool = True
    chat_template_kwargs: TemplateVariables = {}

    @model_validator(mode="after")
    def _check(self) -> ChatBody:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs need logprobs: true")
        names = [tool.function.name for tool in self.tools]
        if len(set(names)) < len(names):
            raise ValueError("tools must have different names")
        if self.tool_choice == "required" and not names:
            raise ValueError("tool_choice required needs tools")
        if isinstance(self.tool_choice, NamedTool) and self.tool_choice.function.name not in names:
            raise ValueError(f"tool_choice names {self.tool_choice.function.name!r}, which is none of the tools")
        return self

    @property
    def offered_tools(self) -> list[Tool]:
        """The tools that may be called."""
        if isinstance(self.tool_choice, NamedTool):
            return [tool for tool in self.tools if tool.function.name == self.tool_choice.function.name]
        return [] if self.tool_choice == "none" else self.tools

    @property
    def must_call(self) -> bool:
        """Whether the answer must be calls, and nothing else."""
        return self.tool_choice not in ("none", "auto")

    @property
    def max_calls(self) -> int | None:
        is_one = not self.parallel_tool_calls or isinstance(self.tool_choice, NamedTool)
        return 1 if is_one else None

    @property
    def argument_schemas(self) -> dict[str, dict[str, Any]]:
        """JSON schema of the arguments of each tool that may be called, by name."""
        functions = [tool.function for tool in self.offered_tools]
        return {f.name: NO_ARGUMENTS if f.parameters is None else f.parameters for f in functions}

    def structured(self) -> StructuredOutput | None:
        """What the text must be: where calls are forced, a list of calls and nothing else."""
        own = super().structured()
        if not self.must_call:
            return own
        if own is not None:
            raise RequestError("a forced tool_choice and structured output exclude each other")
        return StructuredOutput(json_schema=forced_schema(self.argument_schemas, self.max_calls))

    def conversation(self, absent_content: str | None = "") -> list[dict[str, Any]]:
        return [message.as_template_input(absent_content) for message in self.messages]

    def params(self, max_context: int) -> SamplingParams:
        """Without a limit in the body, the answer ends where the context does."""
        max_tokens = self.max_completion_tokens or self.max_tokens or max_context
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        return self.sampling(max_tokens, logprobs, self.prompt_logprobs, self.speculative)


class GenerateSampling(_Sampling):
    max_new_tokens: Annotated[Int, Field(ge=0)] = 128


class GenerateBody(Body):
    """POST /generate, in SGLang's form; one prompt or several."""

    text: Text | Annotated[list[Text], Field(min_length=1, max_length=MAX_CHOICES)] | None = None
    input_ids: TokenIds | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_CHOICES)] | None = None
    sampling_params: GenerateSampling = GenerateSampling()
    stream: Bool = False
    return_logprob: Bool = False
    logprob_start_len: Annotated[Int, Field(ge=-1)] = -1  # of the prompt too, from this token on; -1: of the output
    top_logprobs_num: Annotated[Int, Field(ge=0, le=MAX_TOP_LOGPROBS)] = 0
    speculative: Speculative = Speculative()

    @model_validator(mode="after")
    def _check(self) -> GenerateBody:
        if (self.text is None) == (self.input_ids is None):
            raise ValueError("give text or input_ids, one of the two")
        if len(self.prompts) * self.sampling_params.n > MAX_CHOICES:
            raise ValueError(f"prompts times n must be at most {MAX_CHOICES}")
        if self.logprob_start_len >= 0 and not self.return_logprob:
            raise ValueError("logprob_start_len needs return_logprob: true")
        if self.sampling_params.max_new_tokens == 0 and self.logprob_start_len < 0:
            raise ValueError("max_new_tokens must be at least 1, or 0 with a logprob_start_len of 0 or more")
        return self

    @property
    def is_batch(self) -> bool:
        return not isinstance(self.text, str) and not (self.input_ids and isinstance(self.input_ids[0], int))

    @property
    def prompts(self) -> list[str | list[int]]:
        given = self.text if self.text is not None else self.input_ids
        return list(given) if self.is_batch else [given]  # type: ignore[arg-type, list-item]

    def params(self) -> SamplingParams:
        logprobs = self.top_logprobs_num if self.return_logprob else None
        of_prompt = logprobs if self.logprob_start_len >= 0 else None
        return self.sampling_params.sampling(self.sampling_params.max_new_tokens, logprobs, of_prompt, self.speculative)


class TokenizeBody(Body):
    """POST /tokenize: a text, or a conversation through the chat template."""

    model: Text | None = None
    prompt: Text | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=4096)] | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] = []
    chat_template_kwargs: TemplateVariables = {}

    @model_validator(mode="after")
    def _check(self) -> TokenizeBody:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give prompt or messages, one of the two")
        return self


class DetokenizeBody(Body):
    """POST /detokenize."""

    model: Text | None = None
    tokens: list[Int]


class AbortBody(Body):
    """POST /abort: the id that a response or its first chunk carries."""

    request_id: Text | None = None
    rid: Text | None = None  # SGLang's name

    @model_validator(mode="after")
    def _check(self) -> AbortBody:
        if (self.request_id is None) == (self.rid is None):
            raise ValueError("give request_id")
        return self
