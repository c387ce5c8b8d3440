"""The `treedraft` command: joins the commands, and turns treedraft's own errors into one line and exit code 2."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup

from treedraft import __version__
from treedraft.cli import bench, chat, check, demo, explain, generate, memory, serve, toggles
from treedraft.errors import TreedraftError


class _Commands(TyperGroup):
    """Prints a TreedraftError as one message; any other exception is a bug and keeps its traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except TreedraftError as error:
            typer.echo(f"treedraft: error: {error}", err=True)
            raise typer.Exit(2) from error


app = typer.Typer(
    name="treedraft",
    cls=_Commands,
    help="Tree speculative decoding for MLA models: the model's own text, token for token, in a fraction of the time.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"treedraft {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(
        False, "--version", callback=_print_version, is_eager=True, help="Print the version and stop."
    ),
) -> None:
    """Options before the command's name."""


app.command("generate")(generate.generate)
app.command("serve")(serve.serve)
app.command("chat")(chat.chat)
app.command("check")(check.check)
app.command("explain")(explain.explain)
app.command("memory")(memory.memory)
app.command("demo")(demo.demo)
app.add_typer(bench.app, name="bench")
app.add_typer(toggles.app, name="toggles")


def main() -> None:
    """Run the command line."""
    app()
