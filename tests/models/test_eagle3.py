"""The EAGLE-3 head with latent attention, against its formulas in plain torch, and its checkpoints."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from treedraft.attention.dense import DenseAttend
from treedraft.errors import CheckpointError, ConfigError
from treedraft.models.config import ModelConfig
from treedraft.models.deepseek import DeepseekModel
from treedraft.models.draft.eagle3 import load_head
from treedraft.models.layers import init_weights

TARGET = {
    "model_type": "deepseek_v3", "vocab_size": 60, "hidden_size": 24, "intermediate_size": 40,
    "num_hidden_layers": 6, "num_attention_heads": 3, "kv_lora_rank": 10, "q_lora_rank": None,
    "qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 5, "max_position_embeddings": 64,
    "rope_theta": 50.0, "n_routed_experts": None,
}  # fmt: skip
HEAD = {
    "architectures": ["Eagle3DeepseekV2ForCausalLM"], "model_type": "deepseek_v3", "vocab_size": 60,
    "draft_vocab_size": 60, "hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 1,
    "num_attention_heads": 2, "kv_lora_rank": 8, "q_lora_rank": 12, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6,
    "v_head_dim": 7, "max_position_embeddings": 64, "rope_theta": 50.0,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 5], "use_aux_hidden_state": True},
}  # fmt: skip


def make_target() -> DeepseekModel:
    model = DeepseekModel(ModelConfig.from_hf(TARGET), 64, torch.float64)
    init_weights(model, 0, std=0.2)
    return model.requires_grad_(False)


def hub_tensors(fields: dict, seed: int = 1) -> dict[str, Tensor]:
    """Random weights under the names that the hub's heads have."""
    h, size, c, dr = fields["num_attention_heads"], fields["hidden_size"], fields["kv_lora_rank"], 4
    dn, dv, rank, inter = fields["qk_nope_head_dim"], fields["v_head_dim"], fields["q_lora_rank"], 32
    shapes = {
        "fc.weight": (size, 3 * size),
        "norm.weight": (size,),
        "midlayer.hidden_norm.weight": (size,),
        "midlayer.input_layernorm.weight": (size,),
        "midlayer.post_attention_layernorm.weight": (size,),
        "midlayer.self_attn.kv_a_proj_with_mqa.weight": (c + dr, 2 * size),
        "midlayer.self_attn.kv_a_layernorm.weight": (c,),
        "midlayer.self_attn.kv_b_proj.weight": (h * (dn + dv), c),
        "midlayer.self_attn.o_proj.weight": (size, h * dv),
        "midlayer.mlp.gate_proj.weight": (inter, size),
        "midlayer.mlp.up_proj.weight": (inter, size),
        "midlayer.mlp.down_proj.weight": (size, inter),
    }
    if rank is None:
        shapes["midlayer.self_attn.q_proj.weight"] = (h * (dn + dr), 2 * size)
    else:
        shapes["midlayer.self_attn.q_a_proj.weight"] = (rank, 2 * size)
        shapes["midlayer.self_attn.q_a_layernorm.weight"] = (rank,)
        shapes["midlayer.self_attn.q_b_proj.weight"] = (h * (dn + dr), rank)
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, dtype=torch.float64, generator=generator) * 0.2 + (len(shape) == 1)
        for name, shape in shapes.items()
    }


def write_head(folder: Path, fields: dict, tensors: dict[str, Tensor]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields))
    save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "model.safetensors")
    return folder


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight


def plain_rope(x: Tensor, position: int, theta: float) -> Tensor:
    pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2).contiguous())
    angle = position * theta ** (-torch.arange(0, x.shape[-1], 2, dtype=torch.float64) / x.shape[-1])
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angle), angle)).flatten(-2)


def plain_step(t: dict[str, Tensor], fields: dict, embedding: Tensor, hidden: Tensor, token_ids: Tensor) -> Tensor:
    """One causal step over a sequence: hidden [T, H], token_ids [T] -> recycled state [T, H], row by row."""
    h, dn, dr, dv = fields["num_attention_heads"], fields["qk_nope_head_dim"], 4, fields["v_head_dim"]
    c, a = fields["kv_lora_rank"], "midlayer.self_attn."
    queries, keys, values, out = [], [], [], []
    for i in range(len(token_ids)):
        e = rms(embedding[token_ids[i]], t["midlayer.input_layernorm.weight"])
        x = torch.cat([e, rms(hidden[i], t["midlayer.hidden_norm.weight"])])
        if fields["q_lora_rank"] is None:
            q = t[a + "q_proj.weight"] @ x
        else:
            q = t[a + "q_b_proj.weight"] @ rms(t[a + "q_a_proj.weight"] @ x, t[a + "q_a_layernorm.weight"])
        q = q.view(h, dn + dr)
        kv_a = t[a + "kv_a_proj_with_mqa.weight"] @ x
        latent = rms(kv_a[:c], t[a + "kv_a_layernorm.weight"])
        kv = (t[a + "kv_b_proj.weight"] @ latent).view(h, dn + dv)
        k_rope = plain_rope(kv_a[c:], i, fields["rope_theta"]).expand(h, -1)
        queries.append(torch.cat([q[:, :dn], plain_rope(q[:, dn:], i, fields["rope_theta"])], -1))
        keys.append(torch.cat([kv[:, :dn], k_rope], -1))
        values.append(kv[:, dn:])
        scores = torch.stack([(queries[i] * k).sum(-1) for k in keys]) * (dn + dr) ** -0.5  # [i + 1, h]
        mixed = (scores.softmax(0)[..., None] * torch.stack(values)).sum(0).flatten()
        y = hidden[i] + t[a + "o_proj.weight"] @ mixed
        z = rms(y, t["midlayer.post_attention_layernorm.weight"])
        inner = F.silu(t["midlayer.mlp.gate_proj.weight"] @ z) * (t["midlayer.mlp.up_proj.weight"] @ z)
        out.append(y + t["midlayer.mlp.down_proj.weight"] @ inner)
    return torch.stack(out)


