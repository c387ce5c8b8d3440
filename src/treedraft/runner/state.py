"""What the device knows of each running sequence, by slot."""

from __future__ import annotations

import torch
from torch import Tensor

from treedraft.attention.packed import new_record
from treedraft.errors import InvariantError
from treedraft.kv.buffers import Buffers
from treedraft.runner.operators import Operators, TorchOperators
from treedraft.speculative.sampling import GRAMMAR, MAX_STOP_IDS, SamplingRows
from treedraft.types import PrefillRow, SamplingParams

# Rows of the tables of what each slot has one number of. A float is off at 0, from top_p on at 1.
NUMBERS = ("temperature", "min_p", "presence_penalty", "frequency_penalty", "top_p", "repetition_penalty")
INTEGERS = ("kv_lens", "roots", "top_k", "noise_key", "prompt_lens", "min_tokens")
TABLE_STAGES = ("penalties", "bias")  # stages with a row of [V] for each sequence


class DeviceState:
    """Lengths, roots, recycled draft state and sampling tables of every slot. The host never reads them back.

    `kv_lens[s]` committed positions, `roots[s]` the last emitted token at position kv_lens[s], `draft_hidden[s]` the
    head's recycled state of draft row kv_lens[s] - 1, from which the next tree's first level comes.

    One slot more than sequences: `dummy_slot` belongs to the padded rows of a batch bucket, which read and write it.
    """

    def __init__(
        self,
        num_slots: int,
        vocab_size: int,
        draft_hidden_size: int,
        dtype: torch.dtype,
        memory: Buffers | torch.device | str,
        operators: Operators | None = None,
    ):
        """memory: the buffers to allocate from, or a device. operators: of the rounds; None: plain torch."""
        buffers = Buffers.on(memory)

        def zeros(name: str, dtype: torch.dtype, **columns: int) -> Tensor:
            formula = " * ".join(("(max_batch + 1)", *columns))
            shape = (num_slots + 1, *columns.values())
            return buffers.allocate(f"state.{name}", "index", shape, dtype, formula=formula)

        def settings(name: str, dtype: torch.dtype, names: tuple[str, ...]) -> Tensor:
            formula = "fields * (max_batch + 1)"
            return buffers.allocate(f"state.{name}", "index", (len(names), num_slots + 1), dtype, formula=formula)

        self.device = buffers.device
        self.operators: Operators = TorchOperators() if operators is None else operators
        self.dummy_slot = num_slots
        self.overflow = new_record(buffers)  # of the round that runs; see attention.packed.RECORD
        self.draft_hidden = zeros("draft_hidden", dtype, hidden_size=draft_hidden_size)
        # A row for each field: a batch is one gather of columns.
        self.numbers = settings("numbers", torch.float32, NUMBERS)
        self.integers = settings("integers", torch.int64, INTEGERS)
        self.temperature, self.min_p, self.presence_penalty, self.frequency_penalty = self.numbers[:4].unbind()
        self.top_p, self.repetition_penalty = self.numbers[4:].unbind()
        self.kv_lens, self.roots = self.integers[:2].unbind()
        self.top_k, self.noise_key, self.prompt_lens, self.min_tokens = self.integers[2:].unbind()
        self.stop_ids = zeros("stop_ids", torch.int64, max_stop_ids=MAX_STOP_IDS)
        self.prompt_seen = zeros("prompt_seen", torch.bool, vocab_size=vocab_size)
        self.output_counts = zeros("output_counts", torch.int32, vocab_size=vocab_size)
        self.logit_bias = zeros("logit_bias", torch.float32, vocab_size=vocab_size)

    def install(self, row: PrefillRow) -> None:
        """Fill a slot for a sequence, before it first samples there."""
        slot, params = row.slot, row.sampling
        if len(row.stop_token_ids) > MAX_STOP_IDS and params.min_tokens:
            raise InvariantError(
                f"min_tokens can mask at most {MAX_STOP_IDS} stop ids; request {row.request_id} was admitted with "
                f"{len(row.stop_token_ids)}"
            )
        self.temperature[slot] = params.temperature
        self.top_k[slot] = max(params.top_k, 0)
        self.top_p[slot] = params.top_p
        self.min_p[slot] = params.min_p
        self.repetition_penalty[slot] = params.repetition_penalty
        self.presence_penalty[slot] = params.presence_penalty
        self.frequency_penalty[slot] = params.frequency_penalty
        self.noise_key[slot] = row.noise_key
        self.prompt_lens[slot] = len(row.prompt_token_ids)
        self.min_tokens[slot] = params.min_tokens if params.structured is None else 0  # its masks see to it
        stop_ids = (list(row.stop_token_ids) + [-1] * MAX_STOP_IDS)[:MAX_STOP_IDS]
        self.stop_ids[slot] = torch.tensor(stop_ids, device=self.device)
        stages = stages_of((params,))
        if "penalties" in stages:
            self.prompt_seen[slot] = False
            self.prompt_seen[slot, torch.tensor(row.prompt_token_ids, device=self.device)] = True
            output = torch.tensor(row.output_token_ids, dtype=torch.int64, device=self.device)
            self.output_counts[slot] = torch.bincount(output, minlength=self.output_counts.shape[1])
        if "bias" in stages:
            self.logit_bias[slot] = 0
            ids = torch.tensor(list(params.logit_bias), device=self.device)
            self.logit_bias[slot, ids] = torch.tensor(list(params.logit_bias.values()), device=self.device)

    def reset_dummy(self) -> None:
        """Make the dummy slot a legal row of no consequence: nothing committed, greedy, no setting on."""
        slot = self.dummy_slot
        self.draft_hidden[slot].zero_()
        self.integers[:, slot].zero_()
        self.numbers[:4, slot].zero_()
        self.numbers[4:, slot].fill_(1)

    def sampling_rows(self, slots: Tensor, params: tuple[SamplingParams, ...]) -> SamplingRows:
        """The rows of a batch. slots: [B] int64. A stage that no row uses is skipped, and its tables stay empty."""
        stages = stages_of(params)

        uses = {
            stage: to_device([stage in stages_of((p,)) for p in params], torch.bool, self.device)
            for stage in TABLE_STAGES
            if stage in stages
        }
        return self.gather_sampling(slots, stages, uses)

    def gather_sampling(self, slots: Tensor, stages: frozenset[str], uses: dict[str, Tensor]) -> SamplingRows:
        """The rows of `slots` [B] int64 for these stages. uses: for a stage of TABLE_STAGES, the rows that use it."""

        def table(values: Tensor, stage: str) -> Tensor:
            """Rows of a stage's table; zeros for a request that does not use the stage, whose row is a past one's."""
            return values[slots] * uses[stage][:, None] if stage in stages else values[:0]

        numbers = dict(zip(NUMBERS, self.numbers.index_select(1, slots).unbind(), strict=True))
        integers = dict(zip(INTEGERS[2:], self.integers[2:].index_select(1, slots).unbind(), strict=True))
        return SamplingRows(
            **numbers,
            **integers,
            stop_ids=self.stop_ids[slots] if "min_tokens" in stages else self.stop_ids[:0],
            prompt_seen=table(self.prompt_seen, "penalties"),
            output_counts=table(self.output_counts, "penalties"),
            logit_bias=table(self.logit_bias, "bias"),
            stages=stages,
        )


def to_device(values: list, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Host values as a tensor; the host does not wait for the copy."""
    staged = torch.tensor(values, dtype=dtype)
    return staged.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else staged


def stages_of(params: tuple[SamplingParams, ...]) -> frozenset[str]:
    """Stages of the sampling chain that at least one request uses."""
    stages = set()
    for p in params:
        if p.repetition_penalty != 1 or p.presence_penalty or p.frequency_penalty:
            stages.add("penalties")
        if p.logit_bias:
            stages.add("bias")
        if p.min_tokens and p.structured is None:
            stages.add("min_tokens")
        if p.structured is not None:
            stages.add(GRAMMAR)
        if p.temperature > 0:
            stages.add("noise")
            if p.top_k > 0:
                stages.add("top_k")
            if p.top_p < 1:
                stages.add("top_p")
            if p.min_p > 0:
                stages.add("min_p")
    return frozenset(stages)
