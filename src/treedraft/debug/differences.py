"""Why two runs chose different tokens: how near to a tie the first difference was (design: exactness).

In float32 a row of a matrix product may change in its last bits with the number of rows beside it. A difference is
*explained* when, at its first position, the two best tokens, an expert's choice or a filter's edge was that near.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from treedraft.attention.dense import DenseAttend
from treedraft.models.moe import Router, Routing
from treedraft.runner.state import DeviceState
from treedraft.speculative.noise import gumbel, noise_key
from treedraft.speculative.sampling import process
from treedraft.types import PrefillRow, SamplingParams

NEAR = 1e-4


@dataclass(frozen=True)
class Gaps:
    """Distances to the nearest tie at one position; infinite where there is no such choice."""

    top_two: float  # best minus second of z + noise
    filter_edge: float  # nearest token to a top-k, top-p or min-p threshold
    router: float  # last chosen against first unchosen expert, over all layers, at this position or before

    @property
    def is_explained(self) -> bool:
        return min(self.top_two, self.filter_edge, self.router) < NEAR


@torch.inference_mode()
def gaps_at(
    llm: Any, prompt: Sequence[int], output: Sequence[int], params: SamplingParams, choice: int, key: int | None = None
) -> Gaps:
    """Recompute the choice of the token after `prompt + output` with plain dense attention. Syncs.

    key: the request's noise key; None derives it from params.seed, as `LLM` does.
    """
    model, device = llm.runner.target.model, llm.runner.device
    ids = torch.tensor([[*prompt, *output]], device=device)
    positions = torch.arange(ids.shape[1], device=device)[None]
    with router_gaps(model) as gaps:
        hidden = model(ids, positions, DenseAttend()).hidden[:, -1:]
    logits = model.logits(hidden)
    if key is None:
        key = noise_key(params.seed or 0, choice)
    state = DeviceState(1, logits.shape[-1], 0, logits.dtype, device)
    stops = tuple(sorted(set(params.stop_token_ids) | (set() if params.ignore_eos else set(llm.eos_token_ids))))
    state.install(PrefillRow(0, 0, tuple(prompt), key, params, stops))
    state.output_counts[0] = torch.bincount(torch.tensor(output, dtype=torch.int64), minlength=logits.shape[-1])
    rows = state.sampling_rows(torch.zeros(1, dtype=torch.int64, device=device), (params,))
    zero = torch.zeros(1, 1, dtype=torch.int64, device=device)
    kv_lens = torch.tensor([ids.shape[1] - 1], device=device)
    no_path = torch.empty(1, 1, 0, dtype=torch.int64, device=device)
    z = process(logits, rows, no_path, zero, kv_lens)[0, 0]
    unfiltered = SamplingParams(**{**params.__dict__, "top_k": 0, "top_p": 1.0, "min_p": 0.0})
    free_rows = state.sampling_rows(torch.zeros(1, dtype=torch.int64, device=device), (unfiltered,))
    free = process(logits, free_rows, no_path, zero, kv_lens)[0, 0]
    if params.temperature > 0:
        z = z + gumbel(rows.noise_key, kv_lens[:, None] + 1, z.shape[-1])[0, 0]
    best = z.topk(2).values
    return Gaps(float(best[0] - best[1]), filter_edge(free.double(), params), min(gaps, default=float("inf")))


def filter_edge(z: Tensor, params: SamplingParams) -> float:
    """Distance of the nearest token to a filter's threshold, in logits (top-k, min-p) or in mass (top-p). z: [V]."""
    if params.temperature == 0:
        return float("inf")
    edges = [float("inf")]
    ordered = z.sort(descending=True).values
    if 0 < params.top_k < len(z):
        edges.append(float(ordered[params.top_k - 1] - ordered[params.top_k]))
        ordered = ordered[: params.top_k]
    probs = ordered.softmax(-1)
    if params.top_p < 1:
        sums = probs.cumsum(-1)
        edges.append(float((sums - params.top_p).abs().min()))
        ordered = ordered[: int((sums < params.top_p).sum()) + 1]
    if params.min_p > 0:
        edges.append(float((ordered - ordered[0] - torch.tensor(params.min_p).log()).abs().min()))
    return min(edges)


@contextmanager
def router_gaps(model: Any) -> Iterator[list[float]]:
    """Collect, from every router called inside, the smallest gap between a chosen and an unchosen expert's score."""
    found: list[float] = []

    def hook(router: Router, _args: tuple[Any, ...], routing: Routing) -> None:
        choice = routing.scores + getattr(router, "bias", 0.0)
        is_chosen = torch.zeros_like(choice, dtype=torch.bool).scatter(-1, routing.indices, True)
        worst_chosen = choice.masked_fill(~is_chosen, torch.inf).amin(-1)
        best_unchosen = choice.masked_fill(is_chosen, -torch.inf).amax(-1)
        found.append(float((worst_chosen - best_unchosen).abs().min()))

    hooks = [m.register_forward_hook(hook) for m in model.modules() if isinstance(m, Router)]
    try:
        yield found
    finally:
        for handle in hooks:
            handle.remove()
