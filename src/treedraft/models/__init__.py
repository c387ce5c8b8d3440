"""Weights in, hidden states out: target models and draft heads."""
