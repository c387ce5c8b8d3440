"""Attention of a few rows for each sequence over its paged KV: one interface, several backends, chosen by name.

A new backend is one file and one entry in BACKENDS; tests/conformance picks it up by itself.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Literal

from treedraft.errors import ConfigError

if TYPE_CHECKING:
    from treedraft.attention.base import TreeAttention
    from treedraft.attention.packed import Reserved

PREFERRED = ("gluon", "triton", "torch")  # what "auto" means: the first that can do what is needed
DETERMINISTIC = ("triton-deterministic",)


@dataclass(frozen=True)
class Backend:
    """Where a backend's class is, and what it can do. The class is imported when asked for."""

    module: str
    class_name: str
    devices: tuple[str, ...]  # torch device types
    dtypes: tuple[str, ...]  # of KV and queries, by their names in torch
    mla: bool = True
    gqa: bool = True
    trees: Literal["mask", "lists"] | None = "mask"  # how a row sees its ancestors alone; None: chains only
    page_sizes: tuple[int, ...] | None = None  # None: all
    graph: Literal["round", "forward"] | None = "round"  # the largest part of a round that one captured graph may hold
    log_sum_exp: bool = True  # returns it, so that two passes may be merged
    latent_dims: tuple[tuple[int, int], ...] | None = None  # (latent, rope) that its MLA kernels exist for; None: all
    index_bits: int | None = None  # of offsets into kv_indices; None: it needs no lists
    is_invariant: bool = False  # a row's bits do not depend on the rows, sequences and tree beside it
    has_interpreter: bool = False  # runs on a CPU too under TRITON_INTERPRET=1, slowly, for tests

    @property
    def device_types(self) -> tuple[str, ...]:
        """Where it runs in this process."""
        is_interpreted = self.has_interpreter and os.environ.get("TRITON_INTERPRET") == "1"
        return (*self.devices, "cpu") if is_interpreted else self.devices


BACKENDS: dict[str, Backend] = {
    "torch": Backend(
        module="treedraft.attention.reference",
        class_name="TorchTreeAttention",
        devices=("cpu", "cuda"),
        dtypes=("float64", "float32", "bfloat16"),
    ),
    "packed-torch": Backend(
        module="treedraft.attention.packed_torch",
        class_name="PackedTorchAttention",
        devices=("cpu", "cuda"),
        dtypes=("float64", "float32", "bfloat16"),
        trees="lists",
        index_bits=64,
    ),
    "packed-torch-merged": Backend(
        module="treedraft.attention.packed_torch",
        class_name="MergedTorchAttention",
        devices=("cpu", "cuda"),
        dtypes=("float64", "float32", "bfloat16"),
        trees="lists",
        index_bits=64,
    ),
    "triton": Backend(
        module="treedraft.attention.triton",
        class_name="TritonTreeAttention",
        devices=("cuda",),
        dtypes=("float32", "bfloat16"),
        has_interpreter=True,
    ),
    "triton-deterministic": Backend(  # a row's bits do not depend on what is beside it
        module="treedraft.attention.triton",
        class_name="DeterministicTritonAttention",
        devices=("cuda",),
        dtypes=("float32", "bfloat16"),
        is_invariant=True,
        has_interpreter=True,
    ),
    "flashmla": Backend(
        module="treedraft.attention.flashmla",
        class_name="FlashMlaAttention",
        devices=("cuda",),
        dtypes=("bfloat16",),
        gqa=False,
        page_sizes=(64,),
        latent_dims=((512, 64),),
    ),
    "flashinfer": Backend(
        module="treedraft.attention.flashinfer",
        class_name="FlashInferAttention",
        devices=("cuda",),
        dtypes=("bfloat16",),
        trees="lists",
        graph="forward",
        latent_dims=((512, 64),),
        index_bits=32,
    ),
    "flashinfer-merged": Backend(
        module="treedraft.attention.flashinfer",
        class_name="MergedFlashInferAttention",
        devices=("cuda",),
        dtypes=("bfloat16",),
        trees="lists",
        graph="forward",
        latent_dims=((512, 64),),
        index_bits=32,
    ),
    "gluon": Backend(
        module="treedraft.attention.gluon",
        class_name="GluonTreeAttention",
        devices=("cuda",),
        dtypes=("bfloat16",),
        gqa=False,
        page_sizes=(16, 32, 64, 128, 256),
        latent_dims=((512, 64),),
    ),
}