@pytest.mark.parametrize("rank", [12, None])
def test_head_over_two_steps_equals_formulas(rank: int | None, tmp_path: Path) -> None:
    target = make_target()
    fields = {**HEAD, "q_lora_rank": rank}
    tensors = hub_tensors(fields)
    head = load_head(write_head(tmp_path, fields, tensors), target, dtype=torch.float64)
    assert head.taps == (1, 3, 5) and head.latent_width == 12
    ids = torch.randint(0, 60, (9,), generator=torch.Generator().manual_seed(4))
    features = target(ids[None], torch.arange(9)[None], DenseAttend(), head.taps).features
    fused = head.fuse(features[:, :7])
    positions = torch.arange(7)[None]
    first = head(fused, ids[None, 1:8], positions, DenseAttend())
    second = head(first, ids[None, 2:9], positions, DenseAttend())
    plain_fused = features[0, :7] @ tensors["fc.weight"].T
    plain_first = plain_step(tensors, fields, target.embedding, plain_fused, ids[1:8])
    plain_second = plain_step(tensors, fields, target.embedding, plain_first, ids[2:9])
    torch.testing.assert_close(first[0], plain_first, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(second[0], plain_second, rtol=1e-11, atol=1e-12)
    logits = head.logits(second)
    assert logits.dtype == torch.float64
    torch.testing.assert_close(logits[0], rms(plain_second, tensors["norm.weight"]) @ target.head.T)


def test_head_with_own_vocabulary_maps_ids(tmp_path: Path) -> None:
    ids = torch.tensor([3, 4, 9, 20, 21, 33, 47, 59])
    tensors = {
        **hub_tensors(HEAD),
        "lm_head.weight": torch.randn(8, 24, dtype=torch.float64),
        "d2t": ids - torch.arange(8),
        "t2d": torch.zeros(60, dtype=torch.bool).scatter(0, ids, True),
    }
    fields = {**HEAD, "draft_vocab_size": 8}
    head = load_head(write_head(tmp_path, fields, tensors), make_target(), dtype=torch.float64)
    assert head.draft_vocab_size == 8
    assert head.logits(torch.zeros(2, 3, 24, dtype=torch.float64)).shape == (2, 3, 8)
    assert head.draft_to_target is not None and head.draft_to_target.tolist() == ids.tolist()
    assert head.target_ids(torch.tensor([[0, 7], [2, 2]])).tolist() == [[3, 59], [9, 9]]
    tensors["t2d"] = ~tensors["t2d"]
    with pytest.raises(CheckpointError, match="d2t and t2d"):
        load_head(write_head(tmp_path, fields, tensors), make_target())
    tensors["d2t"] = ids - torch.arange(8) + 1
    with pytest.raises(CheckpointError, match=r"0\.\.59"):
        load_head(write_head(tmp_path, fields, tensors), make_target())


def test_head_with_norm_output_recycles_the_normed_state(tmp_path: Path) -> None:
    tensors = hub_tensors(HEAD)
    plain = load_head(write_head(tmp_path / "a", HEAD, tensors), make_target(), dtype=torch.float64)
    fields = {**HEAD, "norm_output": True}
    normed = load_head(write_head(tmp_path / "b", fields, tensors), make_target(), dtype=torch.float64)
    hidden = torch.randn(1, 5, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    args = (torch.arange(5)[None], torch.arange(5)[None], DenseAttend())
    out = plain(hidden, *args)
    torch.testing.assert_close(normed(hidden, *args), rms(out, tensors["norm.weight"]))
    torch.testing.assert_close(normed.logits(normed(hidden, *args)), plain.logits(out))


def test_load_head_shares_targets_tables_without_owning_them(tmp_path: Path) -> None:
    target = make_target()
    head = load_head(write_head(tmp_path, HEAD, hub_tensors(HEAD)), target, dtype=torch.float64)
    assert head.embedding is target.embedding and head.lm_head is target.head
    assert not any(p is target.embedding or p is target.head for p in head.parameters())
    tensors = {**hub_tensors(HEAD), "embed_tokens.weight": torch.randn(60, 24, dtype=torch.float64)}
    own = load_head(write_head(tmp_path, HEAD, tensors), target, dtype=torch.float64)
    torch.testing.assert_close(own.embedding.detach(), tensors["embed_tokens.weight"])


def test_load_head_without_taps_takes_the_default_layers(tmp_path: Path) -> None:
    target = make_target()
    fields = {k: v for k, v in HEAD.items() if k != "eagle_config"}
    assert load_head(write_head(tmp_path, fields, hub_tensors(HEAD)), target).taps == (2, 3, 3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 32}, "32.*24"),
        ({"target_hidden_size": 48}, "48.*24"),
        ({"vocab_size": 61}, "61.*60"),
        ({"architectures": ["LlamaForCausalLMEagle3"]}, "LlamaForCausalLMEagle3"),
        ({"num_hidden_layers": 2}, "num_hidden_layers"),
        ({"fc_norm": True}, "fc_norm"),
        ({"norm_before_residual": True}, "norm_before_residual"),
        ({"attention_bias": True}, "attention_bias"),
        ({"surprise": 3}, "surprise"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 7]}}, r"0\.\.6.*\[1, 3, 7\]"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [-1, 1, 5]}}, r"\[-1, 1, 5\]"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 5], "other": 1}}, "other"),
        ({"draft_vocab_size": 30}, "30.*60.*lm_head"),
    ],
)
def test_load_head_that_does_not_fit_says_why(changes: dict, message: str, tmp_path: Path) -> None:
    folder = write_head(tmp_path, {**HEAD, **changes}, hub_tensors(HEAD))
    with pytest.raises(ConfigError, match=message):
        load_head(folder, make_target())


