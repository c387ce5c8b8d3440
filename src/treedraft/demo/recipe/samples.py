"""The target's own text: what the head will meet when it serves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from treedraft.demo.recipe.attend import SamplingCache
from treedraft.models.deepseek import DeepseekModel

Noise = Callable[[int], Tensor]  # position -> [B, V] Gumbel noise of the token at that position


@dataclass(frozen=True)
class SampleSet:
    """Texts of one temperature: token_ids [M, length] int32, each a prompt from the corpus and the target's words."""

    temperature: float
    token_ids: Tensor


def random_noise(rows: int, vocab_size: int, generator: torch.Generator) -> Noise:
    """Fresh Gumbel noise at every position."""

    def draw(position: int) -> Tensor:
        uniform = torch.rand(rows, vocab_size, generator=generator, device=generator.device)
        return -(-uniform.clamp_(1e-20, 1 - 1e-7).log()).log()

    return draw


@torch.inference_mode()
def continue_prompts(
    target: DeepseekModel,
    prompts: Tensor,
    prompt_lens: Tensor,
    length: int,
    temperature: float,
    noise: Noise | None,
    dtype: torch.dtype,
) -> Tensor:
    """Continue prompts [B, P], padded on the right, to `length` tokens: [B, length] int64. No end of text stops it.

    The token at position p is argmax(logits / T + noise(p)), or argmax(logits) at T = 0. `prompt_lens`: [B].
    `dtype`: of the KV cache. Syncs.
    """
    rows, start = len(prompts), 0
    config = target.config
    cache = SamplingCache(config.num_hidden_layers, rows, length, config.mla.latent_width, dtype, prompts.device)
    tokens = torch.empty(rows, length, dtype=torch.int64, device=prompts.device)
    tokens[:, : prompts.shape[1]] = prompts
    positions = torch.arange(length, device=prompts.device).expand(rows, -1)
    for end in range(int(prompt_lens.min()), length):
        output = target(tokens[:, start:end], positions[:, start:end], cache)
        cache.length = end
        logits = target.logits(output.hidden[:, -1])
        if temperature > 0 and noise is not None:
            logits = logits / temperature + noise(end)
        tokens[:, end] = torch.where(prompt_lens > end, tokens[:, end], logits.argmax(-1))
        start = end
    return tokens


def draw_samples(
    target: DeepseekModel,
    draw_prompts: Callable[[int, int], Tensor],
    temperatures: dict[float, int],
    length: int,
    prompt_lens: tuple[int, int],
    batch_rows: int,
    dtype: torch.dtype,
    seed: int,
) -> list[SampleSet]:
    """Draw sets of texts. `temperatures`: temperature -> number of texts; `prompt_lens`: bounds, one length a batch.

    `draw_prompts(rows, length)` gives prompts [rows, length].
    """
    lengths = torch.Generator().manual_seed(seed)
    sets = []
    for temperature, num_texts in temperatures.items():
        parts: list[Tensor] = []
        for first in range(0, num_texts, batch_rows):
            rows = min(batch_rows, num_texts - first)
            prompt_len = int(torch.randint(prompt_lens[0], prompt_lens[1] + 1, (), generator=lengths))
            prompts = draw_prompts(rows, prompt_len)
            generator = torch.Generator(prompts.device).manual_seed(seed * 1000 + len(parts))
            noise = random_noise(rows, target.config.vocab_size, generator) if temperature > 0 else None
            lens = torch.full((rows,), prompt_len, device=prompts.device)
            parts.append(continue_prompts(target, prompts, lens, length, temperature, noise, dtype).int())
        sets.append(SampleSet(temperature, torch.cat(parts)))
    return sets
