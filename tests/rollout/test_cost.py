# SPDX-License-Identifier: Apache-2.0
"""Online fit of a replica's speeds."""

import random

import pytest

from war_rl.config import SchedulerConfig
from war_rl.rollout.cost import OwnRates, RatePriors, ReplicaRates
from war_rl.rollout.scheduler import GlobalScheduler, ReplicaInfo
from war_rl.types import TrajectoryId, TurnRequest, TurnResult

PRIORS = RatePriors(4000.0, 0.025, 0.0015, 0.98)


def turns(seed, prefill, decode, interference, noise, count):
    rng = random.Random(seed)
    for _ in range(count):
        computed, generated, others = rng.randint(0, 4000), rng.randint(5, 300), rng.uniform(0, 12)
        seconds = computed / prefill + generated * (decode + interference * others)
        yield computed, generated, others, seconds * rng.uniform(1 - noise, 1 + noise)


@pytest.mark.parametrize("prefill, decode, interference", [(1200.0, 0.023, 0.0019), (40_000.0, 0.012, 0.0001)])
def test_rates_are_recovered_from_noisy_turns(prefill, decode, interference):
    rates = ReplicaRates(PRIORS)
    for turn in turns(1, prefill, decode, interference, 0.1, 300):
        rates.observe(*turn)
    assert rates.prefill_tokens_per_s == pytest.approx(prefill, rel=0.25)
    assert rates.decode == pytest.approx(decode, rel=0.15)
    assert rates.interference == pytest.approx(interference, rel=0.6)


def test_a_change_of_speed_is_followed():
    rates = ReplicaRates(PRIORS)
    for turn in turns(1, 4000.0, 0.02, 0.001, 0.05, 200):
        rates.observe(*turn)
    for turn in turns(2, 4000.0, 0.06, 0.001, 0.05, 300):
        rates.observe(*turn)
    assert rates.decode == pytest.approx(0.06, rel=0.2)


def test_garbage_is_survived():
    rates = ReplicaRates(PRIORS)
    for seconds in (0.0, -1.0, 1e9, 1e-9, 5.0):
        rates.observe(1000, 100, 3.0, seconds)
    rates.observe(0, 0, 0.0, 1.0)
    for _ in range(5000):
        rates.observe(0, 100, 0.0, 2.5)  # two directions are never excited
    assert rates.decode == pytest.approx(0.025, rel=0.05)
    assert 0 < rates.prefill < 1 and 0 < rates.interference < 10
    for turn in turns(3, 1000.0, 0.025, 0.002, 0.05, 200):
        rates.observe(*turn)
    assert rates.prefill_tokens_per_s == pytest.approx(1000.0, rel=0.25)


def test_one_replica_that_is_slower_is_scaled_and_noise_is_not():
    fleet, slow, noisy = ReplicaRates(PRIORS), OwnRates(), OwnRates()
    believed = {"slow": fleet, "noisy": fleet}
    for i, (a, b) in enumerate(
        zip(turns(1, 4e3, 0.02, 0.001, 0.3, 200), turns(2, 4e3, 0.02, 0.001, 0.3, 200), strict=True)
    ):
        believed["noisy"] = noisy.observe(fleet, *a)
        believed["slow"] = slow.observe(fleet, *b[:3], 2.0 * b[3])
        if i < 20:
            assert believed["slow"] is fleet, "a few turns say nothing"
        fleet.observe(*a)
    assert believed["noisy"] is fleet
    assert believed["slow"].decode == pytest.approx(2.0 * fleet.decode, rel=0.2)


def test_a_short_turn_that_waited_for_others_does_not_bend_the_fit():
    rates = ReplicaRates(PRIORS)
    for turn in turns(1, 4000.0, 0.025, 0.0015, 0.1, 10):
        rates.observe(*turn)
    rates.observe(0, 1, 7.0, 0.6)  # one token beside seven others, and half a second of somebody's prefill
    assert rates.interference < 0.01


def test_what_a_full_engine_lets_a_turn_wait_is_no_speed():
    def speed(seconds, queued):
        scheduler = GlobalScheduler(SchedulerConfig())
        scheduler.add_replica(ReplicaInfo("r", 0, 16), 0.0)
        for number in range(20):
            now, turn = 100.0 * number, TurnRequest(f"t{number}", TrajectoryId(f"t{number}", 0, 1), 0, 400)
            scheduler.submit(turn, now)
            for placement in scheduler.decide(now):
                scheduler.reserve(placement, now)
            result = TurnResult(50, 0, 0, seconds, engine_queue_seconds=queued)
            scheduler.release(turn.key, result, now + seconds)
        return scheduler.counters()["sched/replica/r/prefill_tokens_per_s"]

    assert speed(31.5, 30.0) == pytest.approx(speed(1.5, 0.0))
    assert speed(31.5, 0.0) < 0.5 * speed(1.5, 0.0)
