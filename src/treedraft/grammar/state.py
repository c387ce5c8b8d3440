"""One request's grammar: how far its output has come, and which tokens may follow each node of a tree behind it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

ALL = np.uint32(0xFFFFFFFF)
Mask = NDArray[np.int32]  # bit v & 31 of word v >> 5 is token v


def num_words(vocab_size: int) -> int:
    """Words of a mask over the vocabulary."""
    return -(-vocab_size // 32)


def write_mask(matcher: LLMatcher, mask: Mask) -> bool:
    """Write which tokens may follow; False where the matcher cannot tell."""
    matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
    return not matcher.is_error()


def shortened(message: str) -> str:
    """A message of the library's without what only its authors can read."""
    message = message.split("\n<backtrace>")[0].replace("<non-verbose/>", "").strip()
    return message if len(message) <= 600 else f"{message[:300]} ... {message[-300:]}"


class GrammarState:
    """See types.Grammar. The matcher has taken the output so far and nothing else: a tree's nodes are tried on copies.

    So it is right whatever becomes of a round, and nothing of it is lost when a request gives up its pages.
    """

    def __init__(
        self, matcher: LLMatcher, mask: Mask, num_words: int, min_tokens: int, masked_stop_ids: frozenset[int]
    ) -> None:
        """mask: work space of the library's vocabulary. num_words: of a mask of the model's, which may be smaller.

        masked_stop_ids: forbidden while fewer than min_tokens are said, unless nothing else may be said.
        """
        self.is_finished = False
        self.error: str | None = None
        self._matcher, self._mask, self._num_words = matcher, mask, num_words
        self._min_tokens, self._masked_stop_ids = min_tokens, masked_stop_ids
        self._num_said = 0
        self._root_mask: Mask | None = None  # of what was said so far, where it was asked for

    def advance(self, token_id: int) -> None:
        """See types.Grammar."""
        self._num_said += 1
        self._root_mask = None
        if self._matcher.consume_token(token_id):
            self.is_finished = self._matcher.is_stopped()
        else:
            self.error = shortened(self._matcher.get_error())

    def fill_masks(self, token_ids: Sequence[int], parents: Sequence[int], masks: Mask) -> None:
        """See types.Grammar."""
        masks.fill(-1)
        children: list[list[int]] = [[] for _ in token_ids]
        for node, parent in enumerate(parents):
            if parent >= 0 and token_ids[node] >= 0:  # not the root, nor inert
                children[parent].append(node)
        root = self._matcher.deep_copy()
        if not self._visit(0, 0, root, token_ids, children, masks):
            self.error = shortened(root.get_error()) or "no token may follow"

    def _visit(
        self,
        node: int,
        depth: int,
        matcher: LLMatcher,
        token_ids: Sequence[int],
        children: Sequence[Sequence[int]],
        masks: Mask,
    ) -> bool:
        """Fill in a node, which the matcher has taken, and all below it. False where it cannot be."""
        if node == 0 and self._root_mask is not None:
            masks[0] = self._root_mask
        elif not write_mask(matcher, self._mask) or not self._mask.any():
            return False
        else:
            masks[node] = self._mask[: self._num_words]
            if self._num_said + depth < self._min_tokens:
                self._forbid_stops(masks[node])
        if node == 0:
            self._root_mask = masks[0].copy()
        allowed = [child for child in children[node] if _has(masks[node], token_ids[child])]
        for child in allowed:
            below = matcher if child == allowed[-1] else matcher.deep_copy()
            if below.consume_token(token_ids[child]) and not below.is_stopped():
                self._visit(child, depth + 1, below, token_ids, children, masks)
        return True

    def _forbid_stops(self, mask: Mask) -> None:
        """Where the text is complete nothing but its end may follow, however early that is."""
        kept = mask.copy()
        for token_id in self._masked_stop_ids:
            mask.view(np.uint32)[token_id >> 5] &= ALL ^ np.uint32(1 << (token_id & 31))
        if not mask.any():
            mask[:] = kept


def _has(mask: Mask, token_id: int) -> bool:
    return bool(mask[token_id >> 5] >> (token_id & 31) & 1)
