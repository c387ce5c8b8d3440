"""Every registered attention backend against plain loops, on every device type and dtype that it names."""

import pytest
import torch
from attention_oracle import attend, make_case, random_cache, random_tree
from torch.utils._python_dispatch import TorchDispatchMode

from interpreted import IS_INTERPRETED, run_interpreted
from treedraft.attention import BACKENDS, make_backend
from treedraft.errors import ConfigError, InvariantError
from treedraft.kv.page_table import slots_of
from treedraft.types import TreeRows

HEADS, LATENT, ROPE = 4, 16, 8
SCALE = 0.17
PAGE_SIZES = [1, 2, 3, 16, 64]
# Largest error allowed. float64, float32: rounding in sums of a few hundred terms of size 1; bfloat16: the output's
# own rounding, 2^-9 of values up to about 4, and as much again.
TOLERANCE = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 2e-2}
# bfloat16: of the same rounded inputs; GPU kernels approximate exp2 and add in the tensor cores' own order.
LSE_TOLERANCE = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 1e-4}
TARGETS = [
    pytest.param((name, device, dtype), id=f"{name}-{device}-{dtype}", marks=[pytest.mark.gpu] * (device == "cuda"))
    for name, backend in BACKENDS.items()
    for device in backend.device_types
    for dtype in backend.dtypes
    if device == "cpu" or torch.cuda.is_available()
    if backend.latent_dims is None  # the others have tests of their own, with the sizes that they know
    if not IS_INTERPRETED or backend.has_interpreter
]


def test_interpreted_backends_equal_loops():
    """The Triton backends without a GPU: small cases of each kind, in a process of their own. All of them: by hand."""
    small = "trash or one_prefix or sees_nothing or alone or gqa or sign or without_room or no_device_value"
    run_interpreted(__file__, f"float32 and cpu and not 64] and ({small})")


class Target(tuple):
    """(backend, device, dtype name), and what the backend's kernels exist for."""

    def __new__(cls, name, device, dtype):
        self = super().__new__(cls, (make_backend(name), device, dtype))
        self.entry = BACKENDS[name]
        return self

    @property
    def dims(self):
        """(latent, rope)."""
        return (LATENT, ROPE) if self.entry.latent_dims is None else self.entry.latent_dims[0]

    def page_size(self, wanted):
        sizes = self.entry.page_sizes
        return wanted if sizes is None or wanted in sizes else sizes[0]


@pytest.fixture(params=TARGETS)
def target(request):
    try:
        return Target(*request.param)
    except ConfigError as error:
        pytest.skip(str(error))


def rows_on(rows, device):
    return TreeRows(
        rows.page_table.to(device),
        rows.kv_lens.to(device),
        rows.ancestor_bits.to(device),
        rows.tree_len,
        rows.max_kv_len,
    )


def check_mla(target, case, seed):
    """Run one case and compare outputs and log-sum-exps with the loops."""
    backend, device, dtype = target
    latent, rope = target.dims
    generator = torch.Generator().manual_seed(seed)
    kv = random_cache(case, (latent + rope,), getattr(torch, dtype), generator)
    batch, num_rows = case.rows.ancestor_bits.shape[:2]
    q = torch.randn(batch, num_rows, HEADS, latent + rope, generator=generator, dtype=torch.float64).to(kv.dtype)
    plan = backend.plan(rows_on(case.rows, device), case.page_size)
    out = backend.run_mla(plan, kv.to(device), q.to(device), latent, SCALE)
    same, lse = backend.run_mla_with_lse(plan, kv.to(device), q.to(device), latent, SCALE)
    expected, expected_lse = attend(case, kv[:, None], kv[:, None, :latent], q, SCALE)
    assert out.dtype == kv.dtype
    assert lse.dtype == (torch.float64 if dtype == "float64" else torch.float32)
    for given in (out, same):
        torch.testing.assert_close(given.double().cpu(), expected, rtol=0, atol=TOLERANCE[dtype])
    torch.testing.assert_close(lse.double().cpu(), expected_lse, rtol=0, atol=LSE_TOLERANCE[dtype])


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_run_mla_every_length_mod_page_size_equals_loops(target, page_size):
    page_size = target.page_size(page_size)
    generator = torch.Generator().manual_seed(page_size)
    kv_lens = [5 + i for i in range(page_size)] + [0, 1]
    trees = [random_tree(5, generator) for _ in kv_lens]
    check_mla(target, make_case(kv_lens, trees, tree_len=5, page_size=page_size, seed=1, slack=page_size % 7), seed=2)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("num_nodes", [1, 2, 33, 63, 64, 65, 130])
