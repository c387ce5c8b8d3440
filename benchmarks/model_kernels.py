"""Times of the model's kernels beside torch's operators, for DeepSeek-V2-Lite's shapes in bfloat16, on a GPU.

Usage: python benchmarks/model_kernels.py OUT_FOLDER

Each kernel runs over rotating copies of its weights, more than the cache holds, in a captured graph; roofline is the
bytes of weights that the rows need over the measured bandwidth of a copy. "step" is the whole model without its
attention kernel: every launch of a decode step but that one.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from treedraft.attention.paged import PagedTreeAttend, absorb, expand_values
from treedraft.bench.results import write_result
from treedraft.kv.pool import LatentPool
from treedraft.models import layers
from treedraft.models.config import ModelConfig
from treedraft.models.deepseek import DeepseekModel
from treedraft.models.layers import RMSNorm
from treedraft.models.moe import MoE

BYTES_PER_S = 4.3e12  # of a device copy, bytes read and written
CACHE_BYTES = 200e6  # of weights to rotate among: several times the L2
ROWS = (1, 4, 8, 16, 32, 64)
V2_LITE = {
    "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "vocab_size": 102400, "hidden_size": 2048,
    "intermediate_size": 10944, "moe_intermediate_size": 1408, "num_hidden_layers": 27, "num_attention_heads": 16,
    "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6, "first_k_dense_replace": 1,
    "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "topk_method": "greedy",
    "max_position_embeddings": 163840, "rms_norm_eps": 1e-6,
}  # fmt: skip
PAGE_SIZE = 64


class NoAttention:
    """Stands where a backend does: gives each query's own first columns, without a launch."""

    def run_mla(self, plan: Any, kv: Tensor, q: Tensor, v_width: int, scale: float) -> Tensor:
        return q[..., :v_width]


@dataclass(frozen=True)
class Measured:
    """One kernel and number of rows."""

    kernel: str
    rows: int
    form: str  # "fused" or "torch"
    time_us: float
    roofline_us: float

    @property
    def fraction(self) -> float:
        return self.roofline_us / self.time_us


def time_us(calls: list[Callable[[], object]], replays: int = 20) -> float:
    """Median time of one of the calls, captured one after another in one graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(replays):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(calls))
    return statistics.median(times)


def count_launches(call: Callable[[], object]) -> int:
    """Kernels, copies and fills that one call launches."""
    call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in profile.events())


def random(*shape: int, scale: float = 1.0) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_(0, scale)


def copies(*shape: int, at_least: int = 8) -> list[Tensor]:
    size = 2 * torch.Size(shape).numel()
    return [random(*shape, scale=0.02) for _ in range(max(at_least, int(CACHE_BYTES / size) + 1))]


def in_torch(call: Callable[[], object]) -> Callable[[], object]:
    """The same call on torch's operators."""

    def run() -> object:
        with patch.object(layers, "has_triton", lambda: False):
            return call()

    return run


def both(kernel: str, rows: int, num_bytes: float, calls: list[Callable[[], object]]) -> list[Measured]:
    roofline = num_bytes / BYTES_PER_S * 1e6
    return [
        Measured(kernel, rows, "fused", time_us(calls), roofline),
        Measured(kernel, rows, "torch", time_us([in_torch(call) for call in calls]), roofline),
    ]


def linears(rows: int) -> list[Measured]:
    """Plain products: the Triton kernel against cuBLAS, whichever of them serves."""
    from treedraft.kernels.linear import linear_triton

    found = []
    shapes = {"qkv": (3648, 2048), "out": (2048, 2048), "dense gate_up": (21888, 2048), "dense down": (2048, 10944)}
    for name, (columns, width) in (shapes | {"lm_head": (102400, 2048)}).items():
        weights, x = copies(columns, width, at_least=1), random(rows, width)
        roofline = 2 * columns * width / BYTES_PER_S * 1e6
        out_dtype = torch.float32 if name == "lm_head" else torch.bfloat16
        fused = [partial(linear_triton, x, w, out_dtype) for w in weights]
        cublas = [partial(torch.mm, x, w.t(), out_dtype=out_dtype) for w in weights]
        found.append(Measured(name, rows, "fused", time_us(fused), roofline))
        found.append(Measured(name, rows, "torch", time_us(cublas), roofline))
    return found


def latents(rows: int) -> list[Measured]:
    """Rope, latent norm, KV write and absorption; the product after the attention."""
    from treedraft.kernels.latent import absorb_and_write_triton
    from treedraft.kernels.linear import linear_heads_triton

    config = ModelConfig.from_hf(V2_LITE)
    rope = layers_rope(config)
    norm = RMSNorm(512, 1e-6, torch.bfloat16, "cuda")
    weights, pool = copies(16, 256, 512), LatentPool(1, 8, PAGE_SIZE, 576, torch.bfloat16, "cuda")
    fused, slots = random(1, rows, 3648), torch.arange(128, 128 + rows, device="cuda")[None]
    table = rope(torch.arange(rows, device="cuda")[None])
    q, kv = fused[..., 576:].unflatten(-1, (16, 192)), fused[..., :576]

    def with_torch(kv_b: Tensor) -> Tensor:
        q_rope = rope.rotate(q[..., 128:], table)
        k_rope = rope.rotate(kv[..., 512:].unsqueeze(-2), table).squeeze(-2)
        pool.write_finite(0, slots, F.rms_norm(kv[..., :512], (512,), norm.weight, 1e-6), k_rope)
        return absorb(q[..., :128], q_rope, kv_b[:, :128])

    def with_triton(kv_b: Tensor) -> Tensor:
        return absorb_and_write_triton(q, kv, table, norm.weight, 1e-6, kv_b[:, :128], slots, pool.layer(0), True)

    out, roofline = random(1, rows, 16, 512), 2 * 16 * 128 * 512 / BYTES_PER_S * 1e6
    forms: list[tuple[str, str, Callable[[Tensor], object]]] = [
        ("absorb and write", "fused", with_triton),
        ("absorb and write", "torch", with_torch),
        ("values", "fused", lambda kv_b: linear_heads_triton(out.flatten(0, 1), kv_b[:, 128:])),
        ("values", "torch", lambda kv_b: expand_values(out, kv_b[:, 128:])),
    ]
    return [
        Measured(name, rows, form, time_us([partial(call, w) for w in weights]), roofline) for name, form, call in forms
    ]


