"""`treedraft memory`: what a configuration takes, buffer by buffer, before any of it is allocated."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Annotated, Any

import typer

from treedraft.cli.console import make_console
from treedraft.cli.options import EngineOptions, TreeOptions, parse_bytes, takes_groups
from treedraft.errors import ConfigError

if TYPE_CHECKING:
    from treedraft.config import EngineConfig
    from treedraft.runner.budget import Budget


@takes_groups
def memory(
    engine: EngineOptions = EngineOptions(),
    tree: TreeOptions = TreeOptions(),
    no_speculation: Annotated[
        bool, typer.Option("--no-speculation", help="One token a round.", rich_help_panel="Speculation")
    ] = False,
    device_memory: Annotated[
        str | None,
        typer.Option(help="Memory of the device, in bytes or as 80G. Default: what this machine's has."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One object: buffers, each with name, kind, bytes.")] = False,
) -> None:
    """Show every buffer with its formula and bytes, for each attention backend, and what is left for KV.

    Nothing is allocated, and a model on the hub is not downloaded but for its config.json.
    """
    from treedraft.runner.budget import budget

    config = _resolve(engine, None if no_speculation else tree.as_config())
    num_bytes = parse_bytes(device_memory) if device_memory is not None else _device_bytes(config.device)
    result = budget(config, num_bytes)
    if as_json:
        fields = ("name", "kind", "backend", "formula", "bytes")
        typer.echo(json.dumps({"buffers": [{f: getattr(r, f) for f in fields} for r in result.records]}))
        return
    _print(result, num_bytes)


def _resolve(engine: EngineOptions, speculative: Any) -> EngineConfig:
    """The configuration that `LLM` would resolve; a GPU may be planned for where there is none."""
    import torch

    from treedraft.config import EngineConfig

    arguments = {name: value for name, value in engine.as_arguments().items() if name != "debug"}
    has_cuda = torch.cuda.is_available() or engine.device.startswith("cuda")
    is_gpu = engine.device.startswith("cuda") or (engine.device == "auto" and has_cuda)
    return EngineConfig(**arguments, speculative=speculative, max_pending=int(is_gpu)).resolve(has_cuda)


def _device_bytes(device: str) -> int:
    import torch

    if device == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if not torch.cuda.is_available():
        raise ConfigError(f"torch sees no GPU here; say how much memory {device!r} has: --device-memory 141G")
    return int(torch.cuda.mem_get_info(device)[1])


def _print(result: Budget, device_bytes: int) -> None:
    from rich.table import Table

    from treedraft.kv.buffers import KINDS

    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("kind", "name", "backend"):
        table.add_column(name, overflow="fold")
    table.add_column("MiB", justify="right")
    table.add_column("formula", overflow="fold")
    for record in sorted(result.records, key=lambda r: (KINDS.index(r.kind), r.backend != "all", r.backend)):
        table.add_row(record.kind, record.name, record.backend, f"{record.bytes / 2**20:,.3f}", record.formula)
    console = make_console()
    for note in result.layout.notes:
        console.print(note, markup=False)
    console.print(table)
    console.print()
    config = result.layout.config
    for backend, free in result.kv_free_bytes.items():
        tokens = free // result.page_bytes * config.page_size
        fits = f"{tokens:,} tokens" if free >= 0 else "it does not fit"
        line = (
            f"{backend}: {result.total_bytes(backend) / 2**20:,.1f} MiB in all, {result.num_pages} pages of KV; of "
            f"{device_bytes / 2**20:,.0f} MiB {free / 2**20:,.1f} MiB are left for KV ({fits})"
        )
        console.print(line, markup=False, soft_wrap=True, highlight=False)
