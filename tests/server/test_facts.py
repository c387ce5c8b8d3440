"""Endpoints that say something about text, the server, and what it did."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from live_server import Live
from treedraft import LLM, SamplingParams, __version__

DASHBOARD = Path(__file__).parents[2] / "docs" / "grafana.json"


def post(live: Live, path: str, **body: Any) -> Any:
    answer = live.http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_tokenize_and_detokenize_are_inverse(live: Live) -> None:
    answer = post(live, "/tokenize", prompt="héllo 🌍 <|user|>")
    assert answer["tokens"] == live.llm.encode("héllo 🌍 <|user|>") and answer["count"] == len(answer["tokens"])
    assert answer["max_model_len"] == 512
    assert post(live, "/detokenize", tokens=live.llm.encode("héllo 🌍"))["prompt"] == "héllo 🌍"
    assert live.http.post("/detokenize", json={"tokens": [4096]}).status_code == 400


def test_tokenize_takes_a_conversation(live: Live) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    answer = live.openai.chat.completions.create(model="demo", messages=messages, max_tokens=1)
    assert post(live, "/tokenize", messages=messages)["count"] == answer.usage.prompt_tokens


def test_version_and_server_info(live: Live) -> None:
    assert live.http.get("/version").json() == {"version": __version__}
    info = live.http.get("/server_info").json()
    assert info["config"]["speculative"]["num_draft_tokens"] == 16 and info["served_model_name"] == "demo"
    assert info["internal_states"][0]["avg_spec_accept_length"] >= 1
    assert live.http.get("/get_model_info").json() == {"model_path": "demo", "is_generation": True}


def test_generate_has_the_form_that_bench_tools_read(live: Live, plain64: LLM) -> None:
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, logprobs=1)
    [expected] = plain64.generate(["Once upon"], params, progress=False)[0].outputs
    settings = {"max_new_tokens": 12, "temperature": 0, "ignore_eos": True}
    answer = post(
        live, "/generate", text="Once upon", sampling_params=settings, return_logprob=True, top_logprobs_num=1
    )
    about = answer["meta_info"]
    assert answer["text"] == expected.text and answer["output_ids"] == list(expected.token_ids)
    assert about["finish_reason"] == {"type": "length"} and about["completion_tokens"] == 12
    assert [x for x, _, _ in about["output_token_logprobs"]] == pytest.approx(expected.logprobs, abs=1e-9)
    assert 0 < about["spec_verify_ct"] < 12
    several = post(live, "/generate", input_ids=[live.llm.encode("Once upon")] * 2, sampling_params=settings)
    assert [a["text"] for a in several] == [expected.text] * 2
    stream = live.http.post("/generate", json={"text": "Once upon", "sampling_params": settings, "stream": True})
    events = stream.text.strip().split("\n\n")
    assert events[-1] == "data: [DONE]" and f'"output_ids": {list(expected.token_ids)}' in events[-2]


def test_metrics_count_what_was_done(live: Live) -> None:
    before = scrape(live)
    answer = live.openai.completions.create(
        model="demo", prompt="Once upon", max_tokens=30, temperature=0, n=2, extra_body={"ignore_eos": True}
    )
    live.wait_until_idle()
    after = scrape(live)

    def gained(name: str) -> float:
        return after.get(f"treedraft:{name}", 0) - before.get(f"treedraft:{name}", 0)

    def gained_rank(depth: int, rank: int) -> float:
        return gained(f'spec_decode_num_accepted_tokens_per_rank_total{{position="{depth}",rank="{rank}"}}')

    rounds, metrics = gained("spec_decode_num_drafts_total"), answer.metrics
    assert rounds == metrics["rounds"] == gained("spec_tree_size_count") == gained("spec_accept_length_count")
    assert gained("prompt_tokens_total") == 2 * answer.usage.prompt_tokens
    assert gained("generation_tokens_total") == 60
    assert gained('request_success_total{finished_reason="length"}') == 2
    assert gained("time_to_first_token_seconds_count") == gained("e2e_request_latency_seconds_count") == 2
    assert gained("inter_token_latency_seconds_count") == 58
    assert gained("spec_tree_size_sum") == 16 * rounds == gained("spec_decode_num_draft_tokens_total") + rounds
    assert gained("spec_decode_num_accepted_tokens_total") == sum(
        gained(f'spec_decode_num_accepted_tokens_per_pos_total{{position="{d}"}}') for d in range(5)
    )
    for depth in range(5):
        assert gained(f'spec_decode_num_accepted_tokens_per_pos_total{{position="{depth}"}}') == sum(
            gained_rank(depth, rank) for rank in range(4)
        )
    assert gained_rank(0, 0) > gained_rank(0, 1) > 0, "the first choice, and what only a tree has"
    assert gained("spec_accept_length_sum") >= 58  # the last rounds' tokens beyond max_tokens are counted too
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert after[f"treedraft:{name}"] == 0
    assert gained("prefix_cache_queries_total") == 2 * answer.usage.prompt_tokens


def test_metrics_say_which_fixes_are_reverted(live: Live) -> None:
    info = live.http.get("/server_info").json()
    assert f'reverted_fixes_info{{digest="{info["revert_digest"]}",ids=""}} 1.0' in live.http.get("/metrics").text


def test_metrics_have_what_the_dashboard_shows(live: Live) -> None:
    live.openai.completions.create(model="demo", prompt="Once", max_tokens=20, temperature=0)
    families = {line.split()[2] for line in live.http.get("/metrics").text.splitlines() if line.startswith("# HELP")}
    named = set(re.findall(r"treedraft:[a-z0-9_]+", DASHBOARD.read_text(encoding="utf-8")))
    assert {re.sub(r"_(bucket|sum|count)$", "", name) for name in named} <= families


def test_usage_counts_cached_tokens(live: Live) -> None:
    prompt = list(range(100, 160))
    usages = [
        live.openai.completions.create(model="demo", prompt=prompt, max_tokens=4, temperature=0).usage for _ in range(2)
    ]
    assert 16 <= usages[1].prompt_tokens_details.cached_tokens < len(prompt)
    assert usages[0].prompt_tokens == usages[1].prompt_tokens == len(prompt)


def scrape(live: Live) -> dict[str, float]:
    lines = live.http.get("/metrics").text.splitlines()
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")}
