"""Checkpoints on disk: Hugging Face layout, safetensors."""
