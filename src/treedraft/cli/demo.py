"""`treedraft demo`, what `make demo` runs: text through tree speculation, its acceptance, its speed beside none."""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from treedraft.cli.console import depth_style, make_console
from treedraft.cli.options import EngineOptions, TreeOptions, takes_groups
from treedraft.cli.prompts import read_prompts
from treedraft.types import SamplingParams

if TYPE_CHECKING:
    from treedraft.debug.trace import RoundTrace
    from treedraft.llm import LLM
    from treedraft.types import RequestOutput

SHOWN = (("story", 0, 0.8), ("kid", 0, 0.8), ("code", 18, 0.0))  # domain, which of its prompts, temperature


@takes_groups
def demo(
    max_tokens: Annotated[int, typer.Option(min=8, help="Tokens for each text.")] = 96,
    repetitions: Annotated[int, typer.Option(min=1, help="Timed repetitions of each engine.")] = 3,
    engine: EngineOptions = EngineOptions(max_context=1024, prefix_cache=False),
    tree: TreeOptions = TreeOptions(),
) -> None:
    """Generate real text through tree speculation, with its acceptance, and its speed beside no speculation."""
    console = make_console()
    started = time.perf_counter()
    speculative = engine.load(tree.as_config())
    plain = engine.load(None)
    for note in speculative.notes:
        console.print(f"· {note}", style="dim", markup=False)
    console.print(f"· loaded in {time.perf_counter() - started:.1f} s\n", style="dim")

    legend = Text("colour: depth of the tree at which a token was accepted:")
    for depth in range(1, tree.as_config().max_path):
        legend.append(f" {depth}", style=depth_style(depth))
    console.print(legend.append("; plain: the target's own token\n"))

    lines = read_prompts("demo")
    of_domain = {domain: [line.prompt for line in lines if line.domain == domain] for domain, _, _ in SHOWN}
    rounds: list[RoundTrace] = []
    for domain, index, temperature in SHOWN:
        params = SamplingParams(max_tokens=max_tokens, temperature=temperature)
        console.rule(f"{domain}, temperature {temperature:g}", align="left", style="dim")
        rounds += _stream(console, speculative, str(of_domain[domain][index]), params)
    _print_depths(console, rounds)

    # Timed without tracing, the two engines in turn.
    prompts = [prompt for domain, _, _ in SHOWN for prompt in of_domain[domain][1:3]]
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    seconds: dict[str, list[float]] = {"plain": [], "speculative": []}
    results: dict[str, list[RequestOutput]] = {}
    for _ in range(repetitions):
        for name, llm in (("plain", plain), ("speculative", speculative)):
            begin = time.perf_counter()
            results[name] = [llm.generate([prompt], params, progress=False)[0] for prompt in prompts]
            seconds[name].append(time.perf_counter() - begin)
    _print_speed(console, results, seconds)
    _print_verdict(console, results)
    console.print(f"{time.perf_counter() - started:.0f} s in all", style="dim")


def _stream(console: Console, llm: LLM, prompt: str, params: SamplingParams) -> list[RoundTrace]:
    """Print a text while it is generated; returns its rounds."""
    from treedraft.debug.trace import LiveTrace, recording

    console.print(prompt, style="dim", end="", markup=False, soft_wrap=True)
    pending: list[int] = []

    def show(token_id: int, depth: int) -> None:
        pending.append(token_id)
        text = llm.decode(pending)
        if not text.endswith("\ufffd"):  # else the token ends inside a character
            console.print(text, style=depth_style(depth), end="", markup=False, soft_wrap=True)
            pending.clear()

    def on_round(trace: RoundTrace) -> None:
        if len(rounds) == 1:
            show(trace.token_ids[0], 0)  # the prefill's token
        for token_id, depth in zip(trace.emitted_token_ids, trace.emitted_depths):
            show(token_id, depth)

    rounds = LiveTrace(on_round)
    with recording(llm, rounds):
        [output] = llm.generate([prompt], params, progress=False)
    metrics = output.metrics
    console.print(
        f"\n[{metrics.num_generated_tokens} tokens in {metrics.num_rounds} rounds: "
        f"{metrics.accept_length:.2f} tokens a round]\n",
        style="dim",
        markup=False,
    )
    return rounds


def _print_depths(console: Console, rounds: list[RoundTrace]) -> None:
    from treedraft.debug.compare import bar

    table = Table(title="Accepted drafts by depth", title_justify="left", box=None, show_header=False)
    for depth in range(1, max((max(r.depths) for r in rounds), default=0) + 1):
        share = sum(r.num_accepted >= depth for r in rounds) / len(rounds)
        table.add_row(Text(f"depth {depth}", style=depth_style(depth)), f"{share:4.0%} of rounds", bar(share))
    console.print(table, "")


def _print_speed(console: Console, results: dict[str, list[RequestOutput]], seconds: dict[str, list[float]]) -> None:
    table = Table(title="Greedy, one text at a time", title_justify="left", box=None)
    for name in ("", "tokens/s", "tokens a round", "speed"):
        table.add_column(name, justify="left" if not name else "right")
    base = statistics.median(seconds["plain"])
    for name, label in (("plain", "without speculation"), ("speculative", "with tree speculation")):
        tokens = sum(len(o.outputs[0].token_ids) for o in results[name])
        rounds = sum(o.metrics.num_rounds for o in results[name])
        elapsed = statistics.median(seconds[name])
        emitted = tokens - len(results[name])  # the prefill's token is no round's
        table.add_row(label, f"{tokens / elapsed:.0f}", f"{emitted / max(rounds, 1):.2f}", f"{base / elapsed:.2f}x")
    console.print(table, "")


def _print_verdict(console: Console, results: dict[str, list[RequestOutput]]) -> None:
    from treedraft.debug.compare import first_difference

    pairs = [
        (a.outputs[0].token_ids, b.outputs[0].token_ids)
        for a, b in zip(results["plain"], results["speculative"], strict=True)
    ]
    positions = [first_difference(a, b) for a, b in pairs]
    if all(position is None for position in positions):
        tokens = sum(len(a) for a, _ in pairs)
        console.print(f"Equal: all {tokens} tokens are the same with and without speculation.", style="bold green")
        return
    where = ", ".join(f"text {i} at token {p}" for i, p in enumerate(positions) if p is not None)
    console.print(f"The texts part: {where}. `treedraft check` says how near a tie that was.", style="bold yellow")
