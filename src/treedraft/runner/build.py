"""From a configuration to a runner: weights, pools sized to memory, tables."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from treedraft.attention import Needs, check_backend, choose_backend, make_backend
from treedraft.attention.base import TreeAttention
from treedraft.attention.packed import Reserved, RowLimits, draft_limits, extend_limits, verify_limits
from treedraft.config import EngineConfig, max_logical_len, offered_shapes, speculative_tail
from treedraft.errors import ConfigError
from treedraft.kv.allocator import NUM_RESERVED_PAGES, PageAllocator
from treedraft.kv.buffers import BufferRecord, Buffers
from treedraft.kv.manager import KVManager
from treedraft.kv.page_table import PageTable
from treedraft.kv.pool import LatentPool
from treedraft.kv.prefix import PrefixCache
from treedraft.models.config import ModelConfig
from treedraft.models.deepseek import DeepseekModel
from treedraft.models.draft.eagle3 import Eagle3Config, Eagle3MlaHead, target_tables
from treedraft.models.layers import Products, pack_matrices
from treedraft.models.registry import draft_head_config, load_draft_head, load_model, model_class
from treedraft.runner.capture import RECORD_AFTER, CapturedRounds, can_capture
from treedraft.runner.drafter import EagleDrafter, chain_bits
from treedraft.runner.graphs import init_graph_state
from treedraft.runner.operators import make_operators
from treedraft.runner.round import Target
from treedraft.runner.runner import Runner
from treedraft.runner.shapes import shape_limits, shaped_round, time_shapes
from treedraft.runner.state import DeviceState
from treedraft.runner.workspace import round_bytes
from treedraft.weights.loader import CHECKPOINT_FILES, METADATA_FILES, read_config, resolve_folder

DEFAULT_KV_BYTES = 1 << 30  # CPU pools are never larger unless asked for
GPU_WORKSPACE_BYTES = 1 << 30  # at least this is left for a prefill


@dataclass(frozen=True)
class Layout:
    """What follows from a configuration and the checkpoints' own, before anything is loaded or allocated."""

    config: EngineConfig  # max_context filled in; speculative None when there is no head
    folder: Path
    draft_folder: Path | None  # None when there is no head
    model: ModelConfig
    logical_len: int  # positions that a sequence may ever address
    table_width: int  # pages of a page-table row
    tail: int  # slots beyond kv_len that a round may write
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Memory:
    """Every lasting buffer but the weights."""

    target_pool: LatentPool
    draft_pool: LatentPool | None
    state: DeviceState
    pages: PageTable
    chain: Tensor  # [tail, words] int64: ancestor bits of a chain


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
    round_times: dict[int, tuple[float, ...]] = field(default_factory=dict)  # seconds by offered shape, by batch size


