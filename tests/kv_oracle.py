"""What the page pools must hold: the KV of one dense forward over the final text.

Faults that only lower acceptance (positions, features or tokens of the wrong row) show here, and nowhere in the text.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from treedraft.attention.dense import DenseAttend
from treedraft.kv.page_table import slots_of
from treedraft.types import RequestOutput


class CapturingAttend(DenseAttend):
    """Dense attention that keeps what each layer would cache."""

    def __init__(self) -> None:
        self.rows: dict[int, Tensor] = {}

    def mla(
        self, layer: int, q_nope: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, kv_b: Tensor, scale: float
    ):
        self.rows[layer] = torch.cat((latent, k_rope), -1)
        return super().mla(layer, q_nope, q_rope, latent, k_rope, kv_b, scale)


@dataclass
class KvLog:
    """A runner's observer that keeps each sequence's pools as they are after its latest round."""

    runner: Any
    target: dict[int, Tensor] = field(default_factory=dict)  # request id -> [layers, kv_len, width]
    draft: dict[int, Tensor] = field(default_factory=dict)
    num_nan: int = 0

    def __call__(self, rows: Any, batch: Any, result: Any) -> None:
        self.num_nan += int(result.has_nan.sum())
        for b, row in enumerate(rows):
            kv_len = int(batch.kv_lens[b] + result.accepted.num_accepted[b] + 1)
            slots = slots_of(batch.page_table[b : b + 1], torch.arange(kv_len)[None], batch.page_size)[0]
            self.target[row.request_id] = self.runner.target.pool.data[:, slots].clone()
            self.draft[row.request_id] = self.runner.drafter.pool.data[:, slots].clone()


@torch.inference_mode()
def dense_kv(llm: Any, token_ids: list[int]) -> tuple[Tensor, Tensor]:
    """Target KV [layers, n, width] and draft KV [1, n - 1, width] of a text of n tokens."""
    model, head = llm.runner.target.model, llm.runner.drafter.head
    ids, positions = torch.tensor(token_ids), torch.arange(len(token_ids))
    attend, draft_attend = CapturingAttend(), CapturingAttend()
    features = model(ids, positions, attend, head.taps).features
    head(head.fuse(features[:-1]), ids[1:], positions[:-1], draft_attend)
    return torch.stack([attend.rows[i] for i in sorted(attend.rows)]), draft_attend.rows[0][None]


def generate_checked(
    llm: Any, prompts: Any, params: Any, tolerance: float = 1e-9
) -> tuple[list[RequestOutput], list[str]]:
    """Generate, and name the sequences whose pools differ from the dense forward over their text (float64)."""
    log, first_id = KvLog(llm.runner), llm._next_id
    llm.runner.observer = log
    try:
        outputs = llm.generate(prompts, params, progress=False)
    finally:
        llm.runner.observer = None
    problems = [f"{log.num_nan} rounds with NaN"] if log.num_nan else []
    for number, output in enumerate(outputs):
        text = [*output.prompt_token_ids, *output.outputs[0].token_ids]
        expected = dict(zip(("target", "draft"), dense_kv(llm, text), strict=True))
        for kind, given in (("target", log.target), ("draft", log.draft)):
            kept = given[first_id + number]
            length = min(kept.shape[1], expected[kind].shape[1])
            error = (kept[:, :length] - expected[kind][:, :length]).abs().amax((0, 2))
            wrong = (~(error < tolerance)).nonzero().flatten().tolist()
            if wrong:
                problems.append(f"{kind} KV of prompt {number} is wrong at {len(wrong)} positions from {wrong[0]} on")
    return outputs, problems
