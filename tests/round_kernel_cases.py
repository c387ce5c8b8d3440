"""Cases of a round's kernels: each against its torch twin, on the device of `DEVICE`.

tests/kernels/test_round_kernels.py runs them in Triton's interpreter, tests/gpu/test_round_kernels_gpu.py on a GPU.
"""

from __future__ import annotations

import math
from dataclasses import fields

import pytest
import torch
from torch import Tensor

from treedraft.kv.pool import LatentPool
from treedraft.runner.operators import TorchOperators, TritonOperators
from treedraft.speculative.noise import gumbel, noise_key
from treedraft.speculative.sampling import STAGES, SamplingRows
from treedraft.speculative.tree import CandidatePool, Frontier, first_level, num_words
from treedraft.types import Accepted, DraftTree

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TORCH, TRITON = TorchOperators(), TritonOperators()
IS_SMALL = DEVICE == "cpu"  # the interpreter takes 0.1 s for a row with filters
NEAR = 1e-5  # scores of a softmax: a sum in another order


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_logits(g: torch.Generator, *shape: int, scale: float = 4.0) -> Tensor:
    """Normal logits with a few large ones a row, as a language model has."""
    x = torch.randn(*shape, generator=g) * scale
    index = torch.randint(shape[-1], (*shape[:-1], 6), generator=g)
    return x.scatter_add_(-1, index, torch.rand(*shape[:-1], 6, generator=g) * 4 * scale)


def keys_of(batch: int) -> Tensor:
    return torch.tensor([noise_key(7 + b, 0) for b in range(batch)], device=DEVICE)


# ------------------------------------------------------------------ the best children of draft rows


def check_children(
    logits: Tensor, temperature: Tensor, noise: Tensor | None, target_ids: Tensor | None, topk: int
) -> None:
    args = [x if x is None else x.to(DEVICE) for x in (temperature, noise, target_ids)]
    logits = logits.to(DEVICE)
    expected, expected_ids = TORCH.best_children(logits, *args, topk)
    scores, token_ids = TRITON.best_children(logits, *args, topk)
    is_finite = expected.isfinite()
    assert torch.equal(is_finite, scores.isfinite())
    assert torch.allclose(scores[is_finite], expected[is_finite], rtol=NEAR, atol=NEAR)
    assert torch.equal(scores[~is_finite], expected[~is_finite])
    assert (scores[..., 1:] <= scores[..., :-1]).all()
    # Where ids differ, two scores were so near that the order of a sum decides.
    if topk > 1:
        gaps = (expected[..., 1:] - expected[..., :-1]).abs().amin(-1)
        differs = (token_ids != expected_ids).any(-1)
        assert (gaps[differs] < NEAR * 10).all() and differs.float().mean() <= 0.02
    else:
        assert torch.equal(token_ids, expected_ids)


@pytest.mark.parametrize(("vocab", "topk"), [(10, 10), (80, 1), (700, 4), (4096, 4), (9000, 10), (9000, 1)])
def test_best_children_random_logits(vocab: int, topk: int) -> None:
    g = generator(vocab + topk)
    logits = random_logits(g, 3, 2 if IS_SMALL else 8, vocab)
    temperature = torch.tensor([0.0, 0.7, 1.3])
    noise = gumbel(keys_of(3), torch.tensor([[5], [6], [1 << 33]], device=DEVICE), vocab)[:, 0]
    target_ids = torch.arange(vocab) + torch.arange(vocab) % 50
    check_children(logits, temperature, None, None, topk)
    check_children(logits, temperature, noise, None, topk)
    check_children(logits, temperature, noise, target_ids, topk)


def test_best_children_ties_go_to_the_lowest_id() -> None:
    logits = torch.zeros(2, 3, 1000)
    logits[0, 1, 700:] = 1.0
    logits[1, 2, ::100] = 3.0
    for temperature in (0.0, 1.0):
        given = TRITON.best_children(logits.to(DEVICE), torch.full((2,), temperature, device=DEVICE), None, None, 6)
        wanted = TORCH.best_children(logits.to(DEVICE), torch.full((2,), temperature, device=DEVICE), None, None, 6)
        assert torch.equal(given[1], wanted[1])


