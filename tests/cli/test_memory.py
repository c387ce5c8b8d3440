"""`treedraft memory` against what torch's profiler sees allocated, and its two forms of output."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from typer.testing import CliRunner

from small_models import write_head, write_target
from treedraft import LLM, SamplingParams, SpeculativeConfig
from treedraft.attention import BACKENDS
from treedraft.cli.app import app
from treedraft.config import EngineConfig
from treedraft.kv.buffers import KINDS
from treedraft.runner.budget import Budget, budget
from treedraft.types import DecodeRow, StepPlan

EVERY_STAGE = SamplingParams(
    temperature=1.0,
    top_k=50,
    top_p=0.9,
    min_p=0.01,
    repetition_penalty=1.1,
    min_tokens=2,
    logit_bias={5: 1.0},
    max_tokens=8,
)
CONFIGS: list[dict[str, Any]] = [
    {"max_batch": 4, "max_context": 512, "attention_backend": "torch"},
    {
        "max_batch": 3, "max_context": 300, "page_size": 1, "attention_backend": "packed-torch",
        "speculative": SpeculativeConfig(num_steps=3, topk=8, num_draft_tokens=24),
    },
    {
        "max_batch": 4, "max_context": 512, "page_size": 64, "attention_backend": "packed-torch-merged",
        "speculative": SpeculativeConfig(num_steps=7, topk=8, num_draft_tokens=40), "cuda_graph": "eager",
    },
    {"max_batch": 2, "max_context": 128, "dtype": "bfloat16", "speculative": None},
]  # fmt: skip
IDS = ["torch", "packed", "merged-static", "plain-bfloat16"]


def full_round(llm: LLM) -> StepPlan:
    """A round in which every slot is used and has reached the context limit. Syncs."""
    state, pages, config = llm.runner.state, llm.runner.pages, llm.config
    assert config.max_context is not None
    nodes = 1 if config.speculative is None else config.speculative.num_draft_tokens
    for slot in range(config.max_batch):
        first = 2 + slot * pages.width
        pages.table[slot] = torch.arange(first, first + pages.width)
        state.kv_lens[slot] = config.max_context
        state.temperature[slot], state.top_k[slot] = EVERY_STAGE.temperature, EVERY_STAGE.top_k
        state.top_p[slot], state.min_p[slot], state.repetition_penalty[slot] = 0.9, 0.01, 1.1
    rows = (DecodeRow(i, i, config.max_context, nodes, EVERY_STAGE) for i in range(config.max_batch))
    return StepPlan(decodes=tuple(rows))


def measure(arguments: dict[str, Any]) -> tuple[int, int]:
    """Bytes held when an LLM is built, and the most alive during a full round, as torch's profiler sees them."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as building:
        llm = LLM("demo", device="cpu", **arguments)
    plan = full_round(llm)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as running:
        ticket = llm.runner.launch(plan)
    del ticket
    lasting = allocations(building)
    alive = peak = 0
    for size in allocations(running):
        alive += size
        peak = max(peak, alive)
    return sum(lasting), sum(lasting) + peak


def allocations(profiled: profile) -> list[int]:
    """Bytes of each allocation (positive) and release (negative), in order."""
    assert profiled.profiler is not None
    events = [e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]
    return [e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())]


def predicted(arguments: dict[str, Any]) -> tuple[Budget, str]:
    made = budget(EngineConfig(device="cpu", **arguments).resolve(has_cuda=False), 2**34)
    return made, made.layout.config.attention_backend


@pytest.mark.parametrize("arguments", CONFIGS, ids=IDS)
def test_budget_agrees_with_allocations_measured_by_profiler(arguments: dict[str, Any]) -> None:
    lasting, peak = measure(arguments)
    made, backend = predicted(arguments)
    in_round = sum(
        r.bytes for r in made.records if r.backend in ("all", backend) and r.name in ("target logits", "round")
    )
    assert made.total_bytes(backend) - in_round == pytest.approx(lasting, rel=0.02)
    assert made.total_bytes(backend) == pytest.approx(peak, rel=0.02)


def test_budget_of_a_long_context_allocates_nothing(tmp_path: Path) -> None:
    folder = write_target(tmp_path / "model", max_position_embeddings=131072)
    (folder / "model.safetensors").unlink()  # a config.json is enough
    head = write_head(tmp_path / "draft")
    config = EngineConfig(str(folder), str(head), device="cpu", max_batch=160, max_context=131072).resolve(False)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        made = budget(config, 2**34)
    assert sum(size for size in allocations(profiled) if size > 0) < 2**20
    lists = {r.name: r.bytes for r in made.records if r.backend == "packed-torch"}
    assert lists["verify kv_indices"] == 160 * 16 * (131072 + 5 + 1) * 4
    assert lists["draft kv_indices"] == 160 * 4 * (131072 + 5) * 4


@pytest.mark.parametrize("field", ["max_batch", "max_context", "page_size"])
def test_budget_of_a_larger_configuration_is_larger(field: str) -> None:
    small = {"max_batch": 2, "max_context": 256, "page_size": 4, "kv_memory_bytes": 2**24}
    first, second = (predicted({**small, field: small[field] * scale})[0] for scale in (1, 2))
    is_larger = [second.total_bytes(name) > first.total_bytes(name) for name in first.kv_free_bytes]
    assert all(is_larger) != (field == "page_size")


# ---------------------------------------------------------------- the command

SMALL = ["memory", "--device", "cpu", "--max-batch", "2", "--max-context", "64", "--kv-memory", "1M"]


def test_memory_json_has_the_documented_form() -> None:
    result = CliRunner().invoke(app, [*SMALL, "--json"], catch_exceptions=False)
    document = json.loads(result.stdout)
    assert list(document) == ["buffers"]
    for entry in document["buffers"]:
        assert list(entry) == ["name", "kind", "backend", "formula", "bytes"]
        assert entry["kind"] in KINDS and entry["bytes"] >= 0 and entry["backend"] in ("all", *BACKENDS)
    names = {(entry["name"], entry["backend"]) for entry in document["buffers"]}
    assert len(names) == len(document["buffers"])
    assert {("target KV", "all"), ("draft kv_indices", "packed-torch"), ("round", "torch")} <= names


def test_memory_formulas_multiply_to_their_bytes() -> None:
    for record in predicted({"max_batch": 3, "max_context": 128})[0].records:
        numbers = record.formula.rpartition(" = ")[2]
        assert eval(numbers, {}) == record.bytes, record


def test_memory_table_says_what_is_left_for_kv() -> None:
    result = CliRunner().invoke(app, [*SMALL, "--device-memory", "2G"], catch_exceptions=False)
    assert "packed-torch-merged:" in result.stdout and "of 2,048 MiB" in result.stdout


def test_memory_without_gpu_and_size_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = CliRunner().invoke(app, ["memory", "--device", "cuda"])
    assert result.exit_code == 2 and "--device-memory" in result.stderr
    planned = CliRunner().invoke(app, ["memory", "--device", "cuda", "--device-memory", "141G"])
    assert planned.exit_code == 0, planned.output
