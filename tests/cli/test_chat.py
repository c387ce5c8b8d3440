"""`treedraft chat` over a fake engine: what it prints and keeps, its commands, and where an answer ends."""

from __future__ import annotations

import io
from collections.abc import Iterator

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

import treedraft.llm
from fake_llm import FakeLLM, make_round
from treedraft.cli.app import app
from treedraft.cli.chat import AnswerPrinter, Conversation
from treedraft.config import SpeculativeConfig
from treedraft.types import SamplingParams


@pytest.fixture(autouse=True)
def fake_engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    FakeLLM.built.clear()
    monkeypatch.setattr(treedraft.llm, "LLM", FakeLLM)
    yield


def call(typed: str, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["chat", "--max-tokens", "7", *arguments], input=typed, catch_exceptions=False)


def talk(*lines: str, params: SamplingParams | None = None, llm: FakeLLM | None = None) -> tuple[Conversation, str]:
    """A conversation after these lines, and what it printed."""
    out = io.StringIO()
    llm = llm or FakeLLM(max_context=None, speculative=SpeculativeConfig())
    conversation = Conversation(Console(file=out, width=100), llm, params or SamplingParams(max_tokens=7))
    for line in lines:
        assert conversation.take(line)
    return conversation, out.getvalue()


# The fake's text is a function of the prompt's length: of "abc" it is "dehmtcn".


def test_chat_prints_each_answer_once_and_ends_with_quit() -> None:
    result = call("abc\n/quit\nnever read\n")
    assert result.exit_code == 0
    assert result.output.count("dehmtcn") == 1
    assert "[7 tokens, 14 tokens/s, 3.00 tokens a round; length]" in result.output
    assert "never" not in result.output


def test_chat_end_of_input_ends_it() -> None:
    assert call("abc\n").exit_code == 0
    assert call("").exit_code == 0


def test_chat_without_speculation_prints_the_text_too() -> None:
    result = call("abc\n/tree\n", "--no-speculation")
    assert "dehmtcn\n" in result.output
    assert "there is no tree yet" in result.output
    assert FakeLLM.built[0]["speculative"] is None


def test_chat_several_choices_are_refused() -> None:
    result = call("", "--n", "2")
    assert result.exit_code == 2
    assert "--n must be 1; got 2" in result.stderr


def test_conversation_keeps_the_messages_and_clear_forgets_them() -> None:
    conversation, _ = talk("abc", "de")
    assert [m["role"] for m in conversation.messages] == ["user", "assistant", "user", "assistant"]
    assert [m["content"] for m in conversation.messages][:3] == ["abc", "dehmtcn", "de"]
    conversation, _ = talk("abc", "/clear")
    assert (conversation.messages, conversation.rounds) == ([], [])


def test_conversation_begins_with_the_system_message() -> None:
    llm = FakeLLM(max_context=None, speculative=None)
    conversation = Conversation(Console(file=io.StringIO()), llm, SamplingParams(max_tokens=2), "be brief")
    conversation.take("abc")
    conversation.take("/clear")
    assert conversation.messages == [{"role": "system", "content": "be brief"}]


def test_commands_change_the_settings() -> None:
    conversation, printed = talk("/temperature 0.25", "/seed 17")
    assert (conversation.params.temperature, conversation.params.seed) == (0.25, 17)
    assert "temperature 0.25" in printed and "seed 17" in printed
    conversation.take("/seed")
    assert conversation.params.seed is None


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/temperature -1", "temperature must be >= 0"),
        ("/temperature hot", "a number is needed; got 'hot'"),
        ("/temperature", "no such command: /temperature"),
        ("/seed 1 2", "no such command: /seed 1 2"),
        ("/dance", "no such command: /dance"),
        ("/", "no such command: /"),
        ("/tree", "there is no tree yet"),
        ("/tree 9", "there is no tree yet"),
    ],
)
def test_what_is_refused_is_said_and_changes_nothing(line: str, message: str) -> None:
    conversation, printed = talk(line)
    assert f"error: {message}" in printed
    assert conversation.params == SamplingParams(max_tokens=7)
    assert conversation.messages == []


