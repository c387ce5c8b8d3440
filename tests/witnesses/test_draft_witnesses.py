"""Witnesses of fixes in drafting: each passes with its fix and fails without it (src/treedraft/debug/fixes.yaml)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kv_oracle import generate_checked
from small_models import write_head, write_target
from treedraft import LLM, SpeculativeConfig
from treedraft.errors import CheckpointError
from treedraft.models.draft.eagle3 import Eagle3MlaHead
from treedraft.speculative.tree import first_level, next_level
from treedraft.weights.loader import read_config, save_checkpoint, shards
from witnesses.tiny_llm import GREEDY, PROMPTS, make_llm, tokens_of


def test_positions_of_draft_rows(tmp_path, monkeypatch) -> None:
    """In a round from kv_len L: level l >= 2 forwards K rows at L + l - 2, then the extension L .. L + P - 1."""
    llm = make_llm(tmp_path, (3, 2, 6))
    log: list[Any] = []
    forward = Eagle3MlaHead.forward

    def spy(self: Any, hidden: Any, token_ids: Any, positions: Any, attend: Any) -> Any:
        log.append(positions.tolist())
        return forward(self, hidden, token_ids, positions, attend)

    def see_round(rows: Any, batch: Any, result: Any) -> None:
        [start] = batch.kv_lens.tolist()
        path = result.accepted.columns.shape[1]
        assert log[-3:] == [[[start] * 2], [[start + 1] * 2], [list(range(start, start + path))]]

    monkeypatch.setattr(Eagle3MlaHead, "forward", spy)
    llm.runner.observer = see_round
    llm.generate(PROMPTS[:1], GREEDY, progress=False)
    assert log[0] == list(range(5)), "prefill"


def test_pools_hold_the_kv_of_a_dense_forward(tmp_path) -> None:
    _, problems = generate_checked(make_llm(tmp_path, (3, 2, 6)), PROMPTS, GREEDY)
    assert problems == []


def test_tree_with_fewer_nodes_than_levels(tmp_path) -> None:
    plain = tokens_of(make_llm(tmp_path, None).generate(PROMPTS, GREEDY, progress=False))
    assert tokens_of(make_llm(tmp_path, (3, 4, 2)).generate(PROMPTS, GREEDY, progress=False)) == plain


def test_frontier_rows_descend_from_their_parents() -> None:
    """K = 2: the candidates of level 2 are children of rows 0, 0, 1, 1, and the two of row 1 are the best."""
    pool, frontier = first_level(torch.tensor([[10, 11]]), torch.tensor([[-1.0, -1.5]]), words=1)
    child_ids = torch.tensor([[[20, 21], [22, 23]]])
    child_logps = torch.tensor([[[-5.0, -6.0], [-0.1, -0.2]]])
    _, best, parent_rows = next_level(pool, frontier, child_ids, child_logps, level=2)
    assert best.token_ids.tolist() == [[22, 23]]
    assert parent_rows.tolist() == [[1, 1]]
    assert best.ancestor_bits.tolist() == [[[0b0110], [0b1010]]]  # row 1 of level 1, and the row itself


def test_tensor_of_another_shape_is_refused(tmp_path) -> None:
    """As many numbers, in another shape: the final norm's weight as a column."""
    names = {"model": str(write_target(tmp_path / "model")), "draft": str(write_head(tmp_path / "draft"))}
    folder = tmp_path / "draft"
    config = read_config(folder)
    tensors = load_all(folder)
    tensors["fc.weight"] = tensors["fc.weight"].t().contiguous()
    save_checkpoint(folder, iter(tensors.items()), config)
    with pytest.raises(CheckpointError, match=r"fc\.weight must have shape"):
        LLM(**names, device="cpu", speculative=SpeculativeConfig(2, 2, 4))


def load_all(folder: Any) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return {name: tensor for path in set(shards(folder).values()) for name, tensor in load_file(path).items()}
