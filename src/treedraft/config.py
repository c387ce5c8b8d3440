"""What a user may choose, each value followed by its meaning; `resolve()` replaces every "auto"."""

from __future__ import annotations

from dataclasses import dataclass, replace

from treedraft.errors import ConfigError


@dataclass(frozen=True)
class SpeculativeConfig:
    """The shape of the draft tree (EAGLE-2, section 4)."""

    num_steps: int = 5  # S: levels of the draft tree
    topk: int = 4  # K: branches kept per level; 1 is a chain
    num_draft_tokens: int = 16  # N: nodes verified per sequence, the root included
    shared_noise: bool = True  # rank drafts with the target's sampling noise (no effect at temperature 0)
    auto: bool = False  # each round uses the fastest of `offered_shapes`; the numbers above are the largest one's

    def check(self, draft_vocab_size: int | None = None) -> None:
        """Raise ConfigError when no tree of this shape exists."""
        for name in ("num_steps", "topk", "num_draft_tokens"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"{name} must be an integer of at least 1; got {value!r}")
        if not isinstance(self.auto, bool):
            raise ConfigError(f"auto must be True or False; got {self.auto!r}")
        bound = max_tree_nodes(self.num_steps, self.topk)
        if not 2 <= self.num_draft_tokens <= bound:
            raise ConfigError(
                f"num_draft_tokens must be in 2..{bound} for num_steps={self.num_steps}, topk={self.topk} "
                f"(1 + topk + (num_steps - 1) * topk^2 = {bound}, root included); got {self.num_draft_tokens}. "
                "Lower num_draft_tokens, or raise num_steps or topk."
            )
        if draft_vocab_size is not None and self.topk > draft_vocab_size:
            raise ConfigError(f"topk must be at most the draft head's vocabulary, {draft_vocab_size}; got {self.topk}")

    @property
    def max_path(self) -> int:
        """P: most tokens one round can emit, the bonus token included."""
        return min(self.num_steps, self.num_draft_tokens - 1) + 1


def max_tree_nodes(num_steps: int, topk: int) -> int:
    """Nodes of the largest tree that `num_steps` levels of `topk` branches can fill, the root included."""
    return 1 + topk + (num_steps - 1) * topk * topk


AUTO_NUM_DRAFT_TOKENS = 32  # largest tree of "auto" where the user names none


