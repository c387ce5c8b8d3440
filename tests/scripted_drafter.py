"""A drafter whose trees are written by the test: which columns carry the target's own tokens is known beforehand."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from treedraft.speculative.tree import num_words
from treedraft.types import DraftTree


class ScriptedDrafter:
    """Proposes one fixed tree. Columns in `path` carry the text's next tokens, all others wrong ones.

    `texts`: prompt and expected output of each prompt. Draft KV is kept by the head's own drafter.
    """

    def __init__(self, llm: Any, parents: list[int], path: list[int], texts: list[list[int]]):
        self.inner = llm.runner.drafter
        self.head, self.pool, self.shape = self.inner.head, self.inner.pool, self.inner.shape
        self.vocab_size = llm.vocab_size
        self.parents, self.path, self.texts = parents, path, texts
        self.text_of_slot: dict[int, list[int]] = {}
        depths = [0]
        for parent in parents[1:]:
            depths.append(depths[parent] + 1)
        self.depths = depths
        words = num_words(len(parents), self.shape.topk, self.shape.num_steps)
        bits = [1]
        for column in range(1, len(parents)):
            bits.append(bits[parents[column]] | 1 << column)
        mask = (1 << 64) - 1
        signed = [[(b >> 64 * w) & mask for w in range(words)] for b in bits]
        self.bits = torch.tensor([[x - (1 << 64) if x >> 63 else x for x in row] for row in signed])

    def prefill(self, batch: Any, features: Tensor, next_tokens: Tensor) -> None:
        start = 0
        for slot, (_, length) in zip(batch.slots.tolist(), batch.sequences, strict=True):
            prompt = batch.token_ids[start : start + length].tolist()
            self.text_of_slot[slot] = next(t for t in self.texts if t[:length] == prompt)
            start += length
        self.inner.prefill(batch, features, next_tokens)

    def extend(self, batch: Any, features: Tensor, accepted: Any) -> None:
        self.inner.extend(batch, features, accepted)

    def propose(self, batch: Any, rows: Any, noise: Tensor | None, root_masks: Tensor | None) -> DraftTree:
        size = len(batch.slots)
        tokens = [self._tokens(slot, kv_len) for slot, kv_len in zip(batch.slots.tolist(), batch.kv_lens.tolist())]
        token_ids = torch.tensor(tokens)
        token_ids[:, 0] = batch.roots
        parents, depths = (torch.tensor(x).expand(size, -1) for x in (self.parents, self.depths))
        return DraftTree(token_ids, parents, depths, self.bits.expand(size, -1, -1), -depths.float())

    def _tokens(self, slot: int, kv_len: int) -> list[int]:
        text = self.text_of_slot[slot]
        out = []
        for column, depth in enumerate(self.depths):
            place = kv_len + depth
            right = text[place] if place < len(text) else 0
            out.append(right if column in self.path else (right + 1 + column) % self.vocab_size)
        return out
