"""The kernels of a round beside the model's, against plain torch and the bytes that they must move: on a GPU.

    python benchmarks/round_kernels.py                    kernels, at vocabularies and batches of real models
    python benchmarks/round_kernels.py --launches         launches and time of a captured round of the demo model

Times are medians of replays of a CUDA graph of several calls, each on its own copy of the logits where these are
larger than the cache. The floor is the bytes read and written once, over the bandwidth of a device copy measured in the
same run. A round's launches are counted by torch's profiler in replays of its graph.
"""

from __future__ import annotations

import argparse
import statistics
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from treedraft import LLM, SamplingParams, SpeculativeConfig
from treedraft.bench.results import write_result
from treedraft.kernels.commit import move_rows_triton
from treedraft.runner import build, graphs
from treedraft.runner.operators import TorchOperators, TritonOperators
from treedraft.runner.state import stages_of
from treedraft.speculative.noise import noise_key
from treedraft.speculative.sampling import SamplingRows
from treedraft.speculative.tree import first_level
from treedraft.types import DraftTree

TORCH, TRITON = TorchOperators(), TritonOperators()
CACHE_BYTES = 50 << 20
S, K, N = 5, 8, 16
BATCHES = (1, 8, 64)


def time_us(calls: list[Callable[[], object]], repeats: int = 20) -> float:
    """Median time of one of the calls, replayed one after another from a graph, in microseconds."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / len(calls))
    return statistics.median(times)


def copy_bandwidth() -> float:
    """Bytes a microsecond of a device copy, read and written bytes counted."""
    x = torch.randn(1 << 28, device="cuda")
    y = torch.empty_like(x)
    # Not copy_: in a graph that is a copy engine's work, 2.7 TB/s where a kernel reaches 4.
    return 2 * x.nbytes / time_us([lambda: torch.neg(x, out=y)] * 4)


def settings(batch: int, vocab: int, stages: frozenset[str], **values: float) -> SamplingRows:
    off = {"temperature": 0.8, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
    numbers = off | {"presence_penalty": 0.0, "frequency_penalty": 0.0, "prompt_lens": 0, "min_tokens": 0} | values
    whole = {"top_k", "prompt_lens", "min_tokens"}
    fields: dict[str, Any] = {
        name: torch.full((batch,), value, dtype=torch.int64 if name in whole else torch.float32, device="cuda")
        for name, value in numbers.items()
    }
    zeros = torch.zeros(batch, vocab, device="cuda")
    return SamplingRows(
        **fields,
        noise_key=torch.tensor([noise_key(i, 0) for i in range(batch)], device="cuda"),
        stop_ids=torch.full((batch, 16), -1, device="cuda"),
        prompt_seen=zeros.bool(),
        output_counts=zeros.int(),
        logit_bias=zeros,
        stages=stages,
    )


def copies(make: Callable[[], Tensor], num_bytes: int) -> list[Tensor]:
    """As many tensors as exceed the cache twice over, at most 8."""
    return [make() for _ in range(max(1, min(8, 2 * CACHE_BYTES // num_bytes + 1)))]


def model_like(rows: int, vocab: int) -> Tensor:
    """Normal logits, sixteen of them larger: most of the mass lies there, as in a language model."""
    x = torch.randn(rows, vocab, device="cuda") * 2.5
    index = torch.randint(vocab, (rows, 16), device="cuda")
    return x.scatter_add_(1, index, 12 + 3 * torch.randn(rows, 16, device="cuda"))


def sized_cases(
    batch: int, vocab: int
) -> list[tuple[str, int, list[Callable[[], object]], list[Callable[[], object]]]]:
    """(name, bytes, calls of torch, calls of the kernels) of what depends on the vocabulary."""
    out = []
    keys = torch.tensor([noise_key(i, 0) for i in range(batch)], device="cuda")
    positions = torch.arange(batch * (S + 1), device="cuda").view(batch, S + 1)
    noise = TRITON.noise(keys, positions, vocab)
    row_bytes = vocab * 4
    size = batch * (S + 1) * row_bytes
    out.append(
        ("noise", size, [lambda: TORCH.noise(keys, positions, vocab)], [lambda: TRITON.noise(keys, positions, vocab)])
    )

    draft = copies(lambda: model_like(batch * K, vocab).view(batch, K, vocab), batch * K * row_bytes)
    heat = torch.full((batch,), 0.8, device="cuda")
    for name, of_noise in (("children", None), ("children, noise", noise[:, 1])):
        calls = [
            [lambda x=x, ops=ops, g=of_noise: ops.best_children(x, heat, g, None, K) for x in draft]
            for ops in (TORCH, TRITON)
        ]
        out.append((name, batch * (K + (of_noise is not None)) * row_bytes, *calls))
    del draft

    logits = copies(lambda: model_like(batch * N, vocab).view(batch, N, vocab), batch * N * row_bytes)
    depths = torch.randint(S + 1, (batch, N), device="cuda")
    kv_lens = torch.zeros(batch, dtype=torch.int64, device="cuda")
    no_path = torch.empty(batch, N, 0, dtype=torch.int64, device="cuda")
    stage = frozenset({"noise"})
    # With filters at T = 1: the kernel leaves logits / T where the logits were.
    cases = {
        "sample greedy": (settings(batch, vocab, frozenset(), temperature=0), None),
        "sample noise": (settings(batch, vocab, stage), noise),
        "sample top_p": (settings(batch, vocab, stage | {"top_p"}, temperature=1, top_p=0.9), noise),
        "sample top_k top_p": (
            settings(batch, vocab, stage | {"top_k", "top_p"}, temperature=1, top_p=0.9, top_k=50),
            noise,
        ),
    }
    for name, (rows, g) in cases.items():
        calls = [
            [lambda x=x, ops=ops, r=rows, g=g: ops.sample(x, r, no_path, depths, kv_lens, g) for x in logits]
            for ops in (TORCH, TRITON)
        ]
        out.append((name, (batch * N + (0 if g is None else batch * (S + 1))) * row_bytes, *calls))
    return out


def small_cases(batch: int) -> list[tuple[str, int, list[Callable[[], object]], list[Callable[[], object]]]]:
    """The same of what does not."""
    words, slots = 1, torch.arange(batch, device="cuda")

    def grow(ops: Any) -> DraftTree:
        pool, frontier = first_level(ids, scores, words)
        for level in range(2, S + 1):
            pool, frontier, _ = ops.next_level(pool, frontier, child_ids, child_logps, level)
        return ops.select(pool, slots, N, words, limits)

    ids = torch.randint(1000, (batch, K), device="cuda")
    scores = (-torch.rand(batch, K, device="cuda")).sort(-1, descending=True).values
    child_ids = torch.randint(1000, (batch, K, K), device="cuda")
    child_logps = -torch.rand(batch, K, K, device="cuda")
    limits = torch.full((batch,), N, device="cuda")
    tree = grow(TORCH)
    sampled = torch.randint(1000, (batch, N), device="cuda")
    has_nan = torch.zeros(batch, N, dtype=torch.bool, device="cuda")
    accepted, _ = TORCH.walk(tree, sampled, S + 1, has_nan)
    lens, roots = torch.zeros(2, batch, dtype=torch.int64, device="cuda").unbind()
    record = torch.zeros(7, dtype=torch.int64, device="cuda")
    table = torch.zeros(batch, 512, dtype=torch.int32, device="cuda")
    data = torch.zeros(27, batch * 64, 576, dtype=torch.bfloat16, device="cuda")
    tail_slots = torch.arange(batch * 64, device="cuda").view(batch, 64)[:, :N]
    src, dst = tail_slots[:, torch.tensor([0, 2, 3, 7, 9, 12], device="cuda")], tail_slots[:, : S + 1]

    def move() -> None:
        rows = data.index_select(1, src.reshape(-1))
        data.index_copy_(1, dst.reshape(-1), rows)

    def both(call: Callable[[Any], object]) -> tuple[list[Callable[[], object]], list[Callable[[], object]]]:
        return [lambda: call(TORCH)] * 8, [lambda: call(TRITON)] * 8

    return [
        ("4 levels and select", 0, *both(grow)),
        ("walk", 0, *both(lambda ops: ops.walk(tree, sampled, S + 1, has_nan))),
        ("gather", batch * 512 * 8, *both(lambda ops: ops.gather(slots, lens, roots, table, 64, 40))),
        ("advance", 0, *both(lambda ops: ops.advance(slots, lens, roots, accepted, record, lens, roots, None))),
        (
            "commit, 27 layers",
            27 * batch * 5 * 1152 * 2,
            [move] * 8,
            [lambda: move_rows_triton(data, src, dst)] * 8,
        ),
    ]


def measure_kernels() -> dict[str, Any]:
    bandwidth = copy_bandwidth()
    results = []
    for vocab in (102_400, 129_280):
        for batch in BATCHES:
            cases = sized_cases(batch, vocab) + (small_cases(batch) if vocab == 102_400 else [])
            for name, num_bytes, plain, kernel in cases:
                floor = num_bytes / bandwidth
                torch_us, kernel_us = time_us(plain, 5), time_us(kernel)
                row = {"name": name, "vocab": vocab, "batch": batch, "bytes": num_bytes, "floor_us": floor}
                results.append(row | {"torch_us": torch_us, "kernel_us": kernel_us})
                print(
                    f"{name:20s} {vocab:7d} {batch:3d} torch {torch_us:9.1f} kernel {kernel_us:8.1f} floor {floor:7.1f}"
                )
            del cases
            torch.cuda.empty_cache()
    return {"copy_bandwidth_tb_s": bandwidth / 1e6, "tree": [S, K, N], "results": results}


def count_launches(llm: LLM, batch: int, params: SamplingParams) -> dict[str, Any]:
    """Device time and kernels of one replay of the round's graph, and the names that take most launches."""
    prompt = llm.encode("Once upon a time there was a")
    llm.generate([prompt] * batch, params, progress=False)
    programs = llm.runner.graphs
    assert programs is not None
    program = programs.pick(batch, stages_of((params,)))

    def replay() -> None:
        for step in program.steps:
            step()

    for _ in range(3):
        replay()
    times = []
    for _ in range(30):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        replay()
        torch.cuda.synchronize()
    kernels = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    names = Counter(e.name[:60] for e in kernels)
    busy: Counter[str] = Counter()
    for event in kernels:
        busy[event.name[:60]] += event.time_range.elapsed_us()
    return {
        "batch": batch,
        "round_ms": statistics.median(times),
        "launches": len(kernels),
        "busy_ms": sum(busy.values()) / 1e3,
        "most_launches": names.most_common(25),
        "most_time_us": busy.most_common(25),
    }


