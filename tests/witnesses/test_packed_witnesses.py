"""Witnesses of fixes in packed lists and static buffers: each passes with its fix and fails without it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from treedraft.attention.packed import IndexLists, Reserved, draft_limits, new_record, read_overflow
from treedraft.kv.buffers import Buffers
from treedraft.speculative.tree import own_bits
from witnesses.tiny_llm import GREEDY, PROMPTS, make_llm, tokens_of


def check_engine(tmp_path: Any, backend: str) -> None:
    """Two sequences of a full batch end at the context limit; no list is too small, and the text is right."""
    params = replace(GREEDY, max_tokens=100)
    options = {"max_context": 20, "max_batch": 2}
    plain = tokens_of(make_llm(tmp_path, None, **options).generate(PROMPTS[:2], params, progress=False))
    llm = make_llm(tmp_path, (3, 4, 9), attention_backend=backend, **options)
    outputs = llm.generate(PROMPTS[:2], params, progress=False)
    errors = " ".join(o.outputs[0].error or "" for o in outputs).strip()
    assert not errors
    assert tokens_of(outputs) == plain


def test_drafting_fits_its_lists(tmp_path) -> None:
    check_engine(tmp_path, "packed-torch")


def test_merged_drafting_fits_its_lists(tmp_path) -> None:
    check_engine(tmp_path, "packed-torch-merged")


@pytest.mark.parametrize("level", [2, 3, 4])
def test_full_batch_at_the_context_limit_fits(level) -> None:
    """max_batch 2, topk 3, 4 steps, context 6: level l lists 6 prefix slots and l - 1 path slots for each row."""
    memory = Buffers("cpu")
    limits = draft_limits(max_batch=2, topk=3, num_steps=4, max_context=6)
    lists = IndexLists(Reserved(limits, memory, new_record(memory)), "all", "test", 64)
    start = 3 * (level - 2)
    bits = own_bits(start, 3, 1, torch.device("cpu"))
    for earlier in range(level - 2):
        bits = bits | own_bits(3 * earlier, 3, 1, torch.device("cpu"))
    pages = torch.arange(2, 42, dtype=torch.int32).view(2, 20)  # of one token
    tail_slots = pages[:, 6:18].long()
    made = lists.build(pages, torch.tensor([6, 6]), tail_slots, bits.expand(2, 3, 1), start + 3, 6, 1)
    assert read_overflow(lists.record.tolist()) is None
    assert made.kv_indptr.diff().tolist() == [6 + level - 1] * 6


def test_batch_smaller_than_its_bucket(tmp_path) -> None:
    """Three sequences, then two, in a bucket of four: a row that is counted twice is penalised twice."""
    params = [replace(GREEDY, max_tokens=n, frequency_penalty=0.7) for n in (4, 12, 12)]
    options: dict[str, Any] = {"max_batch": 4, "max_context": 32}
    plain = tokens_of(make_llm(tmp_path, (3, 2, 6), **options).generate(PROMPTS, params, progress=False))
    llm = make_llm(tmp_path, (3, 2, 6), cuda_graph="eager", **options)
    assert tokens_of(llm.generate(PROMPTS, params, progress=False)) == plain
