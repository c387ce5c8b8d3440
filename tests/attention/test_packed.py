"""The packed layout: every index is the true ancestor's slot, every list fits its width, nothing is written beyond it.

python tests/attention/test_packed.py      the Triton kernel in its interpreter against the loops
"""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from packed_oracle import GUARD, random_case

from treedraft import LLM, SamplingParams, SpeculativeConfig, attention
from treedraft.attention import BACKENDS, Needs, check_backend, make_backend, packed
from treedraft.attention.packed import (
    Reserved,
    build_packed,
    check_addressable,
    draft_limits,
    extend_limits,
    merge,
    new_record,
    packed_width,
    read_overflow,
    verify_limits,
)
from treedraft.errors import ConfigError, InvariantError
from treedraft.kv.buffers import Buffers

GREEDY = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True)
PACKED = ("packed-torch", "packed-torch-merged")

# ------------------------------------------------------------------ the layout against plain loops


def limits_of(case):
    make = draft_limits if case.is_draft else verify_limits
    return make(case.max_batch, case.num_rows, case.num_steps, case.max_context)


def check_case(case, width=None):
    """Build a case's lists between guard words. Returns what is wrong."""
    limit = limits_of(case).width if width is None else width
    memory = torch.full((limit + 64,), GUARD, dtype=torch.int32)
    kv_indptr = torch.full((case.batch * case.num_rows + 1 + 8,), GUARD)
    row = memory[32 : 32 + limit]
    need = build_packed(**case.tensors(), kv_indptr=kv_indptr[:-8], kv_indices=row)
    expected = case.expected()
    found = []
    if (memory[:32] != GUARD).any() or (memory[32 + limit :] != GUARD).any() or (kv_indptr[-8:] != GUARD).any():
        found.append("a word beyond the row was written")
    if int(need) != sum(map(len, expected)):
        found.append(f"need {int(need)}, the lists hold {sum(map(len, expected))}")
    if int(need) > limit:
        found.append(f"need {int(need)} > width {limit}")
        if (memory != GUARD).any() or (kv_indptr[:-8] != 0).any():
            found.append("something was written although it does not fit")
        return found
    starts = kv_indptr[:-8].tolist()
    given = [row[a:b].tolist() for a, b in zip(starts, starts[1:], strict=False)]
    if given != expected:
        found.append("a row's list is not its prefix and its ancestors")
    if (row[int(need) :] != GUARD).any():
        found.append("a word beyond need was written")
    return found


def run_cases(count, seed):
    rng = random.Random(seed)
    num_full = 0
    for number in range(count):
        case = random_case(rng)
        num_full += case.batch == case.max_batch and min(case.kv_lens) == case.max_context
        assert check_case(case) == [], (number, case)
    assert num_full > count / 5  # full batches at the context limit are among them


def test_build_packed_random_forwards_equal_loops_and_fit():
    run_cases(3_000, seed=0)


@pytest.mark.slow
def test_build_packed_1e5_random_forwards_equal_loops_and_fit():
    run_cases(100_000, seed=1)


@pytest.mark.parametrize(
    "width",
    [
        lambda max_batch, rows, max_context, tail: max_batch * (max_context + tail),  # the rows forgotten
        lambda max_batch, rows, max_context, tail: max_batch * rows * max_context,  # the tail forgotten
        lambda max_batch, rows, max_context, tail: rows * (max_context + tail),  # the batch forgotten
    ],
    ids=["rows", "tail", "batch"],
)
def test_build_packed_width_that_forgets_a_factor_is_noticed_and_harmless(width, monkeypatch):
    """Failure class 3: a buffer sized by another formula. Only "does not fit" is reported: no word was written."""
    monkeypatch.setattr(packed, "packed_width", width)
    rng = random.Random(2)
    problems = [check_case(random_case(rng)) for _ in range(400)]
    noticed = [p for p in problems if p]
    assert len(noticed) > 20
    assert all(len(p) == 1 and re.fullmatch(r"need \d+ > width \d+", p[0]) for p in noticed)


