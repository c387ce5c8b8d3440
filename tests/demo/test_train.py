"""The demo's recipe on a CPU at tiny sizes: every step end to end, and each part against a plain oracle."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor

from treedraft.attention.dense import DenseAttend
from treedraft.config import SpeculativeConfig
from treedraft.demo import train as recipe
from treedraft.demo.recipe.attend import TreeProbe, attend_unrolled, attend_unrolled_fused
from treedraft.demo.recipe.corpus import END_OF_TEXT, Corpus, Windows, encode_corpus
from treedraft.demo.recipe.evaluate import Prompt, accepted_depths, chain_rounds, repeated_roots, write_texts
from treedraft.demo.recipe.head import HeadRecipe, MixedRows, grow_from, head_fields, new_head
from treedraft.demo.recipe.samples import SampleSet, continue_prompts
from treedraft.demo.recipe.target import TARGET_FIELDS, BalanceRecorder, TargetRecipe, load_target, new_target
from treedraft.demo.recipe.unroll import unroll
from treedraft.errors import CheckpointError, ConfigError
from treedraft.models.deepseek import DeepseekModel
from treedraft.models.draft.eagle3 import Eagle3MlaHead, load_head
from treedraft.speculative.noise import gumbel
from treedraft.speculative.sampling import draft_scores

CPU = torch.device("cpu")
WORDS = [f"w{i}" for i in range(38)]
FIELDS = TARGET_FIELDS | {
    "vocab_size": len(WORDS) + 2,
    "hidden_size": 16,
    "intermediate_size": 24,
    "moe_intermediate_size": 8,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "n_routed_experts": 4,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 4,
}
SMALL_HEAD = HeadRecipe(
    max_steps=2,
    num_steps=4,
    length=24,
    rows=8,
    is_compiled=False,
    log_every=1,
    taps=(0, 1, 2),
    intermediate_size=24,
    num_attention_heads=2,
    kv_lora_rank=8,
    qk_nope_head_dim=4,
    v_head_dim=4,
    has_own_embedding=False,
)


def build(head_recipe: HeadRecipe = SMALL_HEAD, spread: float = 8.0) -> tuple[DeepseekModel, Eagle3MlaHead]:
    """A random target and head in float32, with weights large enough that tokens differ."""
    target = new_target(FIELDS, 64, seed=0, device=CPU).requires_grad_(False).eval()
    head = new_head(head_recipe, target, head_fields(head_recipe, FIELDS), 64).requires_grad_(False)
    with torch.no_grad():
        for module in (target, head):
            for parameter in module.parameters():
                if parameter.dim() >= 2:
                    parameter.mul_(spread)
    return target, head


def write_corpus(folder: Path) -> None:
    rng = np.random.default_rng(0)
    held_out = {}
    for domain in ("story", "kid", "fiction", "code"):
        documents = [{"src": f"{domain}{i}", "text": " ".join(rng.choice(WORDS, 60))} for i in range(6)]
        lines = "\n".join(json.dumps(d) for d in documents).encode()
        held_out[domain] = [f"{domain}5"]
        if domain == "code":  # one domain inside an archive
            with tarfile.open(folder / "more.tar.xz", "w:xz") as archive:
                member = tarfile.TarInfo("code_a.jsonl")
                member.size = len(lines)
                archive.addfile(member, io.BytesIO(lines))
        else:
            (folder / f"{domain}.jsonl").write_bytes(lines)
    (folder / "heldout.json").write_text(json.dumps(held_out))


def write_tokenizer(path: Path) -> None:
    tokenizer = Tokenizer(
        models.WordLevel({w: i for i, w in enumerate(["<|endoftext|>", *WORDS, "<unk>"])}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(path))


@pytest.fixture
def corpus_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "corpus"
    folder.mkdir()
    write_corpus(folder)
    write_tokenizer(tmp_path / "tokenizer.json")
    return folder


def test_train_tiny_run_exports_checkpoints_that_load(corpus_folder: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(recipe, "MAX_POSITIONS", 64)
    prompts = [Prompt(d, (1, 2, 3)) for d in ("story", "kid", "fiction", "code")]
    monkeypatch.setattr(recipe, "read_prompts", lambda *_: prompts)
    lines: list[str] = []
    metrics = recipe.train(
        corpus_folder,
        tmp_path / "out",
        None,
        tmp_path / "tokenizer.json",
        CPU,
        TargetRecipe(max_steps=2, length=16, rows=4, is_compiled=False, log_every=1),
        recipe.SampleRecipe(
            texts=(("0.0", 6), ("0.8", 6), ("1.0", 6)), length=24, min_prompt=3, max_prompt=6, batch_rows=4
        ),
        SMALL_HEAD,
        recipe.EvaluationRecipe(max_tokens=10, windows=2, window_length=20),
        log=lines.append,
        target_fields=FIELDS,
    )
    target = load_target(tmp_path / "out" / "target", 64, torch.float32, CPU)
    head = load_head(tmp_path / "out" / "draft", target)
    assert head.taps == (0, 1, 2)
    assert metrics["target"]["steps"] == 2 and metrics["head"]["steps"] == 2
    assert set(metrics["held_out_loss"]) == {"story", "kid", "fiction", "code"}
    assert len(metrics["agreement"]["code"]) == SMALL_HEAD.num_steps
    assert all(a["accept_length"] >= 1 for a in metrics["acceptance"])
    assert json.loads((tmp_path / "out" / "metrics.json").read_text())["samples"] == {
        "0.0": 144,
        "0.8": 144,
        "1.0": 144,
    }
    assert any(line.startswith("head step 2") for line in lines)


def test_train_head_many_steps_lowers_loss() -> None:
    target, _ = build()
    head = new_head(SMALL_HEAD, target, head_fields(SMALL_HEAD, FIELDS), 64)
    tokens = np.random.default_rng(0).integers(1, 40, 4000).astype(np.uint16)
    settings = recipe.override(
        SMALL_HEAD, ["max_steps=80", "lr=0.02", "warmup=5", 'mix=[["corpus", 1.0]]', "log_every=1"]
    )
    rows = MixedRows(settings, Windows({"code": tokens}, {"code": 1.0}, CPU, 0), [])
    result = recipe.train_head(head, target, rows, settings, lambda line: None)
    losses = [entry["loss"] for entry in result["history"]]
    agreement = [entry["agreement"][0] for entry in result["history"]]
    # A random teacher's distributions are nearly flat: their entropy is most of the loss. Agreement by chance: 1/40.
    assert sum(losses[-5:]) < 0.95 * sum(losses[:5])
    assert sum(agreement[-5:]) / 5 > 0.15


# ------------------------------------------------------------------ corpus


def test_encode_corpus_keeps_held_out_documents_apart(corpus_folder: Path, tmp_path: Path) -> None:
    corpus = encode_corpus(corpus_folder, tmp_path / "tokenizer.json")
    assert set(corpus.train) == {"story", "kid", "fiction", "code"}
    for domain in corpus.train:
        assert (corpus.train[domain] == END_OF_TEXT).sum() == 5
        assert (corpus.held_out[domain] == END_OF_TEXT).sum() == 1
        assert len(corpus.held_out[domain]) == 61
    corpus.save(tmp_path / "tokens.npz")
    again = Corpus.load(tmp_path / "tokens.npz")
    assert all(np.array_equal(again.train[d], corpus.train[d]) for d in corpus.train)


def test_encode_corpus_empty_folder_raises(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "tokenizer.json")
    with pytest.raises(CheckpointError, match=r"heldout\.json"):
        encode_corpus(tmp_path, tmp_path / "tokenizer.json")


def test_windows_draw_by_weight_stays_inside_domains() -> None:
    tokens = {"story": np.full(50, 1, np.uint16), "code": np.full(50, 2, np.uint16), "kid": np.full(50, 3, np.uint16)}
    windows = Windows(tokens, {"story": 3.0, "code": 1.0}, CPU, seed=0)
    rows = windows.draw(2000, 20)
    assert (rows == rows[:, :1]).all()  # never across two domains
    share = float((rows[:, 0] == 1).float().mean())
    assert abs(share - 0.75) < 0.04  # 4 standard deviations of 2000 draws
    assert not (rows == 3).any()


# ------------------------------------------------------------------ target


def test_balance_recorder_pushes_biases_toward_even_loads() -> None:
    target, _ = build()
    recorder = BalanceRecorder(target)
    ids = torch.randint(1, 40, (4, 16), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for _ in range(300):
            target(ids, torch.arange(16).expand(4, -1), DenseAttend())
            recorder.push_biases(recorder.loads(), 0.01)
    loads = recorder.loads()
    assert torch.allclose(loads.sum(-1), torch.full((2,), 2.0))
    assert float(loads.max()) < 0.75 and float(recorder.aux()) < 1.6  # even: 0.5 and 1


# ------------------------------------------------------------------ samples


def test_continue_prompts_ragged_equals_whole_forwards() -> None:
    target, _ = build()
    prompts = torch.tensor([[3, 4, 0, 0], [7, 8, 9, 10], [5, 6, 11, 0]])
    lens = torch.tensor([2, 4, 3])
    keys = torch.tensor([1, 2, 3])

    def noise(position: int) -> Tensor:
        return gumbel(keys, torch.full((3, 1), position), 40)[:, 0]

    for temperature in (0.0, 0.8):
        got = continue_prompts(target, prompts, lens, 14, temperature, noise, torch.float32)
        for row in range(3):
            tokens = prompts[row, : lens[row]].tolist()
            while len(tokens) < 14:
                ids = torch.tensor([tokens])
                logits = target.logits(target(ids, torch.arange(len(tokens))[None], DenseAttend()).hidden[0, -1])
                if temperature:
                    logits = logits / temperature + noise(len(tokens))[row]
                tokens.append(int(logits.argmax()))
            assert got[row].tolist() == tokens


def test_mixed_rows_shares_follow_mix() -> None:
    windows = Windows({"code": np.full(99, 1, np.uint16)}, {"code": 1.0}, CPU, 0)
    samples = [SampleSet(t, torch.full((3, 30), i + 2, dtype=torch.int32)) for i, t in enumerate((0.0, 0.8, 1.0))]
    drawn = MixedRows(recipe.override(SMALL_HEAD, ["rows=20"]), windows, samples).draw()
    assert drawn.shape == (20, 24)
    assert [(drawn[:, 0] == i).sum() for i in (1, 2, 3, 4)] == [4, 4, 5, 7]
    with pytest.raises(ConfigError, match=r"temperature 0\.8"):
        MixedRows(SMALL_HEAD, windows, samples[:1])


# ------------------------------------------------------------------ head


def test_attend_unrolled_fused_equals_plain_with_gradients() -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 9, 3, 8)] * 3 + [(4, 2, 9, 3, 8)] * 2
    inputs = [torch.randn(s, generator=generator).requires_grad_() for s in shapes]
    grad = torch.randn(shapes[0], generator=generator)
    for taken in ([True, False, False, False], [True] * 4):
        outputs, grads = [], []
        for attend in (attend_unrolled, attend_unrolled_fused):
            out = attend(*inputs, torch.tensor(taken), 0.3)
            outputs.append(out)
            grads.append(torch.autograd.grad(out, inputs, grad))
        torch.testing.assert_close(outputs[0], outputs[1], atol=1e-5, rtol=1e-5)
        for plain, fused in zip(*grads, strict=True):
            torch.testing.assert_close(plain, fused, atol=1e-5, rtol=1e-5)


def draft_chain(target: DeepseekModel, head: Eagle3MlaHead, text: list[int], row: int, drafted: list[int]) -> Tensor:
    """Logits after draft row `row` and the chain `drafted` under it: one dense forward a node, nothing cached."""
    ids = torch.tensor([text])
    features = target(ids, torch.arange(len(text))[None], DenseAttend(), head.taps).features
    hidden = head.fuse(features[:, : row + 1])
    tokens = text[1 : row + 2]
    for token in [*drafted, None]:
        out = head(hidden, torch.tensor([tokens]), torch.arange(len(tokens))[None], DenseAttend())
        if token is not None:
            hidden = torch.cat([hidden, out[:, -1:]], 1)
            tokens = [*tokens, token]
    return head.logits(out[0, -1])


def test_unroll_equals_drafting_along_the_text() -> None:
    target, head = build()
    text = torch.randint(1, 40, (1, 12), generator=torch.Generator().manual_seed(1))
    features = target(text, torch.arange(12)[None], DenseAttend(), head.taps).features
    for step, hidden in enumerate(unroll(head, features, text, 4)):
        for row in (0, 3, 6):
            drafted = text[0, row + 2 : row + 2 + step].tolist()
            expected = draft_chain(target, head, text[0].tolist(), row, drafted)
            torch.testing.assert_close(head.logits(hidden[0, row]), expected, atol=1e-4, rtol=1e-4)


def test_grow_from_keeps_the_function() -> None:
    target, small = build()
    wide_recipe = recipe.override(
        SMALL_HEAD, ["kv_lora_rank=12", "v_head_dim=8", "intermediate_size=40", "has_own_embedding=true"]
    )
    wide = new_head(wide_recipe, target, head_fields(wide_recipe, FIELDS), 64).requires_grad_(False)
    grow_from(wide, small)
    text = torch.randint(1, 40, (2, 14), generator=torch.Generator().manual_seed(2))
    features = target(text, torch.arange(14).expand(2, -1), DenseAttend(), small.taps).features
    for before, after in zip(unroll(small, features, text, 3), unroll(wide, features, text, 3), strict=True):
        torch.testing.assert_close(before, after, atol=2e-4, rtol=2e-4)


# ------------------------------------------------------------------ evaluation


@torch.inference_mode()
def test_tree_probe_rows_see_their_own_ancestors() -> None:
    target, head = build()
    generator = torch.Generator().manual_seed(3)
    text = torch.randint(1, 40, (1, 9), generator=generator)
    positions = torch.arange(9)[None]
    features = target(text, positions, DenseAttend(), head.taps).features
    probe = TreeProbe()
    hidden = head(head.fuse(features[:, :8]), text[:, 1:], positions[:, :8], probe)[:, :, None].expand(-1, -1, 3, -1)
    tokens = torch.randint(1, 40, (2, 1, 8, 3), generator=generator)  # two levels of three rows under each position
    parents = torch.randint(0, 3, (1, 8, 3), generator=generator)
    own = torch.arange(3).expand(1, 8, 3)
    probe.ancestors = own[..., None]
    hidden = head(hidden, tokens[0], (positions[:, :8, None] + 1).expand(-1, -1, 3), probe)
    hidden = hidden.gather(2, parents[..., None].expand(-1, -1, -1, hidden.shape[-1]))
    probe.ancestors = torch.stack([parents, own], -1)
    hidden = head(hidden, tokens[1], (positions[:, :8, None] + 2).expand(-1, -1, 3), probe)
    for row in range(8):
        for k in range(3):
            chain = [int(tokens[0, 0, row, parents[0, row, k]]), int(tokens[1, 0, row, k])]
            expected = draft_chain(target, head, text[0].tolist(), row, chain)
            torch.testing.assert_close(head.logits(hidden[0, row, k]), expected, atol=1e-4, rtol=1e-4)


def plain_accepted(
    target: DeepseekModel, head: Eagle3MlaHead, text: list[int], root: int, key: Tensor, temperature: float, shape
) -> int:
    """Draft one tree with lists, select its nodes, and follow the text: design section 2 in the plainest code."""

    def children(drafted: tuple[int, ...]) -> list[tuple[float, int]]:
        logits = draft_chain(target, head, text, root - 1, list(drafted))
        noise = gumbel(key[None], torch.tensor([[root + 1 + len(drafted)]]), len(logits))[0] if temperature else None
        logp = draft_scores(logits[None, None], torch.tensor([temperature]), noise)[0, 0]
        return [(float(logp[i]), int(i)) for i in logp.topk(shape.topk).indices]

    pool: list[tuple[float, tuple[int, ...]]] = []
    frontier: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    for _ in range(shape.num_steps):
        new = [(s + logp, (*path, i)) for s, path in frontier for logp, i in children(path)]
        pool += new
        frontier = sorted(new, reverse=True)[: shape.topk]
    chosen = {path for _, path in sorted(pool, reverse=True)[: shape.num_draft_tokens - 1]}
    depth = 0
    while depth < shape.num_steps and tuple(text[root + 1 : root + 2 + depth]) in chosen:
        depth += 1
    return depth


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@torch.inference_mode()
def test_accepted_depths_equals_plain_trees(temperature: float) -> None:
    target, head = build(spread=12.0)  # attention is sharp: a wrong ancestor or position changes the tree
    shape = SpeculativeConfig(num_steps=4, topk=3, num_draft_tokens=20)
    text = write_texts(target, [Prompt("kid", (i, i + 1)) for i in range(1, 6)], 24, temperature, torch.float32)
    depths = accepted_depths(target, head, head.taps, text, shape)
    assert depths.shape == (5, text.token_ids.shape[1] - 5)
    expected = [
        [plain_accepted(target, head, tokens, row + 1, key, temperature, shape) for row in range(depths.shape[1])]
        for tokens, key in zip(text.token_ids.tolist(), text.keys, strict=True)
    ]
    assert depths.tolist() == expected
    assert depths.max() > 0


def test_chain_rounds_counts_tokens_of_each_round() -> None:
    target, head = build()
    shape = SpeculativeConfig(num_steps=3, topk=3, num_draft_tokens=8)
    text = write_texts(target, [Prompt("kid", (3, 4, 5))], 9, 0.0, torch.float32)
    depths = torch.tensor([[9, 9, 1, 9, 0, 2, 9, 9]])  # roots 3 (1 accepted), 5 (0), 6 (2); 9: never a root
    result = {a.domain: a for a in chain_rounds(text, depths, 3, shape)}["all"]
    assert result.num_rounds == 3
    assert result.accept_length == pytest.approx((2 + 1 + 3) / 3)
    assert result.accepted_per_depth == pytest.approx((2 / 3, 1 / 3, 0.0))


def test_repeated_roots_marks_second_occurrence() -> None:
    tokens = list(range(9)) + list(range(9))
    assert [i for i, is_repeat in enumerate(repeated_roots(tokens)) if is_repeat] == [16, 17]


def test_override_unknown_setting_raises() -> None:
    assert recipe.override(HeadRecipe(), ["taps=[1, 2]", "lr=0.5"]).taps == (1, 2)
    with pytest.raises(ConfigError, match="no setting 'lrr'"):
        recipe.override(HeadRecipe(), ["lrr=1"])
