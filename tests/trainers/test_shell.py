# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import asyncio

import pytest

from war_rl.config import SchedulerConfig
from war_rl.rollout.scheduler import GlobalScheduler, ReplicaInfo
from war_rl.trainers.shell import NoReplicaError, SchedulerShell
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
