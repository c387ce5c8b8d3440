"""README's examples of a client run as they stand."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from live_server import Live
from treedraft import LLM

README = (Path(__file__).parents[2] / "README.md").read_text()
URL = "http://127.0.0.1:8000"


def test_python_client_of_the_readme_runs(live: Live, capsys: pytest.CaptureFixture[str]) -> None:
    [example] = [e for e in re.findall(r"```py\n(.*?)```", README, flags=re.DOTALL) if "OpenAI" in e]
    assert URL in example
    exec(compile(example.replace(URL, live.url), "README.md", "exec"), {})
    assert "'accept_length'" in capsys.readouterr().out.splitlines()[-1]


def test_structured_output_of_the_readme_runs(plain64: LLM) -> None:
    [example] = [e for e in re.findall(r"```py\n(.*?)```", README, flags=re.DOTALL) if "StructuredOutput" in e]
    names: dict[str, Any] = {}
    exec(compile(example, "README.md", "exec"), names)
    [output] = plain64.generate(["It is"], names["params"], progress=False)
    jsonschema.validate(json.loads(output.outputs[0].text), names["animal"])


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_curl_of_the_readme_runs(live: Live) -> None:
    [example] = re.findall(r"```sh\n(.*?)```", README, flags=re.DOTALL)
    assert URL in example
    out = subprocess.run(example.replace(URL, live.url), shell=True, capture_output=True, text=True, check=True).stdout
    assert out.startswith('data: {"id": "cmpl-') and out.endswith("data: [DONE]\n\n")
