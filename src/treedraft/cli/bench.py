"""`treedraft bench latency | acceptance | round | kernels | serving`: measurements, as a table and as JSON."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from treedraft.cli.console import make_console
from treedraft.cli.options import EngineOptions, TreeOptions, takes_groups
from treedraft.cli.prompts import random_prompts, read_prompts
from treedraft.config import SpeculativeConfig
from treedraft.errors import ConfigError

app = typer.Typer(help="Measure speed and acceptance.", no_args_is_help=True)

_PromptsFile = Annotated[str, typer.Option("--prompts", metavar="FILE", help="demo: the bundled held-out set.")]
_LatencyPrompts = Annotated[
    str, typer.Option("--prompts", metavar="FILE", help="demo: the bundled held-out set; random: token ids at random.")
]
_Out = Annotated[Path | None, typer.Option(metavar="FOLDER", help="Write the result there as JSON.")]
_Json = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the result to this file as JSON.")]


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
    temperature: Annotated[list[float] | None, typer.Option(min=0, help="May be repeated. Default: 0.")] = None,
    auto: Annotated[
        bool, typer.Option("--auto", help="Also with the tree chosen round by round, up to the one given.")
    ] = False,
    prompts_file: _LatencyPrompts = "demo",
    out: _Out = None,
    json_file: _Json = None,
    engine: EngineOptions = EngineOptions(),
    tree: TreeOptions = TreeOptions(),
) -> None:
    """Tokens per second: without and with speculation, and beside other engines, in turn in one process."""
    from treedraft.bench.latency import LatencySettings, run_latency

    settings = LatencySettings(
        batches=tuple(batch or (1, 4)),
        max_tokens=max_tokens,
        prompt_tokens=prompt_tokens,
        num_prompts=num_prompts,
        repetitions=repetitions,
        compare=tuple(compare or ()),
        temperatures=tuple(temperature or (0.0,)),
        with_auto=auto,
    )
    console = make_console()
    if prompts_file == "random":
        prompts = random_prompts(engine.model, max(num_prompts, *settings.batches), prompt_tokens)
    else:
        prompts = read_prompts(prompts_file)
    result = run_latency(
        engine, tree.as_config(), prompts, settings, note=lambda text: console.print(text, style="dim")
    )
    console.print(result.render())
    _write(console, "latency", result.as_json(), out, json_file)


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
    json_file: _Json = None,
    engine: EngineOptions = EngineOptions(),
) -> None:
    """Tokens a round by tree shape, temperature and domain, with standard errors over prompts."""
    from treedraft.bench.acceptance import DEFAULT_SHAPES, run_acceptance

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
    _write(console, "acceptance", result.as_json(), out, json_file)


@app.command("round")
@takes_groups
def round_(
    batch: Annotated[
        list[int] | None, typer.Option(min=1, help="Batch sizes; may be repeated. Default 1, 8 and 64.")
    ] = None,
    context: Annotated[int, typer.Option(min=1, help="Committed positions of each sequence.")] = 1024,
    nodes: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Nodes of the verifies to compare; may be repeated. Default 1, 2, 4, ... 64."),
    ] = None,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.")] = 0.0,
    repetitions: Annotated[int, typer.Option(min=1, help="Timed runs of each round; the median counts.")] = 20,
    loop_rounds: Annotated[int, typer.Option(min=0, help="Rounds of the engine's loop; 0 leaves it out.")] = 60,
    parts: Annotated[bool, typer.Option(help="Split a round's time by part.")] = True,
    no_speculation: Annotated[
        bool, typer.Option("--no-speculation", help="One token a round alone.", rich_help_panel="Speculation")
    ] = False,
    out: _Out = None,
    json_file: _Json = None,
    engine: EngineOptions = EngineOptions(),
    tree: TreeOptions = TreeOptions(),
) -> None:
    """A round's time by part, launches, idle share and roofline; a verify of N nodes beside one of 1."""
    from treedraft.bench.rounds import RoundSettings, run_rounds

    settings = RoundSettings(
        batches=tuple(batch or (1, 8, 64)),
        context=context,
        nodes=tuple(nodes or (1, 2, 4, 8, 16, 32, 64)),
        temperature=temperature,
        repetitions=repetitions,
        loop_rounds=loop_rounds,
        parts=parts,
    )
    console = make_console()
    result = run_rounds(
        engine,
        None if no_speculation else tree.as_config(),
        settings,
        note=lambda text: console.print(text, style="dim", markup=False),
    )
    console.print(result.render())
    _write(console, "round", result.as_json(), out, json_file)


