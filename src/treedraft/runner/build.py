"""From a configuration to a runner: weights, pools sized to memory, tables."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from treedraft.attention.reference import TorchTreeAttention
from treedraft.config import EngineConfig, max_logical_len, speculative_tail
from treedraft.errors import ConfigError
from treedraft.kv.allocator import NUM_RESERVED_PAGES, PageAllocator
from treedraft.kv.manager import KVManager
from treedraft.kv.page_table import PageTable
from treedraft.kv.pool import LatentPool
from treedraft.models.config import ModelConfig
from treedraft.models.draft.eagle3 import Eagle3MlaHead, load_head
from treedraft.models.registry import load_model
from treedraft.runner.capture import CapturedRounds, can_capture
from treedraft.runner.drafter import EagleDrafter
from treedraft.runner.round import Target
from treedraft.runner.runner import Runner
from treedraft.runner.state import DeviceState
from treedraft.weights.loader import read_config, resolve_folder

DEFAULT_KV_BYTES = 1 << 30  # CPU pools are never larger unless asked for
GPU_WORKSPACE_BYTES = 1 << 30  # activations of the largest prefill and verify


@dataclass(frozen=True)
class Built:
    """What `build` made."""

    runner: Runner
    kv: KVManager
    config: EngineConfig  # max_context filled in; speculative None when there is no head
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    notes: tuple[str, ...]  # what a user should read at start
    sizes: dict[str, int] = field(default_factory=dict)  # bytes by name


def build(config: EngineConfig) -> Built:
    """Load the model and its head, size the pools, and join them. `config` must be resolved."""
    device, dtype = torch.device(config.device), getattr(torch, config.dtype)
    notes: list[str] = []
    draft = config.draft or ("demo" if config.model == "demo" else None)
    speculative = config.speculative
    if speculative is not None and draft is None:
        notes.append(f"no draft head was given for {config.model!r}: generating without speculation (see --draft)")
        speculative = None
    tail = speculative_tail(speculative)
    folder = resolve_folder(config.model)
    model_config = ModelConfig.from_hf(read_config(folder))
    max_context = _max_context(config.max_context, model_config.max_position_embeddings)
    logical_len = max_logical_len(max_context, speculative, config.max_pending)
    model = load_model(folder, logical_len, dtype, device)
    head: Eagle3MlaHead | None = None
    if speculative is not None and draft is not None:
        head = load_head(resolve_folder(draft, kind="draft"), model, dtype, device)
        speculative.check(head.config.draft_vocab_size)

    table_width = -(-logical_len // config.page_size)
    width = model_config.mla.latent_width
    token_bytes = width * dtype.itemsize * model_config.num_hidden_layers
    if head is not None:
        token_bytes += head.config.mla.latent_width * dtype.itemsize
    page_bytes = token_bytes * config.page_size
    num_pages = _num_pages(config, page_bytes, config.max_batch * table_width + NUM_RESERVED_PAGES, device)
    if num_pages <= NUM_RESERVED_PAGES:
        raise ConfigError(
            f"the KV memory holds {num_pages} pages of {page_bytes} bytes; {NUM_RESERVED_PAGES} are reserved and at "
            "least one more is needed: raise kv_memory_bytes or mem_fraction_static"
        )

    def pool(layers: int, latent_width: int) -> LatentPool:
        return LatentPool(layers, num_pages, config.page_size, latent_width, dtype, device)

    target_pool = pool(model_config.num_hidden_layers, width)
    attention = TorchTreeAttention()
    vocab_size = model_config.vocab_size
    state = DeviceState(config.max_batch, vocab_size, model_config.hidden_size if head else 0, dtype, device)
    target = Target(model, attention, target_pool, head.taps if head is not None else ())
    drafter = None
    sizes = {"target KV": target_pool.data.nbytes}
    if head is not None and speculative is not None:
        draft_pool = pool(1, head.config.mla.latent_width)
        drafter = EagleDrafter(head, attention, draft_pool, state, speculative)
        sizes["draft KV"] = draft_pool.data.nbytes
    pages = PageTable(config.max_batch, table_width, device)
    num_steps = 0 if speculative is None else speculative.num_steps
    runner = Runner(target, drafter, state, pages, config.page_size, tail, num_steps, device)
    if config.capture != "off" and can_capture(drafter, device):
        runner.captured = CapturedRounds(target, drafter, state, num_steps)
    elif config.capture == "on":
        raise ConfigError(f"capture 'on' needs a CPU for now; the device is {config.device}: use 'auto' or 'off'")
    kv = KVManager(PageAllocator(num_pages), config.page_size, table_width)
    num_usable = kv.allocator.num_allocatable
    notes.append(
        f"KV: {num_usable} pages of {config.page_size} tokens ({num_usable * page_bytes / 2**20:.1f} MiB), "
        f"{page_bytes // config.page_size} bytes a token"
    )
    resolved = EngineConfig(**{**config.__dict__, "max_context": max_context, "speculative": speculative})
    return Built(runner, kv, resolved, vocab_size, model_config.eos_token_ids, tuple(notes), sizes)


def _max_context(asked: int | None, limit: int) -> int:
    if asked is None:
        return limit
    if asked > limit:
        raise ConfigError(f"max_context must be at most {limit}, the model's max_position_embeddings; got {asked}")
    return asked


def _num_pages(config: EngineConfig, page_bytes: int, wanted: int, device: torch.device) -> int:
    if config.kv_memory_bytes is not None:
        return config.kv_memory_bytes // page_bytes
    if device.type == "cpu":
        return max(NUM_RESERVED_PAGES + 1, min(wanted, DEFAULT_KV_BYTES // page_bytes))
    free, total = torch.cuda.mem_get_info(device)
    budget = int(total * config.mem_fraction_static) - (total - free) - GPU_WORKSPACE_BYTES
    return min(wanted, budget // page_bytes)
