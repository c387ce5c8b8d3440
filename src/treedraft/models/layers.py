"""Layers that every model shares. Modules accept any leading shape: [..., H] in, [..., H] out.

`checkpoint(prefix)` of a module yields (name in a Hugging Face checkpoint, view of the parameter that it fills):
loading copies into the views, saving reads them, so fused parameters need no conversion step. A view of three
dimensions [a, b, c] is stored as the matrix [a * b, c].
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cache
from importlib.util import find_spec
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDE = (torch.float32, torch.float64)
PACKED_ROWS = 8  # rows that the packed layout is tuned for; it works for any number
PACKED_SIZE = 1 << 16  # elements of the smallest matrix that is packed
HAS_TRITON = find_spec("triton") is not None
NamedViews = Iterator[tuple[str, Tensor]]
# fast: what is measured to be fastest. invariant: a row's result is the same bits whatever rows are beside it (a GPU's
# inference in bfloat16 and float32; elsewhere the two are the same).
Products = Literal["fast", "invariant"]


def at_least_float32(x: Tensor) -> Tensor:
    """Return x in float32, or in float64 where it is float64 already."""
    return x if x.dtype in WIDE else x.float()


def empty_weight(*shape: int, dtype: torch.dtype, device: torch.device | str) -> nn.Parameter:
    """Return an uninitialised parameter; a checkpoint or `init_weights` fills it."""
    return nn.Parameter(torch.empty(*shape, dtype=dtype, device=device))


def is_autocast(x: Tensor) -> bool:
    """Whether autocast is on for x's device; the meta device has none."""
    return not x.is_meta and torch.is_autocast_enabled(x.device.type)


def is_served(x: Tensor) -> bool:
    """Whether the Triton kernels compute with x: inference on a GPU, in bfloat16 or float32, outside autocast."""
    if not x.is_cuda or torch.is_grad_enabled() or x.dtype not in (torch.bfloat16, torch.float32):
        return False
    if torch.compiler.is_compiling():  # compiled functions take the plain form
        return False
    return HAS_TRITON and not is_autocast(x)


def linear_float32(x: Tensor, weight: Tensor) -> Tensor:
    """Return x @ weight.T in at least float32: bfloat16 logits would tie. x: [..., H], weight: [V, H]."""
    if is_autocast(x) or x.dtype in WIDE:
        return at_least_float32(F.linear(x, weight))
    if x.is_cuda:
        return torch.mm(x.reshape(-1, x.shape[-1]), weight.t(), out_dtype=torch.float32).unflatten(0, x.shape[:-1])
    return F.linear(x.float(), weight.float())


class Matrix:
    """A weight [out, in] of a linear map, with a copy in oneDNN's layout where that pays.

    On a CPU the plain product packs the matrix anew for each call and reads it in an order that memory dislikes. Over
    40 matrices of 1024 x 256, more than the cache holds, a product with 1, 4 and 16 rows took 132, 208 and 246 us
    plain, 54, 56 and 81 us packed (2 cores, 2026-12-01). The copy serves inference only, in float32, and is stale
    once the weight changes.
    """

    def __init__(self, weight: Tensor, gives_logits: bool = False) -> None:
        """gives_logits: an lm_head, whose product is float32 in a bfloat16 model too, and so is its copy."""
        self.weight = weight
        self.gives_logits = gives_logits
        self.packed: Tensor | None = None
        self.products: Products = "fast"

    def pack(self, device_type: str | None = None) -> None:
        """Make the copy, once the weight is final; without effect where it would not serve.

        device_type: what a weight on the meta device stands for.
        """
        if not self.packed_bytes(device_type or self.weight.device.type):
            return
        if self.weight.is_meta:
            self.packed = self.weight.detach().float()
        else:
            self.packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.detach().float(), PACKED_ROWS)

    def packed_bytes(self, device_type: str) -> int:
        """Bytes of the copy that `pack` makes on such a device; 0 where it would not serve."""
        is_float32 = self.weight.dtype == torch.float32 or (self.weight.dtype == torch.bfloat16 and self.gives_logits)
        is_served = device_type == "cpu" and is_float32 and self.weight.numel() >= PACKED_SIZE and has_packed_product()
        return self.weight.numel() * 4 if is_served else 0

    def linear(self, x: Tensor) -> Tensor:
        """Return [..., in] -> [..., out] in x's dtype."""
        packed = self.packed
        if self._is_fused(x):
            return self._fused(x, x.dtype)
        if packed is None or x.dtype != torch.float32 or torch.is_grad_enabled():
            return F.linear(x, self.weight)
        return packed_product()(x, packed)

    def logits(self, x: Tensor) -> Tensor:
        """Return [..., in] -> [..., out] in at least float32."""
        if self._is_fused(x):
            return self._fused(x, torch.float32)
        if self.packed is None or torch.is_grad_enabled():
            return linear_float32(x, self.weight)
        return packed_product()(x.float(), self.packed)

    def _is_fused(self, x: Tensor) -> bool:
        if not is_served(x):
            return False
        is_small = x.numel() <= FUSED_ROWS * x.shape[-1] and x.shape[-1] <= FUSED_WIDTH
        return self.products == "invariant" or (x.dtype == torch.bfloat16 and is_small)

    def _fused(self, x: Tensor, out_dtype: torch.dtype) -> Tensor:
        from treedraft.kernels.linear import linear_triton  # here: triton is needed on a GPU alone

        return linear_triton(x, self.weight, out_dtype)