def test_build_packed_wide_scatter_stays_below_the_width_at_every_step():
    """Failure class 4: page 2, topk 8. The largest word written at step s is used(s) - 1, below the row's width."""
    topk, num_steps, batch, max_context = 8, 6, 3, 33
    width = packed_width(batch, topk, max_context, num_steps)
    rng = random.Random(3)
    for level in range(1, num_steps):
        case = replace(
            random_case(rng),
            max_batch=batch,
            num_rows=topk,
            num_steps=num_steps,
            max_context=max_context,
            page_size=2,
            kv_lens=[max_context] * batch,
            paths=[[[d * topk + j for d in range(level)] for j in range(topk)]] * batch,
            tree_len=topk * level,
            pages=[[2 + 37 * b + i for i in range(37)] for b in range(batch)],
            is_draft=True,
        )
        memory = torch.full((width + 512,), GUARD, dtype=torch.int32)
        indptr = torch.zeros(batch * topk + 1, dtype=torch.int64)
        build_packed(**case.tensors(), kv_indptr=indptr, kv_indices=memory[:width])
        written = int((memory != GUARD).nonzero().max())
        assert written == topk * sum(case.kv_lens) + batch * topk * level - 1 < width


def test_build_packed_unguarded_memory_shows_exactly_the_words_past_the_row():
    """With more room than width, as red zones give: the raw symptom is the shortfall, word for word."""
    rng = random.Random(4)
    case = next(c for c in iter(lambda: random_case(rng), None) if c.is_draft and c.batch > 1 and c.num_rows > 2)
    short = packed_width(case.max_batch, 1, case.max_context, case.num_steps)
    memory = torch.full((short + limits_of(case).width,), GUARD, dtype=torch.int32)
    indptr = torch.zeros(case.batch * case.num_rows + 1, dtype=torch.int64)
    need = int(build_packed(**case.tensors(), kv_indptr=indptr, kv_indices=memory))
    assert (memory != GUARD).nonzero()[:, 0].tolist() == list(range(need))
    assert int((memory[short:] != GUARD).sum()) == max(0, need - short)


# ------------------------------------------------------------------ Triton


