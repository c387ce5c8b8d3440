"""Executes step plans on one device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from treedraft.attention.base import TreeAttention
from treedraft.attention.packed import read_overflow
from treedraft.errors import InvariantError
from treedraft.kv.page_table import PageTable
from treedraft.models.deepseek import DeepseekModel
from treedraft.runner.batch import DecodeBatch, pack_decode, pack_prefill
from treedraft.runner.capture import CapturedRounds
from treedraft.runner.drafter import Drafter
from treedraft.runner.graphs import GraphState
from treedraft.runner.operators import logits_parts
from treedraft.runner.prompt_logprobs import Scores, read_scores, score_prompts
from treedraft.runner.round import RoundTensors, Target, run_prefill, run_round
from treedraft.runner.seam import EagerSeam, Seam
from treedraft.runner.shapes import ShapedRound
from treedraft.runner.state import DeviceState
from treedraft.speculative.sampling import SamplingRows
from treedraft.speculative.shapes import accepted_by_shape
from treedraft.types import DecodeRow, PrefillRow, RowResult, SamplingParams, StepPlan, StepResult

RoundObserver = Callable[[tuple[DecodeRow, ...], DecodeBatch, RoundTensors], None]


@dataclass(frozen=True)
class HostCopy:
    """A part of a step on its way to the host."""

    request_ids: tuple[int, ...]
    params: tuple[SamplingParams, ...]
    is_round: bool
    tokens: Tensor  # [B, 2 P + 1] int64: num_accepted, has_nan, token ids, ranks but the root's
    overflow: Tensor  # [7] int64: the overflow record, see attention.packed.RECORD
    logprobs: Tensor | None  # [B, P, 1 + 2k] float64: own, k best values, k best ids
    copied: torch.cuda.Event | None
    shape: int = 0  # of the round's trees
    by_shape: Tensor | None = None  # [B, J] int64: drafts that each offered shape would have had accepted


@dataclass(frozen=True)
class Refused:
    """A round that was not launched: the host knew that an index list would be too small."""

    request_ids: tuple[int, ...]
    reason: str


@dataclass(frozen=True)
class Unsampled:
    """Chunks of known tokens: the token after them is known too."""

    request_ids: tuple[int, ...]


Part = HostCopy | Refused | Unsampled | Scores


@dataclass(frozen=True)
class Ticket:
    """A launched step."""

    parts: tuple[Part, ...]


class Runner:
    """Orders the kernels of a step. Holds the device state; sees neither requests nor prompts' texts."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        state: DeviceState,
        pages: PageTable,
        page_size: int,
        chain: Tensor,
        num_steps: int,
        device: torch.device,
    ):
        self.target, self.drafter, self.state, self.pages = target, drafter, state, pages
        self.page_size, self.num_steps, self.device = page_size, num_steps, device
        self.chain = chain  # [tail, words] int64: ancestor bits of a chain
        self.graphs: GraphState | None = None  # rounds on static buffers, see runner.graphs; None: made anew each time
        self.captured: CapturedRounds | None = None  # rounds recorded on a CPU, see runner.capture
        self.smaller: tuple[ShapedRound, ...] = ()  # rounds of shapes 1, 2, ..., see config.offered_shapes
        self.shape_limits: Tensor | None = None  # [2, J] int64 where there are several shapes, see runner.shapes
        self.observer: RoundObserver | None = None  # debug.trace listens here

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Ticket:
        """Enqueue a step: table changes, then one round for all running sequences, then prefills.

        Syncs with a round's drafts, and with a prefill, where a row has a grammar."""
        for slot in plan.released_slots:
            self.pages.clear(slot)
        self.pages.apply(plan.page_updates)
        parts: list[Part] = []
        if plan.decodes:
            parts.append(self._refuse(plan.decodes) or self._launch_round(plan.decodes, plan.shape))
        if plan.prefills:
            parts += self._launch_prefill(plan.prefills)
        return Ticket(tuple(parts))

    def collect(self, ticket: Ticket) -> StepResult:
        """Read a step's tokens. Syncs with that step's copy alone."""
        scored = tuple(s for part in ticket.parts if isinstance(part, Scores) for s in read_scores(part))
        results = [_read(part) for part in ticket.parts if not isinstance(part, Scores)]
        reasons = (reason for _, reason in results if reason is not None)
        return StepResult(tuple(row for rows, _ in results for row in rows), scored, next(reasons, None))

    @property
    def backends(self) -> tuple[TreeAttention, ...]:
        """The attention backends in use."""
        drafting = (getattr(self.drafter, name, None) for name in ("attention", "extension"))
        return (self.target.attention, *(a for a in drafting if a is not None))

    def _refuse(self, rows: tuple[DecodeRow, ...]) -> Refused | None:
        """Check on the host that the round's index lists fit, where lengths are known; else the device will."""
        if not all(r.is_exact for r in rows):
            return None
        try:
            for backend in self.backends:
                backend.check_fits(len(rows), sum(r.max_kv_len for r in rows))
        except InvariantError as error:
            return Refused(tuple(r.request_id for r in rows), str(error))
        return None

    def _launch_prefill(self, rows: tuple[PrefillRow, ...]) -> list[Part]:
        for row in rows:
            if row.is_last:
                self.state.install(row)
        batch = pack_prefill(rows, self.pages, self.page_size, self.device)
        sampled = tuple(r for r in rows if r.next_token is None)
        slots, params = batch.slots[batch.sampled], tuple(r.sampling for r in sampled)
        sampling = self.state.sampling_rows(slots, params) if sampled else None
        result, hidden = run_prefill(batch, sampling, self.target, self.drafter, self.state, self._seam(sampled))
        parts: list[Part] = [Unsampled(tuple(r.request_id for r in rows if r.next_token is not None))]
        scores = score_prompts(rows, batch, hidden, self.target.model)
        if scores is not None:
            parts.append(scores)
        return parts if result is None else [*parts, self._copy_out(sampled, result, is_round=False)]

    def at_shape(self, shape: int) -> ShapedRound:
        """The round of a shape: its drafter, levels and record."""
        return self.smaller[shape - 1] if shape else ShapedRound(self.drafter, self.num_steps, self.captured)

    def run_round(
        self, batch: DecodeBatch, rows: SamplingRows, shape: int = 0, seam: Seam | None = None
    ) -> RoundTensors:
        """Run one round of a packed batch, with trees of a shape."""
        at = self.at_shape(shape)
        return run_round(batch, rows, self.target, at.drafter, self.state, at.num_steps, seam)

    def _seam(self, rows: tuple[PrefillRow, ...] | tuple[DecodeRow, ...]) -> EagerSeam | None:
        """What a round of these rows calls before it samples; None where none has a grammar."""
        grammars = tuple(r.grammar for r in rows)
        if not any(g is not None for g in grammars):
            return None
        return EagerSeam(grammars, self.target.model.config.vocab_size, self.device)

    def count_by_shape(self, result: RoundTensors) -> Tensor | None:
        """[B, J] int64: what trees of each shape would have had accepted; None where there is only one shape."""
        return None if self.shape_limits is None else accepted_by_shape(result.tree, result.accepted, self.shape_limits)

    def run_rows(self, rows: tuple[DecodeRow, ...], shape: int = 0) -> tuple[DecodeBatch, RoundTensors, Tensor | None]:
        """Run one round, with trees of a shape, by whatever runs rounds here; and count by shape. Does not sync."""
        if self.graphs is not None:
            return self.graphs.run(rows, shape)
        batch = pack_decode(rows, self.state, self.pages, self.page_size, self.target.attention, self.chain)
        sampling = self.state.sampling_rows(batch.slots, tuple(r.sampling for r in rows))
        at, seam = self.at_shape(shape), self._seam(rows)
        if seam is None and at.captured is not None and at.captured.drafter is at.drafter:
            result = at.captured.run(batch, sampling)
        else:
            result = self.run_round(batch, sampling, shape, seam)
        return batch, result, self.count_by_shape(result)

    def _launch_round(self, rows: tuple[DecodeRow, ...], shape: int = 0) -> HostCopy:
        batch, result, by_shape = self.run_rows(rows, shape)
        if self.observer is not None:
            self.observer(rows, batch, result)
        return self._copy_out(rows, result, is_round=True, shape=shape, by_shape=by_shape)

    def _copy_out(
        self,
        rows: tuple[PrefillRow, ...] | tuple[DecodeRow, ...],
        result: RoundTensors,
        is_round: bool,
        shape: int = 0,
        by_shape: Tensor | None = None,
    ) -> HostCopy:
        accepted = result.accepted
        heads = (accepted.num_accepted[:, None], result.has_nan.long()[:, None])
        tokens = torch.cat([*heads, accepted.token_ids, accepted.ranks[:, 1:]], 1)
        params = tuple(r.sampling for r in rows)
        num_top = max((p.logprobs for p in params if p.logprobs is not None), default=None)
        logprobs = (
            None if num_top is None else path_logprobs(result, num_top, self.target.model).to("cpu", non_blocking=True)
        )
        copied, overflow = None, result.overflow.clone()  # outputs of a replayed round are overwritten by the next
        if self.device.type == "cuda":
            tokens, overflow = (t.to("cpu", non_blocking=True) for t in (tokens, overflow))
            by_shape = None if by_shape is None else by_shape.to("cpu", non_blocking=True)
            copied = torch.cuda.Event()
            copied.record()
        return HostCopy(
            request_ids=tuple(r.request_id for r in rows),
            params=params,
            is_round=is_round,
            tokens=tokens,
            overflow=overflow,
            logprobs=logprobs,
            copied=copied,
            shape=shape,
            by_shape=by_shape,
        )