def test_a_refused_message_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = FakeLLM(max_context=None, speculative=None)
    monkeypatch.setattr(llm, "chat", lambda *_, **__: llm.generate([""], SamplingParams()))
    conversation, printed = talk("abc", llm=llm)
    assert "error: prompt 0: the prompt is empty" in printed
    assert conversation.messages == []


def test_interrupt_ends_the_answer_and_not_the_chat(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    llm = FakeLLM(max_context=None, speculative=None)
    monkeypatch.setattr(llm, "chat", interrupted)
    conversation, printed = talk("abc", llm=llm)
    assert "interrupted" in printed
    assert (conversation.messages, llm.runner.observer) == ([], None)


def test_tree_shows_the_longest_round_or_the_one_named() -> None:
    _, printed = talk("abc", "/tree", "/tree 2", "/tree 3")
    assert "round 1 of 2, position 3: 5 nodes, 2 drafts accepted, 3 tokens emitted" in printed
    assert "round 2 of 2, position 6" in printed
    assert "bonus: the target's token" in printed
    assert "error: the last answer has rounds 1..2; got 3" in printed


def test_tokens_are_coloured_by_depth_where_the_terminal_has_colours() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, color_system="standard", width=100)
    llm = FakeLLM(max_context=None, speculative=SpeculativeConfig())
    Conversation(console, llm, SamplingParams(max_tokens=4)).take("abc")
    assert "d\x1b[32me\x1b[0m\x1b[36mh\x1b[0mm\n" in out.getvalue()  # first token, depth 1, depth 2, bonus


# ---------------------------------------------------------------- where an answer ends


def printed_of(params: SamplingParams, runs: list[str], eos: str = "", max_context: int | None = None) -> str:
    """What AnswerPrinter shows of "r" and then rounds of three tokens, before close()."""
    out = io.StringIO()
    llm = FakeLLM(max_context=max_context, speculative=SpeculativeConfig())
    llm.eos_token_ids = tuple(map(ord, eos))
    printer = AnswerPrinter(Console(file=out, width=100), llm, params)
    for i, run in enumerate(runs):
        printer.take(make_round(0, 10 + 3 * i, ord("r"), list(map(ord, run))))
    return out.getvalue()


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (SamplingParams(max_tokens=100), "rabcdef"),
        (SamplingParams(max_tokens=3), "rab"),  # inside a run
        (SamplingParams(max_tokens=4), "rabc"),  # the second round is dead
        (SamplingParams(max_tokens=1), "r"),
        (SamplingParams(stop_token_ids=(ord("b"),)), "ra"),
        (SamplingParams(stop_token_ids=(ord("b"),), min_tokens=4), "rabcdef"),
        (SamplingParams(stop=("cd",)), "rab"),
        (SamplingParams(stop=("dx",)), "rabcde"),  # f may begin no "dx", but one character is always held
    ],
)
def test_printer_shows_no_more_than_the_answer(params: SamplingParams, expected: str) -> None:
    assert printed_of(params, ["abc", "def"]) == expected


def test_printer_ends_at_the_end_of_text_and_at_the_context() -> None:
    assert printed_of(SamplingParams(), ["abc", "def"], eos="e") == "rabcd"
    assert printed_of(SamplingParams(ignore_eos=True), ["abc", "def"], eos="e") == "rabcdef"
    assert printed_of(SamplingParams(), ["abc", "def"], max_context=15) == "rabcd"  # r is at position 10


def test_printer_agrees_with_the_engine_on_the_demo_model(tree64) -> None:
    for stop in ((), (" the",), ("\n",)):
        out = io.StringIO()
        params = SamplingParams(max_tokens=23, temperature=0.8, seed=3, stop=stop)
        conversation = Conversation(Console(file=out, width=1000), tree64, params)
        conversation.take("Tell me a story")
        assert out.getvalue().startswith(conversation.messages[-1]["content"] + "\n")
        assert sum(len(r.emitted_token_ids) for r in conversation.rounds) <= 22
