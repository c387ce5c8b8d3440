"""Red zones: planted writes are found and named, and honest runs stay clean with the same text."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from treedraft import LLM, SamplingParams, SpeculativeConfig
from treedraft.attention import packed
from treedraft.debug.redzone import (
    POISON,
    GuardedSource,
    RedZoneError,
    RedZones,
    Trespass,
    UnguardedSource,
)
from treedraft.errors import ConfigError
from treedraft.kv.buffers import Buffers

PROMPTS = ["Once upon a time", "The quick brown fox", "In the beginning there was a", "Hello", "A tree of"]
DTYPES = [torch.bool, torch.int32, torch.int64, torch.bfloat16, torch.float32, torch.float64]


def beside(tensor: torch.Tensor, first: int, count: int) -> torch.Tensor:
    """Words of a one-row buffer's memory that lie outside it: first 0 is the first word behind it."""
    start = tensor.storage_offset() + (first + tensor.numel() if first >= 0 else first)
    return tensor.as_strided((count,), (1,), start)


# ---------------------------------------------------------------- the guards themselves


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1,), (7,), (3, 5), (2, 3, 64)], ids=str)
def test_buffer_written_within_its_shape_leaves_guards_clean(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    source = GuardedSource()
    tensor = Buffers("cpu", source).allocate("words", "index", shape, dtype, fill=1)
    assert tensor.is_contiguous() and tensor.shape == shape and bool((tensor == 1).all())
    tensor.view(-1).zero_()
    assert source.trespasses(0) == []


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("offset", "place"), [(0, "behind row 0"), (4, "behind row 0"), (-1, "before row 0")])
def test_planted_word_outside_a_buffer_is_named(dtype: torch.dtype, offset: int, place: str) -> None:
    source = GuardedSource()
    tensor = Buffers("cpu", source).allocate("victim", "index", (5, 3), dtype)
    Buffers("cpu", source).allocate("bystander", "index", (5, 3), dtype)
    beside(tensor, offset, 1).fill_(0)
    assert source.trespasses(7) == [Trespass("victim", place, offset, offset, 1, step=7)]


def test_planted_word_between_the_rows_of_a_table_is_named() -> None:
    source = GuardedSource()
    table = Buffers("cpu", source).allocate_rows("steps", "index", (3, 9), torch.int32)
    table.as_strided((2,), (1,), table.storage_offset() + table.stride(0) + 9).fill_(4)
    assert source.trespasses(1) == [Trespass("steps", "behind row 1", 0, 1, 2, step=1)]


def test_room_of_a_table_is_its_rows_unless_unguarded() -> None:
    for source, extra in ((GuardedSource(1 << 12), 0), (UnguardedSource(1 << 12), 1 << 10)):
        buffers = Buffers("cpu", source)
        table = buffers.allocate_rows("lists", "index", (2, 64), torch.int32)
        room = buffers.room(table)
        assert room.shape == (2, 64 + extra)
        room.fill_(3)
        assert [t.count for t in source.trespasses(0)] == ([extra, extra] if extra else [])


def test_poison_is_nan_in_floats_and_beyond_any_index_in_integers() -> None:
    words = torch.full((8,), POISON, dtype=torch.int16)
    assert all(words.view(dtype).isnan().all() for dtype in (torch.bfloat16, torch.float32, torch.float64))
    assert all((words.view(dtype) >= 2**31 - 2**18).all() for dtype in (torch.int32, torch.int64))


# ---------------------------------------------------------------- a whole engine


def zones_of(llm: LLM) -> RedZones:
    zones = llm.engine.runner
    assert isinstance(zones, RedZones)
    return zones


def texts(llm: LLM, params: SamplingParams) -> list[tuple[int, ...]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params, progress=False)]


TREES = [None, SpeculativeConfig(1, 1, 2), SpeculativeConfig(3, 8, 24), SpeculativeConfig(5, 4, 16)]


@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("tree", TREES, ids=["plain", "1-1-2", "3-8-24", "5-4-16"])
def test_honest_run_stays_clean_with_the_same_text(tree: SpeculativeConfig | None, page_size: int) -> None:
    """Freed pages hold NaN, so equal text also says that they are not read."""
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=12, top_k=40)
    arguments: dict[str, Any] = {
        "speculative": tree,
        "page_size": page_size,
        "max_batch": 1 + page_size % 3,  # fewer slots than prompts: pages and slots are freed and taken again
        "max_context": 64,
        "attention_backend": ("torch", "packed-torch", "packed-torch-merged")[page_size % 3],
        "max_pending": page_size % 2,
        "cuda_graph": "off" if page_size == 3 else "eager",
    }
    watched = LLM("demo", debug="redzone", device="cpu", **arguments)
    assert texts(watched, params) == texts(LLM("demo", device="cpu", **arguments), params)
    assert zones_of(watched).step > 4


@torch.inference_mode()
def test_planted_word_past_every_buffer_of_an_engine_is_reported() -> None:
    llm = LLM(
        "demo", debug="redzone", device="cpu", max_batch=2, max_context=64, attention_backend="packed-torch",
        cuda_graph="eager",
    )  # fmt: skip
    zones = zones_of(llm)
    zones.verify()
    names = {zone.name for zone in zones.source.zones}
    assert names == {record.name for record in zones.buffers.records}
    kinds = {record.kind for record in zones.buffers.records}
    assert kinds == {"kv", "index", "mask", "graph"}
    for zone in zones.source.zones:
        end = zone.starts[-1] + zone.length
        kept = zone.raw[end : end + zone.item_size].clone()
        zone.raw[end : end + zone.item_size] = 0
        with pytest.raises(RedZoneError) as caught:
            zones.verify()
        place = f"behind row {len(zone.starts) - 1}"
        assert caught.value.trespasses == [Trespass(zone.name, place, 0, 0, 1, step=0)]
        assert repr(zone.name) in str(caught.value) and "offset 0..0" in str(caught.value)
        zone.raw[end : end + zone.item_size] = kept


