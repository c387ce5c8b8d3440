"""The rows of a batch, gathered from the device's state and page table in one launch.

The twin is `treedraft.runner.operators.TorchOperators.gather`, to the last bit.
"""

# mypy: disable-error-code="no-untyped-def"
# (Triton reads the annotations of a kernel: tl.constexpr or none.)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def gather_triton(
    slots: Tensor,
    state_kv_lens: Tensor,
    state_roots: Tensor,
    table: Tensor,
    page_size: int,
    tail: int,
    trash_page: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return kv_lens [B], roots [B], page_table [B, W] int32, tail_positions and tail_slots [B, tail]; the rest int64.

    slots int64 [B]; state_kv_lens, state_roots int64 [slots]; table int32 [slots, W]. trash_page: where
    positions beyond the row are mapped, its first slot.
    """
    batch, width = len(slots), table.shape[1]
    kv_lens, roots = torch.empty((2, batch), dtype=torch.int64, device=slots.device).unbind()
    tail_positions, tail_slots = torch.empty((2, batch, tail), dtype=torch.int64, device=slots.device).unbind()
    page_table = torch.empty((batch, width), dtype=torch.int32, device=slots.device)
    if not slots.is_meta:
        _gather_kernel[(batch,)](
            slots.contiguous(),
            state_kv_lens,
            state_roots,
            table,
            kv_lens,
            roots,
            page_table,
            tail_positions,
            tail_slots,
            table.stride(0),
            width,
            page_size,
            tail,
            TRASH=trash_page,
            BLOCK=256,
            PAD_TAIL=triton.next_power_of_2(tail),
            num_warps=2,
        )
    return kv_lens, roots, page_table, tail_positions, tail_slots


@triton.jit
def _gather_kernel(
    slots,  # [B] int64
    state_kv_lens,  # [slots] int64
    state_roots,  # [slots] int64
    table,  # [slots, W] int32
    kv_lens,  # [B] int64
    roots,  # [B] int64
    page_table,  # [B, W] int32
    tail_positions,  # [B, tail] int64
    tail_slots,  # [B, tail] int64
    table_stride,
    width,
    page_size,
    tail,
    TRASH: tl.constexpr,
    BLOCK: tl.constexpr,
    PAD_TAIL: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + b)
    kv_len = tl.load(state_kv_lens + slot)
    tl.store(kv_lens + b, kv_len)
    tl.store(roots + b, tl.load(state_roots + slot))
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        is_column = column < width
        page = tl.load(table + slot * table_stride + column, mask=is_column)
        tl.store(page_table + b * width + column, page, mask=is_column)
    place = tl.arange(0, PAD_TAIL)
    is_place = place < tail
    position = kv_len + place
    column = position // page_size
    # A position beyond the row maps to the trash page's first slot.
    is_inside = is_place & (column < width)
    page = tl.load(table + slot * table_stride + column, mask=is_inside, other=TRASH).to(tl.int64)
    offset = tl.where(is_inside, position - column * page_size, 0)
    tl.store(tail_positions + b * tail + place, position, mask=is_place)
    tl.store(tail_slots + b * tail + place, page * page_size + offset, mask=is_place)
