"""Log-probabilities of prompts over HTTP, in the forms of OpenAI, vLLM and SGLang; those of LLM.generate are right."""

from __future__ import annotations

from typing import Any

import pytest

from live_server import Live
from treedraft import LLM, SamplingParams
from treedraft.types import PromptLogprob

PROMPT = "Once upon a time there was"
MESSAGES: list[Any] = [{"role": "user", "content": "Tell me a story"}]


def scores_of(llm: LLM, prompt: Any, num_top: int = 2) -> list[PromptLogprob]:
    params = SamplingParams(max_tokens=0, prompt_logprobs=num_top)
    [output] = llm.generate([prompt], params, progress=False)
    assert output.prompt_logprobs is not None and output.prompt_logprobs[0] is None
    return [one for one in output.prompt_logprobs if one is not None]


def check_echoed(form: Any, llm: LLM, num_generated: int) -> None:
    """OpenAI's form: prompt tokens first, the first without a log-probability."""
    scores = scores_of(llm, PROMPT)
    num_prompt = len(scores) + 1
    assert len(form.tokens) == len(form.token_logprobs) == len(form.top_logprobs) == len(form.text_offset)
    assert len(form.tokens) == num_prompt + num_generated
    assert form.token_logprobs[0] is None and form.top_logprobs[0] is None
    assert form.token_logprobs[1:num_prompt] == pytest.approx([s.logprob for s in scores], abs=1e-9)
    for given, score in zip(form.top_logprobs[1:num_prompt], scores, strict=True):
        assert list(given.values()) == pytest.approx(list(score.top_logprobs.values()), abs=1e-9)
    text = "".join(form.tokens)
    assert text.startswith(PROMPT)
    assert all(text[at:].startswith(t) for at, t in zip(form.text_offset, form.tokens, strict=True))


@pytest.mark.parametrize("n", [1, 2])
def test_echo_with_logprobs_begins_with_the_prompts_tokens(live: Live, plain64: LLM, n: int) -> None:
    options: Any = {"model": "demo", "prompt": PROMPT, "max_tokens": 8, "seed": 3, "logprobs": 2, "echo": True, "n": n}
    options["extra_body"] = {"ignore_eos": True}
    answer = live.openai.completions.create(**options)
    streamed: dict[int, dict[str, list[Any]]] = {i: {} for i in range(n)}
    texts = [""] * n
    for chunk in live.openai.completions.create(**options, stream=True):
        [choice] = chunk.choices
        texts[choice.index] += choice.text
        for name, values in choice.logprobs.model_dump().items():
            streamed[choice.index].setdefault(name, []).extend(values)
    for choice in answer.choices:
        check_echoed(choice.logprobs, plain64, num_generated=8)
        assert choice.text.startswith(PROMPT) and choice.text == texts[choice.index]
        assert choice.logprobs.model_dump() == streamed[choice.index]


@pytest.mark.parametrize("stream", [False, True])
def test_echo_with_no_new_tokens_scores_the_prompt_alone(live: Live, plain64: LLM, stream: bool) -> None:
    options: Any = {"model": "demo", "prompt": PROMPT, "max_tokens": 0, "logprobs": 2, "echo": True}
    given = live.openai.completions.create(**options, stream=stream)
    [choice] = (list(given)[0] if stream else given).choices
    assert (choice.text, choice.finish_reason) == (PROMPT, "length")
    check_echoed(choice.logprobs, plain64, num_generated=0)


