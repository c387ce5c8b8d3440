"""Sampling settings at tree nodes against plain Python, and the sampled distribution against the target's."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from scipy import stats
from torch import Tensor
from tree_oracles import grow_both, random_levels

from treedraft.speculative import noise, sampling, tree
from treedraft.speculative.sampling import STAGES, SamplingRows, draft_scores, mask_tokens, path_tokens, process, sample
from treedraft.speculative.select import select
from treedraft.types import DraftTree

VOCAB = 80


def rows_of(batch: int, stages: frozenset[str] = STAGES, vocab: int = VOCAB, **values: object) -> SamplingRows:
    """Rows with everything off, but for `values`: one number for all sequences, or a tensor."""
    off: dict[str, object] = {
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "noise_key": 0,
        "prompt_lens": 10,
        "min_tokens": 0,
        "stop_ids": torch.full((batch, 16), -1),
        "prompt_seen": torch.zeros(batch, vocab, dtype=torch.bool),
        "output_counts": torch.zeros(batch, vocab, dtype=torch.int32),
        "logit_bias": torch.zeros(batch, vocab),
    }
    whole = {"top_k", "noise_key", "prompt_lens", "min_tokens"}
    fields = {}
    for name, value in (off | values).items():
        if not isinstance(value, Tensor):
            value = torch.full((batch,), value, dtype=torch.int64 if name in whole else torch.float32)
        fields[name] = value
    return SamplingRows(**fields, stages=stages)


def random_rows(batch: int, seed: int) -> SamplingRows:
    """Every setting in use, some rows with each of them off."""
    g = torch.Generator().manual_seed(seed)

    def pick(values: list[float], dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.tensor(values, dtype=dtype)[torch.randint(len(values), (batch,), generator=g)]

    stop_ids = torch.full((batch, 16), -1)
    stop_ids[:, 0] = torch.randint(VOCAB, (batch,), generator=g)
    stop_ids[:, 5] = torch.randint(2, (batch,), generator=g) - 1  # -1 or 0: padding may lie between ids
    stop_ids[::3] = -1
    return rows_of(
        batch,
        temperature=pick([0.0, 0.5, 1.0, 1.7]),
        top_k=pick([-1, 0, 1, 3, 20, VOCAB, 1000], torch.int64),
        top_p=pick([1.0, 0.05, 0.5, 0.9, 0.9999]),
        min_p=pick([0.0, 0.01, 0.3, 1.0]),
        repetition_penalty=pick([1.0, 1.3, 0.8]),
        presence_penalty=pick([0.0, 0.7, -1.0]),
        frequency_penalty=pick([0.0, 0.4, -0.3]),
        min_tokens=pick([0, 3, 4, 100], torch.int64),
        stop_ids=stop_ids,
        prompt_seen=torch.rand(batch, VOCAB, generator=g) < 0.2,
        output_counts=(torch.randint(4, (batch, VOCAB), generator=g) - 1).clamp(min=0).int(),
        logit_bias=torch.where(torch.rand(batch, VOCAB, generator=g) < 0.1, 2.0, 0.0) * pick([0.0, 1.0, -3.0])[:, None],
    )


def random_tree(batch: int, num_draft_tokens: int, seed: int) -> DraftTree:
    """Five levels of four; token ids below 64, a few of them alike so that paths repeat tokens."""
    ids, logps = random_levels(batch, 4, 5, seed)
    pool = grow_both([i % 7 for i in ids], logps, 1)[0]
    limits = torch.full((batch,), num_draft_tokens)
    limits[0] = num_draft_tokens - 2  # inert nodes
    return select(pool, torch.arange(batch), num_draft_tokens, 1, limits)


def paths_of(draft: DraftTree, b: int) -> list[list[int]]:
    """Tokens from below the root to the node, per node, in plain Python."""
    parents, tokens = draft.parents[b].tolist(), draft.token_ids[b].tolist()
    paths: list[list[int]] = []
    for n, parent in enumerate(parents):
        paths.append([] if parent < 0 else paths[parent] + [tokens[n]])
    return paths


def process_oracle(logits: Tensor, path: list[int], output_index: int, rows: SamplingRows, b: int) -> list[float]:
    """One node's z in float64 host numbers, straight from the definitions."""
    z = logits.double().tolist()
    counts = rows.output_counts[b].tolist()
    for token in path:
        counts[token] += 1
    repetition, frequency, presence = (
        float(x[b]) for x in (rows.repetition_penalty, rows.frequency_penalty, rows.presence_penalty)
    )
    for v in range(len(z)):
        if counts[v] or rows.prompt_seen[b, v]:
            z[v] = z[v] / repetition if z[v] > 0 else z[v] * repetition
        z[v] -= frequency * counts[v] + presence * (counts[v] > 0)
        z[v] += float(rows.logit_bias[b, v])
        if output_index < rows.min_tokens[b] and v in rows.stop_ids[b].tolist():
            z[v] = -math.inf
        if rows.temperature[b] > 0:
            z[v] /= float(rows.temperature[b])
    order = sorted(range(len(z)), key=lambda v: (-z[v], v))
    if rows.top_k[b] > 0:
        order = order[: int(rows.top_k[b])]
    if rows.top_p[b] < 1:
        mass = [math.exp(z[v] - z[order[0]]) for v in order]
        kept, reached = 0, 0.0
        while reached < float(rows.top_p[b]) * sum(mass) - 1e-12:
            reached += mass[kept]
            kept += 1
        order = order[:kept]
    if rows.min_p[b] > 0:
        order = [v for v in order if z[v] - z[order[0]] >= math.log(float(rows.min_p[b]))]
    return [z[v] if v in order else -math.inf for v in range(len(z))]