def interpreter_cases(count):
    """Compare the Triton kernel with the torch twin, guard words included. Runs where TRITON_INTERPRET is set."""
    from treedraft.kernels.packed import fill_packed_triton

    rng = random.Random(5)
    for number in range(count):
        case = random_case(rng)
        width = limits_of(case).width if number % 4 else max(1, limits_of(case).width // 3)
        memories = []
        for fill in (packed.fill_packed, lambda *a: fill_packed_triton(*a, block=16)):
            memory = torch.full((width + 64,), GUARD, dtype=torch.int32)
            indptr = torch.zeros(case.batch * case.num_rows + 1, dtype=torch.int64)
            original, packed.fill_packed = packed.fill_packed, fill
            try:
                build_packed(**case.tensors(), kv_indptr=indptr, kv_indices=memory[32 : 32 + width])
            finally:
                packed.fill_packed = original
            memories.append(memory)
        assert torch.equal(*memories), (number, case)
        assert (memories[1][:32] == GUARD).all() and (memories[1][32 + width :] == GUARD).all()


def test_fill_packed_triton_interpreted_equals_the_torch_twin():
    pytest.importorskip("triton")
    env = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    result = subprocess.run([sys.executable, __file__], env=env, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


# ------------------------------------------------------------------ the contract


def test_check_addressable_refuses_with_the_numbers():
    width = packed_width(160, 64, 1_048_576, 6)
    with pytest.raises(ConfigError, match=rf"verify.* = {width} words.* 32 bits \(at most 2147483647\)"):
        check_addressable(width, 32, "verify kv_indices: max_batch * num_draft_tokens * (max_context + num_steps + 1)")
    check_addressable(width, 64, "")
    check_addressable(2**31 - 1, 32, "")


def test_make_backend_lists_beyond_32_bits_are_refused_at_start(monkeypatch):
    monkeypatch.setitem(BACKENDS, "packed-torch", replace(BACKENDS["packed-torch"], index_bits=32))
    memory = Buffers("meta")
    with pytest.raises(ConfigError, match=f"{160 * 64 * (1_048_576 + 6)} words.*32 bits"):
        make_backend("packed-torch", Reserved(verify_limits(160, 64, 5, 1_048_576), memory, new_record(memory)))


def test_limits_every_width_comes_from_the_one_function(monkeypatch):
    monkeypatch.setattr(packed, "packed_width", lambda *args: args)
    assert draft_limits(160, 8, 5, 4096).width == (160, 8, 4096, 5)
    assert verify_limits(160, 64, 5, 4096).width == (160, 64, 4096, 6)
    assert verify_limits(160, 1, 0, 4096).width == (160, 1, 4096, 1)
    assert extend_limits(160, 6, 5, 4096).width == (160, 6, 4096, 6)
    assert draft_limits(160, 8, 5, 4096).prefix_width == (160, 1, 4096, 0)
    assert draft_limits(160, 8, 5, 4096).path_width == (160, 8, 0, 5)


def test_reserved_lists_are_recorded_with_formula_and_bytes():
    memory = Buffers("meta")
    for limits in (draft_limits(160, 8, 5, 131072), verify_limits(160, 64, 5, 131072)):
        make_backend("packed-torch", Reserved(limits, memory, torch.zeros(7, dtype=torch.int64, device="meta")))
    sizes = {r.name: (r.bytes, r.kind, r.backend) for r in memory.records}
    assert sizes["draft kv_indices"] == (160 * 8 * (131072 + 5) * 4, "index", "packed-torch")
    assert sizes["verify kv_indices"] == (160 * 64 * (131072 + 6) * 4, "index", "packed-torch")


def test_overflow_record_names_the_first_forward_that_did_not_fit():
    rng = random.Random(6)
    case = next(c for c in iter(lambda: random_case(rng), None) if c.is_draft and c.num_rows > 2 and sum(c.kv_lens) > 9)
    memory = Buffers("cpu")
    record = new_record(memory)
    lists = packed.IndexLists(Reserved(limits_of(case), memory, record), "all", "packed-torch", 64)
    arguments = case.tensors()
    arguments["max_prefix_len"] = arguments.pop("max_len") - case.tree_len
    lists.build(**arguments)
    assert read_overflow(record.tolist()) is None
    lists.kv_indices = lists.kv_indices[:10]
    for _ in range(2):
        lists.build(**arguments)
        need = sum(map(len, case.expected()))
        message = read_overflow(record.tolist())
        assert message is not None
        for part in (
            f"batch={case.batch}, topk={case.num_rows}, steps={case.num_steps}",
            f"sum of lengths={sum(case.kv_lens)} need {need} words",
        ):
            assert part in message


def test_merge_of_two_halves_is_attention_over_all():
    generator = torch.Generator().manual_seed(7)
    scores = torch.randn(5, 3, 12, generator=generator, dtype=torch.float64)
    values = torch.randn(5, 3, 12, 4, generator=generator, dtype=torch.float64)

    def part(columns):
        return torch.einsum("bhc,bhcd->bhd", scores[..., columns].softmax(-1), values[:, :, columns]), scores[
            ..., columns
        ].logsumexp(-1)

    out, lse = merge(*part(slice(0, 7)), *part(slice(7, 12)))
    expected, expected_lse = part(slice(0, 12))
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-14)
    torch.testing.assert_close(lse, expected_lse, rtol=0, atol=1e-14)
    nothing = torch.zeros_like(out), torch.full_like(lse, -torch.inf)
    for pair in ((out, lse, *nothing), (*nothing, out, lse)):
        assert all(torch.equal(a, b) for a, b in zip(merge(*pair), (out, lse), strict=True))
    both = merge(*nothing, *nothing)
    assert (both[0] == 0).all() and (both[1] == -torch.inf).all()


# ------------------------------------------------------------------ refused at start


@pytest.mark.parametrize(
    ("change", "needs", "message"),
    [
        ({"page_sizes": (1, 64)}, {}, "takes page sizes 1, 64, not 16.*--attention-backend may be: .*packed-torch"),
        ({"latent_dims": ((512, 64),)}, {}, r"exist for latent 512 \+ rope 64, not for 32 \+ 8"),
        ({"trees": None}, {}, "topk must be 1"),
        ({"devices": ("cuda",)}, {"purpose": "draft"}, "runs on cuda, not on cpu.*--draft-attention-backend may be"),
        ({"dtypes": ("bfloat16",)}, {}, "takes bfloat16, not float64"),
        ({"mla": False}, {}, "has no MLA"),
        ({"gqa": False}, {"latent_dims": None}, "has no grouped-query attention"),
    ],
)
def test_check_backend_says_what_is_missing_and_what_would_do(change, needs, message, monkeypatch):
    fitting = Needs("verify", "cpu", "float64", 16, (32, 8), has_trees=True)
    check_backend("torch", replace(fitting, **needs))
    monkeypatch.setitem(BACKENDS, "torch", replace(BACKENDS["torch"], **change))
    with pytest.raises(ConfigError, match=message):
        check_backend("torch", replace(fitting, **needs))


@pytest.mark.parametrize("purpose", ["attention_backend", "draft_attention_backend"])
def test_llm_backend_that_cannot_is_refused_at_start(purpose, monkeypatch):
    monkeypatch.setitem(attention.BACKENDS, "packed-torch", replace(BACKENDS["packed-torch"], page_sizes=(64,)))
    with pytest.raises(ConfigError, match="takes page sizes 64, not 16"):
        make_llm(**{purpose: "packed-torch"})
    with pytest.raises(ConfigError, match="must be one of"):
        make_llm(**{purpose: "flashfire"})


# ------------------------------------------------------------------ text


def make_llm(shape=(4, 3, 12), **options):
    return LLM(
        "demo",
        dtype="float64",
        device="cpu",
        speculative=None if shape is None else SpeculativeConfig(*shape),
        **{"max_batch": 3, "max_context": 64, **options},
    )


@pytest.fixture(scope="module")
def prompts(plain64, demo_prompts):
    return [plain64.encode(p)[:n] for p, n in zip(demo_prompts, (11, 18, 24), strict=False)]


@pytest.fixture(scope="module")
def expected(plain64, prompts):
    return tokens_of(plain64.generate(prompts, GREEDY, progress=False))


def tokens_of(outputs):
    return [o.outputs[0].token_ids for o in outputs]


@pytest.mark.parametrize("backend", PACKED)
@pytest.mark.parametrize(
    ("shape", "page_size", "options"),
    [
        ((4, 3, 12), 16, {}),
        ((5, 8, 70), 2, {}),
        ((3, 1, 4), 64, {}),
        (None, 3, {}),
        ((4, 3, 12), 1, {"max_pending": 1}),
        ((3, 2, 5), 3, {"cuda_graph": "eager"}),
    ],
    ids=str,
)
def test_generate_with_packed_lists_gives_the_same_text(backend, shape, page_size, options, prompts, expected):
    llm = make_llm(shape, page_size=page_size, attention_backend=backend, **options)
    assert llm.config.draft_attention_backend == backend  # "auto" drafts with what verifies
    given = llm.generate(prompts, GREEDY, progress=False)
    assert tokens_of(given) == expected
    if shape is not None:
        reference = make_llm(shape, page_size=page_size).generate(prompts, GREEDY, progress=False)
        assert [o.metrics.accept_length for o in given] == [o.metrics.accept_length for o in reference]


@pytest.mark.parametrize("verify,draft", [("torch", "packed-torch-merged"), ("packed-torch-merged", "packed-torch")])
def test_generate_with_another_backend_for_drafting_gives_the_same_text(verify, draft, prompts, expected):
    llm = make_llm(attention_backend=verify, draft_attention_backend=draft)
    assert tokens_of(llm.generate(prompts, GREEDY, progress=False)) == expected


def test_generate_full_batch_at_the_context_limit_fits(prompts, plain64):
    """The longest lengths there are, with dead rounds in flight: no list is refused."""
    limit = len(prompts[0]) + 12
    params = replace(GREEDY, max_tokens=100)
    same = [prompts[0]] * 3
    for max_pending in (0, 2):
        llm = make_llm((5, 8, 24), max_context=limit, attention_backend="packed-torch", max_pending=max_pending)
        outputs = llm.generate(same, params, progress=False)
        assert [o.outputs[0].finish_reason for o in outputs] == ["length"] * 3
        wanted = plain64.generate(same, replace(params, max_tokens=12), progress=False)
        assert tokens_of(outputs) == tokens_of(wanted)


# ------------------------------------------------------------------ overflow: the step ends, the engine goes on


def forget_rows(monkeypatch):
    monkeypatch.setattr(packed, "packed_width", lambda max_batch, rows, max_context, tail: max_batch * max_context)


@pytest.mark.parametrize("max_pending", [0, 2], ids=lambda n: f"pending {n}")
@pytest.mark.parametrize("cuda_graph", ["off", "eager"])
@pytest.mark.parametrize("noticed_by", ["host", "device"])
def test_generate_overflow_ends_the_steps_requests_and_the_engine_goes_on(
    noticed_by, max_pending, cuda_graph, prompts, monkeypatch
):
    """Failure class 3, through the engine: on the host where lengths are known, else by the device's record."""
    with monkeypatch.context() as planted:
        forget_rows(planted)
        llm = make_llm((4, 8, 12), attention_backend="packed-torch", max_pending=max_pending, cuda_graph=cuda_graph)
    if noticed_by == "device":
        monkeypatch.setattr(llm.runner, "_refuse", lambda rows: None)
    lists = [x for b in llm.runner.backends for x in b._lists.values()]
    guarded = [(x, torch.full((len(x.kv_indices) + 4096,), GUARD, dtype=torch.int32)) for x in lists]
    for x, memory in guarded:
        x.kv_indices = memory[: len(x.kv_indices)]
    state = llm.runner.state
    outputs = llm.generate(prompts, replace(GREEDY, presence_penalty=0.1), progress=False)
    for output in outputs:
        choice = output.outputs[0]
        assert choice.finish_reason == "error"
        assert len(choice.token_ids) == 1  # the prefill's
        pattern = r"batch=3, (topk|nodes)=\d+, steps=4, sum of lengths=53 need \d+ words, the row's width is \d+"
        assert re.search(pattern, choice.error), choice.error
    for x, memory in guarded:
        assert (memory[len(x.kv_indices) :] == GUARD).all()
    assert set(state.kv_lens.tolist()[:3]) == {11, 18, 24}, "a void round must not advance"
    assert state.output_counts[:3].sum(1).tolist() == [1, 1, 1]
    llm.engine.scheduler.check_integrity()
    # One short request fits the small lists: the same engine serves it.
    short = llm.generate([prompts[0][:4]], replace(GREEDY, max_tokens=2), progress=False)[0].outputs[0]
    assert short.finish_reason == "length" and len(short.token_ids) == 2


def test_generate_overflow_spares_the_requests_that_are_no_part_of_the_step(prompts, expected, monkeypatch):
    """Two run and overflow while a third waits for a place: the third is served as if nothing had been."""
    with monkeypatch.context() as planted:
        planted.setattr(packed, "packed_width", lambda max_batch, rows, max_context, tail: rows * 36)
        llm = make_llm((2, 2, 3), max_batch=2, attention_backend="packed-torch")
    params = [GREEDY, GREEDY, replace(GREEDY, max_tokens=12)]
    outputs = llm.generate([prompts[1], prompts[2], prompts[0]], params, progress=False)
    assert [o.outputs[0].finish_reason for o in outputs] == ["error", "error", "length"]
    assert outputs[2].outputs[0].token_ids == expected[0][:12]


def test_runner_refuses_on_the_host_before_anything_is_launched(prompts, monkeypatch):
    with monkeypatch.context() as planted:
        forget_rows(planted)
        llm = make_llm((4, 8, 12), attention_backend="packed-torch")
    with pytest.raises(InvariantError, match="topk=8"):
        llm.runner.drafter.attention.check_fits(3, 53)
    monkeypatch.setattr(llm.runner, "run_round", lambda *a: pytest.fail("launched"))
    assert {o.outputs[0].finish_reason for o in llm.generate(prompts, GREEDY, progress=False)} == {"error"}


if __name__ == "__main__":
    interpreter_cases(50)
