# SPDX-License-Identifier: Apache-2.0
"""The default policy must cost nothing where there is nothing to win: everything fits, and a plain balance is best."""

import pytest

from tests.rollout.engine_model import Load, Machine, Rollout
from war_rl.config import SchedulerConfig

CPU = Machine()
GPU = Machine(base=0.012, per_token=0.00003, kv_tokens=3_000_000)
SMALL_BATCH = Machine(base=0.012, per_token=0.0004, kv_tokens=3_000_000, max_running=8)

CASES = {
    "cpu": (CPU, Load(groups=2), 2),
    "cpu-no-tools": (CPU, Load(groups=2, tool=0.0), 2),
    "cpu-long-group": (CPU, Load(groups=4, output=40, long_group=4.0), 2),
    "gpu-large-groups": (GPU, Load(groups=4, n=16, turns=3, prompt=4000, output=80, env=300, tool=2.0), 4),
    "engine-batch-full": (SMALL_BATCH, Load(groups=8, n=4, turns=4, output=50), 2),
}


def play(policy, case, seed, steps=3):
    machine, load, replicas = CASES[case]
    rollout = Rollout(policy, machine, load, replicas, seed)
    return [rollout.step(number) for number in range(1, steps + 1)]


def test_the_default_is_cost():
    assert SchedulerConfig().policy == "cost"


@pytest.mark.parametrize("case", CASES)
def test_where_everything_fits_nothing_waits_moves_or_gets_slower(case):
    for seed in range(2):
        plain, cost = play("sticky_least_inflight", case, seed), play("cost", case, seed)
        for a, b in zip(plain, cost, strict=True):
            assert b["sched/queue_seconds_max"] == 0.0 and b["sched/waiting_max"] <= 1
            assert b["sched/migrations"] == 0 and b["sched/sticky_rate"] == 1.0
            if case != "gpu-large-groups":  # there a group's prompt is worth more than an even count
                assert b["most"] - b["least"] <= 2
            assert b["seconds"] <= 1.06 * a["seconds"]
        assert sum(s["seconds"] for s in cost) <= 1.01 * sum(s["seconds"] for s in plain)


def test_speeds_are_learned_as_they_are():
    machine, load, replicas = CASES["cpu"]
    rollout = Rollout("cost", machine, load, replicas, seed=8)
    for number in range(1, 4):
        rollout.step(number)
    for replica in rollout.scheduler._replicas.values():
        assert replica.rates.prefill == pytest.approx(machine.per_token, rel=0.25)
        assert replica.rates.decode == pytest.approx(machine.base + machine.per_token, rel=0.1)
        assert replica.rates.interference == pytest.approx(machine.per_token, rel=0.4)