@pytest.mark.parametrize("num_draft_tokens", [1, 2, 16])
@pytest.mark.parametrize("max_depth", [None, 5])
def test_path_tokens_random_trees_equals_oracle(num_draft_tokens: int, max_depth: int | None) -> None:
    if num_draft_tokens == 1:
        one = torch.tensor([[3]])
        assert path_tokens(DraftTree(one, one * 0 - 1, one * 0, one[..., None] * 0 + 1, one.float())).shape == (1, 1, 0)
        return
    draft = random_tree(3, num_draft_tokens, 0) if num_draft_tokens > 2 else draft_of_two()
    paths = path_tokens(draft, max_depth)
    for b in range(draft.token_ids.shape[0]):
        for found, path in zip(paths[b].tolist(), paths_of(draft, b)):
            assert found == path + [-1] * (paths.shape[-1] - len(path))


def draft_of_two() -> DraftTree:
    bits = torch.tensor([[[1], [3]]])
    return DraftTree(torch.tensor([[5, 6]]), torch.tensor([[-1, 0]]), torch.tensor([[0, 1]]), bits, torch.zeros(1, 2))


@pytest.mark.parametrize("seed", range(12))
def test_process_every_setting_equals_oracle(seed: int) -> None:
    batch, nodes = 6, 16
    draft = random_tree(batch, nodes, seed)
    rows = random_rows(batch, seed)
    kv_lens = torch.tensor([9, 10, 11, 12, 13, 20])
    g = torch.Generator().manual_seed(seed)
    logits = (torch.randn(batch, nodes, VOCAB, generator=g, dtype=torch.float64) * 3).double()
    given = logits.clone()
    z = process(logits, rows, path_tokens(draft, 5), draft.depths, kv_lens)
    assert torch.equal(logits, given) and z.dtype == torch.float64
    for b in range(batch):
        for n, path in enumerate(paths_of(draft, b)):
            if draft.token_ids[b, n] < 0:
                continue
            output_index = int(kv_lens[b] + draft.depths[b, n] + 1 - rows.prompt_lens[b])
            expected = process_oracle(logits[b, n], path, output_index, rows, b)
            torch.testing.assert_close(z[b, n], torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_process_nodes_equal_the_same_tokens_said_one_by_one(dtype: torch.dtype) -> None:
    batch, nodes = 6, 16
    draft, rows = random_tree(batch, nodes, 3), random_rows(batch, 3)
    kv_lens = torch.full((batch,), 12)
    logits = torch.randn(batch, nodes, VOCAB, generator=torch.Generator().manual_seed(3)).to(dtype) * 3
    z = process(logits, rows, path_tokens(draft, 5), draft.depths, kv_lens)
    for b in range(batch):
        for n, path in enumerate(paths_of(draft, b)):
            if draft.token_ids[b, n] < 0:
                continue
            counts = rows.output_counts.clone()
            for token in path:
                counts[b, token] += 1
            alone = process(
                logits[:, n : n + 1],
                dataclasses.replace(rows, output_counts=counts),
                torch.empty((batch, 1, 0), dtype=torch.int64),
                torch.zeros((batch, 1), dtype=torch.int64),
                kv_lens + draft.depths[b, n],
            )
            assert torch.equal(z[b, n], alone[b, 0])  # bit for bit: that is what makes speculation exact


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_process_all_stages_named_equals_only_those_used(dtype: torch.dtype) -> None:
    draft = random_tree(4, 16, 1)
    paths, kv_lens = path_tokens(draft, 5), torch.full((4,), 12)
    logits = torch.randn(4, 16, VOCAB, generator=torch.Generator().manual_seed(5)).to(dtype) * 3
    used = random_rows(4, 8)
    stages = {
        "penalties": ("repetition_penalty", "presence_penalty", "frequency_penalty", "prompt_seen", "output_counts"),
        "bias": ("logit_bias",),
        "min_tokens": ("min_tokens", "stop_ids"),
        "noise": ("temperature",),
        "top_k": ("top_k",),
        "top_p": ("top_p",),
        "min_p": ("min_p",),
    }
    for stage, names in stages.items():
        values = {name: getattr(used, name) for name in names}
        alone = process(logits, rows_of(4, frozenset({stage}), **values), paths, draft.depths, kv_lens)
        every = process(logits, rows_of(4, STAGES, **values), paths, draft.depths, kv_lens)
        assert torch.equal(alone, every), stage
        assert not torch.equal(alone, logits), stage
    assert process(logits, rows_of(4, frozenset()), paths, draft.depths, kv_lens) is logits


def test_process_filters_with_equal_logits_keep_the_lowest_ids() -> None:
    logits = torch.tensor([[[1.0, 2.0, 2.0, 0.0, 2.0, 2.0, -0.0, 1.0]]])
    none, zero = torch.empty((1, 1, 0), dtype=torch.int64), torch.zeros((1, 1), dtype=torch.int64)

    def kept(**values: object) -> list[int]:
        rows = rows_of(1, vocab=8, **values)
        return (process(logits, rows, none, zero, zero[0]) > -math.inf)[0, 0].nonzero().flatten().tolist()

    assert kept(top_k=3) == [1, 2, 4]
    assert kept(top_k=5) == [0, 1, 2, 4, 5]
    assert kept(top_k=7) == [0, 1, 2, 3, 4, 5, 7]  # -0.0 ties with 0.0
    share = math.exp(2) / (4 * math.exp(2) + 2 * math.exp(1) + 2)
    assert kept(top_p=share * 1.01) == [1, 2]
    assert kept(top_p=share * 4.01) == [0, 1, 2, 4, 5]
    assert kept(top_k=3, top_p=0.34) == [1, 2]  # a third each after top-k
    assert kept(top_k=3, top_p=0.33) == [1]
    assert kept(top_p=1e-9) == [1]
    assert kept(min_p=1.0) == [1, 2, 4, 5]


@pytest.mark.parametrize("vocab", [64, 4096])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_process_filters_on_wide_rows_equal_sorting(vocab: int, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(vocab)
    logits = torch.randn(8, 4, vocab, generator=g).to(dtype) * torch.tensor([0.0, 0.1, 1.0, 5.0], dtype=dtype)[:, None]
    logits[4:] = logits[4:].round()  # many ties
    logits[7, :, : vocab // 2] = -math.inf
    for top_k, top_p in [(0, 0.1), (0, 0.5), (0, 0.9), (0, 0.999), (5, 1.0), (vocab // 2, 0.7), (vocab - 1, 1.0)]:
        rows = rows_of(8, frozenset({"top_k", "top_p"}), vocab=vocab, top_k=top_k, top_p=top_p)
        zero = torch.zeros((8, 4), dtype=torch.int64)
        z = process(logits, rows, zero[..., None][..., :0], zero, zero[:, 0])
        below_max = logits - logits.amax(-1, keepdim=True)
        ordered, order = below_max.sort(dim=-1, descending=True, stable=True)
        if top_k:
            ordered[..., top_k:] = -math.inf
        mass = (ordered.exp() * 2.0**32).to(torch.int64)
        target = (mass.sum(-1, keepdim=True).double() * torch.tensor(top_p).double()).ceil()
        before = mass.cumsum(-1) - mass
        keep = before < target if top_p < 1 else torch.ones_like(mass, dtype=torch.bool)
        if top_k:
            keep[..., top_k:] = False
        expected = torch.zeros_like(keep).scatter(-1, order, keep)
        assert torch.equal(z, torch.where(expected, logits, -math.inf)), (top_k, top_p)


def test_process_never_drops_the_most_likely_token() -> None:
    for seed in range(6):
        rows = dataclasses.replace(random_rows(6, seed), stages=frozenset({"top_k", "top_p", "min_p"}))
        logits = torch.randn(6, 4, VOCAB, generator=torch.Generator().manual_seed(seed)) * 4
        zero = torch.zeros((6, 4), dtype=torch.int64)
        z = process(logits, rows, zero[..., None][..., :0], zero, zero[:, 0])
        assert torch.equal(z.argmax(-1), logits.argmax(-1))


def test_process_min_tokens_boundary_masks_output_indices_below() -> None:
    stop_ids = torch.full((1, 16), -1)
    stop_ids[0, :2] = torch.tensor([4, 0])
    rows = rows_of(1, frozenset({"min_tokens"}), min_tokens=5, stop_ids=stop_ids)
    depths = torch.tensor([[0, 1, 2, 3]])
    # Prompt of 10, kv_len 12: the root is output index 2, tokens sampled at depths 0.. are outputs 3, 4, 5, 6.
    z = process(torch.zeros(1, 4, VOCAB), rows, torch.full((1, 4, 3), -1), depths, torch.tensor([12]))
    assert (z[0, :, [0, 4]] == -math.inf).tolist() == [[True] * 2, [True] * 2, [False] * 2, [False] * 2]
    assert (z[0, :, 1:4] == 0).all() and (z[0, :, 5:] == 0).all()


@pytest.mark.parametrize("vocab", [7, 320, 4096])
def test_sample_noise_by_depth_and_ties_equal_plain_argmax(vocab: int) -> None:
    g = torch.Generator().manual_seed(vocab)
    z = torch.randint(-3, 4, (3, 16, vocab), generator=g).float()
    z[0, 0] = -math.inf
    z[0, 1, vocab // 2] = math.nan
    z[0, 2] = math.nan
    depths = torch.randint(0, 4, (3, 16), generator=g)
    gumbels = torch.randint(-1, 2, (3, 4, vocab), generator=g).float()
    temperature = torch.tensor([1.0, 0.0, 0.3])
    result = sample(z, gumbels, depths, temperature)
    greedy = sample(z, None, depths, temperature)
    assert ((result >= 0) & (result < vocab)).all()
    for b in range(3):
        for n in range(16):
            if z[b, n].isnan().any():
                continue
            perturbed = z[b, n] + gumbels[b, depths[b, n]] if temperature[b] > 0 else z[b, n]
            row = perturbed.tolist()
            assert result[b, n] == row.index(max(row))
            row = z[b, n].tolist()
            assert greedy[b, n] == row.index(max(row))


def chi_square(tokens: Tensor, probabilities: Tensor) -> float:
    """p-value of the tokens having been drawn from the distribution; tokens of probability 0 must not occur."""
    counts = torch.bincount(tokens.flatten(), minlength=len(probabilities)).double()
    possible = probabilities > 0
    assert counts[~possible].sum() == 0
    expected = probabilities[possible].double() / probabilities.double().sum() * counts.sum()
    return float(stats.chisquare(counts[possible].numpy(), expected.numpy()).pvalue)


def drawn(logits: Tensor, rows: SamplingRows, positions: Tensor) -> Tensor:
    """The token of every (key, position) under the same logits [V]: int64 [B, D]."""
    batch, depth = positions.shape
    depths = torch.arange(depth).expand(batch, depth)
    paths = torch.full((batch, depth, 0), -1)
    z = process(logits.expand(batch, depth, -1), rows, paths, depths, positions[:, 0])
    return sample(z, noise.gumbel(rows.noise_key, positions, logits.shape[-1]), depths, rows.temperature)


@pytest.fixture
def keys() -> Tensor:
    return torch.tensor([noise.noise_key(seed, 0) for seed in range(4000)])


def test_sample_many_seeds_and_positions_follow_the_targets_distribution(keys: Tensor) -> None:
    logits = torch.tensor([2.0, 1.5, 1.0, 0.0, -0.5, 2.2, 0.3, -1.0, 1.9, 0.9])
    positions = torch.arange(40, 45).expand(4000, 5)
    rows = rows_of(4000, frozenset({"noise"}), vocab=10, temperature=0.7, noise_key=keys)
    tokens = drawn(logits, rows, positions)
    p = (logits / 0.7).softmax(-1)
    # Seeds are fixed, so these p-values are too. The planted faults below fall under 1e-6.
    assert chi_square(tokens, p) > 0.01
    pairs = tokens[:, :-1] * 10 + tokens[:, 1:]  # neighbouring positions are independent
    assert chi_square(pairs[:, ::2], (p[:, None] * p[None, :]).flatten()) > 0.01
    filtered = torch.where(p >= p.sort(descending=True).values[3], p, 0.0)
    few = rows_of(800, frozenset({"noise", "top_k"}), vocab=10, temperature=0.7, noise_key=keys[:800], top_k=4)
    assert chi_square(drawn(logits, few, positions[:800]), filtered) > 0.01


def test_sample_planted_faults_are_caught_by_chi_square(keys: Tensor) -> None:
    logits = torch.tensor([2.0, 1.5, 1.0, 0.0, -0.5, 2.2, 0.3, -1.0, 1.9, 0.9])
    p = (logits / 0.7).softmax(-1)
    positions = torch.arange(40, 45).expand(4000, 5)
    rows = rows_of(4000, frozenset({"noise"}), vocab=10, temperature=0.7, noise_key=keys)
    twice = drawn(logits / 0.7, rows, positions)  # temperature applied twice
    assert chi_square(twice, p) < 1e-6
    reused = drawn(logits, rows, torch.full_like(positions, 40))  # noise of one position used again
    pairs = reused[:, :-1] * 10 + reused[:, 1:]
    assert chi_square(pairs[:, ::2], (p[:, None] * p[None, :]).flatten()) < 1e-6
    one_key = drawn(
        logits, rows_of(4000, frozenset({"noise"}), vocab=10, temperature=0.7, noise_key=5), positions
    )  # key ignored
    assert chi_square(one_key, p) < 1e-6


def test_draft_scores_mixed_temperatures_equal_definitions() -> None:
    g = torch.Generator().manual_seed(0)
    logits, gumbels = torch.randn(2, 3, 40, generator=g), torch.randn(2, 40, generator=g)
    temperature = torch.tensor([0.0, 0.6])
    plain = draft_scores(logits, temperature, None)
    torch.testing.assert_close(plain[0], (logits[0] * sampling.GREEDY_SHARPNESS).log_softmax(-1))
    torch.testing.assert_close(plain[1], logits[1].log_softmax(-1))
    for shape in ((2, 40), (2, 1, 40)):
        scores = draft_scores(logits, temperature, gumbels.view(shape))
        torch.testing.assert_close(scores[0], plain[0])
        warm = sampling.SAMPLED_SHARPNESS * (logits[1] / 0.6 + gumbels[1])
        torch.testing.assert_close(scores[1], warm.log_softmax(-1))
    assert (scores <= 0).all()


def test_draft_scores_perfect_draft_ranks_the_targets_token_first(keys: Tensor) -> None:
    logits = torch.randn(64, 1, 500, generator=torch.Generator().manual_seed(1))
    gumbels = noise.gumbel(keys[:64], torch.arange(64)[:, None], 500)
    temperature = torch.full((64,), 0.8)
    first = tree.stable_topk(draft_scores(logits, temperature, gumbels), 1)[1][:, 0]
    rows = rows_of(64, frozenset({"noise"}), vocab=500, temperature=0.8)
    zero = torch.zeros((64, 1), dtype=torch.int64)
    z = process(logits, rows, zero[..., None][..., :0], zero, zero[:, 0])
    assert torch.equal(first, sample(z, gumbels, zero, temperature))


def test_sampling_module_stop_columns_match_the_row() -> None:
    assert sampling.MAX_STOP_IDS == rows_of(1).stop_ids.shape[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_mask_tokens_before_all_settings_equals_masks_behind_the_bias(dtype: torch.dtype) -> None:
    """The order of the settings: penalties, bias, grammar and min_tokens, temperature, filters."""
    batch, nodes, edits = 6, 4, frozenset({"penalties", "bias", "min_tokens"})
    for seed in range(8):
        g = torch.Generator().manual_seed(seed)
        rows = random_rows(batch, seed)
        logits = torch.randn(batch, nodes, VOCAB, generator=g).to(dtype) * 4
        masks = torch.randint(-(2**31), 2**31, (batch, nodes, 3), generator=g).int()
        masks[0] = -1
        masks[1] = 0
        masks[1, :, 2] = 1 << 7
        paths = torch.randint(VOCAB, (batch, nodes, 2), generator=g)
        depths = torch.randint(3, (batch, nodes), generator=g)
        kv_lens = torch.arange(10, 10 + batch)
        first = process(mask_tokens(logits.clone(), masks), rows, paths, depths, kv_lens)
        edited = process(logits, dataclasses.replace(rows, stages=edits), paths, depths, kv_lens)
        rest = dataclasses.replace(rows, stages=STAGES - edits)
        behind = process(mask_tokens(edited.clone(), masks), rest, paths, depths, kv_lens)
        assert torch.equal(first, behind)
        allowed = [[v for v in range(VOCAB) if int(masks[1, 0, v >> 5]) >> (v & 31) & 1]]
        assert allowed == [[2 * 32 + 7]] and (first[1, :, allowed[0][0]] > -torch.inf).any()
