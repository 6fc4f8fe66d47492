# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import asyncio

import pytest

from war_rl.config import SchedulerConfig
from war_rl.rollout.scheduler import GlobalScheduler, ReplicaInfo
from war_rl.trainers.shell import LeaseExpired, NoReplicaError, SchedulerShell
from war_rl.types import TrajectoryId, TurnRequest, TurnResult


def shell(policy: str = "cost", kv_tokens: int = 200) -> SchedulerShell:
    made = SchedulerShell(GlobalScheduler(SchedulerConfig(policy=policy)))
    made.add(ReplicaInfo("r", kv_tokens, 16))
    return made


def turn(number: int) -> TurnRequest:
    return TurnRequest(f"t{number}", TrajectoryId("g", number, 0), 0, 150)


async def blocked(made: SchedulerShell, count: int = 3) -> list[asyncio.Task]:
    """The first turn runs, the others wait for its KV cache."""
    await made.acquire(turn(0))
    tasks = [asyncio.create_task(made.acquire(turn(i))) for i in range(1, count + 1)]
    await asyncio.sleep(0)
    assert made.waiting == count
    return tasks


def test_a_waiting_turn_starts_when_another_trajectory_ends():
    async def main():
        made = shell()
        (task,) = await blocked(made, 1)
        made.release("t0", TurnResult(generated_tokens=5))
        made.finish(TrajectoryId("g", 0, 0))
        assert (await task)[0] == "r" and made.home("t1") == "r" and made.waiting == 0

    asyncio.run(main())


def test_losing_the_last_replica_fails_all_who_wait():
    async def main():
        made = shell()
        tasks = await blocked(made)
        assert made.lose("r", "killed") == ["t0"]
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(result, NoReplicaError) and "killed" in str(result)
        with pytest.raises(NoReplicaError):
            await made.acquire(turn(9))
        made.release("t0", None)
        assert made.inflight == 0 and made.scheduler.turn_count == 0

    asyncio.run(main())


def test_waiting_turns_can_be_turned_away_or_cancelled_and_nothing_is_left():
    async def main():
        made = shell()
        tasks = await blocked(made)
        tasks[0].cancel()
        await asyncio.gather(tasks[0], return_exceptions=True)
        assert made.waiting == 2
        assert made.turn_away(KeyError("no")) == 2
        results = await asyncio.gather(*tasks[1:], return_exceptions=True)
        assert [type(r) for r in results] == [KeyError, KeyError]
        made.release("t0", None)
        made.release("t0", None)
        assert made.inflight == 0 and made.scheduler.turn_count == 0

    asyncio.run(main())


def test_a_key_cannot_be_used_twice_at_once():
    async def main():
        made = shell()
        await made.acquire(turn(0))
        with pytest.raises(ValueError, match="submitted before"):
            await made.acquire(turn(0))
        assert made.inflight == 1 and made.home("t0") == "r"

    asyncio.run(main())


