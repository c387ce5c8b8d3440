"""What a configuration will take, buffer by buffer, without allocating any of it.

Lasting buffers are recorded by the constructors that allocate them, and a round by running it, all on the meta device:
no size is computed twice.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from torch import nn

from treedraft.attention import BACKENDS
from treedraft.config import EngineConfig
from treedraft.errors import ConfigError
from treedraft.kv.allocator import NUM_RESERVED_PAGES
from treedraft.kv.buffers import ALL_BACKENDS, BufferRecord, Buffers
from treedraft.models.layers import at_least_float32, packed_bytes
from treedraft.runner.build import (
    GPU_WORKSPACE_BYTES,
    DryRun,
    Layout,
    allocate,
    dry_run,
    lay_out,
    page_bytes,
    pages_that_fit,
    pages_wanted,
)
from treedraft.runner.operators import logits_parts
from treedraft.weights.loader import CONFIG_FILES


@dataclass(frozen=True)
class Budget:
    """Every buffer of a configuration, and what each backend leaves for KV."""

    layout: Layout
    records: tuple[BufferRecord, ...]
    page_bytes: int  # of one page, target and head together
    num_pages: int  # of the KV pools
    kv_free_bytes: dict[str, int]  # by backend: of the device's share, what is left for KV; negative: it does not fit

    def total_bytes(self, backend: str) -> int:
        """The most that is taken at once with a backend."""
        return sum(record.bytes for record in self.records if record.backend in (ALL_BACKENDS, backend))


def budget(config: EngineConfig, device_bytes: int) -> Budget:
    """Return what a resolved configuration takes on a device of that much memory. Needs no weights of the target.

    The configuration's own backends come first; the others that could serve it draft and verify alone.
    Raise ConfigError, CheckpointError.
    """
    layout = lay_out(config, CONFIG_FILES)
    config = layout.config
    runs = {config.attention_backend: dry_run(layout, NUM_RESERVED_PAGES + 1)}
    for name in BACKENDS:
        with suppress(ConfigError):  # a backend that does not serve this model
            if name not in runs:
                runs[name] = dry_run(_with_backend(layout, name), NUM_RESERVED_PAGES + 1)
    weights = Buffers("meta")
    first = next(iter(runs.values()))
    _add_weights(weights, first, config.device)
    share = int(device_bytes * (1.0 if config.device == "cpu" else config.mem_fraction_static))
    free = {name: share - weights.total_bytes() - _others(run, config.device) for name, run in runs.items()}

    head = None if first.head is None else first.head.config
    bytes_per_page = page_bytes(layout, head)
    num_pages = pages_that_fit(config, bytes_per_page, pages_wanted(layout), free[config.attention_backend])
    pools = Buffers("meta")
    allocate(layout, head, max(num_pages, NUM_RESERVED_PAGES + 1), pools)
    records = {(record.name, record.backend): record for record in (*weights.records, *pools.records)}
    everywhere = set.intersection(*({record.name for record in run.records} for run in runs.values()))
    for name, run in runs.items():
        for record in run.records:
            if record.name not in everywhere:  # static buffers of graphs, which not every backend has
                record = replace(record, backend=name if record.backend == ALL_BACKENDS else record.backend)
            records.setdefault((record.name, record.backend), record)
        for record in _round(run, name, layout):
            records[record.name, record.backend] = record
    return Budget(layout, tuple(records.values()), bytes_per_page, max(num_pages, 0), free)


def _with_backend(layout: Layout, name: str) -> Layout:
    return replace(layout, config=replace(layout.config, attention_backend=name, draft_attention_backend=name))


def _others(run: DryRun, device: str) -> int:
    lasting = sum(record.bytes for record in run.records if record.kind != "kv")
    return lasting + max(run.round_bytes, 0 if device == "cpu" else GPU_WORKSPACE_BYTES)


def _round(run: DryRun, backend: str, layout: Layout) -> Iterable[BufferRecord]:
    """What one round takes on its way: the target's logits, a part of the batch at once, and the rest of the peak."""
    config, vocab = layout.config, layout.model.vocab_size
    nodes = 1 if config.speculative is None else config.speculative.num_draft_tokens
    dtype = getattr(torch, config.dtype)
    wide, batch = at_least_float32(torch.empty(0, dtype=dtype)).itemsize, config.max_batch
    batch = logits_parts(batch, nodes, vocab, dtype)[0].stop
    logits = batch * nodes * vocab * wide
    formula = f"sequences * num_draft_tokens * vocab_size * {wide} B = {batch} * {nodes} * {vocab} * {wide}"
    yield BufferRecord("target logits", "logits", ALL_BACKENDS, formula, logits)
    is_captured = config.device != "cpu" and config.cuda_graph != "off" and BACKENDS[backend].graph is not None
    formula = "most alive at once in a full round at max_context, traced, - target logits"
    yield BufferRecord(
        "round",
        "graph" if is_captured else "workspace",  # all captures share one pool: that of the largest program
        backend,
        f"{formula} = {run.round_bytes} - {logits}" + ("; the pool of all captures" if is_captured else ""),
        run.round_bytes - logits,
    )
    if config.device != "cpu":
        rest = max(GPU_WORKSPACE_BYTES - run.round_bytes, 0)
        yield BufferRecord("prefill reserve", "workspace", backend, f"max({GPU_WORKSPACE_BYTES} - round, 0)", rest)


def _add_weights(buffers: Buffers, run: DryRun, device: str) -> None:
    seen: set[int] = set()

    def add(name: str, model: nn.Module) -> None:
        """Record parameters and tables by dtype, each tensor once: heads share their target's."""
        groups: dict[tuple[str, int], int] = {}
        for part, tensor in (*model.named_parameters(), *model.named_buffers()):
            if id(tensor) not in seen:
                seen.add(id(tensor))
                key = (part.split(".")[0], tensor.itemsize)
                groups[key] = groups.get(key, 0) + tensor.numel()
        for (part, size), count in groups.items():
            own = f"{name}.{part}" + ("" if sum(p == part for p, _ in groups) == 1 else f" ({size} B)")
            buffers.record(own, "weights", ALL_BACKENDS, f"numbers * {size} B = {count} * {size}", count * size)

    models = [run.model] if run.head is None else [run.model, run.head]
    add("target", run.model)
    if run.head is not None:
        add("draft", run.head)
    packed = packed_bytes(models, device)
    if packed:
        formula = f"numbers of packed matrices * 4 B = {packed // 4} * 4"
        buffers.record("packed copies", "weights", ALL_BACKENDS, formula, packed)
