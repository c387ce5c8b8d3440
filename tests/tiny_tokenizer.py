"""A tokenizer of 48 tokens for the models of `small_models`: enough characters for JSON, and some that are longer."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

END = "<|end|>"  # token 0
CHARACTERS = '{}[]":,.-ĠĊ' + "0123456789" + "abcdefghijklmnop"  # Ġ is a space, Ċ a new line
MERGES = [("a", "b"), ("ab", "c"), ('"', ":"), ('"', ","), ("{", '"'), ("n", "o"), ("d", "e"), ("de", "f"), ("1", "2"),
          ("Ġ", "a")]  # fmt: skip


def write_tokenizer(folder: Path) -> Path:
    """Save it beside a checkpoint."""
    tokens = [END, *CHARACTERS, *("".join(pair) for pair in MERGES)]
    assert len(tokens) == len(set(tokens)) == 48
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END).save_pretrained(folder)
    return folder
