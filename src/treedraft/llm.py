"""`LLM`: offline generation. Joins engine and runner."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any, cast

import torch

from treedraft._patcher import in_force
from treedraft.config import EngineConfig, SpeculativeConfig, offered_shapes
from treedraft.engine.engine import Engine
from treedraft.engine.request import Request, metrics_of
from treedraft.engine.scheduler import Scheduler
from treedraft.engine.shapes import ShapeChooser
from treedraft.engine.text import TextStream
from treedraft.errors import RequestError
from treedraft.grammar.compiler import GrammarCompiler
from treedraft.runner.build import build
from treedraft.speculative.noise import noise_key
from treedraft.speculative.sampling import MAX_STOP_IDS
from treedraft.types import RequestOutput, SamplingParams
from treedraft.weights.chat_template import render_chat
from treedraft.weights.loader import METADATA_FILES, resolve_folder
from treedraft.weights.tokenizer import load_tokenizer

Prompt = str | Sequence[int]


class LLM:
    """A model, its draft head, and the engine that runs them.

    Raises ConfigError or CheckpointError when what was asked for cannot work; `notes` holds what was decided at start.

    >>> llm = LLM("demo")
    >>> [output] = llm.generate(["Once upon a time"], SamplingParams(temperature=0, max_tokens=32))
    >>> output.outputs[0].text, output.metrics.accept_length
    """

    def __init__(
        self,
        model: str = "demo",
        draft: str | None = None,
        device: str = "auto",
        dtype: str = "auto",
        page_size: int = 16,
        max_context: int | None = None,
        max_batch: int = 8,
        chunked_prefill: int = 4096,
        prefix_cache: bool = True,
        speculative: SpeculativeConfig | None = SpeculativeConfig(),  # noqa: B008  frozen
        seed: int = 0,
        kv_memory_bytes: int | None = None,
        mem_fraction_static: float = 0.85,
        max_pending: int | None = None,
        cuda_graph: str = "auto",
        attention_backend: str = "auto",
        draft_attention_backend: str = "auto",
        debug: str | None = None,  # "redzone", "redzone,unguarded": see debug.redzone
        capture: str = "auto",
        load_format: str = "auto",
        deterministic: bool = False,
    ):
        has_cuda = torch.cuda.is_available()
        config = EngineConfig(
            model=str(model),
            draft=None if draft is None else str(draft),
            load_format=load_format,
            device=device,
            dtype=dtype,
            page_size=page_size,
            max_context=max_context,
            max_batch=max_batch,
            chunked_prefill=chunked_prefill,
            prefix_cache=prefix_cache,
            kv_memory_bytes=kv_memory_bytes,
            mem_fraction_static=mem_fraction_static,
            speculative=speculative,
            max_pending=max_pending if max_pending is not None else int(has_cuda and device != "cpu"),
            cuda_graph=cuda_graph,
            attention_backend=attention_backend,
            draft_attention_backend=draft_attention_backend,
            capture=capture,
            deterministic=deterministic,
            seed=seed,
        ).resolve(has_cuda)
        # By name: nothing but this line knows that there is debugging, and nothing pays for it.
        zones = None if debug is None else import_module("treedraft.debug.redzone").red_zones(debug, config)
        built = build(config) if zones is None else build(config, zones.buffers)
        self.config, self.runner, self.notes = built.config, built.runner, built.notes
        self.vocab_size, self.eos_token_ids = built.vocab_size, built.eos_token_ids
        self.tokenizer = load_tokenizer(resolve_folder(config.model, files=METADATA_FILES))
        self.grammars = GrammarCompiler(self.tokenizer, self.vocab_size, self.eos_token_ids)
        runner = built.runner if zones is None else zones.watch(built)
        tree = self.config.speculative
        chooser = ShapeChooser(offered_shapes(tree), built.round_times) if tree is not None and tree.auto else None
        self.engine = Engine(Scheduler(self.config, built.kv, chooser=chooser), runner, self.config.max_pending)
        self._sizes = built.sizes
        self._next_id = 0

    # ------------------------------------------------------------------ generating

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] = SamplingParams(),  # noqa: B008  frozen
        progress: bool = True,
    ) -> list[RequestOutput]:
        """Generate for every prompt, texts or token ids; results in the order of the prompts.

        Every prompt is checked before the first token is generated (RequestError names the prompt's number). A request
        that fails later has finish_reason "error" and says why; the others go on.
        """
        every = _as_list(prompts)
        many = [params] * len(every) if isinstance(params, SamplingParams) else list(params)
        if len(many) != len(every):
            raise RequestError(f"as many SamplingParams as prompts are needed: {len(every)}; got {len(many)}")
        groups = []
        first_id = self._next_id
        for number, (prompt, one) in enumerate(zip(every, many, strict=True)):
            try:
                groups.append(self._requests(prompt, one))
            except RequestError as error:
                self._next_id = first_id  # a refused call leaves no trace: unseeded requests derive keys from it
                raise RequestError(f"prompt {number}: {error}") from error
        self._run([r for group in groups for r in group], progress)
        return [self._output(p, group) for p, group in zip(every, groups, strict=True)]

    def chat(
        self,
        messages: Sequence[dict[str, Any]] | Sequence[Sequence[dict[str, Any]]],
        params: SamplingParams = SamplingParams(),  # noqa: B008  frozen
        progress: bool = True,
        tools: Sequence[dict[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Generate the assistant's turn of one conversation, or of several, through the tokenizer's chat template.

        tools: functions in OpenAI's form, for templates that know tools. chat_template_kwargs: a template's variables.
        """
        if self.tokenizer is None or not getattr(self.tokenizer, "chat_template", None):
            raise RequestError("this checkpoint has no chat template; use generate() with a prompt of your own form")
        if not messages:
            raise RequestError("chat needs at least one message; got none")
        conversations = [messages] if isinstance(messages[0], dict) else messages
        prompts = [self._encode_chat(c, tools, chat_template_kwargs) for c in conversations]
        return self.generate(prompts, params, progress)

    # ------------------------------------------------------------------ text and facts

    def encode(self, text: str) -> list[int]:
        """Token ids of a text."""
        if self.tokenizer is None:
            raise RequestError(f"{self.config.model!r} has no tokenizer files; give prompts as token ids")
        return list(self.tokenizer(text)["input_ids"])

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids."""
        if self.tokenizer is None:
            raise RequestError(f"{self.config.model!r} has no tokenizer files")
        return self.tokenizer.decode(list(token_ids), skip_special_tokens=True)

    def info(self) -> dict[str, Any]:
        """What was decided at start. `revert_digest` is the same in processes that run the same reverted code."""
        reverted = in_force()
        return {
            "config": self.config,
            "notes": list(self.notes),
            "bytes": dict(self._sizes),
            "reverted_fixes": list(reverted.ids),
            "revert_digest": reverted.digest,
        }

    # ------------------------------------------------------------------ parts

    def _encode_chat(
        self,
        messages: Any,
        tools: Sequence[dict[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        is_list = isinstance(messages, list | tuple) and len(messages) > 0
        if not is_list or not all(map(_is_message, messages)):
            raise RequestError(
                f"a conversation is a list of {{'role': ..., 'content': ...}} messages; got {messages!r}"
            )
        assert self.tokenizer is not None
        text = render_chat(self.tokenizer, messages, tools, chat_template_kwargs or {})
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _requests(self, prompt: Prompt, params: SamplingParams) -> list[Request]:
        if not isinstance(prompt, Sequence):
            raise RequestError(f"a prompt is a text or a list of token ids; got {prompt!r}")
        token_ids = self.encode(prompt) if isinstance(prompt, str) else list(prompt)
        stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else set(self.eos_token_ids))
        self._check(token_ids, params, stop_ids)
        grammar = None if params.structured is None else self.grammars.compile(params.structured)
        assert self.config.max_context is not None
        number, self._next_id = self._next_id, self._next_id + params.n
        seed = params.seed if params.seed is not None else noise_key(self.config.seed, number + 1)
        requests = [
            Request(
                request_id=number + choice,
                prompt_token_ids=tuple(token_ids),
                params=params,
                choice_index=choice,
                noise_key=noise_key(seed, choice),
                stop_token_ids=stop_ids,
                max_len=min(len(token_ids) + params.max_tokens, self.config.max_context),
                text=TextStream(self.tokenizer, params.stop),
                grammar=None if grammar is None else grammar.start(params.min_tokens, stop_ids),
            )
            for choice in range(params.n)
        ]
        self.engine.scheduler.check_fits(requests[0])
        return requests

    def _check(self, token_ids: list[int], params: SamplingParams, stop_ids: frozenset[int]) -> None:
        if not token_ids:
            raise RequestError("the prompt is empty; at least one token is needed")
        for i, t in enumerate(token_ids):
            if not isinstance(t, int) or not 0 <= t < self.vocab_size:
                raise RequestError(f"token ids must be integers in 0..{self.vocab_size - 1}; got {t!r} at index {i}")
        assert self.config.max_context is not None
        if len(token_ids) >= self.config.max_context:
            raise RequestError(
                f"the prompt has {len(token_ids)} tokens; the context of {self.config.max_context} must hold it and at "
                "least one more: shorten it or raise max_context"
            )
        for name, ids in (("logit_bias", params.logit_bias), ("stop_token_ids", params.stop_token_ids)):
            bad = [t for t in ids if not 0 <= t < self.vocab_size]
            if bad:
                raise RequestError(f"{name} names token {bad[0]}; the vocabulary is 0..{self.vocab_size - 1}")
        if params.min_tokens and len(stop_ids) > MAX_STOP_IDS:
            raise RequestError(
                f"min_tokens can mask at most {MAX_STOP_IDS} stop ids, end-of-sequence included; got {len(stop_ids)}"
            )
        if params.stop and self.tokenizer is None:
            raise RequestError("stop strings need a tokenizer, which this checkpoint lacks; use stop_token_ids")

    def _run(self, requests: list[Request], progress: bool) -> None:
        try:
            for request in requests:
                self.engine.scheduler.add(request)
            with _progress_bar(len(requests), progress) as advance:
                while not self.engine.is_idle:
                    changed = self.engine.step()
                    advance(sum(r.is_finished for r in changed))
        except BaseException:
            self.engine.reset()  # an interrupt leaves the engine usable
            raise

    def _output(self, prompt: Prompt, requests: list[Request]) -> RequestOutput:
        return RequestOutput(
            prompt=prompt if isinstance(prompt, str) else None,
            prompt_token_ids=requests[0].prompt_token_ids,
            outputs=tuple(r.choice() for r in requests),
            metrics=metrics_of(requests),
            prompt_logprobs=None if requests[0].params.prompt_logprobs is None else requests[0].whole_prompt_logprobs(),
        )


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and "role" in message and bool({"content", "tool_calls"} & set(message))


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt (a text, or token ids) or several, as a list of prompts."""
    if not isinstance(prompts, Sequence):
        raise RequestError(f"prompts are texts or lists of token ids; got {prompts!r}")
    is_one = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int))
    return [cast(Prompt, prompts)] if is_one else list(cast(Sequence[Prompt], prompts))


@contextmanager
def _progress_bar(total: int, is_shown: bool) -> Iterator[Callable[[int], None]]:
    """Yield a function that advances a bar over `total` requests; the bar is not drawn unless `is_shown`."""
    from rich.progress import Progress

    with Progress(transient=True, disable=not is_shown) as bar:
        task = bar.add_task("generating", total=total)
        yield lambda count: bar.advance(task, count)
