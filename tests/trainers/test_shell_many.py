# SPDX-License-Identifier: Apache-2.0
"""Two thousand turns under admission, with everything going wrong that can: nothing may be left held."""

from __future__ import annotations

import asyncio
import random

from war_rl.config import SchedulerConfig
from war_rl.rollout.scheduler import GlobalScheduler, ReplicaInfo
from war_rl.trainers.shell import LeaseExpired, NoReplicaError, SchedulerShell
from war_rl.types import TrajectoryId, TurnRequest, TurnResult

TRAJECTORIES = 2000
KV_TOKENS = 12_000


def nothing_is_held(shell: SchedulerShell) -> bool:
    scheduler = shell.scheduler
    replicas = scheduler._replicas.values()
    return (
        not (shell.inflight or shell.waiting or any(shell.running().values()) or shell._homes)
        and not (scheduler._turns or scheduler._trajectories or scheduler._groups or scheduler._clients)
        and len(scheduler.queue) == 0
        and all(r.numbers()[:5] == (0, 0, 0, 0, 0) and r.work == 0 and r.shared.tokens == 0 for r in replicas)
        and all(len(r.idle) == 0 and not r.residency._held and not r.residency._unnamed for r in replicas)
        and all(scheduler.take_step_stats(v)["sched/admitted"] == 0 for v in (False, True))
    )


class Storm:
    """Trajectories of several clients, each with a few turns; cancelled, killed and restarted at random."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.time = 0.0
        self.shell = SchedulerShell(GlobalScheduler(SchedulerConfig(max_wait_s=5.0)), clock=lambda: self.time)
        for name in ("r0", "r1", "r2"):
            self.shell.add(ReplicaInfo(name, KV_TOKENS, 16))
        self.finished = self.most_waiting = self.placed_again = 0
        self.lost: set[str] = set()

    async def turn(self, request: TurnRequest, client: str) -> None:
        """One turn as a client runs it: where its replica is lost, it asks again."""
        while True:
            home, _ = await self.shell.acquire(request, client)
            result: TurnResult | None = None
            try:
                for _ in range(self.random.randint(1, 4)):
                    await asyncio.sleep(0)
                    self.most_waiting = max(self.most_waiting, self.shell.waiting)
                if home not in self.lost:
                    result = TurnResult(generated_tokens=self.random.randint(1, 60), seconds=0.01)
                    return
                self.placed_again += 1
                result = TurnResult(error="lost")
            finally:
                self.shell.release(request.key, result)

    async def trajectory(self, number: int) -> None:
        client = f"client{number % 8}"
        identity = TrajectoryId(f"g{number // 8}", number % 8, 1, validate=number % 16 == 0)
        try:
            tokens = self.random.randint(20, 800)
            for n in range(self.random.randint(1, 3)):
                blocks = tuple((number // 8 << 20) + i if i < 1 else (number << 36) + i for i in range(tokens // 16))
                await self.turn(TurnRequest(f"{number}/{n}", identity, n, tokens, 64, blocks), client)
                tokens += 80
                await asyncio.sleep(0)
            self.finished += 1
        finally:
            self.shell.finish(identity)

    async def disturb(self, tasks: list[asyncio.Task[None]]) -> None:
        """Cancellations, a drain, a loss, a new replica and a client's death, while turns wait and run."""
        for task in self.random.sample(tasks, 500):
            task.cancel()
            if self.random.random() < 0.1:
                await asyncio.sleep(0)
        self.shell.drain("r1")
        await asyncio.sleep(0)
        self.lost.add("r0")
        self.shell.lose("r0", "killed")
        self.shell.add(ReplicaInfo("r3", KV_TOKENS, 16))
        self.shell.release_client("client5")
        for _ in range(20):
            self.time += 0.1
            await asyncio.sleep(0)
        self.shell.add(ReplicaInfo("r1", KV_TOKENS, 16))


def test_nothing_leaks_under_two_thousand_waiting_turns():
    async def main() -> None:
        storm = Storm(seed=1)
        tasks = [asyncio.create_task(storm.trajectory(i)) for i in range(TRAJECTORIES)]
        await asyncio.sleep(0)
        assert storm.shell.waiting > 1800
        await storm.disturb(tasks)
        while not all(task.done() for task in tasks):
            storm.time += 0.01
            await asyncio.sleep(0)
        failures = [t.exception() for t in tasks if not t.cancelled() and t.exception()]
        assert all(isinstance(e, LeaseExpired) for e in failures), failures[:3]
        assert len(failures) <= TRAJECTORIES // 8, "only the dead client's turns may fail"
        assert storm.finished > 1200 and storm.placed_again > 0
        counters = storm.shell.scheduler.counters()
        assert counters["sched/lost_replicas"] == 1 and counters["sched/dead_clients"] >= 1
        assert storm.shell.scheduler.turn_count == 0
        storm.shell.weights_updated(2)
        assert nothing_is_held(storm.shell)

    asyncio.run(main())


def test_losing_every_replica_leaves_nothing():
    async def main() -> None:
        storm = Storm(seed=2)
        tasks = [asyncio.create_task(storm.trajectory(i)) for i in range(TRAJECTORIES)]
        await asyncio.sleep(0)
        for name in ("r0", "r1", "r2"):
            storm.lost.add(name)
            storm.shell.lose(name, "killed")
        await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(task.exception(), NoReplicaError) for task in tasks)
        assert nothing_is_held(storm.shell)

    asyncio.run(main())
