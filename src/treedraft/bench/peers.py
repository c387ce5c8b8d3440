"""Attention kernels of other projects, for comparison: causal chains over the same pages. Imported when asked for."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, Protocol

import torch
from torch import Tensor

LATENT, ROPE = 512, 64
FLASHINFER_WORKSPACE_BYTES = 128 << 20

Run = Callable[[], tuple[Tensor, Tensor]]  # out [B, R, h, 512], log-sum-exp [B, R, h] base e


class Peer(Protocol):
    """A kernel of another project. Made with the device; raises ImportError where it is not installed."""

    name: str

    def refuses(self, num_heads: int, page_size: int, latent: int) -> str | None:
        """Why it cannot run a shape, or None."""

    def prepare(self, q: Tensor, kv: Tensor, page_table: Tensor, lens: Tensor, page_size: int, scale: float) -> Run:
        """Plan, outside the clock, and return what is timed and may be captured.

        q: [B, R, h, 576], the last R of lens [B] positions; kv: [slots, 576]; page_table: [B, W] int32.
        """


class FlashMla:
    """FlashMLA's dense decode (wheel sgl-flash-mla): its legacy half holds the sm_90 kernel."""

    name = "FlashMLA"

    def __init__(self, device: torch.device) -> None:
        self.module: Any = import_module("flash_mla")

    def refuses(self, num_heads: int, page_size: int, latent: int) -> str | None:
        """See Peer.refuses."""
        return None if (page_size, latent) == (64, LATENT) else "takes pages of 64 and latent 512 only"

    def prepare(self, q: Tensor, kv: Tensor, page_table: Tensor, lens: Tensor, page_size: int, scale: float) -> Run:
        """See Peer.prepare."""
        metadata, _ = self.module.get_mla_metadata()  # made by the first call, then kept: lengths do not change here
        pages, lens32 = kv.view(-1, page_size, 1, kv.shape[-1]), lens.int()
        table = page_table.contiguous()

        def run() -> tuple[Tensor, Tensor]:
            out, lse = self.module.flash_mla_with_kvcache(
                q, pages, table, lens32, LATENT, metadata, None, scale, True, use_legacy=True
            )
            return out, lse.transpose(1, 2)

        return run


class FlashInfer:
    """FlashInfer's fa3 MLA wrapper (0.6.14): planned on the host, once for lengths that do not change."""

    name = "FlashInfer"

    def __init__(self, device: torch.device) -> None:
        self.wrapper_class: Any = import_module("flashinfer").mla.BatchMLAPagedAttentionWrapper
        self.workspace = torch.empty(FLASHINFER_WORKSPACE_BYTES, dtype=torch.uint8, device=device)

    def refuses(self, num_heads: int, page_size: int, latent: int) -> str | None:
        """See Peer.refuses."""
        return None if latent == LATENT else "takes latent 512 only"

    def prepare(self, q: Tensor, kv: Tensor, page_table: Tensor, lens: Tensor, page_size: int, scale: float) -> Run:
        """See Peer.prepare."""
        batch, num_rows, num_heads, width = q.shape
        counts = (lens + page_size - 1) // page_size
        owned = torch.arange(page_table.shape[1], device=lens.device) < counts[:, None]
        zero = torch.zeros(1, dtype=torch.int32, device=lens.device)
        wrapper = self.wrapper_class(self.workspace, backend="fa3")
        wrapper.plan(
            torch.arange(batch + 1, dtype=torch.int32, device=lens.device) * num_rows,
            torch.cat((zero, counts.cumsum(0).int())),
            page_table[owned].contiguous(),
            lens.int(),
            num_heads,
            LATENT,
            ROPE,
            page_size,
            True,
            scale,
            q.dtype,
            kv.dtype,
        )
        pages, rows = kv.view(-1, page_size, width), q.flatten(0, 1)
        q_nope, q_rope = rows[..., :LATENT].contiguous(), rows[..., LATENT:].contiguous()

        def run() -> tuple[Tensor, Tensor]:
            out, lse = wrapper.run(
                *(q_nope, q_rope, pages[..., :LATENT], pages[..., LATENT:]),
                return_lse=True,
                return_lse_base_on_e=True,
            )
            return out.unflatten(0, (batch, num_rows)), lse.unflatten(0, (batch, num_rows))

        return run


PEERS: dict[str, Callable[[torch.device], Peer]] = {"flashmla": FlashMla, "flashinfer": FlashInfer}
