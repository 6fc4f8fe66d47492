# SPDX-License-Identifier: Apache-2.0
"""The scheduler's state in Prometheus' terms: ``war_sched_*``, with replicas and reasons as labels.

Counts are cumulative over the run and hold training and validation alike, as the engines' own do; per step, and apart,
they are logged as ``war/sched/...``.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from war_rl.rollout.scheduler import GlobalScheduler
from war_rl.rollout.stats import QUEUE_BOUNDS

PREFIX = "war_sched_"

GAUGES = {
    "sched/waiting": ("waiting_turns", "turns that wait in the router"),
    "sched/trajectories": ("live_trajectories", "trajectories that have begun and not ended"),
    "sched/replicas": ("replicas", "replicas that the router knows"),
    "sched/tool_seconds": ("tool_seconds", "usual time between two turns of a trajectory"),
}
"""Key of ``GlobalScheduler.counters()`` -> name after :data:`PREFIX`, and meaning."""

REPLICA_GAUGES = {
    "running": ("running_turns", "turns that run on the replica", 1.0),
    "admitted": ("admitted_trajectories", "trajectories that live on the replica", 1.0),
    "resident_tokens": ("resident_tokens", "KV tokens believed to be in use or to serve a hit", 1.0),
    "kv_admitted": ("kv_promised_tokens", "KV tokens that its trajectories are expected to need", 1.0),
    "kv_capacity": ("kv_capacity_tokens", "KV tokens that may be promised; 0 without a bound", 1.0),
    "draining": ("draining", "1 while no turn starts there", 1.0),
    "prefill_tokens_per_s": ("prefill_tokens_per_second", "fitted speed of computing prompts", 1.0),
    "decode_ms": ("decode_seconds_per_token", "fitted, of a turn that runs alone", 1e-3),
    "interference_ms": ("interference_seconds_per_token", "fitted, added by each further running turn", 1e-3),
}
"""Last part of ``sched/replica/<id>/...`` -> name, meaning, and factor to the base unit; label ``replica``."""

COUNTERS = {
    "sched/held_turns": ("held_turns", "turns that had to wait"),
    "sched/migrations": ("migrations", "turns placed elsewhere than their trajectory's last one"),
    "sched/migration_seconds": ("migration_prefill_seconds", "prefill that migrations cost, by the scheduler's price"),
    "sched/preemptions": ("preemptions", "preemptions that engines reported"),
    "sched/lost_turns": ("lost_turns", "turns whose replica was lost while they ran"),
    "sched/lost_replicas": ("lost_replicas", "replicas lost"),
    "sched/cancelled_turns": ("cancelled_turns", "turns given up by their client"),
    "sched/dead_clients": ("dead_clients", "clients whose lease ran out"),
    "sched/finished_trajectories": ("finished_trajectories", "trajectories that ended"),
    "sched/abandoned_trajectories": ("abandoned_trajectories", "trajectories whose end nobody told"),
    "sched/unknown_releases": ("unknown_releases", "releases of turns that the router did not know"),
    "sched/replica_resized": ("replica_resizes", "replicas that came back with another cache"),
    "sched/residency_evicted_blocks": ("evicted_blocks", "KV blocks believed to be evicted"),
    "sched/residency_divergences": ("divergences", "prompts that did not continue with their trajectory's text"),
    "sched/residency_corrections": ("residency_corrections", "reports of fewer cached tokens than predicted"),
    "sched/reported_prompt_tokens": ("prompt_tokens", "prompt tokens of turns whose cached tokens were reported"),
    "sched/reported_cached_tokens": ("cached_tokens", "those of them that were cached, as engines reported"),
    "sched/predicted_cached_tokens": ("predicted_cached_tokens", "the same, as the scheduler had predicted"),
    "sched/residency_error_tokens": ("residency_error_tokens", "absolute difference of the two, summed over turns"),
}
"""Key -> name before Prometheus' ``_total``, and meaning."""