@pytest.mark.parametrize("vocab", [600, 5000])
def test_best_children_of_rows_that_are_not_finite(vocab: int) -> None:
    logits = random_logits(generator(1), 1, 6, vocab)
    logits[0, 0, 17] = math.nan
    logits[0, 1, 3] = math.inf
    logits[0, 2] = -math.inf
    logits[0, 3, 2:] = -math.inf
    logits[0, 4, 5 : vocab - 3] = -math.inf
    check_children(logits, torch.zeros(1), None, None, 4)


# ------------------------------------------------------------------ the tree

SHAPES = [(1, 1, 2), (5, 1, 6), (3, 2, 7), (5, 4, 16), (1, 4, 3), (5, 4, 69), (4, 10, 64), (8, 10, 70)]
SHAPES = SHAPES[2:6] if IS_SMALL else SHAPES
TIES = torch.tensor([0.0, 0.0, -1.0, -2.5, -math.inf, math.nan])


def grow(operators: object, batch: int, num_steps: int, topk: int, words: int, has_ties: bool, seed: int) -> tuple:
    g = generator(seed)
    pool: CandidatePool | None = None
    frontier: Frontier | None = None
    seen: list[Tensor] = []
    for level in range(1, num_steps + 1):
        rows = 1 if level == 1 else topk
        ids = torch.randint(64, (batch, rows, topk), generator=g).to(DEVICE)
        logps = (
            TIES[torch.randint(len(TIES), (batch, rows, topk), generator=g)]
            if has_ties
            else -torch.rand(batch, rows, topk, generator=g)
        )
        logps = logps.to(DEVICE)
        if pool is None or frontier is None:
            scores = torch.nan_to_num(logps[:, 0], nan=-math.inf).sort(-1, descending=True).values
            pool, frontier = first_level(ids[:, 0], scores, words)
            continue
        pool, frontier, parent_rows = operators.next_level(pool, frontier, ids, logps, level)  # type: ignore[attr-defined]
        seen += [parent_rows, frontier.pool_index, frontier.token_ids, frontier.scores, frontier.ancestor_bits]
    assert pool is not None
    return pool, seen


def same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a.nan_to_num(7.5), b.nan_to_num(7.5))


