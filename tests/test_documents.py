"""README and CONTRIBUTING tell the truth: their example runs, their commands, targets and files exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.main import get_command

import treedraft.llm
from fake_llm import FakeLLM
from treedraft.cli.app import app

ROOT = Path(__file__).parent.parent
DOCUMENTS = ("README.md", "CONTRIBUTING.md")


def test_readme_example_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(treedraft.llm, "LLM", FakeLLM)
    [example] = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    assert len(example.splitlines()) <= 20
    exec(compile(example, "README.md", "exec"), {})
    assert capsys.readouterr().out.endswith("[True, True]\n")


def test_documents_name_commands_that_exist() -> None:
    command = get_command(app)
    for name in re.findall(r"`treedraft ([a-z]+(?: [a-z]+)?)", (ROOT / "README.md").read_text()):
        inner = command
        for word in name.split():
            inner = inner.commands[word]


def test_documents_name_flags_that_exist() -> None:
    known = set()

    def collect(command) -> None:
        known.update(flag for p in command.params for flag in p.opts + p.secondary_opts)
        for inner in getattr(command, "commands", {}).values():
            collect(inner)

    collect(get_command(app))
    for script in (ROOT / "benchmarks").glob("*.py"):
        known.update(re.findall(r'add_argument\(\s*"(--[a-z-]+)"', script.read_text()))
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", (ROOT / "README.md").read_text()))
    assert named - known <= {"--help"}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_documents_name_make_targets_that_exist(document: str) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    assert set(re.findall(r"\bmake ([a-z-]+)", (ROOT / document).read_text())) - {"with"} <= targets


@pytest.mark.parametrize("document", DOCUMENTS)
def test_documents_link_to_files_that_exist(document: str) -> None:
    links = re.findall(r"\]\(([^)#]+)\)", (ROOT / document).read_text())
    assert [link for link in links if "://" not in link and not (ROOT / link).exists()] == []


def test_results_name_no_place_of_a_checkout() -> None:
    """A result's paths are relative, so that it says the same wherever it was made."""
    for file in (ROOT / "benchmarks/results").glob("*.json"):
        assert not re.search(r'"/[^"\s]*/(benchmarks|src|treedraft)\b', file.read_text()), file.name
