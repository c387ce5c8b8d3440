"""What a model's text means: its thoughts, its answer, and the calls of tools in it."""
