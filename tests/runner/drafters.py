"""A drafter made for tests: the target itself."""

import torch

from treedraft.attention.paged import PagedTreeAttend
from treedraft.config import SpeculativeConfig
from treedraft.kv.page_table import slots_of
from treedraft.runner.round import Target
from treedraft.speculative.sampling import draft_scores
from treedraft.speculative.select import select
from treedraft.speculative.tree import first_level, last_level, next_level, num_words, own_bits, stable_topk
from treedraft.types import TreeRows


class PerfectDrafter:
    """The target itself as the draft head: its best child is always the target's token (greedy, or plain sampling).

    Scores are sharpened until the best child has probability 1 nearly, so that no tree leaves it out.

    The root and the tree's nodes go through the target into the sequence's next slots, which the verification
    overwrites: root at kv_len, row r of the draft at kv_len + 1 + r.
    """

    def __init__(self, target: Target, shape: SpeculativeConfig):
        self.target, self.shape = target, shape

    def propose(self, batch, rows, noise, root_masks):
        topk, num_steps = self.shape.topk, self.shape.num_steps
        words = num_words(self.shape.num_draft_tokens, topk, num_steps)
        root_bits = torch.zeros(len(batch.slots), 1, words + 1, dtype=torch.int64)
        root_bits[..., 0] = 1
        scores, ids = self._children(batch, rows, noise, batch.roots[:, None], root_bits, 0, 1)
        pool, frontier = first_level(ids[:, 0], scores[:, 0], words)
        bits = self._bits(root_bits.expand(-1, topk, -1), 1)
        for level in range(2, num_steps + 1):
            start = 1 + (level - 2) * topk
            scores, ids = self._children(batch, rows, noise, frontier.token_ids, bits, start, level)
            if level == num_steps:
                pool = last_level(pool, frontier, ids, scores)
                break
            pool, frontier, parent_rows = next_level(pool, frontier, ids, scores, level)
            bits = bits.gather(1, parent_rows[..., None].expand(-1, -1, words + 1))
            bits = self._bits(bits, 1 + (level - 1) * topk)
        return select(pool, batch.roots, self.shape.num_draft_tokens, words, batch.node_limits)

    def prefill(self, batch, features, next_tokens):
        pass

    def extend(self, batch, features, accepted):
        pass

    def _bits(self, parents, start):
        return parents | own_bits(start, parents.shape[1], parents.shape[2], parents.device)

    def _children(self, batch, rows, noise, token_ids, bits, start, level):
        """Forward nodes of depth level - 1 and rank their children at position kv_len + level."""
        count = token_ids.shape[1]
        tree_rows = TreeRows(batch.page_table, batch.kv_lens, bits, start + count, batch.max_kv_len)
        attention = self.target.attention
        places = batch.kv_lens[:, None] + start + torch.arange(count)
        write_slots = slots_of(batch.page_table, places, batch.page_size)
        attend = PagedTreeAttend(attention, attention.plan(tree_rows, batch.page_size), self.target.pool, write_slots)
        positions = (batch.kv_lens[:, None] + level - 1).expand(-1, count)
        hidden = self.target.model(token_ids, positions, attend).hidden
        at_level = None if noise is None else noise[:, level - 1]
        scores = draft_scores(self.target.model.logits(hidden), rows.temperature, at_level)
        return stable_topk((scores * 1e4).log_softmax(-1), self.shape.topk)


def use_perfect_drafter(llm):
    """Replace the head of an LLM by the target itself."""
    llm.runner.drafter = PerfectDrafter(llm.runner.target, llm.config.speculative)
    return llm
