"""Flags shared by the commands, each defined once, under the names that users of other engines know.

A command takes whole groups; `takes_groups` spreads a group's fields into the command's own flags:

    @takes_groups
    def generate(prompts: ..., engine: EngineOptions, sampling: SamplingOptions = SamplingOptions(temperature=0.8)):
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_type_hints

import typer

from treedraft.config import AUTO_NUM_DRAFT_TOKENS, SpeculativeConfig, max_tree_nodes
from treedraft.errors import ConfigError, RequestError
from treedraft.types import SamplingParams, StructuredOutput

if TYPE_CHECKING:
    from treedraft.llm import LLM

AUTO = 0  # TreeOptions.num_draft_tokens for "auto"
_MODEL, _TREE, _SAMPLING = "Model and engine", "Speculation", "Sampling"


@dataclass(frozen=True)
class EngineOptions:
    """What `LLM` is built from."""

    model: Annotated[
        str, typer.Option("--model", "--model-path", help="demo, a folder, or a hub id.", rich_help_panel=_MODEL)
    ] = "demo"
    draft: Annotated[
        str | None,
        typer.Option(
            "--draft",
            "--speculative-draft-model-path",
            help="Draft head: a folder or hub id. Default: the demo's own head for demo, else no speculation.",
            rich_help_panel=_MODEL,
        ),
    ] = None
    load_format: Annotated[
        str,
        typer.Option(
            help="auto: the folder's safetensors; dummy: random weights from config.json alone, to measure times.",
            rich_help_panel=_MODEL,
        ),
    ] = "auto"
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.", rich_help_panel=_MODEL)] = "auto"
    dtype: Annotated[
        str,
        typer.Option(
            help="auto, float64, float32 or bfloat16; auto is float32 on a CPU, bfloat16 on a GPU.",
            rich_help_panel=_MODEL,
        ),
    ] = "auto"
    page_size: Annotated[
        int, typer.Option("--page-size", "--block-size", help="Tokens in a page of KV.", rich_help_panel=_MODEL)
    ] = 16
    max_context: Annotated[
        int | None,
        typer.Option(
            "--max-context",
            "--max-model-len",
            "--context-length",
            help="Tokens of prompt and output together. Default: the model's own limit.",
            rich_help_panel=_MODEL,
        ),
    ] = None
    max_batch: Annotated[
        int,
        typer.Option(
            "--max-batch", "--max-running-requests", help="Sequences decoded together.", rich_help_panel=_MODEL
        ),
    ] = 8
    chunked_prefill: Annotated[
        int,
        typer.Option(
            "--chunked-prefill-size",
            "--max-num-batched-tokens",
            help="Tokens of prompts that enter in one step, beside the rounds of what runs.",
            rich_help_panel=_MODEL,
        ),
    ] = 4096
    prefix_cache: Annotated[
        bool,
        typer.Option(
            "--enable-prefix-caching/--disable-radix-cache",
            " /--no-enable-prefix-caching",
            help="Keep full pages of past texts, for later ones that begin alike.",
            rich_help_panel=_MODEL,
        ),
    ] = True
    kv_memory: Annotated[
        str | None,
        typer.Option(help="Size of the KV pools, in bytes or as 512M, 2G.", rich_help_panel=_MODEL),
    ] = None
    mem_fraction_static: Annotated[
        float,
        typer.Option(
            "--mem-fraction-static",
            "--gpu-memory-utilization",
            help="Share of a GPU's memory for weights, workspaces and KV together.",
            rich_help_panel=_MODEL,
        ),
    ] = 0.85
    cuda_graph: Annotated[
        str,
        typer.Option(
            help="auto, on, off, or eager: rounds as replayed CUDA graphs. auto: on a GPU, unless the attention "
            "backend plans on the host; eager: on a graph's static buffers, without capture.",
            rich_help_panel=_MODEL,
        ),
    ] = "auto"
    disable_cuda_graph: Annotated[
        bool,
        typer.Option(
            "--disable-cuda-graph", "--enforce-eager", help="The same as --cuda-graph off.", rich_help_panel=_MODEL
        ),
    ] = False
    attention_backend: Annotated[
        str,
        typer.Option(
            help="Verifies and decodes: gluon, triton, flashinfer, torch, ...; auto: the fastest that fits the model.",
            rich_help_panel=_MODEL,
        ),
    ] = "auto"
    draft_attention_backend: Annotated[
        str,
        typer.Option(
            "--draft-attention-backend",
            "--speculative-draft-attention-backend",
            help="Drafts; auto is the same as --attention-backend, or the fastest that fits the head.",
            rich_help_panel=_MODEL,
        ),
    ] = "auto"
    deterministic: Annotated[
        bool,
        typer.Option(
            "--deterministic",
            "--enable-deterministic-inference",
            help="On a GPU: the same bfloat16 text with and without speculation and in any batch. Slower.",
            rich_help_panel=_MODEL,
        ),
    ] = False
    debug: Annotated[
        str | None,
        typer.Option(
            help="redzone: guard words around every buffer, verified after each step; redzone,unguarded: a list that "
            "is too small overflows into them.",
            rich_help_panel=_MODEL,
        ),
    ] = None
    seed: Annotated[
        int,
        typer.Option(help="Seed of the sampling noise: same seed, same text.", rich_help_panel=_SAMPLING),
    ] = 0

    def load(self, speculative: SpeculativeConfig | None) -> LLM:
        """Build the LLM; `speculative` None means one token a round."""
        from treedraft.llm import LLM  # here: --help needs no torch

        return LLM(speculative=speculative, **self.as_arguments())

    def as_arguments(self) -> dict[str, Any]:
        """The arguments of `LLM`, all but `speculative`."""
        not_taken = ("kv_memory", "disable_cuda_graph")
        arguments = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in not_taken}
        if self.disable_cuda_graph:
            arguments["cuda_graph"] = "off"
        arguments["kv_memory_bytes"] = None if self.kv_memory is None else parse_bytes(self.kv_memory)
        return arguments


@dataclass(frozen=True)
class TreeOptions:
    """The shape of the draft tree."""

    num_steps: Annotated[
        int,
        typer.Option("--speculative-num-steps", help="Levels of the draft tree.", rich_help_panel=_TREE),
    ] = 5
    topk: Annotated[
        int,
        typer.Option("--speculative-eagle-topk", help="Branches kept per level; 1 is a chain.", rich_help_panel=_TREE),
    ] = 4
    num_draft_tokens: Annotated[
        int,
        typer.Option(
            "--speculative-num-draft-tokens",
            parser=parse_num_draft_tokens,
            metavar="N|auto",
            help="Nodes verified per round, root included; auto: the fastest of several trees, chosen round by round, "
            "or none where that is faster.",
            rich_help_panel=_TREE,
        ),
    ] = 16  # AUTO: "auto"
    shared_noise: Annotated[
        bool,
        typer.Option(
            "--shared-noise/--no-shared-noise",
            help="Rank drafts with the noise that the target will sample with; the text is the same either way.",
            rich_help_panel=_TREE,
        ),
    ] = True

    def as_config(self) -> SpeculativeConfig:
        """Return the checked tree shape."""
        is_auto = self.num_draft_tokens == AUTO
        largest = min(AUTO_NUM_DRAFT_TOKENS, max_tree_nodes(self.num_steps, self.topk))
        config = SpeculativeConfig(
            num_steps=self.num_steps,
            topk=self.topk,
            num_draft_tokens=largest if is_auto else self.num_draft_tokens,
            shared_noise=self.shared_noise,
            auto=is_auto,
        )
        config.check()
        return config


@dataclass(frozen=True)
class SamplingOptions:
    """How tokens are chosen."""

    max_tokens: Annotated[int, typer.Option(help="Tokens to generate at most.", rich_help_panel=_SAMPLING)] = 128
    temperature: Annotated[float, typer.Option(help="0 is greedy.", rich_help_panel=_SAMPLING)] = 0.0
    top_k: Annotated[int, typer.Option(help="Keep the k most likely tokens; 0: all.", rich_help_panel=_SAMPLING)] = 0
    top_p: Annotated[
        float, typer.Option(help="Keep the most likely tokens up to this mass.", rich_help_panel=_SAMPLING)
    ] = 1.0
    min_p: Annotated[
        float,
        typer.Option(
            help="Drop tokens below this share of the likeliest one's probability.", rich_help_panel=_SAMPLING
        ),
    ] = 0.0
    n: Annotated[int, typer.Option("--n", help="Choices for each prompt.", rich_help_panel=_SAMPLING)] = 1
    repetition_penalty: Annotated[
        float, typer.Option(help="Over prompt and output; 1: none.", rich_help_panel=_SAMPLING)
    ] = 1.0
    presence_penalty: Annotated[float, typer.Option(help="Over the output; 0: none.", rich_help_panel=_SAMPLING)] = 0.0
    frequency_penalty: Annotated[float, typer.Option(help="Over the output; 0: none.", rich_help_panel=_SAMPLING)] = 0.0
    stop: Annotated[
        list[str] | None, typer.Option(help="Stop before this text; may be repeated.", rich_help_panel=_SAMPLING)
    ] = None
    min_tokens: Annotated[
        int, typer.Option(help="No end of text before this many tokens.", rich_help_panel=_SAMPLING)
    ] = 0
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Go on past the end of text.", rich_help_panel=_SAMPLING)
    ] = False

    def as_params(self) -> SamplingParams:
        """Return the checked SamplingParams."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        values["stop"] = tuple(self.stop or ())
        return SamplingParams(**values)


