"""Numbers for Prometheus: requests, tokens, times, and the state of the engine's pages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from quire.engine import Engine

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)

COUNTERS = {
    "submitted": "Answers that were asked for",
    "finished": "Answers that have ended, for any reason",
    "preempted": "Answers whose pages were taken away for a while",
    "steps": "Calls of the model",
    "prompt_tokens": "Tokens of prompts that were computed",
    "cached_tokens": "Tokens of prompts whose pages were found",
    "output_tokens": "Tokens that were sampled",
}
GAUGES = {
    "waiting": "Answers that wait for pages",
    "running": "Answers that are written",
    "pages": "Pages of keys and values",
    "free_pages": "Pages that hold nothing",
    "shared_pages": "Pages that are held more than once",
    "kept_pages": "Pages that are kept for later prompts",
    "num_bytes": "Memory of all pages",
}


class Metrics:
    """What a server counts. The front of several has no engine of its own."""

    def __init__(self, engine: Engine | None = None) -> None:
        self.registry = CollectorRegistry()
        common: dict[str, Any] = {"registry": self.registry}
        self.requests = Counter("quire_http_requests", "Responses", ["route", "status"], **common)
        self.answers = Counter(
            "quire_answers", "Answers that were sent whole", ["reason"], **common
        )
        self.ongoing = Gauge("quire_ongoing_answers", "Answers that run or wait", **common)
        self.refused = Counter("quire_refused", "Requests that found a full queue", **common)
        self.disconnected = Counter(
            "quire_disconnected", "Requests whose client went away", **common
        )
        self.first_token = Histogram(
            "quire_first_token_seconds", "Until the first token", buckets=SECONDS, **common
        )
        self.duration = Histogram(
            "quire_request_seconds", "Until the last token", buckets=SECONDS, **common
        )
        if engine is not None:
            self.registry.register(_EngineCollector(engine))

    def text(self) -> bytes:
        """Return all numbers in Prometheus' format."""
        text: bytes = generate_latest(self.registry)
        return text


class _EngineCollector:
    """Asks the engine when somebody wants to know."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        """Return the numbers of the engine."""
        now = self._engine.statistics()._asdict()
        for name, meaning in COUNTERS.items():
            yield CounterMetricFamily(f"quire_engine_{name}", meaning, value=now[name])
        for name, meaning in GAUGES.items():
            yield GaugeMetricFamily(f"quire_engine_{name}", meaning, value=now[name])


class _Given:
    """Families that were collected elsewhere."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        """Return the families."""
        return self._families


def written(found: Sequence[tuple[str, Sequence[Metric]]]) -> bytes:
    """Return the families of several servers in Prometheus' format, with the name of each."""
    merged: dict[str, Metric] = {}
    for name, families in found:
        for family in families:
            into = merged.setdefault(
                family.name, Metric(family.name, family.documentation, family.type)
            )
            for sample in family.samples:
                into.add_sample(sample.name, sample.labels | {"replica": name}, sample.value)
    registry = CollectorRegistry()
    registry.register(_Given(merged.values()))
    text: bytes = generate_latest(registry)
    return text
