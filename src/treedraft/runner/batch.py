"""A step's host integers as tensors: the one host-to-device copy of a step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from treedraft.attention.base import PrefixPlan, TreeAttention
from treedraft.kv.page_table import PageTable, slots_of
from treedraft.runner.state import DeviceState, to_device
from treedraft.types import DecodeRow, PrefillRow


@dataclass(frozen=True)
class PrefillBatch:
    """Chunks of known tokens, joined: T tokens of all sequences one after another."""

    slots: Tensor  # [B] int64
    token_ids: Tensor  # [T] int64
    next_tokens: Tensor  # [T] int64: the token after each; 0 where it is to be sampled
    positions: Tensor  # [T] int64
    write_slots: Tensor  # [T] int64 physical KV slots
    page_table: Tensor  # [B, W] int32
    last_rows: Tensor  # [B] int64: the row of each chunk's last token
    sampled: Tensor  # [B'] int64: the sequences whose next token is to be sampled
    sequences: tuple[tuple[int, int], ...]  # (first position, number of tokens), by sequence
    page_size: int


@dataclass(frozen=True)
class DecodeBatch:
    """B running sequences at the start of a round."""

    slots: Tensor  # [B] int64
    kv_lens: Tensor  # [B] int64
    roots: Tensor  # [B] int64
    node_limits: Tensor  # [B] int64
    page_table: Tensor  # [B, W] int32
    tail_positions: Tensor  # [B, tail] int64: kv_lens + 0, 1, ...
    tail_slots: Tensor  # [B, tail] int64: the physical slots of those logical positions
    max_kv_len: int  # host bound of kv_lens
    page_size: int
    prefix: PrefixPlan  # the attention backend's plan of the committed prefixes, shared by all forwards of the round
    chain: Tensor  # [tail, words] int64: ancestor bits of a chain

    def chain_bits(self, num_rows: int) -> Tensor:
        """[B, num_rows, words] int64: row r sees tree slots 0..r."""
        words = -(-num_rows // 64)
        return self.chain[:num_rows, :words].expand(len(self.slots), -1, -1)


def pack_prefill(rows: tuple[PrefillRow, ...], pages: PageTable, page_size: int, device: torch.device) -> PrefillBatch:
    """Join the chunks of a step. A chunk's last draft row pairs with the token after the chunk, where it is known."""
    lens = [len(r.token_ids) for r in rows]
    token_ids = [t for r in rows for t in r.token_ids]
    next_tokens = [t for r in rows for t in (*r.token_ids[1:], 0 if r.next_token is None else r.next_token)]
    positions = [p for r in rows for p in range(r.start, r.start + len(r.token_ids))]
    token_ids, next_tokens, positions = to_device([token_ids, next_tokens, positions], torch.int64, device)
    slots = to_device([r.slot for r in rows], torch.int64, device)
    sampled = to_device([b for b, r in enumerate(rows) if r.next_token is None], torch.int64, device)
    page_table = pages.rows(slots)
    owner = torch.repeat_interleave(torch.arange(len(rows)), torch.tensor(lens)).to(device)
    write_slots = slots_of(page_table[owner], positions[:, None], page_size)[:, 0]
    return PrefillBatch(
        slots=slots,
        token_ids=token_ids,
        next_tokens=next_tokens,
        positions=positions,
        write_slots=write_slots,
        page_table=page_table,
        last_rows=(torch.tensor(lens).cumsum(0) - 1).to(device),
        sampled=sampled,
        sequences=tuple((r.start, n) for r, n in zip(rows, lens, strict=True)),
        page_size=page_size,
    )


def pack_decode(
    rows: tuple[DecodeRow, ...],
    state: DeviceState,
    pages: PageTable,
    page_size: int,
    attention: TreeAttention,
    chain: Tensor,
) -> DecodeBatch:
    """Gather the running sequences' device state. Reads no length on the host."""
    slots, node_limits = to_device([[r.slot for r in rows], [r.node_limit for r in rows]], torch.int64, state.device)
    max_kv_len = max(r.max_kv_len for r in rows)
    return gather_decode(slots, node_limits, max_kv_len, state, pages, page_size, attention, chain)


def gather_decode(
    slots: Tensor,
    node_limits: Tensor,
    max_kv_len: int,
    state: DeviceState,
    pages: PageTable,
    page_size: int,
    attention: TreeAttention,
    chain: Tensor,
) -> DecodeBatch:
    """Gather the device state of slots [B] int64, with their node limits [B] int64. Device work only.

    A round begins here: the overflow record is cleared before the first list is made.
    """
    state.overflow.zero_()
    kv_lens, roots, page_table, tail_positions, tail_slots = state.operators.gather(
        slots, state.kv_lens, state.roots, pages.table, page_size, len(chain)
    )
    return DecodeBatch(
        slots=slots,
        kv_lens=kv_lens,
        roots=roots,
        node_limits=node_limits,
        page_table=page_table,
        tail_positions=tail_positions,
        tail_slots=tail_slots,
        max_kv_len=max_kv_len,
        page_size=page_size,
        prefix=attention.plan_prefix(page_table, kv_lens, max_kv_len, tail_slots, page_size),
        chain=chain,
    )