def test_run_mla_random_trees_of_every_word_count_equal_loops(target, num_nodes, page_size):
    page_size = target.page_size(page_size)
    generator = torch.Generator().manual_seed(num_nodes)
    trees = [random_tree(num_nodes, generator) for _ in range(2)]
    check_mla(target, make_case([7, 12], trees, num_nodes, page_size, seed=3), seed=4)


@pytest.mark.parametrize("level", range(2, 9))
def test_run_mla_draft_level_of_ten_branches_equals_loops(target, level):
    """EAGLE's default, topk 10 and 8 steps: 70 draft rows in two words; a branch may have any parent."""
    generator = torch.Generator().manual_seed(level)
    paths: list[list[list[int]]] = [[[j] for j in range(10)], [[j] for j in range(10)]]
    for depth in range(1, level - 1):
        for b in range(2):
            parents = torch.randint(0, 10, (10,), generator=generator).tolist()
            paths[b] = [[*paths[b][parent], depth * 10 + j] for j, parent in enumerate(parents)]
    check_mla(
        target, make_case([9, 4], paths, (level - 1) * 10, page_size=target.page_size(3), seed=5, words=2), seed=6
    )


def test_run_mla_sign_bit_alone_sees_the_last_of_64_nodes(target):
    case = make_case([3, 0], [[[63], [0]], [[63], [62, 63]]], tree_len=64, page_size=target.page_size(2), seed=7)
    check_mla(target, case, seed=8)


def test_run_mla_plain_decode_equals_loops(target):
    check_mla(
        target, make_case([200, 1, 63, 64, 65], [[[0]]] * 5, tree_len=1, page_size=64, seed=9, slack=130), seed=10
    )


def test_run_mla_rows_that_see_nothing_give_zero_and_minus_infinity(target):
    backend, device, dtype = target
    width, page_size = sum(target.dims), target.page_size(4)
    case = make_case([0, 6, 0], [[[], [1]], [[], [0]], [[], []]], tree_len=2, page_size=page_size, seed=11)
    kv = random_cache(case, (width,), getattr(torch, dtype), torch.Generator().manual_seed(12)).to(device)
    q = torch.ones(3, 2, HEADS, width, dtype=kv.dtype, device=device)
    out, lse = backend.run_mla_with_lse(
        backend.plan(rows_on(case.rows, device), page_size), kv, q, target.dims[0], SCALE
    )
    assert (out[0, 0] == 0).all() and (out[2] == 0).all()
    assert (lse[0, 0] == -torch.inf).all() and (lse[2] == -torch.inf).all()
    assert out.isfinite().all() and lse[1].isfinite().all() and (out[0, 1] != 0).all()


def test_run_mla_all_trash_row_leaves_others_finite(target):
    """A padded row: no pages at all, its tree slots in the trash page, which may hold NaN."""
    backend, device, dtype = target
    width, page_size = sum(target.dims), target.page_size(4)
    case = make_case([6, 0], [[[0], [0, 1]], [[], []]], tree_len=2, page_size=page_size, seed=13)
    case.rows.page_table[1] = 1
    case.rows.ancestor_bits[1, :, 0] = torch.tensor([1, 3])
    kv = random_cache(case, (width,), getattr(torch, dtype), torch.Generator().manual_seed(14)).to(device)
    q = torch.ones(2, 2, HEADS, width, dtype=kv.dtype, device=device)
    out = backend.run_mla(backend.plan(rows_on(case.rows, device), page_size), kv, q, target.dims[0], SCALE)
    assert out[0].isfinite().all()