def path_logprobs(result: RoundTensors, num_top: int, model: DeepseekModel) -> Tensor:
    """[B, P, 1 + 2k] float64: log-probability of each emitted token under the raw target, and the k best with ids.

    The path's logits are made anew from its states, a part of the batch at once: a round keeps none.
    """
    columns, token_ids = result.accepted.columns, result.accepted.token_ids
    hidden = result.hidden.gather(1, columns[..., None].expand(-1, -1, result.hidden.shape[-1]))
    vocab_size, parts = model.config.vocab_size, []
    batch, path = columns.shape
    for part in logits_parts(batch, path, vocab_size, torch.float64):
        logprobs = model.logits(hidden[part]).double().log_softmax(-1)
        own = logprobs.gather(-1, token_ids[part].clamp(min=0)[..., None])
        best = logprobs.topk(min(num_top, vocab_size), dim=-1)
        parts.append(torch.cat([own, best.values, best.indices.double()], -1))
    return torch.cat(parts)


def _read(part: HostCopy | Refused | Unsampled) -> tuple[list[RowResult], str | None]:
    """A part's rows, and why they are void if they are."""
    if isinstance(part, Unsampled):
        return [RowResult(i, False, (), False, None, None) for i in part.request_ids], None
    if isinstance(part, Refused):
        return [RowResult(i, True, (), False, None, None) for i in part.request_ids], part.reason
    if part.copied is not None:
        part.copied.synchronize()
    logprobs = None if part.logprobs is None else part.logprobs.tolist()
    by_shape = None if part.by_shape is None else part.by_shape.tolist()
    results = []
    for b, values in enumerate(part.tokens.tolist()):
        num_emitted = values[0] + 1
        first_rank = 2 + len(values) // 2
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
                shape=part.shape,
                ranks=tuple(values[first_rank : first_rank + values[0]]),
                accepted_by_shape=() if by_shape is None else tuple(by_shape[b]),
            )
        )
    return results, read_overflow(part.overflow.tolist())
