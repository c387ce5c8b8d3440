"""Random weights from config.json alone: what they are, and that a model of them runs from token ids."""

import json
from pathlib import Path

import pytest
import torch

import treedraft
from small_models import HEAD, TARGET
from treedraft import LLM, SamplingParams, SpeculativeConfig
from treedraft.config import EngineConfig
from treedraft.errors import CheckpointError, ConfigError, RequestError
from treedraft.models.config import ModelConfig
from treedraft.models.registry import draft_head_config, load_draft_head, load_model
from treedraft.runner.build import dry_run, lay_out
from treedraft.weights.dummy import fill_random

SHAPES = Path(__file__).parents[2] / "benchmarks" / "shapes"


def write_configs(folder: Path, draft_vocab_size: int = 48, **fields) -> dict[str, str]:
    """A target's and a head's config.json without any weights; returns the arguments of an LLM."""
    for name, config in (("model", {**TARGET, **fields}), ("draft", {**HEAD, "draft_vocab_size": draft_vocab_size})):
        (folder / name).mkdir(parents=True)
        (folder / name / "config.json").write_text(json.dumps(config))
    return {"model": str(folder / "model"), "draft": str(folder / "draft"), "load_format": "dummy"}


@pytest.mark.parametrize("draft_vocab_size", [48, 20])
def test_llm_from_configs_alone_gives_the_same_tokens_with_and_without_a_tree(tmp_path, draft_vocab_size):
    made = write_configs(tmp_path, draft_vocab_size)
    options = {**made, "device": "cpu", "dtype": "float64", "max_batch": 2}
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    prompts = [[1, 2, 3], [7, 5]]
    tree = LLM(**options, speculative=SpeculativeConfig(2, 2, 4)).generate(prompts, params, progress=False)
    plain = LLM(**options, speculative=None).generate(prompts, params, progress=False)
    assert [o.outputs[0].token_ids for o in tree] == [o.outputs[0].token_ids for o in plain]


def test_text_without_a_tokenizer_is_refused_with_the_remedy(tmp_path):
    llm = LLM(**write_configs(tmp_path), device="cpu", max_batch=1)
    assert llm.tokenizer is None
    with pytest.raises(RequestError, match="has no tokenizer files; give prompts as token ids"):
        llm.generate("a text", progress=False)
    with pytest.raises(RequestError, match="stop strings need a tokenizer"):
        llm.generate([1], SamplingParams(stop=("x",)), progress=False)


def test_folder_without_weights_is_refused_unless_dummy(tmp_path):
    made = write_configs(tmp_path)
    with pytest.raises(CheckpointError, match="nor a .safetensors file"):
        LLM(**{**made, "load_format": "auto"}, device="cpu")
    with pytest.raises(ConfigError, match="load_format must be one of auto, dummy"):
        LLM(**{**made, "load_format": "random"}, device="cpu")


def test_activations_stay_near_one_in_bfloat16_through_27_layers(tmp_path):
    sizes = {"hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 32, "num_hidden_layers": 27}
    more = {"n_routed_experts": 16, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "v_head_dim": 16}
    model = load_model(Path(write_configs(tmp_path, **sizes, **more)["model"]), 64, torch.bfloat16, load_format="dummy")
    from treedraft.attention.dense import DenseAttend

    token_ids = torch.arange(40).view(1, -1) % 48
    with torch.inference_mode():
        output = model(token_ids, torch.arange(40).view(1, -1), DenseAttend(), taps=(1, 13, 26))
        logits = model.logits(output.hidden)
    assert output.features.isfinite().all() and output.features.abs().max() < 64
    assert 0.5 < logits.std() < 2
    assert len(logits[0].argmax(-1).unique()) > 10  # the prediction depends on the token


def test_same_seed_same_weights_another_seed_others():
    def filled(seed: int) -> torch.Tensor:
        weight = torch.empty(32, 8)
        fill_random([("a.weight", weight)], seed)
        return weight

    assert torch.equal(filled(1), filled(1))
    assert not torch.equal(filled(1), filled(2))


def test_fill_random_by_kind():
    views = {
        "q.weight": torch.empty(400, 100),
        "norm.weight": torch.empty(9),
        "gate.e_score_correction_bias": torch.empty(4),
    }
    fill_random(views.items())
    assert abs(views["q.weight"].std() - 0.1) < 0.005
    assert views["norm.weight"].eq(1).all() and views["gate.e_score_correction_bias"].eq(0).all()


def test_smaller_draft_vocabulary_has_a_consistent_map(tmp_path):
    made = write_configs(tmp_path, draft_vocab_size=20)
    target = load_model(Path(made["model"]), 64, load_format="dummy")
    head = load_draft_head(Path(made["draft"]), target, torch.float32, "cpu", load_format="dummy")
    ids = head.draft_to_target
    assert len(ids.unique()) == 20 and int(ids.max()) < 48
    assert torch.equal(head.t2d.nonzero()[:, 0], ids.sort().values)


def test_shape_of_v2_lite_is_its_published_size():
    """15.7 B parameters, of which 2.4 B are active (DeepSeek-V2 paper, appendix B); the head fits."""
    fields = json.loads((SHAPES / "v2-lite" / "config.json").read_text())
    config = ModelConfig.from_hf(fields)
    assert draft_head_config(SHAPES / "v2-lite-head", config, "dummy").taps == (2, 13, 24)
    engine = EngineConfig(
        model=str(SHAPES / "v2-lite"), draft=str(SHAPES / "v2-lite-head"), load_format="dummy", max_context=1024
    )
    run = dry_run(lay_out(engine.resolve(has_cuda=False)), 3)
    total = sum(p.numel() for p in run.model.parameters())
    experts = 26 * 64 * 3 * 2048 * 1408
    active = total - experts * (64 - 6) / 64 - 102400 * 2048
    assert 15.6e9 < total < 15.8e9
    assert 2.3e9 < active < 2.5e9


def test_load_draft_head_keeps_the_invariant_products_of_the_lm_head_it_shares() -> None:
    """The last to choose wins: a head loaded with fast products once made the target's lm_head fast."""
    demo = Path(treedraft.__file__).parent / "demo"
    target = load_model(demo / "model", 64, torch.float32, "cpu", products="invariant")
    head = load_draft_head(demo / "draft", target, torch.float32, "cpu", products="invariant")
    for model in (target, head):
        chosen = {v.products for m in model.modules() for v in (m, *vars(m).values()) if hasattr(v, "products")}
        assert chosen == {"invariant"}