@pytest.mark.parametrize("has_ties", [False, True])
@pytest.mark.parametrize("num_steps, topk, num_nodes", SHAPES)
def test_tree_of_random_levels(num_steps: int, topk: int, num_nodes: int, has_ties: bool) -> None:
    words, batch = num_words(num_nodes, topk, num_steps), 5
    limits = torch.tensor([num_nodes, num_nodes + 5, 1, num_nodes // 2 + 1, 2], device=DEVICE)
    roots = torch.tensor([3, 1, 4, 1, 5], device=DEVICE)
    expected, expected_seen = grow(TORCH, batch, num_steps, topk, words, has_ties, num_nodes)
    given, seen = grow(TRITON, batch, num_steps, topk, words, has_ties, num_nodes)
    for a, b in zip((*seen, *given.scores, *given.token_ids), (*expected_seen, *expected.scores, *expected.token_ids)):
        assert same(a, b)
    tree = TRITON.select(expected, roots, num_nodes, words, limits)
    wanted = TORCH.select(expected, roots, num_nodes, words, limits)
    for name in ("token_ids", "parents", "depths", "ancestor_bits", "scores"):
        assert same(getattr(tree, name), getattr(wanted, name)), name
    depth = min(num_steps, num_nodes - 1)
    assert same(TRITON.path_tokens(wanted, depth), TORCH.path_tokens(wanted, depth))


def random_tree(batch: int, num_nodes: int, seed: int, num_tokens: int = 5) -> DraftTree:
    """Five levels of four; few token ids, so that siblings and paths repeat them."""
    pool, _ = grow(TORCH, batch, 5, 4, 1, False, seed)
    pool = CandidatePool(tuple(i % num_tokens for i in pool.token_ids), pool.scores, pool.frontiers)
    limits = torch.full((batch,), num_nodes, device=DEVICE)
    limits[0] = num_nodes - 2
    return TORCH.select(pool, torch.arange(batch, device=DEVICE), num_nodes, 1, limits)


@pytest.mark.parametrize("num_nodes", [4, 16, 60])
def test_walk_random_trees(num_nodes: int) -> None:
    for seed in range(4):
        tree = random_tree(6, num_nodes, seed)
        sampled = torch.randint(5, (6, num_nodes), generator=generator(seed)).to(DEVICE)
        has_nan = (torch.rand(6, num_nodes, generator=generator(seed)) < 0.2).to(DEVICE)
        for max_path in (1, min(6, num_nodes)):
            expected, expected_nan = TORCH.walk(tree, sampled, max_path, has_nan)
            given, nan = TRITON.walk(tree, sampled, max_path, has_nan)
            assert same(nan.int(), expected_nan.int())
            for name in ("num_accepted", "columns", "token_ids", "ranks"):
                assert same(getattr(given, name), getattr(expected, name)), name


# ------------------------------------------------------------------ tokens


def rows_of(batch: int, vocab: int, seed: int, stages: frozenset[str]) -> SamplingRows:
    """Every setting in use, some rows with each of them off."""
    g = generator(seed)

    def pick(values: list[float], dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.tensor(values, dtype=dtype)[torch.randint(len(values), (batch,), generator=g)].to(DEVICE)

    stop_ids = torch.full((batch, 16), -1)
    stop_ids[:, 0] = torch.randint(vocab, (batch,), generator=g)
    stop_ids[:, 5] = torch.randint(2, (batch,), generator=g) - 1
    counts = (torch.randint(4, (batch, vocab), generator=g) - 1).clamp(min=0).int()
    bias = torch.where(torch.rand(batch, vocab, generator=g) < 0.1, 2.0, 0.0)
    return SamplingRows(
        temperature=pick([0.0, 0.5, 0.8, 1.0, 1.7]) if "noise" in stages else torch.zeros(batch, device=DEVICE),
        top_k=pick([-1, 0, 1, 3, 20, 50, vocab, vocab + 9], torch.int64),
        top_p=pick([1.0, 0.05, 0.5, 0.9, 0.9999]),
        min_p=pick([0.0, 0.01, 0.3, 1.0]),
        repetition_penalty=pick([1.0, 1.3, 0.8]),
        presence_penalty=pick([0.0, 0.7, -1.0]),
        frequency_penalty=pick([0.0, 0.4, -0.3]),
        noise_key=keys_of(batch),
        prompt_lens=torch.full((batch,), 10, device=DEVICE),
        min_tokens=pick([0, 3, 4, 100], torch.int64),
        stop_ids=stop_ids.to(DEVICE),
        prompt_seen=(torch.rand(batch, vocab, generator=g) < 0.2).to(DEVICE),
        output_counts=counts.to(DEVICE),
        logit_bias=(bias * torch.tensor([0.0, 1.0, -3.0])[torch.randint(3, (batch, 1), generator=g)]).to(DEVICE),
        stages=stages,
    )


def check_tokens(logits: Tensor, rows: SamplingRows, tree: DraftTree) -> None:
    kv_lens = torch.arange(11, 11 + len(logits), device=DEVICE)
    paths = TORCH.path_tokens(tree, 5) if "penalties" in rows.stages else tree.token_ids[..., None][..., :0]
    noise = None
    if "noise" in rows.stages:
        noise = TORCH.noise(rows.noise_key, kv_lens[:, None] + torch.arange(1, 7, device=DEVICE), logits.shape[-1])
    expected, expected_nan = TORCH.sample(logits, rows, paths, tree.depths, kv_lens, noise)
    given, has_nan = TRITON.sample(logits.clone(), rows, paths, tree.depths, kv_lens, noise)
    assert torch.equal(has_nan, expected_nan)
    assert torch.equal(given[~has_nan], expected[~has_nan]), (given != expected).nonzero()
    assert ((given >= 0) & (given < logits.shape[-1])).all()


FILTERED = frozenset({"noise", "top_k", "top_p", "min_p"})


@pytest.mark.parametrize("vocab", [700] if IS_SMALL else [75, 700, 5000, 20_000])
@pytest.mark.parametrize(
    "stages",
    [frozenset(), frozenset({"noise"}), FILTERED, frozenset({"noise", "top_p"}), STAGES, STAGES - FILTERED],
    ids=["greedy", "noise", "filters", "top_p", "all", "edits"],
)
def test_sample_random_logits(stages: frozenset[str], vocab: int) -> None:
    batch, nodes = (6, 3) if IS_SMALL else (16, 12)
    for seed in range(1 if IS_SMALL else 6):
        tree = random_tree(batch, nodes, seed)
        logits = random_logits(generator(seed), batch, nodes, vocab, scale=[4.0, 0.5, 20.0][seed % 3]).to(DEVICE)
        rows = rows_of(batch, vocab, seed, stages)
        check_tokens(logits, rows, tree)
        # Again where the tokens of the paths, and the stop ids among them, are the likely ones.
        rows.stop_ids[:, 0] = torch.arange(batch, device=DEVICE) % 5
        logits[..., :5] += 30.0
        check_tokens(logits, rows, tree)


def random_masks(g: torch.Generator, batch: int, nodes: int, vocab: int) -> Tensor:
    """Nothing, few tokens, one token alone, half of them, and bit 31; the bits beyond the vocabulary are set."""
    words = -(-vocab // 32)
    masks = torch.randint(-(2**31), 2**31, (batch, nodes, words), generator=g)
    masks &= torch.randint(-(2**31), 2**31, (batch, nodes, words), generator=g)
    masks[0] = -1
    masks[1] = 0
    masks[1, :, 1] = 1 << 5
    masks[2] = torch.where(torch.arange(words) % 7 == 3, -(2**31), 0)
    masks[..., -1] |= -1 << (vocab % 32) if vocab % 32 else 0
    return masks.int().to(DEVICE)


@pytest.mark.parametrize("vocab", [700, 4096, 9001])
def test_mask_tokens_random_masks(vocab: int) -> None:
    g = generator(vocab)
    logits, masks = random_logits(g, 4, 3, vocab).to(DEVICE), random_masks(g, 4, 3, vocab)
    bits = masks.cpu().view(4, 3, -1, 1).long() >> torch.arange(32) & 1
    wanted = torch.where(bits.flatten(2)[..., :vocab].bool(), logits.cpu(), -math.inf)
    assert torch.equal(TORCH.mask_tokens(logits.clone(), masks).cpu(), wanted)
    assert torch.equal(TRITON.mask_tokens(logits.clone(), masks).cpu(), wanted)
    ids = torch.randperm(vocab, generator=g)[: vocab // 2].to(DEVICE)  # a draft's vocabulary
    part = logits[..., : len(ids)].contiguous()
    wanted = torch.where(bits.flatten(2)[..., ids.cpu()].bool(), part.cpu(), -math.inf)
    assert torch.equal(TORCH.mask_tokens(part.clone(), masks, ids).cpu(), wanted)
    assert torch.equal(TRITON.mask_tokens(part.clone(), masks, ids).cpu(), wanted)
    columns = masks.repeat(1, 2, 1)[:, ::2]  # rows that lie apart, as those of a smaller tree
    assert torch.equal(TRITON.mask_tokens(logits.clone(), columns), TORCH.mask_tokens(logits.clone(), columns))


@pytest.mark.parametrize("stages", [frozenset(), FILTERED, STAGES], ids=["greedy", "filters", "all"])
def test_sample_masked_logits(stages: frozenset[str]) -> None:
    """Most logits at -inf, as a grammar leaves them: the filters choose among the others."""
    batch, nodes, vocab = (4, 3, 700) if IS_SMALL else (12, 8, 20_000)
    for seed in range(1 if IS_SMALL else 4):
        g = generator(seed)
        masks = random_masks(g, batch, nodes, vocab)
        logits = TORCH.mask_tokens(random_logits(g, batch, nodes, vocab).to(DEVICE), masks)
        check_tokens(logits, rows_of(batch, vocab, seed, stages), random_tree(batch, nodes, seed))


@pytest.mark.parametrize("longest", [None, 16, 128])
def test_sample_ties_and_spikes(longest: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two levels of equal logits, one token that has all the mass, logits at -inf, equal logits.

    longest: of a row's list; where it is too short, all tokens are searched.
    """
    if longest is not None:
        monkeypatch.setattr("treedraft.kernels.sample.LIST", longest)
        monkeypatch.setattr("treedraft.kernels.sample.MAX_TOP_K", longest // 2)
    vocab, nodes = 900, 1 if IS_SMALL else 4
    tree = random_tree(4, 4, 0)
    tree = DraftTree(*(getattr(tree, f.name)[:, :nodes] for f in fields(tree)))
    logits = torch.zeros(4, nodes, vocab)
    logits[0, :, ::3] = 1.0
    logits[1, :, 40] = 200.0
    logits[2, :, 100:] = -math.inf
    for top_k, top_p, min_p in ((0, 0.3, 0.0), (7, 1.0, 0.0), (400, 0.5, 0.0), (0, 0.999, 0.4), (301, 0.37, 0.1)):
        rows = rows_of(4, vocab, 0, FILTERED)
        off = {"top_k": top_k, "top_p": top_p, "min_p": min_p, "temperature": 0.9}
        for name, value in off.items():
            getattr(rows, name).fill_(value)
        check_tokens(logits.to(DEVICE), rows, tree)


@pytest.mark.parametrize("stages", [frozenset(), frozenset({"noise"}), FILTERED])
def test_sample_nan_rows_say_so_and_keep_to_themselves(stages: frozenset[str]) -> None:
    logits = random_logits(generator(3), 3, 3, 700).to(DEVICE)
    logits[1, 2, 650] = math.nan
    logits[2, 0] = math.nan
    check_tokens(logits, rows_of(3, 700, 3, stages), random_tree(3, 3, 1))


# ------------------------------------------------------------------ state


def test_gather_rows_of_the_state() -> None:
    g = generator(0)
    table = torch.randint(2, 90, (9, 7), generator=g, dtype=torch.int32).to(DEVICE)
    kv_lens = torch.tensor([0, 5, 17, 20, 21, 3, 8, 12, 0], device=DEVICE)
    roots = torch.arange(9, device=DEVICE) * 11
    slots = torch.tensor([4, 1, 8, 2, 3, 8], device=DEVICE)
    for page_size, tail in ((3, 5), (1, 4), (16, 33)):
        expected = TORCH.gather(slots, kv_lens, roots, table, page_size, tail)
        given = TRITON.gather(slots, kv_lens, roots, table, page_size, tail)
        assert all(same(a, b) for a, b in zip(given, expected, strict=True))


@pytest.mark.parametrize("is_void", [False, True])
def test_advance_and_keep_hidden(is_void: bool) -> None:
    g = generator(2)
    slots = torch.tensor([2, 0, 5], device=DEVICE)
    tokens = torch.randint(40, (3, 4), generator=g).to(DEVICE)
    tokens[1, 1] = tokens[1, 0]  # one token twice
    accepted = Accepted(
        torch.tensor([2, 1, 0], device=DEVICE), torch.zeros_like(tokens), tokens, torch.zeros_like(tokens)
    )
    tokens[1, 2:], tokens[2, 1:], tokens[0, 3:] = -1, -1, -1
    overflow = torch.tensor([0, 0, 0, 0, 0, 0, 9 * is_void], device=DEVICE)
    kv_lens, roots = torch.tensor([10, 20, 30], device=DEVICE), torch.tensor([1, 2, 3], device=DEVICE)
    hidden = torch.randn(3, 4, 70, generator=g).to(DEVICE)
    results = []
    for operators in (TORCH, TRITON):
        lens, state_roots = torch.full((6,), 7, device=DEVICE), torch.full((6,), 8, device=DEVICE)
        counts = torch.ones(6, 40, dtype=torch.int32, device=DEVICE)
        kept = torch.zeros(6, 70, device=DEVICE)
        operators.advance(slots, kv_lens, roots, accepted, overflow, lens, state_roots, counts)
        operators.keep_hidden(kept, slots, hidden, accepted.num_accepted, overflow)
        results.append((lens, state_roots, counts, kept))
    assert all(same(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("width", [5, 576])
def test_move_rows_of_every_layer(width: int) -> None:
    from treedraft.kernels.commit import move_rows_triton

    for seed in range(3):
        g = generator(seed)
        pool = LatentPool(3, 20, 4, width, torch.bfloat16, "cpu")
        pool.data.copy_(torch.randn(pool.data.shape, generator=g))
        slots = torch.randperm(80, generator=g)[:36].view(3, 12)
        path = torch.stack(
            [torch.cat((torch.zeros(1), torch.randperm(11, generator=g)[:4].sort().values + 1)) for _ in "abc"]
        )
        src, dst = slots.gather(1, path.long()), slots[:, :5]
        data = pool.data.to(DEVICE, copy=True)
        pool.move(src, dst)
        move_rows_triton(data, src.to(DEVICE), dst.to(DEVICE))
        assert torch.equal(data.cpu(), pool.data)
