"""The dataclasses that cross a package boundary.

Host side (plain Python, no torch): StructuredOutput, SamplingParams, StepPlan, StepResult, RequestOutput.
Device side (tensors): TreeRows, ModelOutput, DraftTree, Accepted.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from treedraft.errors import RequestError

if TYPE_CHECKING:
    from numpy import int32
    from numpy.typing import NDArray
    from torch import Tensor


# ---------------------------------------------------------------- host side


@dataclass(frozen=True)
class StructuredOutput:
    """What a text must be, all of it: exactly one of the fields is set. It is compiled by treedraft.grammar.

    >>> StructuredOutput(json_schema={"type": "object", "properties": {"age": {"type": "integer"}}})
    """

    json_schema: str | dict[str, Any] | None = None  # a JSON document that the schema accepts; kept as text
    regex: str | None = None  # a full match, in the syntax of Rust's regex crate
    grammar: str | None = None  # Lark, or EBNF as llama.cpp's: root ::= "yes" | "no"
    choice: tuple[str, ...] | None = None  # one of these texts
    json_object: bool = False  # any JSON object

    def __post_init__(self) -> None:
        given = [name for name in ("json_schema", "regex", "grammar", "choice") if getattr(self, name) is not None]
        given += ["json_object"] if self.json_object else []
        if len(given) != 1:
            raise RequestError(
                "structured output needs one of json_schema, regex, grammar, choice and json_object; "
                f"got {', '.join(given) or 'none'}"
            )
        for name in ("regex", "grammar"):
            value = getattr(self, name)
            _require(value is None or isinstance(value, str), f"{name} must be a text", value)
        if self.json_schema is not None:
            object.__setattr__(self, "json_schema", _schema_text(self.json_schema))
        if self.choice is not None:
            is_texts = not isinstance(self.choice, str) and all(isinstance(c, str) for c in self.choice)
            _require(is_texts and len(self.choice) > 0, "choice must be one or several texts", self.choice)
            object.__setattr__(self, "choice", tuple(self.choice))


def _schema_text(schema: object) -> str:
    """A JSON schema as JSON text. Whether it is a schema is seen when it is compiled."""
    if isinstance(schema, str):
        return schema
    try:
        return json.dumps(schema, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"json_schema must be JSON: {error}") from error


class Grammar(Protocol):
    """The grammar of one request's output, and how far that has come. Its one implementation: treedraft.grammar."""

    is_finished: bool  # the text is complete: nothing may follow
    error: str | None  # it can say nothing more: the request ends

    def advance(self, token_id: int) -> None:
        """Take the next token of the output."""

    def fill_masks(self, token_ids: Sequence[int], parents: Sequence[int], masks: NDArray[int32]) -> None:
        """Write which tokens may follow each node of a tree whose root is the output so far.

        token_ids, parents: of the N nodes, parents before children; the root's token is taken already. masks [N, W]:
        bit v & 31 of word v >> 5 is token v. All ones at a node that cannot be reached. Never raises: sets `error`.
        """


