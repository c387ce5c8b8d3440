"""`treedraft serve`: an OpenAI-compatible server."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated

import typer

from treedraft.cli.options import EngineOptions, TreeOptions, parse_bytes, takes_groups
from treedraft.errors import ConfigError

_SERVER = "Server"


@takes_groups
def serve(
    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0 lets other machines in.", rich_help_panel=_SERVER)
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0: any free one.", min=0, max=65535, rich_help_panel=_SERVER)] = 8000,
    served_model_name: Annotated[
        str | None,
        typer.Option(help="The model's name for clients. Default: --model's last part.", rich_help_panel=_SERVER),
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(help="Clients must send it as their key. Default: none.", rich_help_panel=_SERVER)
    ] = None,
    max_queue: Annotated[
        int,
        typer.Option(help="Choices that may wait; beyond them clients get 429.", min=0, rich_help_panel=_SERVER),
    ] = 256,
    max_body: Annotated[
        str, typer.Option(help="Largest body, in bytes or as 512K, 4M; beyond it 413.", rich_help_panel=_SERVER)
    ] = "4M",
    request_timeout: Annotated[
        float,
        typer.Option(help="Seconds after which a request is aborted.", min=0.001, rich_help_panel=_SERVER),
    ] = 600.0,
    step_timeout: Annotated[
        float,
        typer.Option(
            help="Seconds after which a step counts as hung: /health fails, every request ends with an error.",
            min=0.001,
            rich_help_panel=_SERVER,
        ),
    ] = 300.0,
    drain_timeout: Annotated[
        int | None,
        typer.Option(
            help="Seconds that SIGTERM leaves to what runs. Default: as long as it takes.",
            min=1,
            rich_help_panel=_SERVER,
        ),
    ] = None,
    metrics_prefix: Annotated[
        str,
        typer.Option(
            help="Before the metrics' names, and a colon; vllm: for dashboards made for it.", rich_help_panel=_SERVER
        ),
    ] = "treedraft",
    tool_call_parser: Annotated[
        str | None,
        typer.Option(
            help="How the model writes calls of tools: deepseek_v3, deepseek_v31, kimi_k2, glm45 or qwen. "
            "Default: requests with tools are refused.",
            rich_help_panel=_SERVER,
        ),
    ] = None,
    reasoning_parser: Annotated[
        str | None,
        typer.Option(
            help="How the model writes its thoughts, given as reasoning_content: deepseek_r1, kimi_k2, glm45 or qwen3. "
            "Default: they are content.",
            rich_help_panel=_SERVER,
        ),
    ] = None,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.", rich_help_panel=_SERVER)] = "info",
    engine: EngineOptions = EngineOptions(),
    tree: TreeOptions = TreeOptions(),
    no_speculation: Annotated[
        bool, typer.Option("--no-speculation", help="One token a round.", rich_help_panel="Speculation")
    ] = False,
) -> None:
    """Serve the model over HTTP, as OpenAI's API and as SGLang's /generate."""
    if log_level not in ("debug", "info", "warning", "error"):
        raise ConfigError(f"log-level must be debug, info, warning or error; got {log_level!r}")
    if not metrics_prefix.isidentifier() or not metrics_prefix.isascii():
        raise ConfigError(f"metrics-prefix must be letters, digits and underscores; got {metrics_prefix!r}")
    try:
        from treedraft.server.reply.formats import call_format, reasoning_format
        from treedraft.server.serve import make_server, run  # here: --help needs neither torch nor a web server
    except ModuleNotFoundError as error:
        raise ConfigError(f"serve needs {error.name}: pip install 'treedraft[server]'") from error
    from treedraft.server.service import ServerSettings

    call_format(tool_call_parser), reasoning_format(reasoning_parser)  # an unknown name is refused before the load
    settings = ServerSettings(
        model_name=served_model_name or Path(engine.model).name or engine.model,
        api_key=api_key,
        max_body_bytes=parse_bytes(max_body),
        request_timeout_s=request_timeout,
        tool_call_parser=tool_call_parser,
        reasoning_parser=reasoning_parser,
    )
    speculative = None if no_speculation else tree.as_config()
    logging.basicConfig(level=log_level.upper(), format="%(levelname)s %(name)s: %(message)s")
    llm = engine.load(speculative)
    run(make_server(llm, settings, host, port, max_queue, drain_timeout, metrics_prefix, log_level, step_timeout))