def test_prompt_logprobs_field_is_that_of_each_prompt(live: Live, plain64: LLM) -> None:
    prompts = [PROMPT, "import numpy as np"]
    answer = live.openai.completions.create(
        model="demo", prompt=prompts, max_tokens=2, extra_body={"prompt_logprobs": 2}
    )
    chat = live.openai.chat.completions.create(
        model="demo", messages=MESSAGES, max_tokens=2, extra_body={"prompt_logprobs": 2}
    )
    chat_prompt = plain64._encode_chat(MESSAGES)
    given = [choice.prompt_logprobs for choice in answer.choices] + [chat.prompt_logprobs]
    for prompt, scores in zip([*map(plain64.encode, prompts), chat_prompt], given, strict=True):
        assert scores[0] is None and len(scores) == len(prompt)
        for token_id, entries, expected in zip(prompt[1:], scores[1:], scores_of(plain64, prompt), strict=True):
            own = entries[str(token_id)]
            assert own["logprob"] == pytest.approx(expected.logprob, abs=1e-9) and own["rank"] == expected.rank
            assert own["decoded_token"] == plain64.decode([token_id]) or "<|" in own["decoded_token"]
            assert set(entries) == {str(t) for t in (*expected.top_logprobs, token_id)}
            assert sorted(e["rank"] for e in entries.values())[:2] == [1, 2]


def test_generate_gives_input_token_logprobs_from_a_position_on(live: Live, plain64: LLM) -> None:
    ids = plain64.encode(PROMPT)
    scores = scores_of(plain64, PROMPT)
    for start in (0, 3, len(ids) - 1, len(ids) + 5):
        body = {"text": PROMPT, "return_logprob": True, "logprob_start_len": start, "top_logprobs_num": 2}
        body["sampling_params"] = {"max_new_tokens": start % 2, "temperature": 0}
        about = live.http.post("/generate", json=body).json()["meta_info"]
        given, best = about["input_token_logprobs"], about["input_top_logprobs"]
        assert [entry[1] for entry in given] == ids[start:]
        assert [entry[0] for entry in given[1:]] == pytest.approx([s.logprob for s in scores[start:]], abs=1e-9)
        assert [entry[0] for entry in given[:1]] == [None for _ in ids[start : start + 1]]
        assert [[t for _, t, _ in each] for each in best[1:]] == [list(s.top_logprobs) for s in scores[start:]]
        assert len(about["output_token_logprobs"]) == start % 2
    plain = live.http.post("/generate", json={"text": PROMPT, "return_logprob": True}).json()["meta_info"]
    assert "input_token_logprobs" not in plain


def test_scored_prompts_do_not_read_the_cache(live: Live) -> None:
    options: Any = {"model": "demo", "prompt": PROMPT * 6, "max_tokens": 1}

    def num_cached(**own: Any) -> int:
        return live.openai.completions.create(**options, **own).usage.prompt_tokens_details.cached_tokens

    assert num_cached(logprobs=0, echo=True) == 0
    assert num_cached(extra_body={"prompt_logprobs": 0}) == 0
    assert num_cached() > 0


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/v1/completions", {"max_tokens": 0}, "max_tokens must be at least 1, or 0 with prompt_logprobs"),
        ("/v1/completions", {"max_tokens": 0, "echo": True}, "max_tokens must be at least 1"),
        ("/v1/completions", {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs need an answer that is no stream"),
        ("/v1/completions", {"prompt_logprobs": 21}, "prompt_logprobs"),
        ("/v1/chat/completions", {"prompt_logprobs": -1}, "prompt_logprobs"),
        ("/v1/chat/completions", {"prompt_logprobs": 1, "max_tokens": 0}, "max_tokens"),
        ("/generate", {"logprob_start_len": 0}, "logprob_start_len needs return_logprob"),
        ("/generate", {"sampling_params": {"max_new_tokens": 0}}, "max_new_tokens must be at least 1"),
    ],
)
def test_scoring_that_cannot_be_is_refused(live: Live, path: str, body: dict[str, Any], words: str) -> None:
    base = {"/v1/completions": {"prompt": "a"}, "/generate": {"text": "a"}}.get(path, {"messages": MESSAGES})
    answer = live.http.post(path, json={**base, **body})
    assert answer.status_code == 400 and words in answer.json()["error"]["message"]
