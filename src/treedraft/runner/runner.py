"""Executes step plans on one device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from treedraft.kv.page_table import PageTable
from treedraft.runner.batch import DecodeBatch, pack_decode, pack_prefill
from treedraft.runner.capture import CapturedRounds
from treedraft.runner.drafter import Drafter, chain_bits
from treedraft.runner.round import RoundTensors, Target, run_prefill, run_round
from treedraft.runner.state import DeviceState
from treedraft.types import DecodeRow, PrefillRow, RowResult, SamplingParams, StepPlan, StepResult

RoundObserver = Callable[[tuple[DecodeRow, ...], DecodeBatch, RoundTensors], None]


@dataclass(frozen=True)
class HostCopy:
    """A part of a step on its way to the host."""

    request_ids: tuple[int, ...]
    params: tuple[SamplingParams, ...]
    is_round: bool
    tokens: Tensor  # [B, P + 2] int64: num_accepted, has_nan, token ids
    logprobs: Tensor | None  # [B, P, 1 + 2k] float64: own, k best values, k best ids
    copied: torch.cuda.Event | None


@dataclass(frozen=True)
class Ticket:
    """A launched step."""

    parts: tuple[HostCopy, ...]


class Runner:
    """Orders the kernels of a step. Holds the device state; sees neither requests nor prompts' texts."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        state: DeviceState,
        pages: PageTable,
        page_size: int,
        tail: int,
        num_steps: int,
        device: torch.device,
    ):
        self.target, self.drafter, self.state, self.pages = target, drafter, state, pages
        self.page_size, self.num_steps, self.device = page_size, num_steps, device
        self.chain = chain_bits(tail, device)
        self.captured: CapturedRounds | None = None  # None: every round runs eagerly
        self.observer: RoundObserver | None = None  # debug.trace listens here

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Ticket:
        """Enqueue a step: table changes, then prefills, then one round for all running sequences."""
        for slot in plan.released_slots:
            self.pages.clear(slot)
        self.pages.apply(plan.page_updates)
        parts = []
        if plan.decodes:
            parts.append(self._launch_round(plan.decodes))
        if plan.prefills:
            parts.append(self._launch_prefill(plan.prefills))
        return Ticket(tuple(parts))

    def collect(self, ticket: Ticket) -> StepResult:
        """Read a step's tokens. Syncs with that step's copy alone."""
        return StepResult(rows=tuple(row for part in ticket.parts for row in _read(part)))

    def _launch_prefill(self, rows: tuple[PrefillRow, ...]) -> HostCopy:
        for row in rows:
            self.state.install(row)
        batch = pack_prefill(rows, self.pages, self.page_size, self.device)
        sampling = self.state.sampling_rows(batch.slots, tuple(r.sampling for r in rows))
        result = run_prefill(batch, sampling, self.target, self.drafter, self.state)
        return self._copy_out(rows, result, is_round=False)

    def _launch_round(self, rows: tuple[DecodeRow, ...]) -> HostCopy:
        batch = pack_decode(rows, self.state, self.pages, self.page_size, self.target.attention, self.chain)
        sampling = self.state.sampling_rows(batch.slots, tuple(r.sampling for r in rows))
        if self.captured is not None and self.captured.drafter is self.drafter:
            result = self.captured.run(batch, sampling)
        else:
            result = run_round(batch, sampling, self.target, self.drafter, self.state, self.num_steps)
        if self.observer is not None:
            self.observer(rows, batch, result)
        return self._copy_out(rows, result, is_round=True)

    def _copy_out(
        self, rows: tuple[PrefillRow, ...] | tuple[DecodeRow, ...], result: RoundTensors, is_round: bool
    ) -> HostCopy:
        accepted = result.accepted
        tokens = torch.cat([accepted.num_accepted[:, None], result.has_nan.long()[:, None], accepted.token_ids], 1)
        params = tuple(r.sampling for r in rows)
        num_top = max((p.logprobs for p in params if p.logprobs is not None), default=None)
        logprobs = None if num_top is None else path_logprobs(result, num_top).to("cpu", non_blocking=True)
        copied = None
        if self.device.type == "cuda":
            tokens = tokens.to("cpu", non_blocking=True)
            copied = torch.cuda.Event()
            copied.record()
        return HostCopy(
            request_ids=tuple(r.request_id for r in rows),
            params=params,
            is_round=is_round,
            tokens=tokens,
            logprobs=logprobs,
            copied=copied,
        )


def path_logprobs(result: RoundTensors, num_top: int) -> Tensor:
    """[B, P, 1 + 2k] float64: log-probability of each emitted token under the raw target, and the k best with ids."""
    columns, token_ids = result.accepted.columns, result.accepted.token_ids
    logits = result.logits.gather(1, columns[..., None].expand(-1, -1, result.logits.shape[-1]))
    logprobs = logits.double().log_softmax(-1)
    own = logprobs.gather(-1, token_ids.clamp(min=0)[..., None])
    best = logprobs.topk(min(num_top, logprobs.shape[-1]), dim=-1)
    return torch.cat([own, best.values, best.indices.double()], -1)


def _read(part: HostCopy) -> list[RowResult]:
    if part.copied is not None:
        part.copied.synchronize()
    logprobs = None if part.logprobs is None else part.logprobs.tolist()
    results = []
    for b, values in enumerate(part.tokens.tolist()):
        num_emitted = values[0] + 1
        num_top = part.params[b].logprobs
        own = top = None
        if num_top is not None and logprobs is not None:
            row = logprobs[b][:num_emitted]
            width = (len(row[0]) - 1) // 2  # the most that any request of the batch wants
            num_top = min(num_top, width)
            own = tuple(x[0] for x in row)
            top = tuple(
                {int(i): lp for lp, i in zip(x[1 : 1 + num_top], x[1 + width : 1 + width + num_top], strict=True)}
                for x in row
            )
        results.append(
            RowResult(
                request_id=part.request_ids[b],
                is_round=part.is_round,
                token_ids=tuple(values[2 : 2 + num_emitted]),
                has_nan=bool(values[1]),
                logprobs=own,
                top_logprobs=top,
            )
        )
    return results