def lay_out(config: EngineConfig, model_files: tuple[str, ...] = CHECKPOINT_FILES) -> Layout:
    """Read the checkpoints' config.json and derive every size that does not depend on free memory.

    model_files: what of a target on the hub is downloaded.
    """
    notes: list[str] = []
    draft = config.draft or ("demo" if config.model == "demo" else None)
    speculative = config.speculative
    if speculative is not None and draft is None:
        notes.append(f"no draft head was given for {config.model!r}: generating without speculation (see --draft)")
        speculative = None
    head_files: tuple[str, ...] = CHECKPOINT_FILES
    if config.load_format == "dummy":
        model_files = head_files = METADATA_FILES
    folder = resolve_folder(config.model, files=model_files)
    model = ModelConfig.from_hf(read_config(folder))
    max_context = _max_context(config.max_context, model.max_position_embeddings)
    logical_len = max_logical_len(max_context, speculative, config.max_pending)
    config = replace(config, max_context=max_context, speculative=speculative)
    draft_folder = None if speculative is None or draft is None else resolve_folder(draft, "draft", head_files)
    head = None if draft_folder is None else draft_head_config(draft_folder, model, config.load_format)
    return Layout(
        config=_with_backends(config, model, head),
        folder=folder,
        draft_folder=draft_folder,
        model=model,
        logical_len=logical_len,
        table_width=-(-logical_len // config.page_size),
        tail=speculative_tail(speculative),
        notes=tuple(notes),
    )


def _with_backends(config: EngineConfig, model: ModelConfig, head: Eagle3Config | None) -> EngineConfig:
    """Replace "auto" backends. Drafts cannot change the text, so they need not be deterministic."""
    tree = config.speculative
    verifying, drafting = config.attention_backend, config.draft_attention_backend
    if verifying == "auto":
        verifying = choose_backend(_needs(config, "verify", model, tree is not None and tree.topk > 1))
    if drafting == "auto":
        drafting = verifying
        if head is not None and tree is not None and (config.deterministic or config.attention_backend == "auto"):
            drafting = choose_backend(_needs(config, "draft", head, tree.topk > 1))
    return replace(config, attention_backend=verifying, draft_attention_backend=drafting)


def page_bytes(layout: Layout, head: Eagle3Config | None) -> int:
    """Bytes of one page in the target's and the head's pool together."""
    page_size, dtype = layout.config.page_size, getattr(torch, layout.config.dtype)
    width = layout.model.mla.latent_width
    size = LatentPool.bytes_per_page(layout.model.num_hidden_layers, page_size, width, dtype)
    return size if head is None else size + LatentPool.bytes_per_page(1, page_size, head.mla.latent_width, dtype)


def pages_wanted(layout: Layout) -> int:
    """Pages with which every sequence of a full batch reaches the context limit; more would never be used."""
    return layout.config.max_batch * layout.table_width + NUM_RESERVED_PAGES


def allocate(layout: Layout, head: Eagle3Config | None, num_pages: int, buffers: Buffers) -> Memory:
    """Allocate pools, tables and device state. On the meta device this is how memory is budgeted."""
    config, model, dtype = layout.config, layout.model, getattr(torch, layout.config.dtype)

    def pool(name: str, num_layers: int, width: int) -> LatentPool:
        return LatentPool(num_layers, num_pages, config.page_size, width, dtype, buffers, name)

    target_pool = pool("target KV", model.num_hidden_layers, model.mla.latent_width)
    draft_pool = None if head is None else pool("draft KV", 1, head.mla.latent_width)
    draft_hidden_size = 0 if head is None else model.hidden_size
    operators = make_operators(torch.device(config.device).type, dtype)
    state = DeviceState(config.max_batch, model.vocab_size, draft_hidden_size, dtype, buffers, operators)
    pages = PageTable(config.max_batch + 1, layout.table_width, buffers)  # the dummy slot's row stays all trash
    bits = chain_bits(layout.tail, torch.device("cpu"))
    chain = buffers.allocate("chain bits", "mask", bits.shape, bits.dtype, formula="tail * words").copy_(bits)
    return Memory(target_pool, draft_pool, state, pages, chain)


@dataclass(frozen=True)
class Backends:
    """The attention of each kind of forward. Those with index lists have their own."""

    verify: TreeAttention
    draft: TreeAttention
    extend: TreeAttention


def make_backends(layout: Layout, head: Eagle3Config | None, state: DeviceState, buffers: Buffers) -> Backends:
    """Make the backends that the configuration names, with lists for its largest batch, longest context and its tree.

    Raise ConfigError when one cannot do what it is asked for.
    """
    config, tree = layout.config, layout.config.speculative
    verifying, drafting = config.attention_backend, config.draft_attention_backend
    check_backend(verifying, _needs(config, "verify", layout.model, tree is not None and tree.topk > 1))
    if head is not None and tree is not None:
        check_backend(drafting, _needs(config, "draft", head, tree.topk > 1))
    longest = layout.logical_len - layout.tail  # of a committed prefix, rounds in flight included

    def backend(name: str, limits: RowLimits) -> TreeAttention:
        return make_backend(name, Reserved(limits, buffers, state.overflow))

    if tree is None:
        plain = backend(verifying, verify_limits(config.max_batch, 1, 0, longest))
        return Backends(plain, plain, plain)
    draft = draft_limits(config.max_batch, tree.topk, tree.num_steps, longest)
    extend = extend_limits(config.max_batch, tree.max_path, tree.num_steps, longest)
    return Backends(
        verify=backend(verifying, verify_limits(config.max_batch, tree.num_draft_tokens, tree.num_steps, longest)),
        draft=backend(drafting, replace(draft, has_prefix=drafting != verifying)),
        extend=backend(drafting, replace(extend, has_prefix=False)),
    )


def _needs(config: EngineConfig, purpose: str, model: ModelConfig | Eagle3Config, has_trees: bool) -> Needs:
    return Needs(
        purpose=purpose,
        device=torch.device(config.device).type,
        dtype=config.dtype,
        page_size=config.page_size,
        latent_dims=(model.mla.kv_lora_rank, model.mla.qk_rope_head_dim),
        has_trees=has_trees,
        is_deterministic=config.deterministic and purpose == "verify",
    )


def assemble(
    layout: Layout, model: DeepseekModel, head: Eagle3MlaHead | None, num_pages: int, buffers: Buffers
) -> Runner:
    """Allocate all that lasts and join it with the weights. On the meta device it is how memory is budgeted."""
    config, speculative = layout.config, layout.config.speculative
    memory = allocate(layout, None if head is None else head.config, num_pages, buffers)
    attend = make_backends(layout, None if head is None else head.config, memory.state, buffers)
    taps = head.taps if head is not None else ()
    target = Target(model, attend.verify, memory.target_pool, taps, config.deterministic)
    drafter = None
    if head is not None and speculative is not None and memory.draft_pool is not None:
        plans_prefix = config.draft_attention_backend != config.attention_backend
        drafter = EagleDrafter(
            head, attend.draft, attend.extend, plans_prefix, memory.draft_pool, memory.state, speculative
        )
    num_steps = 0 if speculative is None else speculative.num_steps
    state, pages = memory.state, memory.pages
    runner = Runner(target, drafter, state, pages, config.page_size, memory.chain, num_steps, buffers.device)
    if drafter is not None and speculative is not None and speculative.auto:
        shapes = offered_shapes(speculative)
        runner.smaller = tuple(shaped_round(drafter, shape) for shape in shapes[1:])
        runner.shape_limits = shape_limits(shapes, buffers)
    return runner


def build(config: EngineConfig, buffers: Buffers | None = None) -> Built:
    """Load the model and its head, size the pools, and join them. `config` must be resolved.

    buffers: where lasting buffers come from; None: plain ones on the device.
    """
    device, dtype = torch.device(config.device), getattr(torch, config.dtype)
    layout = lay_out(config)
    config, speculative = layout.config, layout.config.speculative
    products: Products = "invariant" if config.deterministic else "fast"
    model = load_model(layout.folder, layout.logical_len, dtype, device, products, config.load_format)
    head: Eagle3MlaHead | None = None
    if speculative is not None and layout.draft_folder is not None:
        head = load_draft_head(layout.draft_folder, model, dtype, device, products, config.load_format)
        speculative.check(head.config.draft_vocab_size)
    head_config = None if head is None else head.config

    bytes_per_page = page_bytes(layout, head_config)
    num_pages = pages_that_fit(config, bytes_per_page, pages_wanted(layout), _free_bytes(layout, device))
    if num_pages <= NUM_RESERVED_PAGES:
        raise ConfigError(
            f"the KV memory holds {num_pages} pages of {bytes_per_page} bytes; {NUM_RESERVED_PAGES} are reserved and "
            "at least one more is needed: raise kv_memory_bytes or mem_fraction_static"
        )
    buffers = Buffers(device) if buffers is None else buffers
    runner = assemble(layout, model, head, num_pages, buffers)
    cache = PrefixCache(config.page_size) if config.prefix_cache else None
    kv = KVManager(PageAllocator(num_pages), config.page_size, layout.table_width, cache)
    num_usable = kv.allocator.num_allocatable
    note = (
        f"KV: {num_usable} pages of {config.page_size} tokens ({num_usable * bytes_per_page / 2**20:.1f} MiB), "
        f"{bytes_per_page // config.page_size} bytes a token"
    )
    config, graph_notes = init_graphs(runner, config, buffers)
    if runner.graphs is None and config.capture != "off" and can_capture(runner.target, runner.drafter, device):
        record_after = 1 if config.capture == "on" else RECORD_AFTER
        runner.captured, *smaller = (
            CapturedRounds(runner.target, at.drafter, runner.state, at.num_steps, record_after)
            for at in (runner.at_shape(0), *runner.smaller)
        )
        for at, captured in zip(runner.smaller, smaller, strict=True):
            at.captured = captured
    elif config.capture == "on":
        raise ConfigError(
            "capture 'on' records rounds on a CPU, with the torch attention backend and without static buffers; "
            f"the device is {config.device}, the backend {config.attention_backend}: use 'auto' or 'off'"
        )
    round_times: dict[int, tuple[float, ...]] = {}
    if runner.smaller and speculative is not None:
        assert config.max_context is not None
        round_times = time_shapes(runner, offered_shapes(speculative), config.max_batch, config.max_context)
    notes = (*layout.notes, note, *graph_notes, *shape_notes(config, round_times))
    sizes = {record.name: record.bytes for record in buffers.records if record.kind == "kv"}
    vocab_size, eos_token_ids = layout.model.vocab_size, layout.model.eos_token_ids
    return Built(runner, kv, config, vocab_size, eos_token_ids, notes, sizes, round_times)


def shape_notes(config: EngineConfig, times_s: dict[int, tuple[float, ...]]) -> tuple[str, ...]:
    """What a user should know of the shapes: how long each takes."""
    if config.speculative is None or not times_s:
        return ()
    names = ["no tree" if s is None else f"({s.num_steps}, {s.topk}, {s.num_draft_tokens})"
             for s in offered_shapes(config.speculative)]  # fmt: skip
    sizes = sorted({min(times_s), max(times_s)})
    parts = (f"{name} " + ", ".join(f"{times_s[size][i] * 1e3:.1f}" for size in sizes) for i, name in enumerate(names))
    return (f"tree shapes, ms a round at batch {' and '.join(map(str, sizes))}: {'; '.join(parts)}",)


def init_graphs(runner: Runner, config: EngineConfig, buffers: Buffers) -> tuple[EngineConfig, tuple[str, ...]]:
    """Give the runner its rounds on static buffers, as the configuration asks. Returns it without "auto", and notes.

    Call it again after a part of the runner (drafter, backend) was replaced: captured rounds keep the old one.
    """
    backends = {id(a): a for a in runner.backends}
    host_planned = [a for a in backends.values() if getattr(a, "plans_on_host", False)]
    notes: list[str] = []
    cuda_graph = config.cuda_graph
    if cuda_graph == "auto":
        cuda_graph = "off" if host_planned else "on"
    if host_planned:
        how = "one CUDA graph a forward" if cuda_graph == "on" else "no CUDA graphs"
        notes.append(f"the attention backend's plan reads lengths on the host: {how}, no overlap of rounds")
        config = replace(config, max_pending=0)
    config = replace(config, cuda_graph=cuda_graph)
    if cuda_graph == "off":
        return config, tuple(notes)
    started_s = time.perf_counter()
    runner.graphs = init_graph_state(
        max_batch=config.max_batch,
        max_kv_len=runner.pages.width * config.page_size - len(runner.chain),
        run_round=runner.run_round,
        state=runner.state,
        pages=runner.pages,
        page_size=config.page_size,
        chain=runner.chain,
        attention=runner.target.attention,
        buffers=buffers,
        replay="capture" if cuda_graph == "on" and runner.device.type == "cuda" else "eager",
        host_planned=host_planned,
        num_shapes=1 + len(runner.smaller),
        count_by_shape=runner.count_by_shape,
    )
    if cuda_graph == "on":
        buckets = ", ".join(map(str, runner.graphs.buckets))
        shapes = f", {1 + len(runner.smaller)} tree shapes" if runner.smaller else ""
        notes.append(f"CUDA graphs: batches of {buckets}{shapes}, captured in {time.perf_counter() - started_s:.1f} s")
    return config, tuple(notes)


def _max_context(asked: int | None, limit: int) -> int:
    if asked is None:
        return limit
    if asked > limit:
        raise ConfigError(f"max_context must be at most {limit}, the model's max_position_embeddings; got {asked}")
    return asked


def pages_that_fit(config: EngineConfig, page_bytes: int, wanted: int, free_bytes: int) -> int:
    """Pages of the pools: of the memory that was asked for, else as many as are wanted and fit.

    free_bytes: what is left of a GPU's share when all but KV has its own; on a CPU DEFAULT_KV_BYTES counts instead.
    """
    if config.kv_memory_bytes is not None:
        return config.kv_memory_bytes // page_bytes
    if config.device == "cpu":
        return max(NUM_RESERVED_PAGES + 1, min(wanted, DEFAULT_KV_BYTES // page_bytes))
    return min(wanted, free_bytes // page_bytes)


@dataclass(frozen=True)
class DryRun:
    """A runner without memory, and what it would take."""

    model: DeepseekModel  # on the meta device
    head: Eagle3MlaHead | None
    records: tuple[BufferRecord, ...]  # every lasting buffer but the weights
    round_bytes: int  # the most that a round takes at once beside them

    def bytes_besides_kv(self) -> int:
        """Bytes of all but weights and KV, on a GPU the prefill's reserve included."""
        lasting = sum(record.bytes for record in self.records if record.kind != "kv")
        return lasting + max(self.round_bytes, GPU_WORKSPACE_BYTES)


def dry_run(layout: Layout, num_pages: int) -> DryRun:
    """Assemble the runner on the meta device and run one round there. Needs config.json files only."""
    config, meta = layout.config, torch.device("meta")
    dtype, buffers = getattr(torch, config.dtype), Buffers(meta)
    with meta:
        model = model_class(layout.model.architecture)(layout.model, layout.logical_len, dtype, meta)
        head = None
        if layout.draft_folder is not None:
            head_config = draft_head_config(layout.draft_folder, layout.model, config.load_format)
            head = Eagle3MlaHead(head_config, target_tables(model), layout.logical_len, dtype, meta)
    for each in (model, head):
        if each is not None:
            pack_matrices(each.requires_grad_(False), torch.device(config.device).type)
    runner = assemble(layout, model, head, num_pages, buffers)
    init_graphs(runner, config, buffers)
    assert config.max_context is not None
    taken = round_bytes(runner, config.max_batch, layout.logical_len - layout.tail)
    return DryRun(model, head, tuple(buffers.records), taken)


def _free_bytes(layout: Layout, device: torch.device) -> int:
    """What a GPU with the weights on it has left for KV."""
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    planned = dry_run(layout, NUM_RESERVED_PAGES + 1).bytes_besides_kv()
    return int(total * layout.config.mem_fraction_static) - (total - free) - planned