def has_packed_product() -> bool:
    """Whether this build of torch has oneDNN's product with a packed matrix."""
    names = ("_reorder_linear_weight", "_linear_pointwise")
    return torch.backends.mkldnn.is_available() and all(hasattr(torch.ops.mkldnn, name) for name in names)


@cache
def packed_product() -> Callable[[Tensor, Tensor], Tensor]:
    """The product with a packed matrix, as TorchScript: only so can `runner.capture` record it."""
    source = """
def packed_product(x: Tensor, packed: Tensor) -> Tensor:
    scalars = torch.jit.annotate(List[Optional[Union[complex, float, int]]], [])
    return torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", scalars, "")
"""
    return torch.jit.CompilationUnit(source).packed_product


def choose_products(model: nn.Module, products: Products) -> None:
    """Choose the products of every matrix and mixture of experts of a model."""
    for module in model.modules():
        for value in (module, *vars(module).values()):
            if hasattr(value, "products"):
                value.products = products


def pack_matrices(model: nn.Module, device_type: str | None = None) -> None:
    """Pack every `Matrix` that is an attribute of a module of the model, and every module that packs itself.

    device_type: what a model on the meta device stands for.
    """
    for module in model.modules():
        pack = getattr(module, "pack", None)
        if callable(pack):
            pack(device_type)
        for value in vars(module).values():
            if isinstance(value, Matrix):
                value.pack(device_type)


def packed_bytes(models: Iterable[nn.Module], device_type: str) -> int:
    """Bytes of the copies that `pack_matrices` makes of the models on such a device. They may be on the meta device."""
    modules = [module for model in models for module in model.modules()]
    matrices = {id(value): value for module in modules for value in vars(module).values() if isinstance(value, Matrix)}
    own = [getattr(module, "packed_bytes") for module in modules if hasattr(module, "packed_bytes")]  # noqa: B009
    return sum(matrix.packed_bytes(device_type) for matrix in matrices.values()) + sum(f(device_type) for f in own)


class RMSNorm(nn.Module):
    """Root-mean-square norm, computed in at least float32."""

    eps: Tensor

    def __init__(self, size: int, eps: float, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, dtype=dtype, device=device))
        self.size = size
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        self.register_buffer("eps", torch.tensor(eps, dtype=wide, device=device), persistent=False)
        self.eps_host = eps

    def add(self, delta: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return (norm of the sum, the sum) of delta and the residual stream [..., H]; None stands for 0.

        delta: [..., H], or [..., P, H], parts to be summed: what a mixture of experts gives on a GPU.
        """
        if is_served(delta):
            from treedraft.kernels.norm import add_rms_norm_triton  # here: triton is needed on a GPU alone

            return add_rms_norm_triton(delta, residual, self.weight, self.eps_host)
        if residual is None:
            return self(delta), delta
        if delta.dim() > residual.dim():
            delta = delta.sum(-2).to(residual.dtype)
        total = residual + delta
        return self(total), total

    def forward(self, x: Tensor) -> Tensor:
        if is_served(x):
            return self.add(x, None)[0]
        if torch.is_grad_enabled() or x.dtype not in WIDE or x.device.type != "cpu":
            return F.rms_norm(x, (self.size,), self.weight.to(x.dtype), self.eps_host)
        # On a CPU torch runs rms_norm as seven operators, 10 us for a row; these five take 6 (2026-12-01).
        length = torch.linalg.vector_norm(x, 2, -1, True)
        return x * torch.addcmul(self.eps, length, length, value=1 / self.size).rsqrt_() * self.weight

    def checkpoint(self, prefix: str) -> NamedViews:
        yield f"{prefix}.weight", self.weight.detach()


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x)), gate and up in one product."""

    def __init__(self, hidden_size: int, size: int, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.size = size
        self.gate_up = empty_weight(2 * size, hidden_size, dtype=dtype, device=device)
        self.down = empty_weight(hidden_size, size, dtype=dtype, device=device)
        self.to_gate_up, self.to_hidden = Matrix(self.gate_up), Matrix(self.down)

    def forward(self, x: Tensor) -> Tensor:
        gate_up = self.to_gate_up.linear(x)
        if is_served(gate_up):
            from treedraft.kernels.norm import silu_and_mul_triton  # here: triton is needed on a GPU alone

            return self.to_hidden.linear(silu_and_mul_triton(gate_up))
        gate, up = gate_up.split(self.size, -1)
        return self.to_hidden.linear(F.silu(gate) * up)

    def checkpoint(self, prefix: str) -> NamedViews:
        gate, up = self.gate_up.detach().split(self.size)
        yield f"{prefix}.gate_proj.weight", gate
        yield f"{prefix}.up_proj.weight", up
        yield f"{prefix}.down_proj.weight", self.down.detach()


# The largest products that the Triton kernel serves instead of cuBLAS. An NVIDIA H200, one row, us: 2048 -> 2048 5.1
# against 6.2, 2048 -> 102400 100 against 109, 10944 -> 2048 23 against 17; 2048 -> 3648 7.9 against 6.6, but its
# neighbours gain about 1 us each by the chain. From 32 rows on cuBLAS is level or ahead (2026-12-01).
FUSED_ROWS = 16
FUSED_WIDTH = 8192


def init_weights(module: nn.Module, seed: int, std: float = 0.02) -> None:
    """Fill every matrix with normal noise, every norm with ones, every bias with zeros: the start of a training."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() >= 2:
                noise = torch.empty(parameter.shape, dtype=torch.float32).normal_(0.0, std, generator=generator)
                parameter.copy_(noise)
            else:
                parameter.fill_(1.0)
