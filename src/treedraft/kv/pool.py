"""The page pool: KV of every layer, slot by slot."""

from __future__ import annotations

import torch
from torch import Tensor

from treedraft.errors import ConfigError
from treedraft.kv.allocator import NUM_RESERVED_PAGES
from treedraft.kv.buffers import Buffers


class LatentPool:
    """MLA's cache: for each layer and slot one row, the normed latent then the roped key.

    data [layers, num_pages * page_size, width]     width = c + dr; slot = page * page_size + offset
    """

    def __init__(
        self,
        num_layers: int,
        num_pages: int,
        page_size: int,
        width: int,
        dtype: torch.dtype,
        memory: Buffers | torch.device | str,
        name: str = "KV",
    ) -> None:
        """memory: the buffers to allocate from, or a device. name: of the buffer.

        Raise ConfigError for an empty pool, or one with more slots than 31 bits address.
        """
        if min(num_layers, page_size, width) < 1 or num_pages <= NUM_RESERVED_PAGES:
            raise ConfigError(
                f"a pool needs layers, page_size and width of at least 1 and more than {NUM_RESERVED_PAGES} pages; "
                f"got {num_layers} layers, {num_pages} pages, page_size {page_size}, width {width}"
            )
        if num_pages * page_size >= 2**31:
            raise ConfigError(
                f"{num_pages} pages x page_size {page_size} = {num_pages * page_size} slots, but slots are addressed "
                f"with 31 bits (at most {2**31 - 1}); lower kv_memory_bytes or mem_fraction_static"
            )
        self.num_pages = num_pages
        self.page_size = page_size
        # Zeros everywhere: the zero page must hold them, and fresh memory may hold NaN.
        shape = (num_layers, num_pages * page_size, width)
        self.data = Buffers.on(memory).allocate(
            name, "kv", shape, dtype, formula="layers * (pages * page_size) * latent_width"
        )

    @staticmethod
    def bytes_per_page(num_layers: int, page_size: int, width: int, dtype: torch.dtype) -> int:
        """Bytes that one page takes over all layers."""
        return num_layers * page_size * width * dtype.itemsize

    def layer(self, index: int) -> Tensor:
        """The layer's slots, a view: [num_slots, width]."""
        return self.data[index]

    def write(self, layer: int, slots: Tensor, latent: Tensor, k_rope: Tensor) -> None:
        """Store latent [..., c] and k_rope [..., dr] at `slots` [...] int64 of a layer."""
        rows = torch.cat((latent, k_rope), -1)
        self.data[layer].index_copy_(0, slots.reshape(-1), rows.view(-1, rows.shape[-1]))

    def write_finite(self, layer: int, slots: Tensor, latent: Tensor, k_rope: Tensor) -> None:
        """As `write`, NaN as 0: for tree rows, whose siblings' masks do not stop a NaN (0 * NaN is NaN).

        A node with NaN has NaN logits, so its request is told if the path takes it; a rejected one must not matter.
        """
        rows = torch.cat((latent, k_rope), -1).nan_to_num_(0.0, torch.inf, -torch.inf)
        self.data[layer].index_copy_(0, slots.reshape(-1), rows.view(-1, rows.shape[-1]))

    def move(self, src: Tensor, dst: Tensor) -> None:
        """Copy slots src [B, P] int64 to dst [B, P] int64 in every layer.

        All rows are read before the first is written, so src and dst may overlap. Slots in dst are distinct,
        save the trash page's.
        """
        if self.data.is_cuda:
            from treedraft.kernels.commit import move_rows_triton  # here: triton is needed on a GPU alone

            move_rows_triton(self.data, src, dst)
            return
        rows = self.data.index_select(1, src.reshape(-1))
        self.data.index_copy_(1, dst.reshape(-1), rows)
