"""HTTP in, text out: an OpenAI-compatible server over the engine."""
