"""The grid, its inputs, its oracle and its table, on a CPU with tiny shapes."""

from __future__ import annotations

import json
import math

import pytest
import torch

from treedraft.bench import kernels
from treedraft.bench.kernels import KernelSettings, cases, errors, oracle, run_kernels, sample, work
from treedraft.bench.results import json_safe
from treedraft.bench.trees import CHAIN, TREE, random_draft_tree
from treedraft.cli.bench import _parse_sizes
from treedraft.errors import ConfigError

CPU = torch.device("cpu")
TINY = KernelSettings(
    heads=(2,), tokens=(1, 5), batches=(1, 3), lengths=(30, 64), page_size=16, latent=16, rope=8, repetitions=2
)


@pytest.mark.parametrize("ragged", [False, True])
def test_run_kernels_measures_every_shape_within_the_limits(ragged) -> None:
    result = run_kernels(KernelSettings(**{**vars(TINY), "ragged": ragged}), CPU)
    shapes = {(r.length, r.batch, r.tokens, r.kind) for r in result.rows}
    assert shapes == {
        (length, batch, tokens, kind)
        for length in (30, 64)
        for batch in (1, 3)
        for tokens, kind in ((1, CHAIN), (5, CHAIN), (5, TREE))
    }
    assert {r.kernel for r in result.rows} >= {"torch", "packed-torch"}
    for row in result.rows:
        # bfloat16 outputs: rounded once, or where parts are merged more than once; 16 numbers a row are a small sample.
        assert row.is_finite and row.max_error < 2**-7 and row.rms_error < 2**-8 and row.lse_error < 1e-5, row
        assert row.rounding <= 2**-8
        assert row.us > 0 and 0 < row.roofline
    json.dumps(json_safe(result.as_json()))
    result.render()


