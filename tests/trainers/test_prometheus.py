# SPDX-License-Identifier: Apache-2.0
"""The scheduler's state as Prometheus reads it."""

from __future__ import annotations

import re
from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from war_rl.config import SchedulerConfig
from war_rl.rollout.scheduler import GlobalScheduler, ReplicaInfo
from war_rl.trainers.prometheus import COUNTERS, GAUGES, REPLICA_GAUGES, SchedulerCollector, look, names
from war_rl.types import TrajectoryId, TurnRequest, TurnResult

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def scrape(scheduler: GlobalScheduler) -> Samples:
    registry = CollectorRegistry()
    registry.register(SchedulerCollector(lambda: look(scheduler)))
    text = generate_latest(registry).decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples[f"war_sched_{name}", tuple(sorted(labels.items()))]


def turn(uid: str, number: int = 0, tokens: int = 160) -> TurnRequest:
    return TurnRequest(f"{uid}/{number}", TrajectoryId(uid, 0, 1), number, tokens)


def used() -> GlobalScheduler:
    """Two replicas with room for one trajectory each; three want to run, and the third waits a second for it."""
    prior = {"prior_turns": 1.0, "prior_turn_tokens": 16.0, "prior_context_tokens": 176.0}
    scheduler = GlobalScheduler(SchedulerConfig(admission_fill=0.75, **prior))
    for name in ("10.0.0.1:1", "http://b:2"):
        scheduler.add_replica(ReplicaInfo(name, 256, 16), 0.0)
    for uid in ("a", "b", "c"):
        scheduler.submit(turn(uid), 0.0)
    place(scheduler, 0.0)
    scheduler.release("a/0", TurnResult(generated_tokens=16, cached_tokens=32, preemptions=2, seconds=1.0), 1.0)
    scheduler.finish(TrajectoryId("a", 0, 1), 1.0)
    place(scheduler, 1.0)
    return scheduler


def place(scheduler: GlobalScheduler, now: float) -> None:
    for placement in scheduler.decide(now):
        scheduler.reserve(placement, now)


def test_state_and_counts() -> None:
    scheduler = used()
    scheduler.submit(turn("d"), 1.0)
    place(scheduler, 1.0)
    found = scrape(scheduler)
    replicas = ("10.0.0.1:1", "http://b:2")
    assert [value(found, "running_turns", replica=r) for r in replicas] == [1, 1]
    assert [value(found, "admitted_trajectories", replica=r) for r in replicas] == [1, 1]
    assert value(found, "waiting_turns") == 1 and value(found, "live_trajectories") == 3
    assert value(found, "replicas") == 2 and value(found, "draining", replica="http://b:2") == 0
    # Ten blocks of the prompt that runs, and those of the one that ended there.
    assert value(found, "resident_tokens", replica="http://b:2") >= 160
    assert value(found, "kv_promised_tokens", replica="10.0.0.1:1") > 0
    assert value(found, "kv_capacity_tokens", replica="10.0.0.1:1") == 0.75 * 256
    assert value(found, "decode_seconds_per_token", replica="10.0.0.1:1") < 1.0
    assert value(found, "placements_total", reason="first") == 3
    assert value(found, "held_turns_total") == 1 and value(found, "finished_trajectories_total") == 1
    assert value(found, "preemptions_total") == 2 and value(found, "cached_tokens_total") == 32
    assert value(found, "predicted_cached_tokens_total") == 0 and value(found, "residency_error_tokens_total") == 32
    assert value(found, "lost_replicas_total") == 0  # has not happened, and is there all the same


def test_queue_times_are_a_histogram() -> None:
    found = scrape(used())
    assert value(found, "queue_seconds_count") == 3 and value(found, "queue_seconds_sum") == 1.0
    buckets = {b: value(found, "queue_seconds_bucket", le=b) for b in ("0.01", "0.3", "1.0", "300.0", "+Inf")}
    assert buckets == {"0.01": 2, "0.3": 2, "1.0": 3, "300.0": 3, "+Inf": 3}


def test_a_lost_replica_has_no_samples() -> None:
    scheduler = used()
    scheduler.remove_replica("http://b:2", 2.0)
    found = scrape(scheduler)
    assert {dict(labels).get("replica") for _, labels in found} == {None, "10.0.0.1:1"}
    assert value(found, "lost_replicas_total") == 1 and value(found, "lost_turns_total") == 1


def test_every_value_of_the_scheduler_is_exposed_and_every_name_is_listed() -> None:
    scheduler = used()
    for policy in ("war", "cache_aware"):
        other = GlobalScheduler(SchedulerConfig(policy=policy))
        other.add_replica(ReplicaInfo("r", 256, 16), 0.0)
        assert {name for name, _ in scrape(other)} <= names()
    # Told otherwise: the sum of the placements by reason, and of the replicas' turns and trajectories.
    known = {"sched/placements", "sched/running", "sched/admitted", *GAUGES, *COUNTERS}
    for key in scheduler.counters():
        _, room, *rest = key.split("/")
        assert key in known or room in ("reason", "policy") or (room == "replica" and rest[-1] in REPLICA_GAUGES), key
    assert {name for name, _ in scrape(scheduler)} <= names()
    assert not {name for name in names() if not name.startswith("war_sched_")}


def test_the_war_policy_tells_of_itself() -> None:
    scheduler = GlobalScheduler(SchedulerConfig(policy="war"))
    scheduler.add_replica(ReplicaInfo("r", 256, 16), 0.0)
    told = scheduler.policy.gauges()
    found = scrape(scheduler)
    assert {dict(labels)["name"]: v for (name, labels), v in found.items() if name == "war_sched_policy"} == told


def test_every_name_is_documented() -> None:
    page = (Path(__file__).parents[2] / "docs" / "monitoring.md").read_text()
    bare = {re.sub(r"(queue_seconds)_(bucket|count|sum)$", r"\1", name) for name in names()}
    assert not {name for name in bare if f"`{name}`" not in page}
    assert not set(re.findall(r"`(war_sched_\w+)`", page)) - bare
