"""The noise is the same from torch on the CPU, torch on a GPU, and the Triton kernel, interpreted or compiled.

python tests/kernels/test_noise_kernel.py 100000000              torch on the CPU against a GPU, both twins
TRITON_INTERPRET=1 python tests/kernels/test_noise_kernel.py 100000000      against the interpreter
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from treedraft.speculative.noise import gumbel, noise_key

NUM_POSITIONS, VOCAB = 4, 1 << 18  # of one comparison: 2^20 numbers


def count_differences(size: int, compute: Callable[[Tensor, Tensor, int], Tensor], seed: int = 0) -> tuple[int, int]:
    """Compare `compute` with torch on the CPU, bit for bit: (numbers compared, at least `size`; numbers that differ).

    Keys and positions are random, small and large; the vocabulary's last block of four is cut.
    """
    rng = random.Random(seed)
    compared = differing = 0
    while compared < size:
        keys = torch.tensor([noise_key(rng.randrange(1 << 64), rng.randrange(4))])
        positions = torch.tensor([[rng.randrange(1 << rng.choice((8, 17, 33, 62))) for _ in range(NUM_POSITIONS)]])
        vocab = VOCAB - rng.randrange(4)
        expected, given = gumbel(keys, positions, vocab), compute(keys, positions, vocab)
        differing += int((expected.view(torch.int32) != given.view(torch.int32)).sum())
        compared += expected.numel()
    return compared, differing


def interpreted(keys: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    from treedraft.kernels.noise import gumbel_triton

    return gumbel_triton(keys, positions, vocab_size, block=1 << 16)


def torch_on_gpu(keys: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    return gumbel(keys.cuda(), positions.cuda(), vocab_size).cpu()


def triton_on_gpu(keys: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    from treedraft.kernels.noise import gumbel_triton

    return gumbel_triton(keys.cuda(), positions.cuda(), vocab_size).cpu()


def run_interpreted(size: int) -> str:
    """Run this file under Triton's interpreter, which is chosen when the kernel's module is imported."""
    pytest.importorskip("triton")
    command = [sys.executable, __file__, str(size)]
    result = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_gumbel_triton_interpreted_two_million_numbers_equal_torch() -> None:
    assert "interpreter: 0 of 2" in run_interpreted(2_000_000)


@pytest.mark.slow
def test_gumbel_triton_interpreted_1e8_numbers_equal_torch() -> None:
    assert "interpreter: 0 of 100" in run_interpreted(100_000_000)


def test_gumbel_kernel_compiled_has_no_fused_multiply_add() -> None:
    """Needs no GPU: Triton compiles for one. A fused multiply-add rounds once where the torch twin rounds twice."""
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from treedraft.kernels import noise as kernel
    from treedraft.speculative import noise

    pointers = {"keys": "*i64", "positions": "*i64", "pairs": "*fp64", "out": "*fp32"}
    constants = {
        "M0": noise.PHILOX_M0,
        "M1": noise.PHILOX_M1,
        "W0": noise.PHILOX_W0,
        "W1": noise.PHILOX_W1,
        "ROUNDS": noise.PHILOX_ROUNDS,
        "STREAM": noise.STREAM_TOKEN,
        "SHIFT": noise.LOG_SHIFT,
        "FIRST_CELL": noise.LOG_FIRST_CELL,
        "BLOCK": 256,
    }
    signature = pointers | {"depth": "i32", "vocab_size": "i32"} | dict.fromkeys(constants, "constexpr")
    source = ASTSource(fn=kernel._gumbel_kernel, signature=signature, constexprs=constants)
    for is_fused in (False, True):
        options = {"enable_fp_fusion": is_fused}
        ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
        assert ("fma.rn.f64" in ptx) == is_fused


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("compute", [torch_on_gpu, triton_on_gpu])
def test_gumbel_on_gpu_1e8_numbers_equal_torch_on_cpu(compute: Callable[[Tensor, Tensor, int], Tensor]) -> None:
    assert count_differences(100_000_000, compute)[1] == 0


def main() -> None:
    size = int(float(sys.argv[1])) if len(sys.argv) > 1 else 1_000_000
    if os.environ.get("TRITON_INTERPRET") == "1":
        ways = {"interpreter": interpreted}
    else:
        ways = {"torch on the GPU": torch_on_gpu, "triton on the GPU": triton_on_gpu}
    failed = False
    for name, compute in ways.items():
        start = time.perf_counter()
        compared, differing = count_differences(size, compute)
        failed |= differing > 0
        seconds = time.perf_counter() - start
        print(f"{name}: {differing} of {compared} numbers differ from torch on the CPU ({seconds:.0f} s)")
    sys.exit(failed)


if __name__ == "__main__":
    main()
