"""`treedraft bench latency | acceptance`: measurements, as a table and as JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from treedraft.cli.console import make_console
from treedraft.cli.options import EngineOptions, TreeOptions, takes_groups
from treedraft.cli.prompts import read_prompts
from treedraft.config import SpeculativeConfig
from treedraft.errors import ConfigError

app = typer.Typer(help="Measure speed and acceptance.", no_args_is_help=True)

_PromptsFile = Annotated[str, typer.Option("--prompts", metavar="FILE", help="demo: the bundled held-out set.")]
_Out = Annotated[Path | None, typer.Option(metavar="FOLDER", help="Write the result there as JSON.")]


@app.command()
@takes_groups
def latency(
    compare: Annotated[
        list[str] | None, typer.Option(help="Another engine to run beside: transformers. May be repeated.")
    ] = None,
    batch: Annotated[
        list[int] | None, typer.Option(min=1, help="Batch sizes; may be repeated. Default 1 and 4.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=2, help="Tokens to generate for each prompt.")] = 128,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 24,
    num_prompts: Annotated[int, typer.Option(min=1, help="Prompts for each measurement.")] = 8,
    repetitions: Annotated[int, typer.Option(min=1, help="Repetitions; the median counts.")] = 5,
    prompts_file: _PromptsFile = "demo",
    out: _Out = None,
    engine: EngineOptions = EngineOptions(),
    tree: TreeOptions = TreeOptions(),
) -> None:
    """Tokens per second, greedy: without and with speculation, and beside other engines, in turn in one process."""
    from treedraft.bench.latency import LatencySettings, run_latency
    from treedraft.bench.results import write_result

    settings = LatencySettings(
        batches=tuple(batch or (1, 4)),
        max_tokens=max_tokens,
        prompt_tokens=prompt_tokens,
        num_prompts=num_prompts,
        repetitions=repetitions,
        compare=tuple(compare or ()),
    )
    console = make_console()
    prompts = read_prompts(prompts_file)
    result = run_latency(
        engine, tree.as_config(), prompts, settings, note=lambda text: console.print(text, style="dim")
    )
    console.print(result.render())
    if out is not None:
        console.print(f"wrote {write_result(out, 'latency', result.as_json())}", markup=False)


@app.command()
@takes_groups
def acceptance(
    shape: Annotated[
        list[str] | None,
        typer.Option(
            metavar="S,K,N",
            help="Steps, topk, nodes; may be repeated. Default: 3,1,4 5,1,6 5,4,16 5,4,32 7,8,48.",
        ),
    ] = None,
    temperature: Annotated[list[float] | None, typer.Option(help="May be repeated. Default: 0, 0.8 and 1.")] = None,
    head: Annotated[
        list[str] | None,
        typer.Option(help="A draft head to measure, beside others in one run; may be repeated. Default: --draft's."),
    ] = None,
    noise: Annotated[str, typer.Option(help="Shared noise: on, off or both.")] = "on",
    max_tokens: Annotated[int, typer.Option(min=2, help="Tokens to generate for each prompt.")] = 128,
    limit: Annotated[int | None, typer.Option(min=1, help="Use only this many prompts of each domain.")] = None,
    prompts_file: _PromptsFile = "demo",
    out: _Out = None,
    engine: EngineOptions = EngineOptions(),
) -> None:
    """Tokens a round by tree shape, temperature and domain, with standard errors over prompts."""
    from treedraft.bench.acceptance import DEFAULT_SHAPES, run_acceptance
    from treedraft.bench.results import write_result

    if noise not in ("on", "off", "both"):
        raise ConfigError(f"--noise must be on, off or both; got {noise!r}")
    console = make_console()
    result = run_acceptance(
        engine,
        heads=tuple(head) if head else (engine.draft,),
        shapes=tuple(_parse_shape(text) for text in shape) if shape else DEFAULT_SHAPES,
        temperatures=tuple(temperature or (0.0, 0.8, 1.0)),
        noises={"on": (True,), "off": (False,), "both": (True, False)}[noise],
        prompts=read_prompts(prompts_file),
        limit=limit,
        max_tokens=max_tokens,
        note=lambda text: console.print(text, style="dim"),
    )
    console.print(result.render())
    if out is not None:
        console.print(f"wrote {write_result(out, 'acceptance', result.as_json())}", markup=False)


def _parse_shape(text: str) -> SpeculativeConfig:
    try:
        steps, topk, nodes = (int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"--shape is three integers, steps,topk,nodes, as in 5,4,16; got {text!r}") from None
    config = SpeculativeConfig(num_steps=steps, topk=topk, num_draft_tokens=nodes)
    config.check()
    return config
