"""The bodies that the server reads. Every limit of a body is checked here; what the model limits, `LLM` checks.

A field set to null is as if it were absent. An unknown field is refused, as is what is known but not supported yet:
silence would let a client believe that its setting has an effect.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from treedraft.errors import RequestError
from treedraft.server.structured import StructuredFields
from treedraft.types import SamplingParams

INT32_MAX = 2**31 - 1
MAX_CHOICES = 128  # choices of one body, over all its prompts
MAX_STOPS = 64
MAX_TOP_LOGPROBS = 20
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

    def sampling(self, max_tokens: int, logprobs: int | None, speculative: Speculative) -> SamplingParams:
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
            num_draft_tokens=speculative.num_draft_tokens if speculative.enabled else 1,
            structured=self.structured(),
        )


# Known elsewhere, not supported here; and the values of it that ask for nothing.
_REFUSED: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "guided_json": (),
    "guided_regex": (),
    "guided_grammar": (),
    "guided_choice": (),
    "prompt_logprobs": (),
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
    speculative: Speculative = Speculative()
    treedraft: Tracing = Tracing()
    # Read by services around a model, not by a model.
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    parallel_tool_calls: Any = None

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        for name, harmless in _REFUSED.items():
            if data.get(name) is not None and data[name] not in harmless:
                raise ValueError(f"{name} is not supported by this server yet; leave it out")
        return {k: v for k, v in data.items() if k not in _REFUSED}

    @model_validator(mode="after")
    def _check_stream_options(self) -> _OpenAIBody:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options need stream: true")
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
    logprobs: Annotated[Int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    echo: Bool = False

    @model_validator(mode="after")
    def _check(self) -> CompletionBody:
        if self.echo and self.logprobs is not None:
            raise ValueError("echo with logprobs needs log-probabilities of the prompt, which are not supported yet")
        if len(self.prompts) * self.n > MAX_CHOICES:
            raise ValueError(f"prompts times n must be at most {MAX_CHOICES}; got {len(self.prompts)} x {self.n}")
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        is_one = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        return [self.prompt] if is_one else list(self.prompt)  # type: ignore[list-item, arg-type]

    def params(self) -> SamplingParams:
        return self.sampling(self.max_tokens or 16, self.logprobs, self.speculative)


class TextPart(Body):
    type: Literal["text"]
    text: Text


class Message(Body):
    """One message. Fields that a client's own library returned as null are ignored."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Text | list[TextPart]
    name: Text | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_calls(cls, data: Any) -> Any:
        if isinstance(data, dict) and (data.get("role") in ("tool", "function") or data.get("tool_calls")):
            raise ValueError("tool calls are not supported by this server yet")
        return data

    def as_template_input(self) -> dict[str, str]:
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": self.role, "content": content}


class ChatBody(_OpenAIBody):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=4096)]
    max_completion_tokens: Annotated[Int, Field(ge=1)] | None = None
    logprobs: Bool = False
    top_logprobs: Annotated[Int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None

    @model_validator(mode="after")
    def _check(self) -> ChatBody:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs need logprobs: true")
        return self

    def conversation(self) -> list[dict[str, str]]:
        return [message.as_template_input() for message in self.messages]

    def params(self, max_context: int) -> SamplingParams:
        """Without a limit in the body, the answer ends where the context does."""
        max_tokens = self.max_completion_tokens or self.max_tokens or max_context
        return self.sampling(max_tokens, (self.top_logprobs or 0) if self.logprobs else None, self.speculative)


class GenerateSampling(_Sampling):
    max_new_tokens: Annotated[Int, Field(ge=1)] = 128


class GenerateBody(Body):
    """POST /generate, in SGLang's form; one prompt or several."""

    text: Text | Annotated[list[Text], Field(min_length=1, max_length=MAX_CHOICES)] | None = None
    input_ids: TokenIds | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_CHOICES)] | None = None
    sampling_params: GenerateSampling = GenerateSampling()
    stream: Bool = False
    return_logprob: Bool = False
    top_logprobs_num: Annotated[Int, Field(ge=0, le=MAX_TOP_LOGPROBS)] = 0
    speculative: Speculative = Speculative()

    @model_validator(mode="after")
    def _check(self) -> GenerateBody:
        if (self.text is None) == (self.input_ids is None):
            raise ValueError("give text or input_ids, one of the two")
        if len(self.prompts) * self.sampling_params.n > MAX_CHOICES:
            raise ValueError(f"prompts times n must be at most {MAX_CHOICES}")
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
        return self.sampling_params.sampling(self.sampling_params.max_new_tokens, logprobs, self.speculative)


class TokenizeBody(Body):
    """POST /tokenize: a text, or a conversation through the chat template."""

    model: Text | None = None
    prompt: Text | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=4096)] | None = None

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
