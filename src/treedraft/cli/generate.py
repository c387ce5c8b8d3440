"""`treedraft generate`: prompts in, text out."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from treedraft.bench.results import json_safe
from treedraft.cli.console import make_console
from treedraft.cli.options import EngineOptions, SamplingOptions, StructuredOptions, TreeOptions, takes_groups
from treedraft.cli.prompts import collect_prompts

if TYPE_CHECKING:
    from treedraft.types import RequestMetrics, RequestOutput


@takes_groups
def generate(
    prompts: Annotated[list[str] | None, typer.Argument(metavar="PROMPT...", help="One or several prompts.")] = None,
    prompts_file: Annotated[
        str | None,
        typer.Option(
            "--prompts", metavar="FILE", help="JSON lines or one prompt a line; demo: the bundled set; -: stdin."
        ),
    ] = None,
    token_ids: Annotated[
        bool, typer.Option("--token-ids", help="PROMPT arguments are token ids, as in 17,4,256.")
    ] = False,
    engine: EngineOptions = EngineOptions(),
    tree: TreeOptions = TreeOptions(),
    no_speculation: Annotated[
        bool, typer.Option("--no-speculation", help="One token a round.", rich_help_panel="Speculation")
    ] = False,
    sampling: SamplingOptions = SamplingOptions(temperature=0.8),
    structured: StructuredOptions = StructuredOptions(),
    as_json: Annotated[
        bool,
        typer.Option("--json", help="One object a line: prompt, text, token_ids, finish_reason, metrics."),
    ] = False,
) -> None:
    """Generate text for each PROMPT."""
    params = replace(sampling.as_params(), structured=structured.as_structured())
    speculative = None if no_speculation else tree.as_config()
    given = collect_prompts(prompts, prompts_file, token_ids)
    llm = engine.load(speculative)
    outputs = llm.generate(given, params, progress=not as_json)
    console = make_console()
    for output in outputs:
        if as_json:
            for record in as_records(output):
                typer.echo(json.dumps(record, ensure_ascii=False))
        else:
            print_output(console, output)
    errors = [choice.error for output in outputs for choice in output.outputs if choice.finish_reason == "error"]
    if errors:
        for error in errors:
            typer.echo(f"treedraft: error: {error}", err=True)
        raise typer.Exit(2)


def as_records(output: RequestOutput) -> list[dict[str, Any]]:
    """One JSON object for each choice; a metric that does not exist (no round was run) is null."""
    return [
        {
            "prompt": output.prompt,
            "prompt_token_ids": list(output.prompt_token_ids),
            "index": choice.index,
            "text": choice.text,
            "token_ids": list(choice.token_ids),
            "finish_reason": choice.finish_reason,
            "metrics": json_safe(output.metrics),
        }
        | ({"error": choice.error} if choice.error else {})
        for choice in output.outputs
    ]


def print_output(console: Console, output: RequestOutput) -> None:
    """Print the prompt dim, each choice's text after it, and one line of figures."""
    for choice in output.outputs:
        if output.prompt is None:
            console.print(f"token ids {list(choice.token_ids)}", markup=False, soft_wrap=True)
        else:
            console.print(output.prompt, style="dim", end="", markup=False, soft_wrap=True)
            console.print(choice.text, markup=False, soft_wrap=True)
    console.print(
        f"[{describe_metrics(output.metrics)}; {output.outputs[0].finish_reason}]\n", style="cyan", markup=False
    )


def describe_metrics(metrics: RequestMetrics) -> str:
    """Tokens, speed and acceptance in words."""
    text = f"{metrics.num_generated_tokens} tokens, {metrics.tokens_per_s:.0f} tokens/s"
    if not math.isnan(metrics.accept_length):
        text += f", {metrics.accept_length:.2f} tokens a round"
    return text