@dataclass(frozen=True)
class StructuredOptions:
    """What the text must be; at most one of them."""

    json_schema: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="The text is a JSON document of this schema.", rich_help_panel=_SAMPLING),
    ] = None
    regex: Annotated[str | None, typer.Option(help="The text matches this expression.", rich_help_panel=_SAMPLING)] = (
        None
    )
    grammar: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="The text follows this grammar, Lark or EBNF.", rich_help_panel=_SAMPLING),
    ] = None

    def as_structured(self) -> StructuredOutput | None:
        """Return what was asked for; None for any text. Raises RequestError."""
        if (self.json_schema, self.regex, self.grammar) == (None, None, None):
            return None
        return StructuredOutput(_read(self.json_schema), self.regex, _read(self.grammar))


def _read(path: str | None) -> str | None:
    try:
        return None if path is None else Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"cannot read {path}: {error}") from error


_Command = TypeVar("_Command", bound=Callable[..., Any])


def takes_groups(command: _Command) -> _Command:
    """Let a command's dataclass parameters appear as their fields' flags; a default instance gives the defaults."""
    hints = get_type_hints(command, include_extras=True)
    parameters: list[inspect.Parameter] = []
    groups: dict[str, type] = {}
    for parameter in inspect.signature(command).parameters.values():
        hint = hints[parameter.name]
        if not is_dataclass(hint) or not isinstance(hint, type):
            parameters.append(parameter.replace(annotation=hint, kind=inspect.Parameter.KEYWORD_ONLY))
            continue
        groups[parameter.name] = hint
        default = hint() if parameter.default is inspect.Parameter.empty else parameter.default
        field_hints = get_type_hints(hint, include_extras=True)
        parameters += [
            inspect.Parameter(
                f.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=getattr(default, f.name),
                annotation=field_hints[f.name],
            )
            for f in fields(hint)
        ]

    @functools.wraps(command)
    def spread(**flags: Any) -> Any:
        built = {name: group(**{f.name: flags.pop(f.name) for f in fields(group)}) for name, group in groups.items()}
        return command(**flags, **built)

    del spread.__wrapped__  # signature() and get_type_hints() must see the spread flags, not the command's own
    spread.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    spread.__annotations__ = {p.name: p.annotation for p in parameters}
    return spread  # type: ignore[return-value]


def parse_num_draft_tokens(text: str | int) -> int:
    """Read a number of nodes, or "auto", which is AUTO. The flag's default comes here too, as it is."""
    if text == "auto":
        return AUTO
    try:
        return int(text) or -1  # 0 is no number of nodes; SpeculativeConfig.check names the bounds
    except ValueError:
        raise typer.BadParameter(f"a number of nodes, or auto; got {text!r}") from None


def parse_bytes(text: str) -> int:
    """Read "1073741824", "512M" or "2G" (powers of 1024).

    Raises:
        ConfigError: the text is no size.
    """
    units = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
    digits = text.strip().upper().removesuffix("B").removesuffix("I")
    unit = units.get(digits[-1:], 1)
    number = digits[:-1] if unit > 1 else digits
    try:
        return int(float(number) * unit)
    except ValueError:
        raise ConfigError(f"a size is a number of bytes, or a number with K, M, G or T; got {text!r}") from None
