"""The measurements on a GPU: their numbers make sense."""

import pytest
import torch

from treedraft.bench.kernels import KernelSettings, run_kernels
from treedraft.bench.rounds import RoundSettings, run_rounds
from treedraft.bench.timing import measure_ceilings
from treedraft.cli.options import EngineOptions
from treedraft.config import SpeculativeConfig

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def test_ceilings_are_those_of_a_gpu():
    ceilings = measure_ceilings(torch.device("cuda"))
    assert 2e11 < ceilings.copy_bytes_per_s < 2e13
    assert 1e13 < ceilings.matmul_flop_per_s < 1e16


def test_kernels_of_every_backend_are_accurate():
    settings = KernelSettings(heads=(16,), tokens=(1, 8), batches=(2, 7), lengths=(100,), ragged=True, repetitions=3)
    rows = run_kernels(settings, torch.device("cuda")).rows
    assert {r.kernel for r in rows if r.us} >= {"torch"}
    # Where two parts are merged, each was rounded to bfloat16 (up to 2^-8 of its largest value), and then their sum.
    wrong = [r for r in rows if not r.skipped and not (r.is_finite and r.max_error < 1e-2 and r.lse_error < 1e-4)]
    assert wrong == []


def test_round_parts_add_up_to_the_round():
    engine = EngineOptions(device="cuda")
    settings = RoundSettings(batches=(1,), context=64, nodes=(1, 8), repetitions=5, loop_rounds=10)
    result = run_rounds(engine, SpeculativeConfig(3, 2, 6), settings)
    for row in result.rows:
        assert row.launches > 10 and 0 < row.busy_ms < row.round_ms * 1.25
        assert sum(row.parts_us.values()) == pytest.approx(row.busy_ms * 1e3, rel=0.25)
        assert sum(us for part, us in row.parts_us.items() if part.startswith("verify/")) > 0
        assert row.tokens_per_s > 0
    assert [v.nodes for v in result.verifies] == [1, 8]