@dataclass(frozen=True)
class SamplingParams:
    """How one request's tokens are chosen. Temperature 0 is greedy."""

    max_tokens: int = 128
    temperature: float = 1.0
    top_k: int = 0  # 0 or -1: off
    top_p: float = 1.0
    min_p: float = 0.0
    n: int = 1  # choices generated for one prompt
    seed: int | None = None  # None: derived from the engine's seed and the request's number
    repetition_penalty: float = 1.0  # over prompt and output
    presence_penalty: float = 0.0  # over the output
    frequency_penalty: float = 0.0  # over the output
    logit_bias: dict[int, float] = field(default_factory=dict)
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0  # end-of-sequence and stop ids are masked until then
    logprobs: int | None = None  # None: none; k: the token's own and the k best of the raw distribution
    prompt_logprobs: int | None = None  # the same of every prompt token but the first; with it max_tokens may be 0
    num_draft_tokens: int | None = None  # nodes of each round's tree, at most the engine's; 1: no speculation
    structured: StructuredOutput | None = None  # what the text must be; None: anything

    def __post_init__(self) -> None:
        try:
            stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
            stop_token_ids = tuple(self.stop_token_ids or ())
            logit_bias = {int(k): float(v) for k, v in (self.logit_bias or {}).items()}
        except (AttributeError, TypeError, ValueError) as error:
            raise RequestError(
                "stop must be strings, stop_token_ids token ids, and logit_bias numbers by token id; "
                f"got {self.stop!r}, {self.stop_token_ids!r} and {self.logit_bias!r}"
            ) from error
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", stop_token_ids)
        object.__setattr__(self, "logit_bias", logit_bias)
        _require(all(map(_is_int, stop_token_ids)), "stop_token_ids must be integers", stop_token_ids)
        least = 1 if self.prompt_logprobs is None else 0
        _require(
            _is_int(self.max_tokens) and self.max_tokens >= least,
            f"max_tokens must be at least {least}",
            self.max_tokens,
        )
        _require(_is_real(self.temperature) and self.temperature >= 0, "temperature must be >= 0", self.temperature)
        _require(_is_int(self.top_k) and self.top_k >= -1, "top_k must be >= 1, or 0 to switch it off", self.top_k)
        _require(_is_real(self.top_p) and 0 < self.top_p <= 1, "top_p must be in (0, 1]", self.top_p)
        _require(_is_real(self.min_p) and 0 <= self.min_p <= 1, "min_p must be in [0, 1]", self.min_p)
        _require(_is_int(self.n) and self.n >= 1, "n must be at least 1", self.n)
        _require(
            self.seed is None or (_is_int(self.seed) and -(2**63) <= self.seed < 2**64),
            "seed must be an integer of at most 64 bits",
            self.seed,
        )
        _require(
            _is_real(self.repetition_penalty) and self.repetition_penalty > 0,
            "repetition_penalty must be > 0",
            self.repetition_penalty,
        )
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            _require(_is_real(value) and -2 <= value <= 2, f"{name} must be in [-2, 2]", value)
        for token_id, bias in self.logit_bias.items():
            _require(_is_real(bias), f"logit_bias of token {token_id} must be a finite number", bias)
        _require(all(isinstance(s, str) and s for s in self.stop), "stop must be non-empty strings", self.stop)
        _require(_is_int(self.min_tokens) and self.min_tokens >= 0, "min_tokens must be >= 0", self.min_tokens)
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            _require(value is None or (_is_int(value) and 0 <= value <= 20), f"{name} must be in 0..20", value)
        _require(
            self.num_draft_tokens is None or (_is_int(self.num_draft_tokens) and self.num_draft_tokens >= 1),
            "num_draft_tokens must be at least 1, or None for the engine's",
            self.num_draft_tokens,
        )
        _require(
            self.structured is None or isinstance(self.structured, StructuredOutput),
            "structured must be a StructuredOutput",
            self.structured,
        )


def _require(ok: bool, expected: str, given: object) -> None:
    if not ok:
        raise RequestError(f"{expected}; got {given!r}")


def _is_int(x: object) -> bool:
    return isinstance(x, int) and not isinstance(x, bool)


def _is_real(x: object) -> bool:
    import math

    return isinstance(x, int | float) and not isinstance(x, bool) and math.isfinite(x)


@dataclass(frozen=True)
class PrefillRow:
    """A stretch of a sequence's known tokens whose KV is made in this step. It owns its slot's pages already.

        prompt and, after a preemption, output:   0 ..... start ... start + len(token_ids) - 1 | next_token ...
                                                  in the pool      this step's rows

    The last draft row pairs with next_token. None: it is not known, but sampled from the last row.
    """

    request_id: int
    slot: int
    prompt_token_ids: tuple[int, ...]
    noise_key: int  # 64 bits, see speculative.noise
    sampling: SamplingParams
    stop_token_ids: tuple[int, ...]  # masked while fewer than min_tokens are generated
    output_token_ids: tuple[int, ...] = ()  # emitted before a preemption
    token_ids: tuple[int, ...] = ()
    start: int = 0
    next_token: int | None = None
    is_last: bool = True  # rounds may follow: next_token is the sequence's root
    scored: tuple[int, int] = (0, 0)  # positions whose next prompt token's log-probability is wanted: first, and end
    grammar: Grammar | None = None


class DecodeRow(NamedTuple):
    """One running sequence: a round is launched for it.

    A tuple, since hundreds are made in a step: 0.6 us each, where a frozen dataclass takes 1.9 (2026-12-01).
    """

    request_id: int
    slot: int
    max_kv_len: int  # upper end of the interval that the host knows for kv_len
    node_limit: int  # nodes of the tree that may be used, root included: as many as its pages hold
    sampling: SamplingParams
    is_exact: bool = False  # no round is in flight: kv_len is max_kv_len
    grammar: Grammar | None = None  # of its output up to the root


@dataclass(frozen=True)
class PageUpdate:
    """Pages appended to a sequence: page-table row `slot`, from column `column` on."""

    slot: int
    column: int
    pages: tuple[int, ...]


@dataclass(frozen=True)
class StepPlan:
    """What one step runs, in host integers."""

    released_slots: tuple[int, ...] = ()  # their page-table rows are cleared first
    page_updates: tuple[PageUpdate, ...] = ()
    prefills: tuple[PrefillRow, ...] = ()
    decodes: tuple[DecodeRow, ...] = ()
    shape: int = 0  # of the rounds' trees: index into config.offered_shapes
    freed_pages: tuple[int, ...] = ()  # neither owned nor cached since the last step; page_updates may name them again

    @property
    def is_empty(self) -> bool:
        return not (self.prefills or self.decodes or self.released_slots)


