# SPDX-License-Identifier: Apache-2.0
"""The router's own flat values for others, those of its scheduler left out (:mod:`war_rl.trainers.prometheus`): as
Prometheus text, and as the values of one step."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

_SESSION = "router/session_by/"

GAUGES = frozenset(
    {"router/sessions", "router/inflight", "router/workers", "router/workers_healthy"}
    | {"corpus/wanted", "corpus/wanted_tokens", "corpus/wanted_documents", "corpus/server_tokens_max"}
    | {"corpus/servers_supported", "corpus/servers_unsupported"}
)
"""Values that are as they are at the moment; all others of the router and the feed only grow."""


class StepValues:
    """Growing values as their growth since they were last taken, gauges as they are."""

    def __init__(self) -> None:
        self._before: dict[str, float] = {}

    def take(self, values: Mapping[str, float]) -> dict[str, float]:
        before, self._before = self._before, dict(values)
        return {k: v if k in GAUGES else v - before.get(k, 0.0) for k, v in values.items()}


class StatsCollector(Collector):
    """Reads the values at each scrape.

    Values are exposed as gauges, counters among them included: their names are those of the JSON statistics.
    """

    def __init__(self, values: Callable[[], Mapping[str, float]]) -> None:
        self._values = values

    def describe(self) -> Iterator[GaugeMetricFamily]:
        yield from ()

    def collect(self) -> Iterator[GaugeMetricFamily]:
        families: dict[str, GaugeMetricFamily] = {}
        for key, value in sorted(self._values().items()):
            name, label, of = key, "", ""
            if key.startswith(_SESSION):
                name, label, of = "router/sessions_found", "by", key[len(_SESSION) :]
            metric = "war_rl_" + re.sub(r"[^a-zA-Z0-9_]", "_", name)
            if metric not in families:
                families[metric] = GaugeMetricFamily(metric, name, labels=[label] if label else [])
            families[metric].add_metric([of] if label else [], value)
        yield from families.values()


def exposition(registry: CollectorRegistry) -> bytes:
    """Prometheus' text format."""
    return generate_latest(registry)
