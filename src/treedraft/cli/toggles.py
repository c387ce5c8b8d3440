"""`treedraft toggles`: the registered fixes, how to take one out, and the proof that it would be noticed."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Annotated

import typer

from treedraft.cli.console import make_console
from treedraft.errors import ConfigError

app = typer.Typer(
    no_args_is_help=True,
    help="Registered fixes. TREEDRAFT_REVERT_FIX=ID[,ID] runs any command without them, to see what each was for.",
)


@app.command("list")
def list_fixes() -> None:
    """List the registered fixes; those that this process runs without are marked."""
    from rich.table import Table

    from treedraft._patcher import in_force
    from treedraft.debug.toggles import fixes

    reverted = in_force()
    table = Table(box=None, pad_edge=False)
    for name in ("id", "title", "edits"):
        table.add_column(name)
    for fix in fixes().values():
        mark = " (reverted)" if fix.id in reverted.ids else ""
        table.add_row(fix.id + mark, fix.title, ", ".join(dict.fromkeys(e.file for e in fix.edits)))
    console = make_console()
    console.print(table, markup=False)
    if reverted.ids:
        console.print(f"\ndigest {reverted.digest}, running {reverted.folder}", markup=False, soft_wrap=True)


@app.command()
def show(fix_id: Annotated[str, typer.Argument(metavar="ID", help="The fix's id, see `toggles list`.")]) -> None:
    """Show what a fix is for, and the diff that takes it out."""
    from treedraft.debug.toggles import choose, diff_of

    [fix] = choose([fix_id])
    typer.echo(f"{fix.id}: {fix.title}\n\n{fix.story}\n\nwitness: {fix.witness}\n\n{diff_of(fix)}", nl=False)


@app.command()
def check(
    ids: Annotated[list[str] | None, typer.Argument(metavar="[ID]...", help="Which fixes; none: all.")] = None,
    tests: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Where the witnesses are; found by itself in a checkout.")
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Processes at once.")] = max(1, min(4, os.cpu_count() or 1)),
    as_json: Annotated[bool, typer.Option("--json", help="Print the proofs as JSON.")] = False,
) -> None:
    """Prove that fixes can be reverted: each edit applies, its witness passes with the fix and fails without it.

    Exits with 1 if any cannot be proven.
    """
    from treedraft.debug import toggles

    chosen = toggles.choose(ids or [])
    if tests is not None and not (tests / "witnesses").is_dir():
        raise ConfigError(f"--tests must be a folder that holds witnesses/; got {str(tests)!r}")
    tests = tests or toggles.find_tests()
    proofs = toggles.check(chosen, tests, jobs)
    num_bad = sum(not p.is_good for p in proofs)
    if as_json:
        records = [dataclasses.asdict(p) for p in proofs]
        proven = "application" if tests is None else "application and witness"
        typer.echo(json.dumps({"proven": proven, "num_bad": num_bad, "fixes": records}, indent=2))
    else:
        for proof in proofs:
            typer.echo(f"{'ok ' if proof.is_good else 'BAD'} {proof.id}: {proof.title}")
            for problem in proof.problems:
                typer.echo("    " + problem.replace("\n", "\n    "))
            if proof.is_good and proof.symptom:
                typer.echo(f"    without it: {proof.symptom}")
        if tests is None:
            typer.echo(
                "There is no tests folder beside this package: application was proven, the witnesses did not run."
            )
        typer.echo(f"{len(proofs) - num_bad} of {len(proofs)} proven")
    if num_bad:
        raise typer.Exit(1)