def measure_launches() -> dict[str, Any]:
    results = []
    params = {
        "greedy": SamplingParams(temperature=0, max_tokens=24, ignore_eos=True),
        "t1": SamplingParams(temperature=1, seed=1, max_tokens=24, ignore_eos=True),
        "t0.8 top_p": SamplingParams(temperature=0.8, top_p=0.9, seed=1, max_tokens=24, ignore_eos=True),
    }
    for name, operators in (("torch", TORCH), ("kernels", TRITON)):
        build.make_operators = lambda device, dtype, operators=operators: operators  # type: ignore[assignment]
        graphs.bucket_sizes = lambda max_batch: BATCHES  # captures of the others would only take time
        tree = SpeculativeConfig(5, 4, 16)
        llm = LLM("demo", device="cuda", dtype="bfloat16", max_context=512, max_batch=64, speculative=tree)
        for sampling, asked in params.items():
            for batch in BATCHES:
                result = {"operators": name, "sampling": sampling} | count_launches(llm, batch, asked)
                results.append(result)
                shown = {k: result[k] for k in ("operators", "sampling", "batch", "round_ms", "launches", "busy_ms")}
                print(shown, flush=True)
        del llm
    return {"tree": [5, 4, 16], "rounds": results}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--launches", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    args = parser.parse_args()
    with torch.inference_mode():
        if args.launches:
            print(write_result(args.out, "round-launches", measure_launches()))
        else:
            print(write_result(args.out, "round-kernels", measure_kernels()))


if __name__ == "__main__":
    main()
