"""`treedraft check`: the same prompts with and without speculation."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from treedraft.cli.console import make_console
from treedraft.cli.options import EngineOptions, SamplingOptions, TreeOptions, takes_groups
from treedraft.cli.prompts import collect_prompts


@takes_groups
def check(
    prompts: Annotated[list[str] | None, typer.Argument(metavar="[PROMPT]...", help="Prompts to compare.")] = None,
    prompts_file: Annotated[
        str | None,
        typer.Option(
            "--prompts",
            metavar="FILE",
            help="JSON lines or one prompt a line; -: stdin. Default: the bundled held-out set (demo).",
        ),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Use only this many prompts.")] = None,
    engine: EngineOptions = EngineOptions(),
    tree: TreeOptions = TreeOptions(),
    sampling: SamplingOptions = SamplingOptions(max_tokens=64),
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Compare the text with and without speculation, token for token.

    Lists for each difference its first position and how near the tie was; gives acceptance by depth and the verdict.
    Exit code 1 on a difference. `--dtype float64` is strict: there must be none.
    """
    from treedraft.debug.compare import run_check

    params = sampling.as_params()
    speculative = tree.as_config()
    given = collect_prompts(prompts, prompts_file or (None if prompts else "demo"))[:limit]
    report = run_check(engine.load, given, params, speculative, engine.seed, progress=not as_json)
    if as_json:
        typer.echo(json.dumps(report.as_json(), ensure_ascii=False, indent=1))
    else:
        make_console().print(report.render())
    if report.differences:
        raise typer.Exit(1)
