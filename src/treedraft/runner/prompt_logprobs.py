"""Log-probabilities of prompt tokens: each row of a prefill says how likely the token behind it was.

They are of the raw target distribution, as those of generated tokens, and in float64 like them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from treedraft.models.deepseek import DeepseekModel
from treedraft.runner.batch import PrefillBatch
from treedraft.runner.operators import logits_parts
from treedraft.runner.state import to_device
from treedraft.types import PrefillRow, PromptLogprob, ScoredTokens


@dataclass(frozen=True)
class Scores:
    """Log-probabilities of a step's prompt tokens on their way to the host."""

    rows: tuple[PrefillRow, ...]
    values: Tensor  # [R, 2 + 2k] float64: own log-probability, rank, k best values, k best ids
    copied: torch.cuda.Event | None


def score_prompts(
    rows: tuple[PrefillRow, ...], batch: PrefillBatch, hidden: Tensor, model: DeepseekModel
) -> Scores | None:
    """Score what the rows of a prefill ask for; None where they ask for nothing. hidden [T, H]: states of all rows."""
    wanted: list[int] = []
    offset = 0
    for row in rows:
        first, end = row.scored
        wanted += range(offset + first - row.start, offset + end - row.start)
        offset += len(row.token_ids)
    if not wanted:
        return None
    scored = tuple(row for row in rows if row.scored[0] < row.scored[1])
    num_top = max(row.sampling.prompt_logprobs or 0 for row in scored)
    index = to_device(wanted, torch.int64, hidden.device)
    values = token_logprobs(hidden, index, batch.next_tokens, num_top, model).to("cpu", non_blocking=True)
    copied = None
    if hidden.device.type == "cuda":
        copied = torch.cuda.Event()
        copied.record()
    return Scores(scored, values, copied)


def token_logprobs(hidden: Tensor, index: Tensor, next_tokens: Tensor, num_top: int, model: DeepseekModel) -> Tensor:
    """[R, 2 + 2k] float64, see `Scores`, of the rows `index` [R]. hidden [T, H]; next_tokens [T] int64.

    A part of the rows at once, so that their logits never exist whole.
    """
    vocab_size, parts = model.config.vocab_size, []
    num_top = min(num_top, vocab_size)
    for part in logits_parts(len(index), 1, vocab_size, torch.float64):
        rows = index[part]
        logprobs = model.logits(hidden[rows]).double().log_softmax(-1)
        own = logprobs.gather(-1, next_tokens[rows, None])
        rank = (logprobs > own).sum(-1, keepdim=True) + 1
        best = logprobs.topk(num_top, dim=-1)
        parts.append(torch.cat([own, rank.double(), best.values, best.indices.double()], -1))
    return torch.cat(parts)


def read_scores(scores: Scores) -> list[ScoredTokens]:
    """What each row asked for. Syncs with the copy alone."""
    if scores.copied is not None:
        scores.copied.synchronize()
    values = scores.values.tolist()
    width, results, offset = (scores.values.shape[1] - 2) // 2, [], 0
    for row in scores.rows:
        first, end = row.scored
        num_top = min(row.sampling.prompt_logprobs or 0, width)
        logprobs = tuple(_one(each, num_top, width) for each in values[offset : offset + end - first])
        results.append(ScoredTokens(row.request_id, first, logprobs))
        offset += end - first
    return results


def _one(values: list[float], num_top: int, width: int) -> PromptLogprob:
    own, rank, best = values[0], values[1], values[2:]
    ids = best[width : width + num_top]
    return PromptLogprob(own, int(rank), {int(i): lp for i, lp in zip(ids, best[:num_top], strict=True)})
