"""What a round allocates on its way, measured by running it on the meta device: all shapes, no memory."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from treedraft.runner.batch import gather_decode
from treedraft.runner.runner import Runner
from treedraft.runner.seam import EagerSeam
from treedraft.runner.state import TABLE_STAGES
from treedraft.speculative.sampling import STAGES


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of storages that operators make while the mode is on: `now` alive, `peak` the most so far.

    A storage that comes in as an argument before any operator made it was there already and counts as nothing.
    Memory that a kernel takes for itself is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._known.update(t.untyped_storage()._cdata for t in _meta_tensors((args, kwargs)))
        out = func(*args, **(kwargs or {}))
        for tensor in _meta_tensors(out):
            storage = tensor.untyped_storage()
            if storage._cdata not in self._known:
                self._known.add(storage._cdata)
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._free, storage._cdata, storage.nbytes())
        return out

    def _free(self, key: int, num_bytes: int) -> None:
        self._known.discard(key)
        self.now -= num_bytes


@torch.inference_mode()
def round_bytes(runner: Runner, max_batch: int, max_kv_len: int) -> int:
    """The most bytes alive at once in one round that uses every stage of sampling. The runner is on the meta device.

    max_kv_len: committed positions of the longest sequence.
    """
    with LiveBytes() as live:
        slots = torch.zeros(max_batch, dtype=torch.int64, device="meta")
        batch = gather_decode(
            slots,
            slots,
            max_kv_len,
            runner.state,
            runner.pages,
            runner.page_size,
            runner.target.attention,
            runner.chain,
        )
        rows = runner.state.gather_sampling(slots, STAGES, {stage: slots.bool() for stage in TABLE_STAGES})
        # With static buffers the masks of grammars are among these.
        vocab_size, meta = runner.target.model.config.vocab_size, torch.device("meta")
        seam = EagerSeam((), vocab_size, meta) if runner.graphs is None else runner.graphs.seam
        result = runner.run_round(batch, rows, 0, seam)
        del result, rows, batch, slots, seam
    return live.peak


def _meta_tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_iter(tree) if isinstance(leaf, Tensor) and leaf.is_meta]