def test_load_head_with_wrong_tensors_names_them(tmp_path: Path) -> None:
    tensors = hub_tensors(HEAD)
    tensors["midlayer.extra.weight"] = torch.zeros(2)
    with pytest.raises(CheckpointError, match="midlayer.extra.weight"):
        load_head(write_head(tmp_path, HEAD, tensors), make_target())
    del tensors["midlayer.extra.weight"], tensors["fc.weight"]
    with pytest.raises(CheckpointError, match="lacks fc.weight"):
        load_head(write_head(tmp_path, HEAD, tensors), make_target())
    tensors["fc.weight"] = torch.zeros(24, 48)
    with pytest.raises(CheckpointError, match=r"fc.weight.*\[24, 72\].*\[24, 48\]"):
        load_head(write_head(tmp_path, HEAD, tensors), make_target())


def test_demo_head_agrees_with_its_target_about_as_often_as_when_it_was_trained() -> None:
    transformers = pytest.importorskip("transformers")
    from treedraft.models.registry import load_model
    from treedraft.weights.loader import resolve_folder

    target = load_model(resolve_folder("demo"), 512)
    head = load_head(resolve_folder("demo", kind="draft"), target)
    tokenizer = transformers.AutoTokenizer.from_pretrained(resolve_folder("demo"))
    text = (Path(__file__).parent.parent.parent / "src/treedraft/models/moe.py").read_text()
    ids = torch.tensor(tokenizer(text)["input_ids"][:500])[None]
    positions = torch.arange(ids.shape[1])[None]
    with torch.inference_mode():
        output = target(ids, positions, DenseAttend(), head.taps)
        best = target.logits(output.hidden).argmax(-1)
        state = head(head.fuse(output.features[:, :-1]), ids[:, 1:], positions[:, :-1], DenseAttend())
        agreement = (head.logits(state).argmax(-1) == best[:, 1:]).double().mean()
    accuracy = (best[:, :-1] == ids[:, 1:]).double().mean()
    assert accuracy > 0.25  # a shuffled or mis-scaled weight drops it below 0.05
    assert agreement > 0.40  # 0.56 on held-out text; taps off by one give about 0.3


def test_head_gradients_reach_every_parameter_and_no_target_table() -> None:
    from treedraft.models.draft.eagle3 import Eagle3Config, Eagle3MlaHead, target_tables

    target = make_target().float()
    config = Eagle3Config.from_hf(HEAD, target.config, frozenset())
    head = Eagle3MlaHead(config, target_tables(target), 64, torch.float32)
    init_weights(head, 0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden = head.fuse(torch.randn(2, 6, 72))
        for step in range(3):
            ids = torch.randint(0, 60, (2, 6), generator=torch.Generator().manual_seed(step))
            hidden = head(hidden, ids, torch.arange(6).expand(2, -1), DenseAttend())
        logits = head.logits(hidden)
    assert logits.dtype == torch.float32
    logits.square().mean().backward()
    assert all(p.grad is not None and float(p.grad.abs().sum()) > 0 for p in head.parameters())


def test_save_and_load_of_a_head_in_hub_names_is_lossless(tmp_path: Path) -> None:
    from treedraft.weights.loader import save_checkpoint

    target = make_target()
    tensors = hub_tensors(HEAD)
    head = load_head(write_head(tmp_path / "a", HEAD, tensors), target, dtype=torch.float64)
    save_checkpoint(tmp_path / "b", head.checkpoint(), HEAD)
    saved = load_file(tmp_path / "b" / "model.safetensors")
    assert set(saved) == set(tensors)
    for name, tensor in tensors.items():
        assert torch.equal(saved[name], tensor), name
