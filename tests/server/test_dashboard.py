"""docs/grafana.json: a dashboard of every metric that the server has, and of no other."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

DASHBOARD = Path(__file__).parents[2] / "docs" / "grafana.json"
HISTOGRAMS = {
    *("time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds"),
    *("spec_accept_length", "spec_tree_size"),
}
SINGLES = {
    *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prefix_cache_hits_total"),
    *("prefix_cache_queries_total", "prompt_tokens_total", "generation_tokens_total", "num_preemptions_total"),
    *("spec_decode_num_accepted_tokens_per_pos_total", "spec_decode_num_drafts_total"),
    "spec_decode_num_accepted_tokens_per_rank_total",
}


def load() -> dict[str, Any]:
    return json.loads(DASHBOARD.read_text(encoding="utf-8"))


def expressions() -> list[str]:
    return [target["expr"] for panel in load()["panels"] for target in panel["targets"]]


def test_dashboard_names_every_metric_and_only_those() -> None:
    named = set(re.findall(r"treedraft:([a-z0-9_]+)", DASHBOARD.read_text(encoding="utf-8")))
    of_histograms = {name for name in named if re.fullmatch(r".*_(bucket|sum|count)", name)}
    assert {name.rpartition("_")[0] for name in of_histograms} == HISTOGRAMS
    assert named - of_histograms == SINGLES
    words = {word for expr in expressions() for word in re.findall(r"[a-z_]{4,}", re.sub(r"treedraft:\w+", "", expr))}
    functions = {"rate", "histogram_quantile", "ignoring", "group_left"}
    assert words <= functions | {
        "position",
        "rank",
        "instance",
        "__rate_interval",
        "_interval",
    }  # no metric without the prefix


def test_dashboard_uses_counters_as_rates_and_histograms_by_their_buckets() -> None:
    for expr in expressions():
        assert expr.count("(") == expr.count(")") and expr.count("{") == expr.count("}")
        for name in re.findall(r"treedraft:(\w+)", expr):
            is_counter = name.endswith(("_total", "_bucket", "_sum", "_count"))
            assert (f"rate(treedraft:{name}" in expr) is is_counter
        assert ("histogram_quantile" in expr) is ("_bucket" in expr)


def test_dashboard_panels_do_not_overlap_and_have_ids_of_their_own() -> None:
    panels = load()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for at in (panel["gridPos"] for panel in panels)
        for x in range(at["x"], at["x"] + at["w"])
        for y in range(at["y"], at["y"] + at["h"])
    ]
    assert len(set(cells)) == len(cells) and max(x for x, _ in cells) < 24
