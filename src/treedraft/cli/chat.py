"""`treedraft chat`: a conversation in the terminal, each token in the colour of the depth at which it was accepted."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer
from rich.console import Console
from rich.text import Text

from treedraft.cli.console import depth_style, make_console
from treedraft.cli.generate import describe_metrics
from treedraft.cli.options import EngineOptions, SamplingOptions, TreeOptions, takes_groups
from treedraft.engine.text import TextStream
from treedraft.errors import RequestError
from treedraft.types import SamplingParams

if TYPE_CHECKING:
    from treedraft.debug.trace import RoundTrace
    from treedraft.llm import LLM

_Number = TypeVar("_Number", int, float)

HELP = """\
/temperature X    0 is greedy
/seed N           the same seed gives the same answer; /seed alone: a new one each time
/tree [N]         the tree of the last answer's round N; alone: of its longest round
/clear            forget the conversation
/help, /quit"""


@takes_groups
def chat(
    engine: EngineOptions = EngineOptions(),
    tree: TreeOptions = TreeOptions(),
    no_speculation: Annotated[
        bool, typer.Option("--no-speculation", help="One token a round.", rich_help_panel="Speculation")
    ] = False,
    system: Annotated[str | None, typer.Option(help="What the conversation begins with, as the system.")] = None,
    sampling: SamplingOptions = SamplingOptions(temperature=0.8, max_tokens=256),
) -> None:
    """Talk with a model in the terminal; /help lists what else can be typed."""
    params = sampling.as_params()
    if params.n != 1:
        raise RequestError(f"chat has one answer at a time: --n must be 1; got {params.n}")
    console = make_console()
    llm = engine.load(None if no_speculation else tree.as_config())
    conversation = Conversation(console, llm, params, system)
    console.print("/help lists the commands, /quit ends.", style="dim")
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  gives input() line editing and a history
    while (line := _read_line()) is not None and conversation.take(line.strip()):
        pass


def _read_line() -> str | None:
    """A line that was typed or piped; None at the end of the input."""
    try:
        return input("> " if sys.stdin.isatty() else "")
    except (EOFError, KeyboardInterrupt):
        return None


class Conversation:
    """The messages so far, the sampling settings, and the last answer's rounds."""

    def __init__(self, console: Console, llm: LLM, params: SamplingParams, system: str | None = None):
        self.console, self.llm, self.params = console, llm, params
        self.opening = [] if system is None else [{"role": "system", "content": system}]
        self.messages = list(self.opening)
        self.rounds: list[RoundTrace] = []

    def take(self, line: str) -> bool:
        """Answer a message or obey a command; False when it is /quit. What is refused is said, and changes nothing."""
        if line in ("/quit", "/exit"):
            return False
        try:
            if line.startswith("/"):
                self._obey(*line.removeprefix("/").split())
            elif line:
                self._answer(line)
        except RequestError as error:
            self.console.print(f"error: {error}", style="red", markup=False)
        return True

    def _obey(self, name: str = "", *values: str) -> None:
        match name, values:
            case "temperature", (value,):
                self.params = replace(self.params, temperature=_number(value, float))
                self._say(f"temperature {self.params.temperature:g}")
            case "seed", ():
                self.params = replace(self.params, seed=None)
                self._say("a new seed for every answer")
            case "seed", (value,):
                self.params = replace(self.params, seed=_number(value, int))
                self._say(f"seed {self.params.seed}")
            case "tree", ():
                self._show_tree(None)
            case "tree", (value,):
                self._show_tree(_number(value, int))
            case "clear", ():
                self.messages, self.rounds = list(self.opening), []
                self._say("the conversation is forgotten")
            case "help", ():
                self._say(HELP)
            case _:
                raise RequestError(f"no such command: {' '.join(('/' + name, *values))}\n{HELP}")

    def _answer(self, text: str) -> None:
        from treedraft.debug.trace import LiveTrace, live_rounds, recording

        messages = [*self.messages, {"role": "user", "content": text}]
        printer = AnswerPrinter(self.console, self.llm, self.params)
        rounds = LiveTrace(printer.take)
        try:
            with recording(self.llm, rounds):
                [output] = self.llm.chat(messages, self.params, progress=False)
        except KeyboardInterrupt:
            self._say("\ninterrupted; the message is forgotten")
            return
        choice = output.outputs[0]
        printer.close(choice.text)
        if choice.error:
            raise RequestError(choice.error)
        self.messages = [*messages, {"role": "assistant", "content": choice.text}]
        self.rounds = live_rounds(rounds, output.prompt_token_ids, choice.token_ids)
        self._say(f"[{describe_metrics(output.metrics)}; {choice.finish_reason}]")

    def _show_tree(self, number: int | None) -> None:
        from treedraft.debug.explain import describe_round, render_tree

        if not self.rounds:
            raise RequestError("there is no tree yet: an answer has trees, if speculation is on")
        if number is None:
            number = 1 + max(range(len(self.rounds)), key=lambda i: self.rounds[i].num_accepted)
        if not 1 <= number <= len(self.rounds):
            raise RequestError(f"the last answer has rounds 1..{len(self.rounds)}; got {number}")
        chosen = self.rounds[number - 1]
        self._say(f"round {number} of {len(self.rounds)}, {describe_round(chosen)}")
        self.console.print(render_tree(chosen, lambda token_id: self.llm.decode([token_id]) or f"<{token_id}>"))

    def _say(self, text: str) -> None:
        self.console.print(text, style="dim", markup=False)


class AnswerPrinter:
    """Prints an answer round by round, and no further than where it ends: a round's tokens may go on past that."""

    def __init__(self, console: Console, llm: LLM, params: SamplingParams):
        self._console, self._params = console, params
        self._stream = TextStream(llm.tokenizer, params.stop)
        self._end_ids = {*params.stop_token_ids, *(() if params.ignore_eos else llm.eos_token_ids)}
        self._max_tokens, self._max_context = params.max_tokens, llm.config.max_context or sys.maxsize
        self._num_tokens = self._num_shown = 0
        self._is_over = False

    def take(self, trace: RoundTrace) -> None:
        """Print a round's tokens. Before the first round comes the prefill's token, which is its root."""
        if self._num_tokens == 0:
            self._max_tokens = min(self._max_tokens, self._max_context - trace.kv_len)
            self._push(trace.token_ids[0], 0)
        for token_id, depth in zip(trace.emitted_token_ids, trace.emitted_depths):
            self._push(token_id, depth)

    def close(self, text: str) -> None:
        """Print what is missing of the whole text."""
        self._show(text[self._num_shown :], 0)
        self._console.print()

    def _push(self, token_id: int, depth: int) -> None:
        if self._is_over:
            return
        self._num_tokens += 1
        may_stop = self._num_tokens >= self._params.min_tokens
        is_stopped = may_stop and token_id in self._end_ids or self._stream.push(token_id) and may_stop
        self._is_over = is_stopped or self._num_tokens >= self._max_tokens
        # A stop string may be growing at the end: its beginning is not shown before it is known to be none.
        held = max((len(s) - 1 for s in self._params.stop), default=0)
        end = len(self._stream.text) - held
        self._show(self._stream.text[self._num_shown : max(end, self._num_shown)], depth)

    def _show(self, text: str, depth: int) -> None:
        self._num_shown += len(text)
        self._console.print(Text(text, style=depth_style(depth)), end="", soft_wrap=True)


def _number(text: str, kind: Callable[[str], _Number]) -> _Number:
    try:
        return kind(text)
    except ValueError:
        raise RequestError(f"a number is needed; got {text!r}") from None