def test_write_to_a_freed_page_is_reported_at_its_step() -> None:
    llm = LLM("demo", debug="redzone", device="cpu", max_batch=1, max_context=64, page_size=4)
    llm.generate(["Hello"], SamplingParams(temperature=0, max_tokens=5), progress=False)
    zones, pool = zones_of(llm), llm.runner.target.pool
    last = pool.num_pages - 1
    pool.data[2, last * 4 + 1, 3] = 1.0
    with pytest.raises(
        RedZoneError, match=f"'target KV', free page {last}: 1 words at offset {pool.data.shape[2] + 3}"
    ):
        zones.verify()
    step = zones.step
    with pytest.raises(RedZoneError, match=f"step {step + 1}"):
        llm.generate(["Hello"], SamplingParams(temperature=0, max_tokens=5), progress=False)


def test_freed_pages_hold_poison() -> None:
    llm = LLM("demo", debug="redzone", device="cpu", max_batch=1, max_context=64, page_size=4)
    llm.generate(["Hello"], SamplingParams(temperature=0, max_tokens=5), progress=False)
    llm.generate(["A"], SamplingParams(temperature=0, max_tokens=1), progress=False)
    used = (~llm.runner.target.pool.data.isnan()).any(0).any(-1).nonzero()[:, 0] // 4
    assert len(used.unique()) < 8  # the zero page, and those of the sequence that was last


@pytest.mark.parametrize("mode", ["redzones", "unguarded", ""])
def test_unknown_mode_raises(mode: str) -> None:
    with pytest.raises(ConfigError, match="redzone,unguarded"):
        LLM("demo", device="cpu", debug=mode)


# ---------------------------------------------------------------- a list that is too small

SMALL = 'device="cpu", max_batch=2, max_context=64, attention_backend=BACKEND, speculative=shape'
FIXED_IN = {"27460": "packed-torch", "27338": "packed-torch-merged"}
SCRIPT = f"""
from treedraft import LLM, SamplingParams, SpeculativeConfig
from treedraft.debug.redzone import RedZoneError
shape = SpeculativeConfig(num_steps=3, topk=4, num_draft_tokens=12)
prompts = [[65 + i for i in range(30)], [97 + i for i in range(25)]]
params = SamplingParams(temperature=0, max_tokens=4)
llm = LLM("demo", debug=MODE, {SMALL})
try:
    outputs = llm.generate(prompts, params, progress=False)
    print([o.outputs[0].finish_reason for o in outputs])
except RedZoneError as error:
    for t in error.trespasses:
        print(t.name, t.place, t.first, t.last, t.count, sep="|")
"""


def run_reverted(mode: str, fixes: str, cache: Path, backend: str = "packed-torch") -> str:
    environment = {**os.environ, "TREEDRAFT_REVERT_FIX": fixes, "XDG_CACHE_HOME": str(cache)}
    code = SCRIPT.replace("MODE", repr(mode)).replace("BACKEND", repr(backend))
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.mark.parametrize("fix", ["27460", "27338"])
@pytest.mark.parametrize("fixes", ["one", "both"])
def test_reverted_width_is_refused_by_the_check_with_red_zones_on(fix: str, fixes: str, tmp_path: Path) -> None:
    reverted = fix if fixes == "one" else ",".join(FIXED_IN)
    assert run_reverted("redzone", reverted, tmp_path, FIXED_IN[fix]) == "['error', 'error']"


def test_reverted_width_unguarded_changes_exactly_the_words_past_the_row(tmp_path: Path) -> None:
    width = packed.packed_width(2, 1, 64, 3)  # what the fault allocates: one row a sequence
    need = 4 * (30 + 25) + 2 * 4 * 2  # the last draft level: each of 4 rows lists its prefix and 2 ancestors
    name, place, first, last, count = run_reverted("redzone,unguarded", "27460", tmp_path).split("|")
    assert (name, place) == ("draft kv_indices", "behind row 0")
    assert (int(first), int(last), int(count)) == (0, need - width - 1, need - width)


def test_reverted_path_width_unguarded_changes_exactly_the_words_past_the_row(tmp_path: Path) -> None:
    width = packed.packed_width(2, 1, 0, 3)  # what the fault allocates: one row's path a sequence
    need = 2 * 4 * 2  # the last draft level: each of 4 rows of 2 sequences lists its 2 ancestors
    found = run_reverted("redzone,unguarded", "27338", tmp_path, "packed-torch-merged")
    name, place, first, last, count = found.split("|")
    assert (name, place) == ("draft path kv_indices", "behind row 0")
    assert (int(first), int(last), int(count)) == (0, need - width - 1, need - width)


@pytest.mark.parametrize("backend", FIXED_IN.values())
def test_right_width_unguarded_stays_clean(backend: str, tmp_path: Path) -> None:
    assert run_reverted("redzone,unguarded", "", tmp_path, backend) == "['length', 'length']"
