"""The tokenizer beside a checkpoint, when there is one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from treedraft.errors import CheckpointError

FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")


def load_tokenizer(folder: Path) -> Any | None:
    """Return the folder's tokenizer (transformers), or None when it has no tokenizer files.

    Raises CheckpointError when files are there but cannot be read.
    """
    if not any((folder / name).exists() for name in FILES):
        return None
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(folder))
    except Exception as error:  # transformers raises many kinds
        raise CheckpointError(
            f"the tokenizer files in {folder} cannot be read ({error}); remove them to use token ids"
        ) from error