@pytest.mark.parametrize("ragged", [False, True])
def test_what_no_row_sees_is_nan_and_all_that_rows_see_is_finite(ragged) -> None:
    for case in cases(KernelSettings(**{**vars(TINY), "ragged": ragged}), CPU):
        hidden = torch.ones(len(case.kv), dtype=torch.bool)
        for b, length in enumerate(case.lens):
            pages = case.page_table[b].tolist()
            seen = [pages[p // 16] * 16 + p % 16 for p in range(length + case.shape.tokens)]
            assert case.kv[seen].isfinite().all()
            hidden[seen] = False
        hidden[: case.page_size] = False
        assert case.kv[hidden].isnan().all() and hidden.any()
        assert case.kv[: case.page_size].eq(0).all()


def test_oracle_equals_a_loop() -> None:
    case = next(c for c in cases(TINY, CPU) if c.shape.kind == TREE and c.shape.batch == 3)
    s, bits = case.shape, case.ancestor_bits
    out, lse = oracle(case, 1, torch.tensor([0, 3]))
    for i, row in enumerate((0, 3)):
        visible = [*range(s.length), *(s.length + j for j in range(s.tokens) if bits[1, row, 0] >> j & 1)]
        pages = case.page_table[1].tolist()
        keys = torch.stack([case.kv[pages[p // 16] * 16 + p % 16] for p in visible]).double()
        for head in range(s.heads):
            scores = keys @ case.q[1, row, head].double() * kernels.SCALE
            assert torch.allclose(lse[i, head], scores.logsumexp(0), atol=1e-12)
            assert torch.allclose(out[i, head], scores.softmax(0) @ keys[:, : case.latent], atol=1e-12)


def test_errors_see_a_wrong_row_and_a_nan() -> None:
    case = next(c for c in cases(TINY, CPU) if c.shape.kind == TREE)
    rows = torch.arange(case.shape.tokens)
    parts = [oracle(case, b, rows) for b in range(case.shape.batch)]
    out, lse = torch.stack([p[0] for p in parts]), torch.stack([p[1] for p in parts])
    assert errors(case, out, lse) == (0, 0, 0, 0)
    out[0, 2] *= 1.1
    assert errors(case, out, lse)[0] == pytest.approx(0.1)
    out[0, 0, 0, 0] = math.nan
    assert math.isnan(errors(case, out, lse)[0])


def test_work_counts_each_byte_once_and_each_visible_pair() -> None:
    case = next(c for c in cases(TINY, CPU) if c.shape.kind == CHAIN and c.shape.tokens == 5)
    num_bytes, flop = work(case)
    rows = 1 * 5 * 2
    assert num_bytes == 2 * ((30 + 5) * 24 + rows * (24 + 16))
    assert flop == 2 * (24 + 16) * 2 * sum(30 + r + 1 for r in range(5))


def test_chains_and_trees_have_parents_before_children() -> None:
    chain, tree = (random_draft_tree(3, 70, 9, CPU, kind) for kind in (CHAIN, TREE))
    assert chain.parents[0].tolist() == list(range(-1, 69))
    assert tree.ancestor_bits.shape == (3, 70, 2)
    for b, node in ((0, 1), (1, 66), (2, 69)):
        path = [node]
        while tree.parents[b, path[-1]] >= 0:
            path.append(int(tree.parents[b, path[-1]]))
        assert tree.depths[b, node] == len(path) - 1
        seen = [j for j in range(70) if int(tree.ancestor_bits[b, node, j // 64]) >> (j % 64) & 1]
        assert seen == sorted(path)


def test_shape_too_large_for_plain_torch_is_left_out_with_the_reason() -> None:
    settings = KernelSettings(**{**vars(TINY), "max_bytes": 1000, "backends": ("torch",)})
    result = run_kernels(settings, CPU)
    assert all(r.skipped and "too slow" in r.skipped for r in result.rows)
    result.render()


def test_budget_spent_leaves_the_rest_out() -> None:
    result = run_kernels(KernelSettings(**{**vars(TINY), "budget_s": 0.0}), CPU)
    assert result.rows and all(r.skipped == "out of time" for r in result.rows)


@pytest.mark.parametrize(
    ("field", "value", "flag"),
    [("backends", ("x",), "--backend"), ("compare", ("x",), "--compare"), ("kinds", ("x",), "--kind")],
)
def test_unknown_names_are_refused(field, value, flag) -> None:
    with pytest.raises(ConfigError, match=f"{flag} knows .*; got 'x'"):
        run_kernels(KernelSettings(**{**vars(TINY), field: value}), CPU)


def test_peer_that_is_not_installed_is_left_out() -> None:
    notes: list[str] = []
    settings = KernelSettings(**{**vars(TINY), "compare": ("flashmla",), "tokens": (1,), "backends": ("torch",)})
    result = run_kernels(settings, CPU, notes.append)
    assert {r.kernel for r in result.rows} == {"torch"}
    assert notes[0].startswith("not compared: ")


def test_backend_whose_package_is_missing_is_left_out_unless_named(monkeypatch) -> None:
    def missing(name):
        raise ConfigError("needs a package that is not installed")

    monkeypatch.setattr(kernels, "make_backend", missing)
    rows = run_kernels(TINY, CPU).rows
    assert rows and all("not installed" in row.skipped for row in rows)
    with pytest.raises(ConfigError, match="not installed"):
        run_kernels(KernelSettings(**{**vars(TINY), "backends": ("torch",)}), CPU)


def test_ragged_lens_hold_the_edges_and_the_longest() -> None:
    assert kernels.ragged_lens(1, 100) == (100,)
    assert kernels.ragged_lens(3, 100) == (0, 1, 100)
    lens = kernels.ragged_lens(16, 1000)
    assert lens[:5] == (0, 1, 63, 64, 65) and lens[-1] == 1000 and len(lens) == 16 and max(lens) == 1000


def test_sample_spreads_and_keeps_the_last() -> None:
    assert sample(5, 9) == [0, 1, 2, 3, 4]
    assert sample(64, 3) == [21, 42, 63]
    assert sample(4, 1) == [3]


def test_parse_sizes() -> None:
    assert _parse_sizes("1, 8k,64", "--length") == (1, 8192, 64)
    for text in ("", "a", "0", "1,-2"):
        with pytest.raises(ConfigError, match="--length is a list of positive integers"):
            _parse_sizes(text, "--length")
