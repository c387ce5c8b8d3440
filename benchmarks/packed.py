"""FlashInfer's MLA by one list a row, by prefix + tail, and plain torch, side by side: python benchmarks/packed.py

Random trees over random pages of a GPU, 16 heads, latent 512 + rope 64, bfloat16. For each shape of a forward (draft:
topk rows; verification: num_draft_tokens rows): microseconds of a layer's attention, in a graph and with a cold L2
cache, of a forward's plan (layout on the device, and what the backend plans on the host), and the lists' bytes.
"""

import argparse
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from treedraft.attention import BACKENDS, make_backend
from treedraft.attention.base import Plan, TreeAttention
from treedraft.attention.packed import Reserved, new_record, verify_limits
from treedraft.bench.results import write_result
from treedraft.errors import ConfigError
from treedraft.kv.allocator import NUM_RESERVED_PAGES
from treedraft.kv.buffers import Buffers
from treedraft.kv.page_table import slots_of

LATENT, ROPE, SCALE = 512, 64, 192**-0.5
FORWARDS = {"draft": 8, "verify": 16}  # rows: topk, num_draft_tokens


@dataclass(frozen=True)
class Shape:
    forward: str
    batch: int
    context: int
    heads: int
    page_size: int


@dataclass(frozen=True)
class Inputs:
    page_table: Tensor  # [B, W] int32
    kv_lens: Tensor  # [B] int64
    tail_slots: Tensor  # [B, R] int64
    bits: Tensor  # [B, R, 1] int64
    kv: Tensor  # [slots, 576] bfloat16
    q: Tensor  # [B, R, h, 576] bfloat16


def make_inputs(shape: Shape, seed: int) -> Inputs:
    generator = torch.Generator().manual_seed(seed)
    rows = FORWARDS[shape.forward]
    width = -(-(shape.context + rows) // shape.page_size)
    num_pages = shape.batch * width
    pages = torch.randperm(num_pages, generator=generator).view(shape.batch, width) + NUM_RESERVED_PAGES
    bits = torch.zeros(shape.batch, rows, 1, dtype=torch.int64)
    for node in range(rows):
        parents = torch.randint(0, max(node, 1), (shape.batch,), generator=generator)
        inherited = bits[torch.arange(shape.batch), parents] if node else 0
        bits[:, node] = inherited | 1 << node
    table, kv_lens = pages.to("cuda", torch.int32), torch.full((shape.batch,), shape.context, device="cuda")
    tail = kv_lens[:, None] + torch.arange(rows, device="cuda")
    num_slots = (num_pages + NUM_RESERVED_PAGES) * shape.page_size
    return Inputs(
        page_table=table,
        kv_lens=kv_lens,
        tail_slots=slots_of(table, tail, shape.page_size),
        bits=bits.cuda(),
        kv=torch.randn(num_slots, LATENT + ROPE, device="cuda", dtype=torch.bfloat16),
        q=torch.randn(shape.batch, rows, shape.heads, LATENT + ROPE, device="cuda", dtype=torch.bfloat16),
    )


def measure(name: str, shape: Shape, inputs: Inputs, wanted: Tensor | None) -> tuple[dict, Tensor]:
    """Return figures, and the output in float32. wanted: another backend's output to compare with."""
    memory = Buffers("cuda")
    rows = FORWARDS[shape.forward]
    limits = verify_limits(shape.batch, rows, rows - 1, shape.context)  # a random tree may be a chain
    backend = make_backend(name, Reserved(limits, memory, new_record(memory)))

    def plan() -> Plan:
        prefix = backend.plan_prefix(
            inputs.page_table, inputs.kv_lens, shape.context, inputs.tail_slots, shape.page_size
        )
        return backend.plan_tree(prefix, inputs.bits, rows)

    def run(planned: Plan) -> Tensor:
        return backend.run_mla(planned, inputs.kv, inputs.q, LATENT, SCALE)

    planned = plan()
    out = run(planned).float()
    forward_us = statistics.median(wall_us(lambda: run(plan())) for _ in range(7))
    again_us = statistics.median(wall_us(lambda: run(planned)) for _ in range(7))
    layer_us = replay_us(lambda: run(planned))
    figures = {
        "layer_us": round(layer_us, 1),
        "plan_us": round(forward_us - again_us, 1),
        "list_bytes": sum(record.bytes for record in memory.records if record.kind == "index"),
        "error": None if wanted is None else round(float((out - wanted).norm() / wanted.norm()), 6),
    }
    check_used(backend, shape)
    return figures, out


def check_used(backend: TreeAttention, shape: Shape) -> None:
    """Raise when the lists were too small: the figures would be those of empty lists."""
    backend.check_fits(shape.batch, shape.batch * shape.context)


def replay_us(work, repetitions: int = 20) -> float:  # type: ignore[no-untyped-def]
    """Median time of one replay of the work, captured as a graph, with the L2 cache cold."""
    graph, cold = torch.cuda.CUDAGraph(), torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    with torch.cuda.graph(graph):
        work()
    times = []
    for _ in range(repetitions):
        cold.zero_()
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        graph.replay()
        after.record()
        torch.cuda.synchronize()
        times.append(before.elapsed_time(after) * 1e3)
    return statistics.median(times)


def wall_us(work) -> float:  # type: ignore[no-untyped-def]
    torch.cuda.synchronize()
    started = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return (time.perf_counter() - started) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backends", nargs="+", default=["torch", "flashinfer", "flashinfer-merged"])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--context", type=int, nargs="+", default=[1024, 8192, 32768])
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    args = parser.parse_args()
    unknown = [name for name in args.backends if name not in BACKENDS]
    if unknown:
        raise ConfigError(f"--backends must be among {', '.join(BACKENDS)}; got {', '.join(unknown)}")
    results = []
    print(
        f"{'forward':8} {'batch':>5} {'context':>7}  "
        + "  ".join(f"{name + ' us (plan)':>26}" for name in args.backends)
    )
    for forward in FORWARDS:
        for batch in args.batch:
            for context in args.context:
                shape = Shape(forward, batch, context, args.heads, args.page_size)
                inputs, wanted, cells = make_inputs(shape, seed=batch + context), None, []
                for name in args.backends:
                    figures, out = measure(name, shape, inputs, wanted)
                    wanted = out if wanted is None else wanted
                    results.append({"backend": name, **asdict(shape), "rows": FORWARDS[forward], **figures})
                    cells.append(f"{figures['layer_us']:17.1f} ({figures['plan_us']:6.0f})")
                print(f"{forward:8} {batch:5} {context:7}  " + "  ".join(cells), flush=True)
                del inputs, wanted
                torch.cuda.empty_cache()
    worst = max((r["error"] for r in results if r["error"] is not None), default=None)
    print(f"largest relative difference from {args.backends[0]}: {worst}")
    print(f"wrote {write_result(args.out, 'packed', {'results': results})}")


if __name__ == "__main__":
    main()