def offered_shapes(largest: SpeculativeConfig) -> tuple[SpeculativeConfig | None, ...]:
    """The tree shapes that a round may have: `largest` alone, or with `auto` smaller ones too. None: no tree.

    (5, 4, 32): (5, 4, 32), (5, 4, 16), (3, 4, 8), (2, 4, 4), None. Each halves the nodes, which a mixture of experts
    pays for; from the third on the levels too, each of which is a forward of the head. Every shape lies inside the
    first: the same branches per level, fewer of the same nodes. So a round of the first shows what each of the others
    would have accepted (speculative.shapes).
    """
    if not largest.auto:
        return (largest,)
    shapes = [largest]
    steps, nodes = largest.num_steps, largest.num_draft_tokens
    for halves_steps in (False, True, True):
        steps = min(-(-steps // 2) if halves_steps else steps, nodes // 2 - 1)
        nodes = min(nodes // 2, max_tree_nodes(steps, largest.topk))
        if steps >= 1:
            shapes.append(replace(largest, num_steps=steps, num_draft_tokens=nodes))
    return (*shapes, None)


def speculative_tail(speculative: SpeculativeConfig | None) -> int:
    """Logical slots beyond kv_len that one round may write: tree nodes, draft rows, or the draft extension.

    The one place where this is computed: admission, allocator, page-table width, rope tables and checks use it.
    """
    if speculative is None:
        return 1
    s, k, n = speculative.num_steps, speculative.topk, speculative.num_draft_tokens
    return max(n, k * (s - 1), s + 1)


def max_logical_len(max_context: int, speculative: SpeculativeConfig | None, max_pending: int) -> int:
    """Logical positions a sequence may ever address: the context, dead rounds still in flight, and the tail."""
    path = 1 if speculative is None else speculative.max_path
    return max_context + max_pending * path + speculative_tail(speculative)


CUDA_GRAPHS = ("auto", "on", "off", "eager")
DTYPES = ("auto", "float64", "float32", "bfloat16")
LOAD_FORMATS = ("auto", "dummy")


@dataclass(frozen=True)
class EngineConfig:
    """Everything `LLM` is built from."""

    model: str = "demo"  # "demo", a folder, or a hub id
    draft: str | None = None  # folder or hub id of the head; None: the demo's own for "demo", else no speculation
    load_format: str = "auto"  # "auto": the folder's safetensors; "dummy": random weights, from config.json alone
    device: str = "auto"  # "auto": cuda when there is one, else cpu
    dtype: str = "auto"  # "auto": float32 on the CPU, bfloat16 on a GPU
    page_size: int = 16  # tokens in a page
    max_context: int | None = None  # tokens of prompt and output together; None: the model's own limit
    max_batch: int = 8  # sequences decoded together
    kv_memory_bytes: int | None = (
        None  # size of the page pools; None: what max_batch sequences need, at most 1 GiB (CPU)
    )
    mem_fraction_static: float = 0.85  # share of a GPU's memory for weights, workspaces and pools together
    speculative: SpeculativeConfig | None = SpeculativeConfig()
    chunked_prefill: int = 4096  # tokens of prompts that enter in one step, beside the rounds of what runs
    prefix_cache: bool = True  # full pages of past texts are kept, and found by later ones that begin alike
    max_pending: int = 0  # rounds launched before the first is read; "auto" on a GPU is 1
    cuda_graph: str = "auto"  # "on": rounds are replayed graphs; "eager": on the same static buffers, without capture;
    # "auto": off on the CPU; on a GPU on, unless the attention backend plans on the host
    attention_backend: str = "auto"  # verifies and decodes; a name of attention.BACKENDS; "auto": the fastest that fits
    draft_attention_backend: str = "auto"  # drafts; "auto": the same as attention_backend where it fits the head
    deterministic: bool = False  # on a GPU: a row's result does not depend, in any bit, on the rows beside it
    capture: str = (
        "auto"  # record rounds and replay them without Python: "auto" (on a CPU, once it pays), "on" (at once), "off"
    )
    seed: int = 0  # requests without a seed of their own derive one from this

    def check(self) -> None:
        """Raise ConfigError for a value outside its range."""
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype must be one of {', '.join(DTYPES)}; got {self.dtype!r}")
        if self.load_format not in LOAD_FORMATS:
            raise ConfigError(f"load_format must be one of {', '.join(LOAD_FORMATS)}; got {self.load_format!r}")
        if self.cuda_graph not in CUDA_GRAPHS:
            raise ConfigError(f"cuda_graph must be one of {', '.join(CUDA_GRAPHS)}; got {self.cuda_graph!r}")
        for name, low in (("page_size", 1), ("max_batch", 1), ("max_pending", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < low:
                raise ConfigError(f"{name} must be an integer of at least {low}; got {value!r}")
        if self.max_context is not None and (not isinstance(self.max_context, int) or self.max_context < 2):
            raise ConfigError(f"max_context must be at least 2 tokens; got {self.max_context!r}")
        if not isinstance(self.chunked_prefill, int) or self.chunked_prefill < 1:
            raise ConfigError(f"chunked_prefill must be at least 1 token a step; got {self.chunked_prefill!r}")
        if self.capture not in ("auto", "on", "off"):
            raise ConfigError(f"capture must be auto, on or off; got {self.capture!r}")
        if not 0 < self.mem_fraction_static < 1:
            raise ConfigError(f"mem_fraction_static must be between 0 and 1; got {self.mem_fraction_static!r}")
        if self.kv_memory_bytes is not None and self.kv_memory_bytes < 1:
            raise ConfigError(f"kv_memory_bytes must be positive; got {self.kv_memory_bytes!r}")
        if self.speculative is not None:
            self.speculative.check()

    def resolve(self, has_cuda: bool) -> EngineConfig:
        """Return a config without "auto", but for backends, which depend on the model. has_cuda: torch sees a GPU."""
        self.check()
        device = self.device
        if device == "auto":
            device = "cuda" if has_cuda else "cpu"
        if device.startswith("cuda") and not has_cuda:
            raise ConfigError(f"device {device!r} was asked for, but torch sees no GPU; use --device cpu")
        if device.split(":")[0] not in ("cpu", "cuda"):
            raise ConfigError(f"device must be auto, cpu or cuda; got {device!r}")
        if self.cuda_graph == "on" and device == "cpu":
            raise ConfigError('cuda_graph "on" needs a GPU; on the CPU use "off", or "eager" for its static buffers')
        cuda_graph = "off" if self.cuda_graph == "auto" and device == "cpu" else self.cuda_graph
        dtype = self.dtype
        if dtype == "auto":
            dtype = "float32" if device == "cpu" else "bfloat16"
        if self.deterministic and device == "cpu":
            raise ConfigError(
                "deterministic is for a GPU; on the CPU use dtype float64, where speculation changes no token"
            )
        return replace(self, device=device, dtype=dtype, cuda_graph=cuda_graph)
