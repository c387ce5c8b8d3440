"""A watch over acceptance: a useless draft head never changes the text, so nothing else shows it."""

from __future__ import annotations

import logging
from dataclasses import dataclass

logger = logging.getLogger(__name__)

MIN_ROUNDS = 50  # fewer say nothing
LOW = 1.05  # tokens a round; 1 is what no draft at all gives


@dataclass
class AcceptanceWatch:
    """Counts rounds, and warns once when drafts turn out to be hardly ever accepted (failure class 18)."""

    num_rounds: int = 0
    num_accepted: int = 0
    has_warned: bool = False

    def count(self, num_rounds: int, num_accepted: int) -> None:
        """Record rounds that could have accepted drafts, and how many they accepted together."""
        self.num_rounds += num_rounds
        self.num_accepted += num_accepted
        if self.num_rounds < MIN_ROUNDS or self.has_warned:
            return
        accept_length = 1 + self.num_accepted / self.num_rounds
        if accept_length < LOW:
            self.has_warned = True
            logger.warning(
                "the draft head is of no use: %.2f tokens a round over %d rounds, where %.2f would be without a head. "
                "Is it made for this model, and eagle_aux_hidden_state_layer_ids right? The text is not affected; "
                "without speculation it comes faster.",
                accept_length,
                self.num_rounds,
                1.0,
            )
