"""The commands over a fake engine: what they print, what they pass on, how they fail."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner, Result

import treedraft.llm
from fake_llm import FakeLLM
from treedraft.cli.app import app
from treedraft.cli.options import parse_bytes
from treedraft.cli.prompts import read_prompts
from treedraft.config import SpeculativeConfig
from treedraft.debug.differences import Gaps
from treedraft.errors import ConfigError, RequestError
from treedraft.types import SamplingParams, StructuredOutput


@pytest.fixture(autouse=True)
def fake_engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    FakeLLM.built.clear()
    monkeypatch.setattr(treedraft.llm, "LLM", FakeLLM)
    yield


def call(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments), catch_exceptions=False)


def flags_of(*path: str) -> set[str]:
    command = get_command(app)
    for name in path:
        command = command.commands[name]
    return {flag for p in command.params for flag in p.opts + p.secondary_opts if flag.startswith("--")}


# ---------------------------------------------------------------- flags

ENGINE = (
    "--model --model-path --draft --speculative-draft-model-path --load-format --device --dtype --page-size "
    "--block-size --max-context --max-model-len --context-length --max-batch --max-running-requests "
    "--chunked-prefill-size --max-num-batched-tokens --enable-prefix-caching --disable-radix-cache "
    "--no-enable-prefix-caching --kv-memory "
    "--mem-fraction-static --gpu-memory-utilization --cuda-graph --disable-cuda-graph --enforce-eager "
    "--attention-backend --draft-attention-backend --speculative-draft-attention-backend --deterministic "
    "--enable-deterministic-inference --debug --seed"
).split()
TREE = (
    "--speculative-num-steps --speculative-eagle-topk --speculative-num-draft-tokens --shared-noise --no-shared-noise"
).split()
SAMPLING = (
    "--max-tokens --temperature --top-k --top-p --min-p --n --repetition-penalty --presence-penalty "
    "--frequency-penalty --stop --min-tokens --ignore-eos"
).split()


@pytest.mark.parametrize(
    ("command", "own"),
    [
        ("generate", "--prompts --token-ids --no-speculation --json --json-schema --regex --grammar"),
        ("chat", "--no-speculation --system"),
        ("check", "--prompts --limit --json"),
        ("explain", "--token-ids --round --svg"),
    ],
)
def test_flags_of_commands_are_frozen(command: str, own: str) -> None:
    assert flags_of(command) == {*ENGINE, *TREE, *SAMPLING, *own.split()}


def test_help_needs_no_torch() -> None:
    code = (
        "import sys\nfrom treedraft.cli.app import app\nfrom typer.testing import CliRunner\n"
        "assert CliRunner().invoke(app, ['generate', '--help']).exit_code == 0\nassert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_version_is_printed() -> None:
    assert re.fullmatch(r"treedraft \d+\.\d+\.\d+\n", call("--version").output)


# ---------------------------------------------------------------- generate


def test_generate_prints_prompt_text_and_figures() -> None:
    result = call("generate", "abc", "--max-tokens", "7")
    assert result.exit_code == 0
    assert "abcdehmt" in result.output  # the prompt, then the text
    assert "7 tokens, 14 tokens/s, 3.00 tokens a round" in result.output


def test_generate_json_gives_one_object_for_each_choice() -> None:
    result = call("generate", "abc", "xy", "--max-tokens", "4", "--n", "2", "--json")
    records = [json.loads(line) for line in result.stdout.splitlines()]
    assert [(r["prompt"], r["index"]) for r in records] == [("abc", 0), ("abc", 1), ("xy", 0), ("xy", 1)]
    assert set(records[0]) == {
        *("prompt", "prompt_token_ids", "index", "text", "token_ids", "finish_reason", "metrics")
    }
    assert records[0]["text"] == "".join(map(chr, records[0]["token_ids"]))
    assert records[0]["metrics"]["accepted_per_depth"] == [1.0, 0.5]


def test_generate_json_writes_null_for_a_metric_that_does_not_exist() -> None:
    record = json.loads(call("generate", "abc", "--max-tokens", "1", "--json").stdout)
    assert record["metrics"]["accept_length"] is None


def test_generate_passes_the_flags_on() -> None:
    result = call(
        *("generate", "abc", "--model", "folder", "--speculative-draft-model-path", "head", "--block-size", "3"),
        *("--max-model-len", "99", "--kv-memory", "2M", "--gpu-memory-utilization", "0.5", "--seed", "7"),
        *("--speculative-num-steps", "3", "--speculative-eagle-topk", "2", "--speculative-num-draft-tokens", "9"),
        *("--no-shared-noise", "--device", "cpu", "--dtype", "float64", "--max-running-requests", "5"),
        *("--chunked-prefill-size", "64", "--disable-radix-cache"),
    )
    assert result.exit_code == 0
    assert FakeLLM.built == [
        {
            "model": "folder",
            "draft": "head",
            "load_format": "auto",
            "device": "cpu",
            "dtype": "float64",
            "page_size": 3,
            "max_context": 99,
            "max_batch": 5,
            "chunked_prefill": 64,
            "prefix_cache": False,
            "kv_memory_bytes": 2 * 2**20,
            "mem_fraction_static": 0.5,
            "cuda_graph": "auto",
            "attention_backend": "auto",
            "draft_attention_backend": "auto",
            "deterministic": False,
            "debug": None,
            "seed": 7,
            "speculative": SpeculativeConfig(num_steps=3, topk=2, num_draft_tokens=9, shared_noise=False),
        }
    ]


def test_generate_without_speculation_builds_none() -> None:
    assert call("generate", "abc", "--no-speculation").exit_code == 0
    assert FakeLLM.built[0]["speculative"] is None


def test_generate_token_ids_prompt() -> None:
    record = json.loads(call("generate", "97, 98,99", "--token-ids", "--max-tokens", "2", "--json").stdout)
    assert (record["prompt"], record["prompt_token_ids"]) == (None, [97, 98, 99])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["abc", "--max-tokens", "0"], "max_tokens must be at least 1; got 0"),
        (["abc", "--top-p", "0"], "top_p must be in (0, 1]"),
        (["abc", "--speculative-num-draft-tokens", "200"], "num_draft_tokens must be in 2..69"),
        (["abc", "--kv-memory", "much"], "a size is a number of bytes"),
        (["1,x", "--token-ids"], "token ids are integers"),
        (["abc", "--prompts", "/nowhere/p.txt"], "cannot read the prompt file /nowhere/p.txt"),
        (["abc", "--json-schema", "/nowhere/s.json"], "cannot read /nowhere/s.json"),
        (["abc", "--regex", "a", "--grammar", "/dev/null"], "got regex, grammar"),
        ([""], "the prompt is empty"),
        ([], "no prompt: give PROMPT arguments"),
    ],
)
def test_generate_bad_input_prints_one_message_and_exits_with_2(arguments: list[str], message: str) -> None:
    result = call("generate", *arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith("treedraft: error: ")
    assert message in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], None),
        (["--regex", "a+"], StructuredOutput(regex="a+")),
        (["--json-schema", "text"], StructuredOutput(json_schema='{"type": "null"}')),
        (["--grammar", "text"], StructuredOutput(grammar='{"type": "null"}')),
    ],
)
def test_generate_takes_what_the_text_must_be(
    flags: list[str], expected: StructuredOutput | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "text").write_text('{"type": "null"}')
    given: list[SamplingParams] = []
    generate = FakeLLM.generate

    def watched(self: FakeLLM, prompts: Any, params: SamplingParams, progress: bool = True) -> Any:
        given.append(params)
        return generate(self, prompts, params, progress)

    monkeypatch.setattr(FakeLLM, "generate", watched)
    monkeypatch.chdir(tmp_path)
    assert call("generate", "abc", *flags).exit_code == 0
    assert [params.structured for params in given] == [expected]


@pytest.mark.parametrize("flag", ["--tool-call-parser", "--reasoning-parser"])
def test_serve_refuses_a_parser_that_nobody_knows_before_it_loads_a_model(flag: str) -> None:
    result = call("serve", flag, "mine")
    assert result.exit_code == 2 and f"{flag[2:]} must be one of deepseek_" in result.stderr
    assert FakeLLM.built == []


# ---------------------------------------------------------------- prompts


def test_read_prompts_accepts_every_form(tmp_path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text('"text"\n\n[1, 2]\n{"prompt": "x", "domain": "code"}\n{"prompt_token_ids": [3]}\n')
    lines = read_prompts(str(file))
    assert [(x.prompt, x.domain) for x in lines] == [("text", ""), ([1, 2], ""), ("x", "code"), ([3], "")]
    plain = tmp_path / "p.txt"
    plain.write_text("one\n\ntwo\n")
    assert [x.prompt for x in read_prompts(str(plain))] == ["one", "two"]


@pytest.mark.parametrize("line", ["{", "3", '{"text": "x"}', "[1.5]", "[true]"])
def test_read_prompts_names_a_bad_line(tmp_path, line: str) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text(f'"good"\n{line}\n')
    with pytest.raises(RequestError, match=r"p\.jsonl:2: "):
        read_prompts(str(file))


def test_read_prompts_demo_has_24_of_each_domain_with_their_sources() -> None:
    lines = read_prompts("demo")
    assert {d: sum(x.domain == d for x in lines) for d in {x.domain for x in lines}} == {
        **{"story": 24, "kid": 24, "fiction": 24, "code": 24}
    }
    assert len({x.prompt for x in lines}) == len(lines)


@pytest.mark.parametrize(
    ("text", "size"), [("17", 17), ("1k", 1024), ("1.5M", 1572864), ("2GiB", 2**31), ("1TB", 2**40)]
)
def test_parse_bytes(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "G", "x", "1X"])
def test_parse_bytes_refuses(text: str) -> None:
    with pytest.raises(ConfigError, match="a size is"):
        parse_bytes(text)


# ---------------------------------------------------------------- check, explain, demo, bench


def test_check_equal_texts_exit_with_0() -> None:
    result = call("check", "abc", "defg", "--max-tokens", "10")
    assert result.exit_code == 0
    assert "EQUAL" in result.output
    assert [b["speculative"] is None for b in FakeLLM.built] == [True, False]


@pytest.mark.parametrize(("gap", "verdict"), [(0.25, "different"), (1e-5, "explained")])
def test_check_difference_is_listed_and_exits_with_1(monkeypatch: pytest.MonkeyPatch, gap: float, verdict: str) -> None:
    monkeypatch.setattr(treedraft.llm, "LLM", partial(FakeLLM, wrong_at=5))
    monkeypatch.setattr("treedraft.debug.compare.gaps_at", lambda *_: Gaps(gap, math.inf, 1.0))
    result = call("check", "abc", "--max-tokens", "10", "--json")
    assert result.exit_code == 1
    report = json.loads(result.stdout)
    assert report["verdict"] == verdict
    [difference] = report["differences"]
    assert (difference["position"], difference["speculative_token_id"]) == (5, ord("!"))
    assert difference["gaps"] == {"top_two": gap, "filter_edge": None, "router": 1.0}
    assert difference["is_explained"] is (verdict == "explained")
    assert verdict.upper() in call("check", "abc", "--max-tokens", "10").output


def test_check_takes_the_bundled_prompts_by_default() -> None:
    assert "96 prompts" in call("check", "--max-tokens", "2").output
    assert "3 prompts" in call("check", "--max-tokens", "2", "--limit", "3").output


def test_explain_prints_and_draws_the_round(tmp_path) -> None:
    svg = tmp_path / "tree.svg"
    result = call("explain", "abc", "--max-tokens", "7", "--round", "2", "--svg", str(svg))
    assert result.exit_code == 0
    assert "round  2  position 6: 5 nodes, 2 drafts accepted, 3 tokens emitted" in result.output
    assert "bonus: the target's token" in result.output
    assert svg.read_text().startswith("<svg ")


def test_explain_a_round_that_never_was_exits_with_2() -> None:
    result = call("explain", "abc", "--max-tokens", "4", "--round", "9")
    assert result.exit_code == 2
    assert "there is no round 9: the text ended after 1 rounds" in result.stderr


def test_demo_shows_text_acceptance_speed_and_verdict() -> None:
    result = call("demo", "--max-tokens", "16", "--repetitions", "1")
    assert result.exit_code == 0
    for expected in ("a fake", "Accepted drafts by depth", "without speculation", "3.00", "Equal: all 96 tokens"):
        assert expected in result.output


def test_demo_says_where_texts_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(treedraft.llm, "LLM", partial(FakeLLM, wrong_at=5))
    result = call("demo", "--max-tokens", "16", "--repetitions", "1")
    assert "The texts part: text 0 at token 5" in result.output


def test_bench_latency_writes_a_result_with_its_circumstances(tmp_path) -> None:
    result = call(
        *("bench", "latency", "--num-prompts", "4", "--repetitions", "2", "--max-tokens", "8", "--out", str(tmp_path))
    )
    assert result.exit_code == 0, result.output
    [file] = tmp_path.iterdir()
    data = json.loads(file.read_text())
    assert {"benchmark", "commit", "date", "machine", "versions", "settings", "rows"} <= set(data)
    assert [(r["engine"], r["batch"]) for r in data["rows"]] == [
        *[("treedraft", 1), ("treedraft, tree", 1)],
        *[("treedraft", 4), ("treedraft, tree", 4)],
    ]
    assert data["rows"][1]["same_tokens"] == 1.0


def test_bench_latency_unknown_engine_exits_with_2() -> None:
    result = call("bench", "latency", "--compare", "abacus")
    assert result.exit_code == 2
    assert "--compare knows transformers; got 'abacus'" in result.stderr


def test_bench_acceptance_by_shape_temperature_noise_and_domain(tmp_path) -> None:
    result = call(
        *("bench", "acceptance", "--shape", "5,4,16", "--temperature", "0", "--temperature", "0.8", "--noise", "both"),
        *("--limit", "2", "--max-tokens", "10", "--out", str(tmp_path)),
    )
    assert result.exit_code == 0, result.output
    [file] = tmp_path.iterdir()
    rows = json.loads(file.read_text())["rows"]
    settings = [(r["temperature"], r["shared_noise"]) for r in rows if r["domain"] == "all"]
    assert settings == [(0.0, True), (0.8, True), (0.8, False)]
    assert {r["domain"] for r in rows} == {"story", "kid", "fiction", "code", "all"}
    assert all(r["accept_length"]["mean"] == 3.0 for r in rows)  # 9 tokens after the first, in 3 rounds


def test_bench_acceptance_impossible_shape_exits_with_2() -> None:
    assert "num_draft_tokens must be in 2..6" in call("bench", "acceptance", "--shape", "5,1,9").stderr
    assert "three integers" in call("bench", "acceptance", "--shape", "5,1").stderr
