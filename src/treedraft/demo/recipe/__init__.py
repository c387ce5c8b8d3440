"""The recipe of the demo model: corpus, target, the target's own samples, draft head, evaluation."""
