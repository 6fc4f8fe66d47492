# SPDX-License-Identifier: Apache-2.0
"""The router's flat values as Prometheus text. ``sched/replica/<id>/<value>`` becomes a label, not a name."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

_REPLICA = "sched/replica/"
_SESSION = "router/session_by/"


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
            if key.startswith(_REPLICA):
                of, _, name = key[len(_REPLICA) :].rpartition("/")
                name, label = f"sched/replica_{name}", "worker"
            elif key.startswith(_SESSION):
                name, label, of = "router/sessions_found", "by", key[len(_SESSION) :]
            metric = "war_rl_" + re.sub(r"[^a-zA-Z0-9_]", "_", name)
            if metric not in families:
                families[metric] = GaugeMetricFamily(metric, name, labels=[label] if label else [])
            families[metric].add_metric([of] if label else [], value)
        yield from families.values()


def exposition(registry: CollectorRegistry) -> bytes:
    """Prometheus' text format."""
    return generate_latest(registry)