@app.command()
def kernels(
    heads: Annotated[str, typer.Option(metavar="N,N", help="Query heads.")] = "16,128",
    tokens: Annotated[str, typer.Option(metavar="N,N", help="Nodes of each sequence's tree.")] = "1,4,8,16,32,64",
    batch: Annotated[str, typer.Option(metavar="N,N", help="Sequences.")] = "1,16,64",
    length: Annotated[str, typer.Option(metavar="N,N", help="Committed positions; 8k is 8192.")] = "1k,8k,32k,128k",
    kind: Annotated[str, typer.Option(help="chain, tree or both.")] = "chain,tree",
    backend: Annotated[str, typer.Option(help="Attention backends. Default: all that can serve the shape.")] = "",
    compare: Annotated[
        str, typer.Option(help="Kernels of other projects beside, on chains: flashmla, flashinfer.")
    ] = "",
    ragged: Annotated[
        bool, typer.Option("--ragged", help="Lengths up to the one named, among them 0, 1, 63, 64 and 65.")
    ] = False,
    page_size: Annotated[int, typer.Option(min=1, help="Tokens in a page of KV.")] = 64,
    latent: Annotated[int, typer.Option(min=1, help="Width of the latent.")] = 512,
    rope: Annotated[int, typer.Option(min=1, help="Width of the roped key.")] = 64,
    repetitions: Annotated[int, typer.Option(min=1, help="Timed runs of each kernel; the median counts.")] = 20,
    budget_s: Annotated[
        float | None, typer.Option("--budget", metavar="SECONDS", help="Leave out what is not measured by then.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    out: _Out = None,
    json_file: _Json = None,
) -> None:
    """Attention at a grid of shapes: time beside the device's floor, error against a float64 oracle."""
    import torch

    from treedraft.bench.kernels import KernelSettings, run_kernels

    settings = KernelSettings(
        heads=_parse_sizes(heads, "--heads"),
        tokens=_parse_sizes(tokens, "--tokens"),
        batches=_parse_sizes(batch, "--batch"),
        lengths=_parse_sizes(length, "--length"),
        kinds=_parse_names(kind),
        backends=_parse_names(backend),
        compare=_parse_names(compare),
        ragged=ragged,
        page_size=page_size,
        latent=latent,
        rope=rope,
        repetitions=repetitions,
        budget_s=budget_s,
    )
    console = make_console()
    has_cuda = torch.cuda.is_available()
    chosen = torch.device(("cuda" if has_cuda else "cpu") if device == "auto" else device)
    result = run_kernels(settings, chosen, note=lambda text: console.print(text, style="dim", markup=False))
    console.print(result.render())
    _write(console, "kernels", result.as_json(), out, json_file)


@app.command()
def serving(
    base_url: Annotated[
        str, typer.Option(metavar="URL", help="Of any OpenAI endpoint, with or without /v1.")
    ] = "http://127.0.0.1:8000",
    model: Annotated[str | None, typer.Option(help="As the server calls it. Default: the first it names.")] = None,
    endpoint: Annotated[str, typer.Option(help="completions or chat.")] = "completions",
    rate: Annotated[
        float, typer.Option("--rate", "--request-rate", help="Arrivals a second, Poisson; inf: all at once.")
    ] = math.inf,
    num_prompts: Annotated[int, typer.Option(help="Requests to send; prompts repeat if they are fewer.")] = 100,
    concurrency: Annotated[
        int | None,
        typer.Option("--concurrency", "--max-concurrency", help="Requests in flight at most. Default: no limit."),
    ] = None,
    prompt_words: Annotated[
        str | None,
        typer.Option(
            metavar="N|N-N|exp:N",
            help="Words of each prompt: fixed, uniform, or exponential with a mean. Default: prompts as they are.",
        ),
    ] = None,
    output_tokens: Annotated[
        str, typer.Option("--output-tokens", "--max-tokens", metavar="N|N-N|exp:N", help="Tokens of each output.")
    ] = "128",
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of arrivals, lengths and sampling.")] = 0,
    ignore_eos: Annotated[
        bool,
        typer.Option("--ignore-eos/--no-ignore-eos", help="Past the end of text, so that outputs have their lengths."),
    ] = True,
    no_speculation: Annotated[
        bool, typer.Option("--no-speculation", help="Ask a treedraft server for one token a round.")
    ] = False,
    api_key: Annotated[str | None, typer.Option(help="Sent as a bearer token; never written to a result.")] = None,
    timeout_s: Annotated[float, typer.Option("--timeout", metavar="SECONDS", help="For one request.")] = 600.0,
    prompts_file: _PromptsFile = "demo",
    out: _Out = None,
    json_file: _Json = None,
) -> None:
    """Load on a server that runs: throughput, time to first token, between chunks, acceptance; percentiles."""
    from treedraft.bench.serving import ServingSettings, parse_lengths, run_serving

    settings = ServingSettings(
        base_url=base_url,
        model=model,
        endpoint=endpoint,
        rate=rate,
        num_prompts=num_prompts,
        concurrency=concurrency,
        prompt_words=None if prompt_words is None else parse_lengths(prompt_words),
        output_tokens=parse_lengths(output_tokens),
        temperature=temperature,
        seed=seed,
        ignore_eos=ignore_eos,
        speculation=not no_speculation,
        api_key=api_key,
        timeout_s=timeout_s,
    )
    console = make_console()
    prompts = read_prompts(prompts_file)
    result = run_serving(prompts, settings, note=lambda text: console.print(text, style="dim", markup=False))
    console.print(result.render())
    _write(console, "serving", result.as_json(), out, json_file)
    if not result.done:
        raise typer.Exit(1)


def _write(console: Console, name: str, data: dict[str, Any], folder: Path | None, file: Path | None) -> None:
    """Write a result where it was asked for."""
    from treedraft.bench.results import write_result, write_result_file

    if folder is not None:
        console.print(f"wrote {write_result(folder, name, data)}", markup=False)
    if file is not None:
        console.print(f"wrote {write_result_file(file, name, data)}", markup=False)


def _parse_names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _parse_sizes(text: str, flag: str) -> tuple[int, ...]:
    """Read "1,8k": integers, k for 1024."""
    try:
        sizes = tuple(int(p.removesuffix("k")) * (1024 if p.endswith("k") else 1) for p in _parse_names(text))
    except ValueError:
        sizes = ()
    if not sizes or min(sizes) < 1:
        raise ConfigError(f"{flag} is a list of positive integers, as in 1,8,1k; got {text!r}")
    return sizes


def _parse_shape(text: str) -> SpeculativeConfig:
    try:
        steps, topk, nodes = (int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"--shape is three integers, steps,topk,nodes, as in 5,4,16; got {text!r}") from None
    config = SpeculativeConfig(num_steps=steps, topk=topk, num_draft_tokens=nodes)
    config.check()
    return config
