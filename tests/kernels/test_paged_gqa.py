"""The paged grouped-query kernels in Triton's interpreter, against plain loops."""

import pytest
import torch

from conformance.attention_oracle import attend, make_case, random_cache, random_tree
from interpreted import interpreted, run_interpreted
from treedraft.attention import make_backend
from treedraft.types import TreeRows


def test_interpreted_paged_gqa():
    run_interpreted(__file__, "not interpreted")


@interpreted
@pytest.mark.parametrize("name", ["triton", "triton-deterministic"])
@pytest.mark.parametrize(("group", "head_dim", "dtype"), [(1, 64, torch.float32), (16, 20, torch.bfloat16)])
def test_paged_gqa_random_trees_equal_loops(name: str, group: int, head_dim: int, dtype: torch.dtype):
    generator = torch.Generator().manual_seed(group)
    lens = [0, 3, 130]
    case = make_case(lens, [random_tree(5, generator) for _ in lens], tree_len=5, page_size=16, seed=1)
    k, v = (random_cache(case, (2, head_dim), dtype, generator) for _ in range(2))
    q = torch.randn(len(lens), 5, 2 * group, head_dim, generator=generator).to(dtype)
    backend = make_backend(name)
    out = backend.run_gqa(backend.plan(case.rows, 16), k, v, q, 0.2)
    expected, _ = attend(case, k, v, q, 0.2)
    atol = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=atol)


@interpreted
def test_deterministic_gqa_sequence_in_a_batch_has_the_bits_of_itself_alone():
    generator = torch.Generator().manual_seed(2)
    lens = [7, 515]
    case = make_case(lens, [random_tree(3, generator) for _ in lens], tree_len=3, page_size=16, seed=3)
    k, v = (random_cache(case, (1, 16), torch.float32, generator) for _ in range(2))
    q = torch.randn(2, 3, 4, 16, generator=generator)
    backend = make_backend("triton-deterministic")
    out = backend.run_gqa(backend.plan(case.rows, 16), k, v, q, 0.2)
    rows = case.rows
    for b in range(2):
        own = TreeRows(rows.page_table[b : b + 1], rows.kv_lens[b : b + 1], rows.ancestor_bits[b : b + 1], 3, 515)
        assert torch.equal(backend.run_gqa(backend.plan(own, 16), k, v, q[b : b + 1], 0.2)[0], out[b])