@dataclass(frozen=True)
class Needs:
    """What one model asks of the backend that serves it."""

    purpose: str  # "verify" or "draft"
    device: str  # torch device type
    dtype: str
    page_size: int
    latent_dims: tuple[int, int] | None  # (latent, rope) of MLA; None: grouped-query attention
    has_trees: bool  # rows that are no chain
    is_deterministic: bool = False  # a row's bits must not depend on what is beside it


def backend_named(name: str) -> Backend:
    """Return a registered backend's entry. Raise ConfigError for an unknown name."""
    if name not in BACKENDS:
        raise ConfigError(f"attention backend must be one of {', '.join(sorted(BACKENDS))}; got {name!r}")
    return BACKENDS[name]


def check_backend(name: str, needs: Needs) -> None:
    """Raise ConfigError, saying what is missing and which backends have it, unless the backend does what is needed."""
    missing = _missing(backend_named(name), needs)
    if missing:
        able = [other for other, entry in BACKENDS.items() if not _missing(entry, needs)]
        flag = "--attention-backend" if needs.purpose == "verify" else "--draft-attention-backend"
        raise ConfigError(
            f"attention backend {name!r} cannot {needs.purpose}: {'; '.join(missing)}. "
            f"{flag} may be: {', '.join(able) or 'none of the registered ones'}"
        )


def choose_backend(needs: Needs) -> str:
    """Return the fastest backend that can do what is needed, by measurements in benchmarks/notes.md.

    Raise ConfigError when none can. Asks the device whether its kernels are there.
    """
    preferred = DETERMINISTIC if needs.is_deterministic else PREFERRED
    for name in preferred:
        if not _missing(BACKENDS[name], needs) and _is_there(BACKENDS[name]):
            return name
    check_backend(preferred[-1], needs)
    raise ConfigError(f"the attention backend {preferred[-1]!r} needs the package triton: pip install 'treedraft[gpu]'")


def _is_there(entry: Backend) -> bool:
    check = getattr(import_module(entry.module), "is_available", None)
    return check is None or check()


def _missing(entry: Backend, needs: Needs) -> list[str]:
    missing = []
    if needs.is_deterministic and not entry.is_invariant:
        missing.append("its rows depend, in their last bits, on what is beside them, and deterministic was asked for")
    if needs.device not in entry.device_types:
        missing.append(f"it runs on {', '.join(entry.device_types)}, not on {needs.device}")
    if needs.dtype not in entry.dtypes:
        missing.append(f"it takes {', '.join(entry.dtypes)}, not {needs.dtype}")
    if entry.page_sizes is not None and needs.page_size not in entry.page_sizes:
        missing.append(f"it takes page sizes {', '.join(map(str, entry.page_sizes))}, not {needs.page_size}")
    if needs.latent_dims is None and not entry.gqa:
        missing.append("it has no grouped-query attention")
    if needs.latent_dims is not None:
        if not entry.mla:
            missing.append("it has no MLA")
        elif entry.latent_dims is not None and needs.latent_dims not in entry.latent_dims:
            sizes = ", ".join(f"latent {c} + rope {r}" for c, r in entry.latent_dims)
            missing.append(
                f"its MLA kernels exist for {sizes}, not for {needs.latent_dims[0]} + {needs.latent_dims[1]}"
            )
    if needs.has_trees and entry.trees is None:
        missing.append("it has no tree mask and takes no lists; topk must be 1")
    return missing


def make_backend(name: str, reserved: Reserved | None = None) -> TreeAttention:
    """Return a backend by its registered name.

    reserved: the forwards it will plan, and where its lists come from, once. Without it a backend that needs lists
    makes them when it plans. Raise ConfigError for an unknown name, or lists that its kernels cannot address.
    """
    entry = backend_named(name)
    arguments = () if entry.index_bits is None else (reserved, entry.index_bits)
    made: TreeAttention = getattr(import_module(entry.module), entry.class_name)(*arguments)
    return made