PLACEMENTS, POLICY, QUEUE = "placements", "policy", "queue_seconds"
_ABOUT_PLACEMENTS = "turns placed, by the scheduler's reason"
_ABOUT_POLICY = "what the scheduling policy says of itself"
_ABOUT_QUEUE = "time from a turn's arrival to its placement"


@dataclass(frozen=True)
class State:
    """One look at a scheduler: its counters, and its queue times by bucket with their sum in seconds."""

    counters: Mapping[str, float]
    queue_counts: tuple[int, ...]
    queue_total: float


def look(scheduler: GlobalScheduler) -> State:
    """The state now; to be called where the scheduler's events are handled."""
    times = scheduler.queue_times
    return State(scheduler.counters(), tuple(times.counts), times.total)


class SchedulerCollector(Collector):
    """Asks for the state at each scrape. ``state`` may be called from any thread."""

    def __init__(self, state: Callable[[], State]) -> None:
        self._state = state

    def describe(self) -> Iterable[Metric]:
        """Nothing: names are not checked against others', and nothing is asked before the first scrape."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """All families; a count that has not happened yet is 0, a replica that is not there has no sample."""
        state = self._state()
        values = state.counters
        for key, (name, about) in GAUGES.items():
            yield GaugeMetricFamily(PREFIX + name, about, value=values.get(key, 0.0))
        for key, (name, about) in COUNTERS.items():
            yield CounterMetricFamily(PREFIX + name, about, value=values.get(key, 0.0))
        yield from _by_replica(values)
        placements = CounterMetricFamily(PREFIX + PLACEMENTS, _ABOUT_PLACEMENTS, labels=["reason"])
        yield _labelled(placements, "reason", values)
        yield _labelled(GaugeMetricFamily(PREFIX + POLICY, _ABOUT_POLICY, labels=["name"]), "policy", values)
        yield _queue(state)


def _by_replica(values: Mapping[str, float]) -> Iterator[Metric]:
    families = {
        part: GaugeMetricFamily(PREFIX + name, about, labels=["replica"])
        for part, (name, about, _) in REPLICA_GAUGES.items()
    }
    for key, value in values.items():
        if key.startswith("sched/replica/"):
            # Ids are addresses, which may hold slashes (http://...).
            replica, _, part = key.removeprefix("sched/replica/").rpartition("/")
            families[part].add_metric([replica], value * REPLICA_GAUGES[part][2])
    yield from families.values()


def _labelled(family: CounterMetricFamily | GaugeMetricFamily, room: str, values: Mapping[str, float]) -> Metric:
    """``family`` with one sample for each ``sched/<room>/<label>``."""
    for key, value in values.items():
        if key.startswith(f"sched/{room}/"):
            family.add_metric([key.removeprefix(f"sched/{room}/")], value)
    return family


def _queue(state: State) -> Metric:
    buckets, total = [], 0
    for bound, count in zip([*map(str, QUEUE_BOUNDS), "+Inf"], state.queue_counts, strict=True):
        total += count
        buckets.append((bound, float(total)))
    return HistogramMetricFamily(PREFIX + QUEUE, _ABOUT_QUEUE, buckets=buckets, sum_value=state.queue_total)


def names() -> set[str]:
    """Every series name that the collector can expose."""
    plain = [*(name for name, _ in GAUGES.values()), *(name for name, _, _ in REPLICA_GAUGES.values()), POLICY]
    counted = [f"{name}_total" for name in (*(name for name, _ in COUNTERS.values()), PLACEMENTS)]
    return {PREFIX + name for name in (*plain, *counted, *(f"{QUEUE}_{part}" for part in ("bucket", "count", "sum")))}


def serve(state: Callable[[], State], host: str) -> str:
    """Serve ``/metrics`` on a free port of ``host``, and of no other address, from a thread until the process ends.

    Returns:
        ``host:port``, as Prometheus wants it.
    """
    registry = CollectorRegistry()
    registry.register(SchedulerCollector(state))
    server, _ = start_http_server(0, addr=host, registry=registry)
    name = f"[{host}]" if server.address_family == socket.AF_INET6 else host
    return f"{name}:{server.server_port}"
