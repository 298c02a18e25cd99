"""What the server counts, for Prometheus. Nothing here says who asked for what."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from fastweights.serve.worker import Worker

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class Metrics:
    """Counters of one server, in a registry of its own."""

    def __init__(self, worker: Worker) -> None:
        self._registry = registry = CollectorRegistry()
        self.requests = Counter(
            "fastweights_requests", "Requests by path and status.", ("path", "status"), registry=registry
        )
        self.request_seconds = Histogram(
            "fastweights_request_seconds", "Duration of requests.", ("path",), buckets=SECONDS, registry=registry
        )
        self.first_token_seconds = Histogram(
            "fastweights_first_token_seconds", "Time to the first token.", buckets=SECONDS, registry=registry
        )
        self.prompt_tokens = Counter("fastweights_prompt_tokens", "Tokens of prompts that were read", registry=registry)
        self.cached_tokens = Counter(
            "fastweights_cached_tokens", "Tokens of prompts that were in a stored state.", registry=registry
        )
        self.generated_tokens = Counter("fastweights_generated_tokens", "Tokens of answers.", registry=registry)
        registry.register(_WorkerGauges(worker))

    def text(self) -> bytes:
        """All values in Prometheus' format."""
        return generate_latest(self._registry)


class _WorkerGauges(Collector):
    """What the worker is doing when it is asked."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def collect(self) -> Iterator[Metric]:
        stats = self._worker.stats
        yield GaugeMetricFamily("fastweights_running", "Texts that are being generated.", stats.running)
        yield GaugeMetricFamily("fastweights_waiting", "Texts that wait for a slot.", stats.waiting)
        yield GaugeMetricFamily("fastweights_slots", "Texts that can be generated at once.", stats.slots)
