"""A stand-in for `LLM` without a model: a token is a character, the text a fixed function of the prompt."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

from treedraft.debug.trace import RoundTrace
from treedraft.errors import RequestError
from treedraft.types import Choice, RequestMetrics, RequestOutput, SamplingParams


class FakeLLM:
    """Knows `LLM`'s surface; speculation emits up to 3 tokens a round through a tree of 5 nodes.

    `wrong_at`: with speculation, the token at this index differs.
    """

    built: list[dict[str, Any]] = []  # the arguments of every construction

    def __init__(self, model: str = "demo", wrong_at: int | None = None, **arguments: Any):
        arguments = {"model": model, **arguments}
        FakeLLM.built.append(arguments)
        self.wrong_at = wrong_at
        self.speculative = arguments.get("speculative")
        self.config = SimpleNamespace(**{**arguments, "device": "cpu", "dtype": "float32"})
        self.notes = ("a fake",)
        self.tokenizer = SimpleNamespace(decode=lambda ids, skip_special_tokens=False: "".join(map(chr, ids)))
        self.eos_token_ids: tuple[int, ...] = ()
        self.runner = SimpleNamespace(observer=None)
        self._next_id = 0

    def encode(self, text: str) -> list[int]:
        return [ord(c) for c in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))

    def info(self) -> dict[str, Any]:
        return {"config": {"model": "fake"}, "notes": []}

    def generate(
        self,
        prompts: list[str | list[int]],
        params: SamplingParams | list[SamplingParams],
        progress: bool = True,
    ) -> list[RequestOutput]:
        if "" in prompts:
            raise RequestError("prompt 0: the prompt is empty; at least one token is needed")
        trace = self.runner.observer.trace if self.runner.observer else None
        many = params if isinstance(params, list) else [params] * len(prompts)
        return [self._one(prompt, one, trace) for prompt, one in zip(prompts, many, strict=True)]

    def chat(
        self, messages: list[dict[str, str]], params: SamplingParams, progress: bool = True
    ) -> list[RequestOutput]:
        """As `generate` on the messages' texts, joined by "|"."""
        return self.generate(["|".join(m["content"] for m in messages)], params, progress)

    def _one(self, prompt: str | list[int], params: SamplingParams, trace: list[RoundTrace] | None) -> RequestOutput:
        prompt_ids = self.encode(prompt) if isinstance(prompt, str) else list(prompt)
        choices, num_rounds = [], 0
        for index in range(params.n):
            ids = [97 + (len(prompt_ids) + index + i * i) % 26 for i in range(params.max_tokens)]
            if self.speculative is not None and self.wrong_at is not None and self.wrong_at < len(ids):
                ids[self.wrong_at] = ord("!")
            num_rounds += self._trace(prompt_ids, ids, self._next_id, trace)
            self._next_id += 1
            choices.append(Choice(index, self.decode(ids), tuple(ids), "length"))
        num_tokens = params.max_tokens * params.n
        metrics = RequestMetrics(
            num_prompt_tokens=len(prompt_ids),
            num_rounds=num_rounds,
            num_generated_tokens=num_tokens,
            accept_length=(num_tokens - params.n) / num_rounds if num_rounds else math.nan,
            accepted_per_depth=(1.0, 0.5)[: 1 + len(prompt_ids) % 2] if self.speculative else (),
            elapsed_s=0.5,
            tokens_per_s=num_tokens / 0.5,
        )
        return RequestOutput(prompt if isinstance(prompt, str) else None, tuple(prompt_ids), tuple(choices), metrics)

    def _trace(self, prompt_ids: list[int], ids: list[int], request_id: int, trace: list[RoundTrace] | None) -> int:
        """Rounds of 3 tokens (2 accepted, 1 bonus), the last one cut; returns their number."""
        step = 1 if self.speculative is None else 3
        starts = range(1, len(ids), step)
        for start in starts if trace is not None and self.speculative is not None else ():
            run = (ids[start : start + 3] + [63, 63, 63])[:3]
            trace.append(
                make_round(request_id, len(prompt_ids) + start - 1, ids[start - 1], run, min(3, len(ids) - start))
            )
        return len(starts)


def make_round(request_id: int, kv_len: int, root: int, run: list[int], num_emitted: int = 3) -> RoundTrace:
    """A round whose tree is root -> run[0] -> run[1] beside two rejected nodes ("-", and "&" under it)."""
    return RoundTrace(
        slot=0,
        request_id=request_id,
        kv_len=kv_len,
        token_ids=(root, ord("-"), run[0], ord("&"), run[1], -1),
        parents=(-1, 0, 0, 1, 2, 0),
        depths=(0, 1, 1, 2, 2, 1),
        scores=(0.0, -0.4, -1.1, -1.2, -1.9, -math.inf),
        draft_probs=(1.0, 0.67, 0.33, 0.45, 0.46, 0.0),
        sampled=(run[0], 1, run[1], 2, run[2], 3),
        accepted_columns=(0, 2, 4),
        emitted_token_ids=tuple(run[:num_emitted]),
    )
