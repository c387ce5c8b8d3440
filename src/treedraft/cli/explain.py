"""`treedraft explain`: look at one round's tree."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from treedraft.cli.console import make_console
from treedraft.cli.options import EngineOptions, SamplingOptions, TreeOptions, takes_groups
from treedraft.cli.prompts import parse_token_ids
from treedraft.errors import RequestError

if TYPE_CHECKING:
    from treedraft.debug.trace import RoundTrace


@takes_groups
def explain(
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="The text to continue.")],
    token_ids: Annotated[bool, typer.Option("--token-ids", help="PROMPT is token ids, as in 17,4,256.")] = False,
    round_number: Annotated[int, typer.Option("--round", min=1, help="Which round's tree to show.")] = 1,
    svg: Annotated[Path | None, typer.Option(metavar="FILE", help="Also draw the tree as an SVG file.")] = None,
    engine: EngineOptions = EngineOptions(),
    tree: TreeOptions = TreeOptions(),
    sampling: SamplingOptions = SamplingOptions(max_tokens=32),
) -> None:
    """Show a round's tree: the drafted tokens, the draft's probabilities, and the path that the target accepted."""
    from treedraft.debug.explain import as_svg, describe_round, render_tree
    from treedraft.debug.trace import live_rounds, recording

    params = sampling.as_params()
    llm = engine.load(tree.as_config())
    traced: list[RoundTrace] = []
    with recording(llm, traced):
        [output] = llm.generate([parse_token_ids(prompt) if token_ids else prompt], params, progress=False)
    first = [each for each in traced if each.request_id == traced[0].request_id]  # of several choices, one
    rounds = live_rounds(first, output.prompt_token_ids, output.outputs[0].token_ids)
    if round_number > len(rounds):
        raise RequestError(
            f"there is no round {round_number}: the text ended after {len(rounds)} rounds; raise --max-tokens"
        )

    def decode(token_id: int) -> str:
        return str(token_id) if llm.tokenizer is None else llm.tokenizer.decode([token_id])

    console = make_console()
    for number, each in enumerate(rounds, start=1):
        emitted = list(each.emitted_token_ids)
        text = str(emitted) if llm.tokenizer is None else repr(llm.tokenizer.decode(emitted))
        style = "bold" if number == round_number else "dim"
        console.print(f"round {number:2}  {describe_round(each)}: {text}", style=style, markup=False, soft_wrap=True)
    console.print()
    console.print(render_tree(rounds[round_number - 1], decode))
    if svg is not None:
        title = f"Round {round_number}: {prompt if len(prompt) <= 60 else prompt[:59] + '…'}"
        svg.write_text(as_svg(rounds[round_number - 1], decode, title), encoding="utf-8")
        console.print(f"\nwrote {svg}", markup=False)