def layers_rope(config: ModelConfig) -> Any:
    from treedraft.models.rope import Rope

    return Rope(config.mla.rope, config.mla.qk_rope_head_dim, 4096, torch.bfloat16, "cuda")


def experts(rows: int, moes: list[MoE]) -> list[Measured]:
    """Norm, router and experts of one layer; bytes are those of the experts that these rows choose."""
    config = moes[0].config
    norm, x, residual = RMSNorm(2048, 1e-6, torch.bfloat16, "cuda"), random(rows, 2048), random(rows, 2048)
    normed = norm(x + residual)
    chosen = [len(moe.router(normed).indices.unique()) + config.num_shared_experts for moe in moes]
    num_bytes = 2 * 3 * 2048 * 1408 * statistics.mean(chosen) + 2 * 64 * 2048

    def call(moe: MoE) -> object:
        if moe.is_fused(x):
            return moe.fused(x, residual, norm)
        normed, total = norm.add(x, residual)
        return moe(normed, True), total

    found = both("norm, router, experts", rows, num_bytes, [lambda m=m: call(m) for m in moes])
    routings = [moe.router(normed) for moe in moes]
    fixed = [(m, r.indices.int(), r.weights.float()) for m, r in zip(moes, routings, strict=True)]
    parts = [lambda a=a: a[0]._parts(normed, a[1], a[2]) for a in fixed]
    found.append(Measured("experts", rows, "fused", time_us(parts), num_bytes / BYTES_PER_S * 1e6))
    many = [lambda m=m, r=r: m.segmented(normed, r) for m, r in zip(moes, routings, strict=True)]
    found.append(Measured("experts", rows, "torch", time_us(many), num_bytes / BYTES_PER_S * 1e6))
    parts_sum = moes[0]._parts(normed, fixed[0][1], fixed[0][2])
    nothing = 2.0 * rows * 2048 * 4
    return found + both("norm of parts", rows, nothing, [lambda: norm.add(parts_sum, residual)] * 8)


def step(rows: int, model: DeepseekModel) -> tuple[list[Measured], dict[str, int]]:
    """All of a decode step but the attention kernel, logits included, and its launches."""
    config = model.config
    pool = LatentPool(config.num_hidden_layers, 8, PAGE_SIZE, config.mla.latent_width, torch.bfloat16, "cuda")
    slots = torch.arange(128, 128 + rows, device="cuda")[:, None]
    attend = PagedTreeAttend(NoAttention(), None, pool, slots)  # type: ignore[arg-type]
    ids = torch.randint(config.vocab_size, (rows, 1), device="cuda")
    positions = torch.full((rows, 1), 100, device="cuda")

    def call() -> Tensor:
        return model.logits(model(ids, positions, attend).hidden)

    chosen: list[int] = []
    hooks = [
        layer.mlp.router.register_forward_hook(lambda _m, _a, r: chosen.append(len(r.indices.unique()) + 2))
        for layer in model.layers
        if isinstance(layer.mlp, MoE)
    ]
    call()
    for hook in hooks:
        hook.remove()
    moe_bytes = 2 * 3 * 2048 * 1408 * sum(chosen)
    dense = sum(
        p.numel()
        for name, p in model.named_parameters()
        if "embedding" not in name and not name.endswith(("mlp.gate_up", "mlp.down"))
    )
    dense += 3 * config.hidden_size * config.intermediate_size
    launches = {"fused": count_launches(call), "torch": count_launches(in_torch(call))}
    return both("step", rows, moe_bytes + 2 * dense, [call]), launches


def make_model() -> DeepseekModel:
    model = DeepseekModel(ModelConfig.from_hf(V2_LITE), 4096, torch.bfloat16, "cuda").requires_grad_(False)
    for parameter in model.parameters():
        if parameter.dim() >= 2:
            parameter.normal_(0, 0.02)
    return model


@torch.inference_mode()
def main() -> None:
    model = make_model()
    moes = [layer.mlp for layer in model.layers if isinstance(layer.mlp, MoE)][:12]
    found: list[Measured] = []
    launches = {}
    for rows in ROWS:
        num_before = len(found)
        found += linears(rows) + latents(rows) + experts(rows, moes)
        measured, launches[rows] = step(rows, model)
        found += measured
        for each in found[num_before:]:
            print(
                f"{each.kernel:24}{each.rows:4} rows {each.form:6}{each.time_us:9.1f} us, roofline "
                f"{each.roofline_us:7.1f}, {each.fraction:.2f}",
                flush=True,
            )
        print("launches of a step:", launches[rows], flush=True)
    rows_as_json = [vars(each) | {"fraction": round(each.fraction, 3)} for each in found]
    write_result(Path(sys.argv[1]), "model-kernels", {"kernels": rows_as_json, "launches_of_a_step": launches})


if __name__ == "__main__":
    main()