def test_run_mla_sequence_alone_equals_itself_in_a_batch(target):
    """The duplicated-batch oracle: nothing mixes batch, rows and heads up."""
    backend, device, dtype = target
    width, page_size = sum(target.dims), target.page_size(4)
    generator = torch.Generator().manual_seed(15)
    tree = random_tree(6, generator)
    case = make_case([11, 11, 11], [tree] * 3, tree_len=6, page_size=page_size, seed=16)
    kv = torch.randn(case.num_slots, width, generator=generator, dtype=torch.float64)
    slots = torch.tensor([[row[-1] for row in sequence] for sequence in case.visible])
    for b in (1, 2):  # the same numbers in each sequence's own pages
        kv[case.visible[b][0][:11]] = kv[case.visible[0][0][:11]]
        kv[slots[b]] = kv[slots[0]]
    kv[:page_size] = 0
    kv = kv.to(device, getattr(torch, dtype))
    q = torch.randn(1, 6, HEADS, width, generator=generator, dtype=torch.float64).to(kv)
    rows = rows_on(case.rows, device)
    batched = backend.run_mla(backend.plan(rows, page_size), kv, q.expand(3, -1, -1, -1), target.dims[0], SCALE)
    for b in range(3):
        own = TreeRows(rows.page_table[b : b + 1], rows.kv_lens[b : b + 1], rows.ancestor_bits[b : b + 1], 6, 11)
        alone = backend.run_mla(backend.plan(own, page_size), kv, q, target.dims[0], SCALE)
        torch.testing.assert_close(batched[b], alone[0], rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("group", [1, 2, 4])
def test_run_gqa_random_trees_equal_loops(target, group):
    backend, device, dtype = target
    if not target.entry.gqa:
        pytest.skip("no grouped-query attention")
    page_size = target.page_size(3)
    generator = torch.Generator().manual_seed(group)
    case = make_case(
        [7, 0, 20], [random_tree(9, generator) for _ in range(3)], tree_len=9, page_size=page_size, seed=17
    )
    k = random_cache(case, (2, 8), getattr(torch, dtype), generator)
    v = random_cache(case, (2, 6), k.dtype, generator)
    q = torch.randn(3, 9, 2 * group, 8, generator=generator, dtype=torch.float64).to(k.dtype)
    plan = backend.plan(rows_on(case.rows, device), page_size)
    out = backend.run_gqa(plan, k.to(device), v.to(device), q.to(device), SCALE)
    expected, _ = attend(case, k, v, q, SCALE)
    torch.testing.assert_close(out.double().cpu(), expected, rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_plan_tree_over_one_prefix_equals_plans_of_their_own(target, page_size):
    """All forwards of a round share the prefix: draft levels, verification and extension differ in their bits alone."""
    backend, device, dtype = target
    width, page_size = sum(target.dims), target.page_size(page_size)
    generator = torch.Generator().manual_seed(18)
    case = make_case([21, 34], [random_tree(12, generator) for _ in range(2)], 12, page_size, seed=19, slack=3)
    rows = rows_on(case.rows, device)
    kv = random_cache(case, (width,), getattr(torch, dtype), generator).to(device)
    tail_slots = slots_of(rows.page_table, rows.kv_lens[:, None] + torch.arange(12, device=device), page_size)
    prefix = backend.plan_prefix(rows.page_table, rows.kv_lens, rows.max_kv_len, tail_slots, page_size)
    for tree_len in (1, 5, 12):
        bits = rows.ancestor_bits[:, :tree_len]  # parents come first: these rows name no later slot
        q = torch.randn(2, tree_len, HEADS, width, generator=generator, dtype=torch.float64).to(kv)
        own = backend.plan(TreeRows(rows.page_table, rows.kv_lens, bits, tree_len, rows.max_kv_len), page_size)
        given = backend.run_mla(backend.plan_tree(prefix, bits, tree_len), kv, q, target.dims[0], SCALE)
        assert given.isfinite().all()
        # Not the same bits: where keys are cut may depend on the room that the prefix was planned with.
        expected = backend.run_mla(own, kv, q, target.dims[0], SCALE)
        torch.testing.assert_close(given, expected, rtol=0, atol=TOLERANCE[dtype])


class RecordOps(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.overloadpacket._qualified_op_name)
        return func(*args, **(kwargs or {}))


def test_plan_and_run_read_no_device_value(target):
    backend, device, dtype = target
    width, page_size = sum(target.dims), target.page_size(16)
    case = make_case(
        [7, 12], [random_tree(70, torch.Generator().manual_seed(20)) for _ in range(2)], 70, page_size, seed=21
    )
    rows = rows_on(case.rows, device)
    kv = torch.zeros(case.num_slots, width, dtype=getattr(torch, dtype), device=device)
    q = torch.zeros(2, 70, HEADS, width, dtype=kv.dtype, device=device)
    with RecordOps() as recorded:
        backend.run_mla(backend.plan(rows, page_size), kv, q, target.dims[0], SCALE)
    assert recorded.names
    assert not recorded.names & {
        "aten::_local_scalar_dense",
        "aten::item",
        "aten::nonzero",
        "aten::masked_select",
        "aten::equal",
        "aten::unique_consecutive",
    }


def test_plan_without_room_for_a_tree_in_the_row_raises(target):
    backend, device, _ = target
    page_size = target.page_size(4)
    rows = TreeRows(
        torch.full((1, 2), 3, dtype=torch.int32, device=device),
        torch.tensor([3], device=device),
        torch.ones(1, 1, 1, dtype=torch.int64, device=device),
        tree_len=1,
        max_kv_len=2 * page_size,
    )
    with pytest.raises(InvariantError, match=f"2 pages x page_size {page_size}"):
        backend.plan(rows, page_size)


def test_make_backend_unknown_name_raises():
    with pytest.raises(ConfigError, match="packed-torch"):
        make_backend("flashfire")