@dataclass(frozen=True)
class RowResult:
    """What one row of a step produced."""

    request_id: int
    is_round: bool  # False: the prefill's one token, or none where tokens of the sequence are still known
    token_ids: tuple[int, ...]  # accepted drafts in order, then the bonus token
    has_nan: bool  # the target's logits held a NaN: token_ids mean nothing
    logprobs: tuple[float, ...] | None  # of each token, raw target distribution
    top_logprobs: tuple[dict[int, float], ...] | None
    shape: int = 0  # of a round's tree: index into config.offered_shapes
    accepted_by_shape: tuple[int, ...] = ()  # drafts that a tree of each offered shape would have had accepted here
    ranks: tuple[int, ...] = ()  # of each accepted draft among its parent's children, in draft order from 0


@dataclass(frozen=True)
class PromptLogprob:
    """How likely a prompt token was after those before it, in the raw target distribution."""

    logprob: float
    rank: int  # among the whole vocabulary; 1: the likeliest
    top_logprobs: dict[int, float]  # of the k best tokens, the best first


@dataclass(frozen=True)
class ScoredTokens:
    """Log-probabilities of a stretch of a prompt: of the tokens start + 1, start + 2, ..."""

    request_id: int
    start: int
    logprobs: tuple[PromptLogprob, ...]


@dataclass(frozen=True)
class StepResult:
    """What a collected step produced."""

    rows: tuple[RowResult, ...]
    scored: tuple[ScoredTokens, ...] = ()  # of the prompts of prefilled rows
    overflow: str | None = None  # an index list was too small: the step's rounds are void, and this says which, and why


@dataclass(frozen=True)
class RequestMetrics:
    """How a choice was generated. `accept_length` = generated tokens / rounds, the prefill's token not counted."""

    num_prompt_tokens: int
    num_rounds: int
    num_generated_tokens: int
    accept_length: float  # NaN when there was no round
    accepted_per_depth: tuple[float, ...]  # share of rounds in which the draft at depth 1, 2, ... was accepted
    elapsed_s: float
    tokens_per_s: float
    num_cached_tokens: int = 0  # of the prompt, found in the prefix cache
    num_preemptions: int = 0


@dataclass(frozen=True)
class Choice:
    """One generated continuation."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str  # "stop" | "length" | "error" | "abort"
    logprobs: tuple[float, ...] | None = None
    top_logprobs: tuple[dict[int, float], ...] | None = None
    error: str | None = None


@dataclass(frozen=True)
class RequestOutput:
    """What `LLM.generate` returns for one prompt."""

    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[Choice, ...]
    metrics: RequestMetrics
    prompt_logprobs: tuple[PromptLogprob | None, ...] | None = (
        None  # of each prompt token, the first None; if asked for
    )


# -------------------------------------------------------------- device side


@dataclass(frozen=True)
class TreeRows:
    """R query rows for each of B sequences: nodes of a tree over that sequence's KV.

    Row r of sequence b sees logical positions [0, kv_lens[b]) and every tree slot
    kv_lens[b] + j, j < tree_len, whose bit j is set in ancestor_bits[b, r].

        logical:   0 ........ kv_len-1 | kv_len + 0 .. kv_len + tree_len-1
                   committed prefix    | tree slots (bits, own slot included)
    """

    page_table: Tensor  # [B, W] int32: the rows of the page table, by sequence
    kv_lens: Tensor  # [B] int64
    ancestor_bits: Tensor  # [B, R, words] int64, words of 64 bits
    tree_len: int  # number of tree slots that bits may name
    max_kv_len: int  # host upper bound of kv_lens; the static width of a captured graph


@dataclass(frozen=True)
class ModelOutput:
    """hidden: [..., H] after the final norm (lm_head's input). features: [..., taps*H] inputs of the tapped layers."""

    hidden: Tensor
    features: Tensor


@dataclass(frozen=True)
class DraftTree:
    """The N nodes to verify for each sequence. Root first, parents before children.

    An inert node has token -1: it is forwarded like the others but never accepted.
    """

    token_ids: Tensor  # [B, N] int64
    parents: Tensor  # [B, N] int64, column of the parent; -1 for the root
    depths: Tensor  # [B, N] int64, 0 for the root
    ancestor_bits: Tensor  # [B, N, words] int64: the node and its ancestors
    scores: Tensor  # [B, N] float32: cumulative draft log-probability (with noise: the ranking score); 0 for the root


@dataclass(frozen=True)
class Accepted:
    """The walk of one round. P = min(num_steps, N - 1) + 1 columns, the longest possible path."""

    num_accepted: Tensor  # [B] int64, 0..P-1; the bonus token is not counted
    columns: Tensor  # [B, P] int64: tree columns of the path, root first; beyond num_accepted: the column's own index
    token_ids: Tensor  # [B, P] int64: accepted tokens, then the bonus token at column num_accepted; beyond it -1
    ranks: Tensor  # [B, P] int64: which of its parent's children, in draft order from 0; root and beyond the path: 0
