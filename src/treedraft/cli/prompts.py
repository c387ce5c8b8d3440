"""Where prompts come from: the command line, a file, or the bundled held-out set."""

from __future__ import annotations

import json
import random
import sys
from dataclasses import dataclass
from pathlib import Path

from treedraft.errors import RequestError

Prompt = str | list[int]


@dataclass(frozen=True)
class PromptLine:
    """One prompt of a file."""

    prompt: Prompt
    domain: str  # "" where the file names none


def read_prompts(path: str) -> list[PromptLine]:
    """Read a prompt file: `demo` (the bundled held-out set), `-` (standard input), JSON lines, or one prompt a line.

    A JSON line is a string, a list of token ids, or an object with `prompt` or `prompt_token_ids`, and optionally
    `domain`.

    Raises:
        RequestError: no such file, or a line that is no prompt; the message names the line.
    """
    if path == "demo":
        file = Path(__file__).parent.parent / "demo" / "prompts.jsonl"
    else:
        file = Path(path)
    try:
        text = sys.stdin.read() if path == "-" else file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"cannot read the prompt file {file}: {error}") from error
    lines = [(i, line) for i, line in enumerate(text.splitlines(), start=1) if line.strip()]
    is_json = file.suffix in (".jsonl", ".json", ".ndjson")
    prompts = [_parse_json(line, f"{file}:{i}") if is_json else PromptLine(line, "") for i, line in lines]
    if not prompts:
        raise RequestError(f"the prompt file {file} holds no prompt")
    return prompts


def random_prompts(model: str, count: int, length: int) -> list[PromptLine]:
    """Token ids drawn evenly from a model's vocabulary, for models without a tokenizer.

    Raises:
        CheckpointError: no such model.
    """
    from treedraft.weights.loader import METADATA_FILES, read_config, resolve_folder

    vocab_size = int(read_config(resolve_folder(model, files=METADATA_FILES))["vocab_size"])
    rng = random.Random(0)
    return [PromptLine([rng.randrange(vocab_size) for _ in range(length)], "") for _ in range(count)]


def collect_prompts(texts: list[str] | None, path: str | None, as_token_ids: bool = False) -> list[Prompt]:
    """Prompts of the command line, then those of the file.

    Raises:
        RequestError: there is none, or one is malformed.
    """
    given: list[Prompt] = [parse_token_ids(text) if as_token_ids else text for text in texts or []]
    if path is not None:
        given += [line.prompt for line in read_prompts(path)]
    if not given:
        raise RequestError("no prompt: give PROMPT arguments or --prompts FILE (demo: the bundled held-out set)")
    return given


def parse_token_ids(text: str) -> list[int]:
    """Read "1, 2, 3".

    Raises:
        RequestError: an entry is no integer.
    """
    try:
        return [int(part) for part in text.replace(",", " ").split()]
    except ValueError:
        raise RequestError(f"token ids are integers separated by commas or spaces; got {text!r}") from None


def _parse_json(line: str, where: str) -> PromptLine:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise RequestError(f"{where}: not a line of JSON: {error}") from error
    domain = ""
    if isinstance(value, dict):
        domain = str(value.get("domain", ""))
        value = value.get("prompt", value.get("prompt_token_ids"))
    if isinstance(value, str):
        return PromptLine(value, domain)
    if isinstance(value, list) and all(isinstance(x, int) and not isinstance(x, bool) for x in value):
        return PromptLine(value, domain)
    raise RequestError(f"{where}: expected a string, a list of token ids, or an object with prompt or prompt_token_ids")