class Clock:
    """A clock that the test moves."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def leased(lease_s: float = 10.0, **config) -> tuple[SchedulerShell, Clock]:
    clock = Clock()
    made = SchedulerShell(GlobalScheduler(SchedulerConfig(lease_s=lease_s, **config)), clock=clock)
    made.add(ReplicaInfo("r", 200, 16))
    return made, clock


def test_what_a_silent_client_holds_goes_to_others():
    async def main():
        made, clock = leased()
        await made.acquire(turn(0), "dead")
        alive = asyncio.create_task(made.acquire(turn(1), "alive"))
        dying = asyncio.create_task(made.acquire(turn(2), "dead"))
        await asyncio.sleep(0)
        assert made.waiting == 2
        clock.now = 9.0
        made.renew("alive")
        made._decide(clock.now)
        await asyncio.sleep(0)
        assert made.waiting == 2, "a lease holds for its whole length"
        clock.now = 12.0
        made._decide(clock.now)
        assert (await alive)[0] == "r"
        with pytest.raises(LeaseExpired):
            await dying
        made.release("t0", TurnResult(generated_tokens=1))  # it was not dead after all: harmless
        assert made.inflight == 1 and made.home("t1") == "r"
        # It asks again under the same name, and is served when there is room.
        again = asyncio.create_task(made.acquire(turn(2), "dead"))
        await asyncio.sleep(0)
        made.release("t1", TurnResult(generated_tokens=1))
        made.finish(TrajectoryId("g", 1, 0))
        assert (await again)[0] == "r"

    asyncio.run(main())


def test_the_end_of_a_lease_wakes_the_router_by_itself():
    async def main():
        made = SchedulerShell(GlobalScheduler(SchedulerConfig(lease_s=0.05)))
        made.add(ReplicaInfo("r", 200, 16))
        await made.acquire(turn(0), "dead")
        assert (await asyncio.wait_for(made.acquire(turn(1)), 5.0))[0] == "r"

    asyncio.run(main())


def test_without_a_lease_nothing_expires_and_a_client_can_still_be_released():
    async def main():
        made, clock = leased(lease_s=0.0)
        await made.acquire(turn(0), "c")
        other = asyncio.create_task(made.acquire(turn(1)))
        clock.now = 1e6
        made._decide(clock.now)
        await asyncio.sleep(0)
        assert not other.done()
        assert made.release_client("c") == ["t0"]
        assert (await other)[0] == "r" and made.inflight == 1

    asyncio.run(main())


def test_a_draining_replica_starts_nothing_and_a_new_one_takes_what_waits():
    async def main():
        made = shell()
        tasks = await blocked(made, 4)
        made.add(ReplicaInfo("late", 200, 16))
        await asyncio.sleep(0)
        assert [t.result()[0] for t in tasks if t.done()] == ["late"]
        made.drain("r")
        made.release("t0", TurnResult(generated_tokens=5))
        made.finish(TrajectoryId("g", 0, 0))
        await asyncio.sleep(0)
        assert sum(t.done() for t in tasks) == 1 and made.running() == {"r": 0, "late": 1}
        made.add(ReplicaInfo("r", 200, 16))
        await asyncio.sleep(0)
        assert sum(t.done() for t in tasks) == 2 and made.running() == {"r": 1, "late": 1}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(main())


def test_a_lost_replicas_turns_run_elsewhere():
    async def main():
        made = shell(kv_tokens=20_000)
        made.add(ReplicaInfo("other", 20_000, 16))
        homes = {f"t{i}": (await made.acquire(turn(i)))[0] for i in range(6)}
        lost = made.lose("r", "killed")
        assert sorted(lost) == sorted(k for k, home in homes.items() if home == "r") and lost
        for key in lost:
            made.release(key, TurnResult(error="connection lost"))
            assert (await made.acquire(turn(int(key[1:]))))[0] == "other"
        assert made.running() == {"other": 6}
        assert made.scheduler.take_step_stats(False)["sched/lost_turns"] == len(lost)

    asyncio.run(main())


def test_validation_leaves_the_training_statistics_alone():
    async def main():
        made, clock = leased(prior_turn_tokens=64.0)
        made.add(ReplicaInfo("r", 100_000, 16))
        for i in range(5):
            identity = TrajectoryId("v", i, 0, "p", validate=True)
            await made.acquire(TurnRequest(f"v{i}", identity, 0, 150))
            clock.now += 1.0
            made.release(f"v{i}", TurnResult(generated_tokens=900, cached_tokens=0, preemptions=2))
            made.finish(identity)
        assert made.scheduler.expected_output(turn(0)) == 64
        train = made.scheduler.take_step_stats(False)
        assert {k: v for k, v in train.items() if v} == {
            "sched/sticky_rate": 1.0,
            "sched/replica_tokens_max_over_mean": 1.0,
            "sched/replica_seconds_max_over_mean": 1.0,
        }
        assert made.scheduler.take_step_stats(True)["sched/preemptions"] == 10

    asyncio.run(main())


def test_every_decision_is_explained_in_the_log_on_request(caplog):
    async def main():
        made = shell()
        with caplog.at_level("DEBUG", logger="war_rl.decisions"):
            (task,) = await blocked(made, 1)
            made.release("t0", TurnResult(generated_tokens=5))
            made.finish(TrajectoryId("g", 0, 0))
            await task
        # What earlier tests left running may still have something to say.
        lines = [record.getMessage() for record in caplog.records if record.name == "war_rl.decisions"]
        assert lines[0].startswith("t0 -> r: first [r ")
        assert lines[1].startswith("t1 held: begins where its 150 prompt tokens")
        assert lines[2].startswith("t1 -> r: first [r ")

    asyncio.run(main())
