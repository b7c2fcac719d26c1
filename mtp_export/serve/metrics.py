"""Metrics under vLLM's names: what the engine counts, read when they are asked for, and times."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from mtp_export.busy_machine import processor_seconds
from mtp_runtime.engine import Engine
from mtp_runtime.request import Request

if TYPE_CHECKING:
    from mtp_kernels.decoder.compiled_cpu.expert_cache import ExpertCache

_LABELS = ("model_name", "engine")
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


class ServerMetrics:
    """Metrics of one server with one engine. experts: the model's cache of them, if it has one."""

    def __init__(self, engine: Engine, model_name: str, experts: ExpertCache | None = None) -> None:
        self.registry = CollectorRegistry()
        self.served = 0  # requests that ended by themselves, each choice of them for one
        self.registry.register(_EngineCounts(engine, model_name, experts))
        own = (model_name, "0")
        self._finished = self._counter("request_success", "Requests that ended.", "finished_reason")
        self._rejected = self._counter("admission_rejections", "Requests refused.", "reason")
        self._own = own
        self._first = self._seconds("time_to_first_token_seconds", "Arrival to first token.")
        self._between = self._seconds("inter_token_latency_seconds", "Time between tokens.")
        self._whole = self._seconds("e2e_request_latency_seconds", "Arrival to last token.")
        self._queued = self._seconds("request_queue_time_seconds", "Arrival to batch.")

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self.registry)

    def reject(self, reason: str) -> None:
        """Count a request that was refused for want of room."""
        self._rejected.labels(*self._own, reason).inc()

    def observe(self, request: Request, tokens: int, seconds: float) -> None:
        """Note new tokens of a request, and the seconds since those before them."""
        metrics = request.metrics
        if tokens and metrics.output_tokens == tokens:
            self._first.observe(metrics.time_to_first_token_seconds)
            self._queued.observe(metrics.admitted_seconds - metrics.arrival_seconds)
        elif tokens:
            self._between.observe(seconds)
        if request.finish_reason is not None:
            self._finished.labels(*self._own, request.finish_reason).inc()
        if request.finish_reason not in (None, "abort"):
            self.served += 1
            self._whole.observe(metrics.finished_seconds - metrics.arrival_seconds)

    def _counter(self, name: str, words: str, label: str) -> Counter:
        return Counter(f"vllm:{name}", words, (*_LABELS, label), registry=self.registry)

    def _seconds(self, name: str, words: str) -> Histogram:
        histogram = Histogram(
            f"vllm:{name}", words, _LABELS, registry=self.registry, buckets=_SECONDS
        )
        return histogram.labels(*self._own)


class _EngineCounts(Collector):
    """Counters and gauges that are the engine's own state."""

    def __init__(self, engine: Engine, model_name: str, experts: ExpertCache | None) -> None:
        self._engine, self._experts = engine, experts
        self._own = (model_name, "0")

    def collect(self) -> Iterator[Metric]:
        engine, totals = self._engine, self._engine.totals
        drafted, accepted = list(totals.drafted), list(totals.accepted)
        computed, waited = processor_seconds()
        used = 1 - engine.pages.free_pages / engine.pages.pages
        yield self._gauge("num_requests_running", "Requests in the batch.", engine.running)
        yield self._gauge("num_requests_waiting", "Requests in the queue.", engine.waiting)
        yield self._gauge("kv_cache_usage_perc", "Share of pages in use, 0 to 1.", used)
        for name, words, value in (
            ("prompt_tokens", "Tokens of admitted prompts.", totals.prompt_tokens),
            ("generation_tokens", "Generated tokens.", totals.output_tokens),
            ("num_preemptions", "Requests that lost their cache.", totals.preemptions),
            ("prefix_cache_queries", "Prompt tokens looked up.", totals.prompt_tokens),
            ("prefix_cache_hits", "Prompt tokens found.", totals.cached_tokens),
            ("spec_decode_num_drafts", "Verified blocks of drafts.", sum(drafted[:1])),
            ("spec_decode_num_draft_tokens", "Verified drafts.", sum(drafted)),
            ("spec_decode_num_accepted_tokens", "Accepted drafts.", sum(accepted)),
            ("processor_seconds", "Seconds that the server's threads computed.", computed),
            ("processor_wait_seconds", "Seconds that they waited for a processor.", waited),
            *self._expert_counts(),
        ):
            family = CounterMetricFamily(f"vllm:{name}", words, labels=_LABELS)
            family.add_metric(self._own, value)
            yield family
        yield self._by_position("spec_decode_num_draft_tokens_per_pos", "Verified drafts", drafted)
        yield self._by_position(
            "spec_decode_num_accepted_tokens_per_pos", "Accepted drafts", accepted
        )

    def _expert_counts(self) -> list[tuple[str, str, float]]:
        """Return the counts of a cache of routed experts; none without one."""
        if self._experts is None:
            return []
        counts = self._experts.counts
        return [
            ("expert_cache_queries", "Experts that passes asked layers for.", counts.requested),
            ("expert_cache_hits", "Those of them that were in memory.", counts.held),
            ("expert_cache_read_bytes", "Bytes of the others, as read.", counts.read_bytes),
            ("expert_cache_wait_seconds", "Computation waiting for them.", counts.waited_seconds),
        ]

    def _by_position(self, name: str, words: str, counts: list[int]) -> CounterMetricFamily:
        """Return a counter of drafts by position."""
        positions = CounterMetricFamily(
            f"vllm:{name}", f"{words} by position, from 0.", labels=(*_LABELS, "position")
        )
        for position, count in enumerate(counts):
            positions.add_metric((*self._own, str(position)), count)
        return positions

    def _gauge(self, name: str, words: str, value: float) -> GaugeMetricFamily:
        gauge = GaugeMetricFamily(f"vllm:{name}", words, labels=_LABELS)
        gauge.add_metric(self._own, value)
        return gauge
