"""Witnesses of fixes in pages and slots: each passes with its fix and fails without it (debug/fixes.yaml)."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from treedraft.attention.paged import PagedTreeAttend
from treedraft.attention.reference import TorchTreeAttention
from treedraft.config import EngineConfig, SpeculativeConfig
from treedraft.engine.request import Request
from treedraft.engine.scheduler import Scheduler
from treedraft.engine.text import TextStream
from treedraft.kv.allocator import PageAllocator
from treedraft.kv.manager import KVManager
from treedraft.kv.pool import LatentPool
from treedraft.runner.round import Target
from treedraft.types import Accepted, SamplingParams
from witnesses.tiny_llm import GREEDY, PROMPTS, make_llm, tokens_of


@pytest.mark.parametrize("page_size", [1, 16])
def test_request_ends_at_the_context_limit(page_size, tmp_path) -> None:
    """The last rounds' nodes lie beyond the context; rows of the page table and rope tables must cover them."""
    params = replace(GREEDY, max_tokens=100)
    options = {"max_context": 16, "page_size": page_size, "max_batch": 2}
    plain = tokens_of(make_llm(tmp_path, None, **options).generate(PROMPTS[:2], params, progress=False))
    llm = make_llm(tmp_path, (3, 4, 9), **options)
    assert tokens_of(llm.generate(PROMPTS[:2], params, progress=False)) == plain
    assert [len(t) for t in plain] == [11, 8]


def test_scheduler_reserves_the_tail() -> None:
    """With pages in plenty, every round may use the whole tree, whatever kv_len mod page_size."""
    shape = SpeculativeConfig(num_steps=3, topk=4, num_draft_tokens=9)
    config = EngineConfig(max_context=64, max_batch=1, page_size=4, speculative=shape)
    for length in range(4, 8):
        scheduler = Scheduler(config, KVManager(PageAllocator(100), page_size=4, table_width=40))
        params = SamplingParams(temperature=0, max_tokens=20)
        request = Request(0, tuple(range(1, length + 1)), params, 0, 0, frozenset(), 60, TextStream(None, ()))
        scheduler.add(request)
        scheduler.schedule()
        request.pending, request.output_token_ids = 0, [1]  # the prefill was collected
        [row] = scheduler.schedule().decodes
        assert row.node_limit == 9
        assert len(scheduler.kv.owned(request.slot)) * 4 >= length + 9


def test_tail_slots_follow_the_prefix(tmp_path) -> None:
    """Tree nodes are written to the sequence's very next slots, inside its partial last page."""
    llm = make_llm(tmp_path, (3, 2, 6), page_size=4)
    seen = set()

    def see_round(rows: Any, batch: Any, result: Any) -> None:
        for b in range(len(rows)):
            start, table = int(batch.kv_lens[b]), batch.page_table[b].tolist()
            expected = [table[p // 4] * 4 + p % 4 for p in range(start, start + 6)]
            assert batch.tail_slots[b, :6].tolist() == expected
            seen.add(start % 4)

    llm.runner.observer = see_round
    llm.generate(PROMPTS, replace(GREEDY, max_tokens=8), progress=False)
    assert seen == {0, 1, 2, 3}


def test_commit_moves_the_accepted_columns() -> None:
    """Path 0, 2, 5 of six nodes in slots 10 .. 15: afterwards slots 10, 11, 12 hold what 10, 12, 15 held."""
    pool = LatentPool(2, 5, 4, 1, torch.float64, "cpu")
    pool.data[:] = torch.arange(20.0, dtype=torch.float64)[None, :, None]
    batch: Any = SimpleNamespace(tail_slots=torch.arange(10, 16)[None])
    accepted = Accepted(torch.tensor([2]), torch.tensor([[0, 2, 5]]), torch.tensor([[7, 8, 9]]), torch.zeros(1, 3))
    nothing: Any = None
    Target(nothing, nothing, pool, ()).commit(batch, accepted)
    assert pool.data[:, 10:13, 0].tolist() == [[10, 12, 15]] * 2


def test_released_pages_are_free_again() -> None:
    kv = KVManager(PageAllocator(12), page_size=4, table_width=10)
    for num_tokens in (5, 17, 40):
        kv.reserve(0, 3)
        kv.reserve(0, num_tokens)
        kv.release(0)
        assert kv.allocator.num_free == 10
    kv.check_integrity()


def test_nan_of_a_sibling_stays_its_own() -> None:
    """Nodes 1 and 2 are siblings; node 1's KV is NaN."""
    backend, pool = TorchTreeAttention(), LatentPool(1, 5, 4, 3, torch.float64, "cpu")
    page_table, slots = torch.tensor([[2, 3, 4]], dtype=torch.int32), torch.tensor([[8, 9, 10]])
    prefix = backend.plan_prefix(page_table, torch.tensor([0]), 0, slots, 4)
    plan = backend.plan_tree(prefix, torch.tensor([[[0b001], [0b011], [0b101]]]), 3)
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    latent, k_rope = random(1, 3, 2), random(1, 3, 1)
    latent[:, 1] = torch.nan
    attend = PagedTreeAttend(backend, plan, pool, slots)
    out = attend.mla(0, random(1, 3, 1, 2), random(1, 3, 1, 1), latent, k_rope, random(1, 4, 2), 0.5)
    assert not out[:, [0, 2]].isnan().any()
