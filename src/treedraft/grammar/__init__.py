"""Structured output: what a request's text must be, as masks of tokens. Host work by llguidance; no torch."""
