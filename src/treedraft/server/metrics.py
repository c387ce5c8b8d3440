"""Prometheus metrics, under the names that dashboards of other engines scrape, and those of trees."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, generate_latest

from treedraft.config import offered_shapes
from treedraft.engine.engine import Engine, Runner
from treedraft.engine.request import Request
from treedraft.types import StepPlan, StepResult

if TYPE_CHECKING:
    from treedraft.config import SpeculativeConfig
    from treedraft.server.async_engine import AsyncEngine

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
TOKENS_A_ROUND = tuple(range(1, 17))
TREE_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)


class Metrics:
    """One server's metrics, in a registry of their own.

    A round is one verification of one sequence. `spec_decode_num_draft_tokens` counts the nodes of trees without their
    roots, `spec_decode_num_accepted_tokens` counts accepted drafts without the bonus token, so that
    1 + accepted / drafts is the accept length, as vLLM defines it.
    """

    def __init__(self, speculative: SpeculativeConfig | None, prefix: str = "treedraft"):
        self.registry = CollectorRegistry()
        self._prefix = prefix
        self._num_rounds = self._num_accepted = 0
        self._tree_sizes = [1 if s is None else s.num_draft_tokens for s in _shapes(speculative)]
        self.prompt_tokens = self._make(Counter, "prompt_tokens", "Tokens of prompts that arrived")
        self.generation_tokens = self._make(Counter, "generation_tokens", "Tokens generated")
        self.finished = self._make(
            Counter, "request_success", "Choices that ended, by finish reason", labelnames=("finished_reason",)
        )
        self.first_token_s = self._seconds("time_to_first_token_seconds", "From arrival to the first token")
        self.inter_token_s = self._seconds(
            "inter_token_latency_seconds", "Between tokens: a round's time by its tokens, once for each"
        )
        self.request_token_s = self._seconds(
            "request_time_per_output_token_seconds", "A choice's mean time between its tokens"
        )
        self.latency_s = self._seconds("e2e_request_latency_seconds", "From arrival to a choice's end")
        self.queue_s = self._seconds("request_queue_time_seconds", "From arrival to admission")
        self.preemptions = self._make(Counter, "num_preemptions", "Times that a choice lost its pages to another")
        self.cache_queries = self._make(Counter, "prefix_cache_queries", "Prompt tokens looked for in the prefix cache")
        self.cache_hits = self._make(Counter, "prefix_cache_hits", "Prompt tokens found there")
        self.rounds = self._make(Counter, "spec_decode_num_drafts", "Rounds of sequences")
        self.draft_tokens = self._make(Counter, "spec_decode_num_draft_tokens", "Nodes verified, roots not counted")
        self.accepted_tokens = self._make(
            Counter, "spec_decode_num_accepted_tokens", "Drafts accepted, bonus tokens not counted"
        )
        self.accepted_at_depth = self._make(
            Counter,
            "spec_decode_num_accepted_tokens_per_pos",
            "Rounds in which the draft at this depth (from 0) was accepted",
            labelnames=("position",),
        )
        self.accepted_of_rank = self._make(
            Counter,
            "spec_decode_num_accepted_tokens_per_rank",
            "Accepted drafts by depth and by place among their siblings in the draft's order, both from 0",
            labelnames=("position", "rank"),
        )
        self.accept_length = self._make(
            Histogram, "spec_accept_length", "Tokens of a round, the bonus token counted", buckets=TOKENS_A_ROUND
        )
        self.tree_size = self._make(
            Histogram, "spec_tree_size", "Nodes that a round's tree could use, root counted", buckets=TREE_SIZES
        )

    def _make(self, kind: Any, name: str, text: str, **options: Any) -> Any:
        return kind(f"{self._prefix}:{name}", text, registry=self.registry, **options)

    def _seconds(self, name: str, text: str) -> Any:
        return self._make(Histogram, name, text, buckets=SECONDS)

    def watch(self, engine: Engine, server: AsyncEngine) -> None:
        """Read gauges from the engine when scraped, and see the trees of every launched round."""
        scheduler = engine.scheduler
        pages = scheduler.num_pages
        for name, text, read in (
            ("num_requests_running", "Choices being generated", lambda: len(scheduler.running)),
            (
                "num_requests_waiting",
                "Choices that wait for a place",
                lambda: max(0, server.num_unfinished - len(scheduler.running)),
            ),
            (
                "kv_cache_usage_perc",
                "Share of the KV pages that sequences use, 0 to 1; those that are only cached are free for the taking",
                lambda: 1 - scheduler.kv.num_available / pages,
            ),
            ("engine_alive", "1 while the engine's thread runs", lambda: float(server.error is None)),
        ):
            self._make(Gauge, name, text).set_function(read)
        facts = server.llm.info()
        self._make(Info, "reverted_fixes", "Fixes that this process runs without, see treedraft toggles").info(
            {"ids": ",".join(facts["reverted_fixes"]), "digest": facts["revert_digest"]}
        )
        engine.runner = _WatchedRunner(engine.runner, self)

    def arrived(self, request: Request) -> None:
        self.prompt_tokens.inc(len(request.prompt_token_ids))

    def delivered(
        self, request: Request, num_tokens: int, last_s: float | None, now_s: float, arrived_s: float
    ) -> None:
        """Record an increment of `num_tokens`; last_s: when the tokens before it came, None: there were none."""
        if num_tokens:
            self.generation_tokens.inc(num_tokens)
            if last_s is None:
                self.first_token_s.observe(now_s - arrived_s)
                self.queue_s.observe(max(0.0, request.started_s - arrived_s))
            else:
                for _ in range(num_tokens):
                    self.inter_token_s.observe((now_s - last_s) / num_tokens)
        if request.is_finished:
            self.finished.labels(request.finish_reason).inc()
            self.preemptions.inc(request.num_preemptions)
            if request.started_s:
                self.cache_queries.inc(len(request.prompt_token_ids))
                self.cache_hits.inc(request.num_cached_tokens)
            self.latency_s.observe(now_s - arrived_s)
            if len(request.output_token_ids) > 1:
                mean_s = (now_s - request.prefilled_s) / (len(request.output_token_ids) - 1)
                self.request_token_s.observe(mean_s)

    def round_done(self, ranks: Sequence[int]) -> None:
        """Record one sequence's round. ranks: of each accepted draft, see RowResult."""
        accepted = len(ranks)
        self._num_rounds += 1
        self._num_accepted += accepted
        self.rounds.inc()
        self.accepted_tokens.inc(accepted)
        self.accept_length.observe(accepted + 1)
        for depth, rank in enumerate(ranks):
            self.accepted_at_depth.labels(str(depth)).inc()
            self.accepted_of_rank.labels(str(depth), str(rank)).inc()

    def launched(self, plan: StepPlan) -> None:
        """Record the trees of a step."""
        largest = self._tree_sizes[plan.shape]
        for row in plan.decodes:
            size = min(largest, row.node_limit)
            self.tree_size.observe(size)
            self.draft_tokens.inc(size - 1)

    def mean_accept_length(self) -> float:
        """Tokens a round over all rounds so far, the bonus token counted; 1 before the first."""
        return 1 + self._num_accepted / self._num_rounds if self._num_rounds else 1.0

    def text(self) -> bytes:
        """The page that is scraped."""
        return generate_latest(self.registry)


class _WatchedRunner:
    """A runner whose launches and results are counted."""

    def __init__(self, runner: Runner, metrics: Metrics):
        self._runner = runner
        self._metrics = metrics

    def launch(self, plan: StepPlan) -> Any:
        self._metrics.launched(plan)
        return self._runner.launch(plan)

    def collect(self, ticket: Any) -> StepResult:
        result = self._runner.collect(ticket)
        for row in result.rows:
            if row.is_round and not row.has_nan and result.overflow is None:
                self._metrics.round_done(row.ranks)
        return result


def _shapes(speculative: SpeculativeConfig | None) -> tuple[SpeculativeConfig | None, ...]:
    return (None,) if speculative is None else offered_shapes(speculative)
