"""The official openai client against a live server; every text is compared with LLM.generate without speculation."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from live_server import Live
from treedraft import LLM, SamplingParams
from treedraft.types import Choice

PROMPT = "Once upon a time"
MESSAGES: list[Any] = [{"role": "user", "content": "Tell me a story"}]


def offline(llm: LLM, prompt: Any, **params: Any) -> list[Choice]:
    return list(llm.generate([prompt], SamplingParams(**params), progress=False)[0].outputs)


def test_chat_is_the_offline_chat(live: Live, plain64: LLM) -> None:
    answer = live.openai.chat.completions.create(
        model="demo", messages=MESSAGES, max_completion_tokens=16, seed=3, temperature=0.8
    )
    [expected] = plain64.chat(MESSAGES, SamplingParams(max_tokens=16, seed=3, temperature=0.8), progress=False)
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content == expected.outputs[0].text
    assert answer.choices[0].finish_reason == expected.outputs[0].finish_reason
    assert answer.object == "chat.completion" and answer.id.startswith("chatcmpl-") and answer.model == "demo"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(expected.prompt_token_ids)
    assert answer.usage.completion_tokens == len(expected.outputs[0].token_ids)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.prompt_tokens_details.cached_tokens == 0


def test_chat_content_in_parts_is_their_text_joined(live: Live) -> None:
    parts = [{"type": "text", "text": "Tell me"}, {"type": "text", "text": " a story"}]
    texts = [
        live.openai.chat.completions.create(
            model="demo", messages=[{"role": "user", "content": content}], max_tokens=8, temperature=0
        )
        .choices[0]
        .message.content
        for content in (parts, "Tell me a story")
    ]
    assert texts[0] == texts[1]


def test_chat_stream_joins_to_the_whole_answer_and_ends_with_usage(live: Live) -> None:
    options: Any = {"model": "demo", "messages": MESSAGES, "max_tokens": 24, "seed": 5, "n": 2}
    whole = live.openai.chat.completions.create(**options)
    chunks = list(live.openai.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    texts, reasons = ["", ""], [None, None]
    for chunk in chunks[:-1]:
        [choice] = chunk.choices
        texts[choice.index] += choice.delta.content or ""
        reasons[choice.index] = choice.finish_reason or reasons[choice.index]
        assert chunk.usage is None and chunk.id == chunks[0].id
    assert [c.choices[0].delta.role for c in chunks[:2]] == ["assistant", "assistant"]
    assert texts == [c.message.content for c in whole.choices]
    assert reasons == [c.finish_reason for c in whole.choices]
    assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage


def test_stream_comes_round_by_round(live: Live) -> None:
    chunks = list(
        live.openai.completions.create(model="demo", prompt=PROMPT, max_tokens=40, temperature=0, stream=True)
    )
    assert 5 < len(chunks) <= 40


def test_completions_of_several_prompts_texts_and_token_ids(live: Live, plain64: LLM) -> None:
    for prompts in (["Once upon a time", "import numpy"], [plain64.encode(p) for p in (PROMPT, "import numpy")]):
        answer = live.openai.completions.create(model="demo", prompt=prompts, max_tokens=10, n=2, seed=9)
        expected = [c.text for p in prompts for c in offline(plain64, p, max_tokens=10, n=2, seed=9)]
        assert [c.text for c in answer.choices] == expected
        assert [c.index for c in answer.choices] == [0, 1, 2, 3]
    assert len(set(expected)) == 4
    assert answer.usage.prompt_tokens == sum(map(len, prompts))


def test_completions_default_to_16_tokens(live: Live) -> None:
    answer = live.openai.completions.create(model="demo", prompt=PROMPT, extra_body={"ignore_eos": True})
    assert answer.usage.completion_tokens == 16


def test_sampling_fields_reach_the_engine(live: Live, plain64: LLM) -> None:
    base = {"max_tokens": 12, "seed": 4, "temperature": 1.0}
    plain = offline(plain64, PROMPT, **base)[0].text
    for own in (
        {"top_p": 0.5},
        {"presence_penalty": 1.5},
        {"frequency_penalty": 1.5},
        {"logit_bias": {15: -100}},
        {"extra_body": {"top_k": 3}},
        {"extra_body": {"min_p": 0.3}},
        {"extra_body": {"repetition_penalty": 1.5}},
        {"extra_body": {"min_tokens": 12, "stop_token_ids": [15, 16]}},
        {"extra_body": {"stop_token_ids": list(range(250, 500))}},
    ):
        answer = live.openai.completions.create(model="demo", prompt=PROMPT, **base, **own)
        params = {**base, **own.get("extra_body", own)}
        expected = offline(plain64, PROMPT, **params)[0]
        assert (answer.choices[0].text, answer.choices[0].finish_reason) == (expected.text, expected.finish_reason), own
        assert expected.text != plain or "min_tokens" in params, f"{own} changes nothing, so the test shows nothing"


def test_chat_logprobs_are_those_of_every_token(live: Live, plain64: LLM) -> None:
    options: Any = {"model": "demo", "messages": MESSAGES, "max_tokens": 20, "seed": 1, "logprobs": True}
    options["top_logprobs"] = 3
    expected = plain64.chat(MESSAGES, SamplingParams(max_tokens=20, seed=1, logprobs=3), progress=False)[0].outputs[0]
    whole = live.openai.chat.completions.create(**options).choices[0].logprobs.content
    chunks = live.openai.chat.completions.create(**options, stream=True)
    streamed = [entry for c in chunks if c.choices[0].logprobs for entry in c.choices[0].logprobs.content]
    for entries in (whole, streamed):
        assert [e.logprob for e in entries] == pytest.approx(expected.logprobs, abs=1e-9)
        assert [[t.logprob for t in e.top_logprobs] for e in entries] == [
            pytest.approx(list(top.values()), abs=1e-9) for top in expected.top_logprobs
        ]
        text = bytes(b for e in entries for b in e.bytes).decode(errors="replace")
        assert text.startswith(expected.text) and len(entries) == len(expected.token_ids)


def test_completion_logprobs_name_tokens_and_offsets(live: Live, plain64: LLM) -> None:
    expected = offline(plain64, PROMPT, max_tokens=20, temperature=0, logprobs=2)[0]
    options: Any = {"model": "demo", "prompt": PROMPT, "max_tokens": 20, "temperature": 0, "logprobs": 2}
    whole = live.openai.completions.create(**options).choices[0].logprobs
    assert whole.token_logprobs == pytest.approx(expected.logprobs, abs=1e-9)
    assert "".join(whole.tokens).startswith(expected.text)
    assert all(expected.text[at:].startswith(t) for at, t in zip(whole.text_offset, whole.tokens))
    parts = [c.choices[0].logprobs for c in live.openai.completions.create(**options, stream=True)]
    assert [o for p in parts for o in p.text_offset] == whole.text_offset
    assert [t for p in parts for t in p.top_logprobs] == whole.top_logprobs


def test_stop_string_ends_the_text_and_no_part_of_it_is_sent(live: Live, plain64: LLM) -> None:
    text = offline(plain64, PROMPT, max_tokens=40, temperature=0)[0].text
    stop = text[len(text) // 2 : len(text) // 2 + 9]  # over several tokens
    options: Any = {"model": "demo", "prompt": PROMPT, "max_tokens": 40, "temperature": 0, "stop": [stop, "\0"]}
    expected = text[: text.index(stop)]
    whole = live.openai.completions.create(**options).choices[0]
    assert (whole.text, whole.finish_reason) == (expected, "stop")
    sent = ""
    for chunk in live.openai.completions.create(**options, stream=True):
        sent += chunk.choices[0].text
        assert expected.startswith(sent)
    assert sent == expected


def test_echo_puts_the_prompt_first(live: Live, plain64: LLM) -> None:
    text = PROMPT + offline(plain64, PROMPT, max_tokens=6, temperature=0)[0].text
    options: Any = {"model": "demo", "max_tokens": 6, "temperature": 0, "echo": True}
    assert live.openai.completions.create(**options, prompt=PROMPT).choices[0].text == text
    assert live.openai.completions.create(**options, prompt=plain64.encode(PROMPT)).choices[0].text == text
    chunks = live.openai.completions.create(**options, prompt=PROMPT, stream=True)
    assert "".join(c.choices[0].text for c in chunks) == text


def test_requests_without_a_seed_differ_and_with_one_agree(live: Live) -> None:
    def texts(**own: Any) -> set[str]:
        found = set()
        for _ in range(3):
            live.llm._next_id = 0  # as after a restart: the engine's own seeds would be the same
            found.add(live.openai.completions.create(model="demo", prompt=PROMPT, **own).choices[0].text)
        return found

    assert len(texts()) == 3
    assert len(texts(seed=8)) == 1


def test_speculation_switched_off_gives_the_same_text_one_token_a_round(live: Live) -> None:
    def ask(speculative: dict[str, Any]) -> Any:
        return live.openai.completions.create(
            model="demo",
            prompt=PROMPT,
            max_tokens=24,
            seed=2,
            extra_body={"ignore_eos": True, "speculative": speculative},
        )

    with_tree, small, without = ask({}), ask({"num_draft_tokens": 3}), ask({"enabled": False})
    assert with_tree.choices[0].text == small.choices[0].text == without.choices[0].text
    assert without.metrics == {"rounds": 23, "accept_length": 1.0, "accepted_per_depth": []}
    assert with_tree.metrics["rounds"] < 16 and with_tree.metrics["accept_length"] > 1.4
    assert with_tree.metrics["accept_length"] == pytest.approx(23 / with_tree.metrics["rounds"])
    assert 0 < with_tree.metrics["accepted_per_depth"][0] <= 1
    assert len(small.metrics["accepted_per_depth"]) <= 2  # a tree of 3 nodes has no depth 3


def test_concurrent_streams_are_the_offline_texts_of_their_seeds(live: Live, plain64: LLM, demo_prompts) -> None:
    cases = [(demo_prompts[i][:40], i, (0.0, 0.8, 1.0)[i % 3], 8 + 2 * i) for i in range(8)]

    def stream(case: tuple[str, int, float, int]) -> str:
        prompt, seed, temperature, max_tokens = case
        chunks = live.openai.completions.create(
            model="demo", prompt=prompt, seed=seed, temperature=temperature, max_tokens=max_tokens, stream=True
        )
        return "".join(c.choices[0].text for c in chunks)

    with ThreadPoolExecutor(len(cases)) as pool:
        texts = list(pool.map(stream, cases))
    for text, (prompt, seed, temperature, max_tokens) in zip(texts, cases, strict=True):
        assert text == offline(plain64, prompt, seed=seed, temperature=temperature, max_tokens=max_tokens)[0].text


def test_models_lists_the_served_name(live: Live) -> None:
    assert [m.id for m in live.openai.models.list()] == ["demo"]
    assert live.openai.models.retrieve("demo").id == "demo"
