# SPDX-License-Identifier: Apache-2.0
"""Both ends of the line between a client process and the router, over calls that keep no order."""

from __future__ import annotations

import asyncio
import random

import pytest
from ray.exceptions import RayActorError

from tests.trainers.test_shell_many import nothing_is_held
from tests.trainers.verl.nearby import Actor
from war_rl.config import WarConfig, to_dict
from war_rl.trainers.shell import LeaseExpired, NoReplicaError
from war_rl.trainers.verl.exchange import Exchange
from war_rl.trainers.verl.link import RouterLink
from war_rl.trainers.verl.router import Router, RouterLost
from war_rl.types import TrajectoryId, TurnRequest, TurnResult

DONE = TurnResult(generated_tokens=5, seconds=0.01)


def make(kv_tokens: int = 10_000, servers: int = 1) -> Router:
    handles = {f"s{i}": f"handle{i}" for i in range(servers)}
    router = Router(handles)
    info = {"kv_tokens": kv_tokens, "block_size": 16, "max_running": 64}
    router.configure(to_dict(WarConfig()), dict.fromkeys(handles, info))
    return router


def turn(session: int, number: int = 0, tokens: int = 150) -> TurnRequest:
    return TurnRequest(f"{session}/{number}", TrajectoryId("g", session, 1), number, tokens)


async def passes(count: int = 30) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def held(link: RouterLink, count: int) -> list[asyncio.Task]:
    """The first turn runs, the others wait for its KV cache."""
    await link.acquire(turn(0))
    tasks = [asyncio.create_task(link.acquire(turn(i))) for i in range(1, count + 1)]
    await passes()
    assert not any(task.done() for task in tasks)
    return tasks


@pytest.mark.parametrize("seed", range(5))
def test_whatever_order_calls_arrive_in_nothing_is_left(seed):
    """A trajectory's end that overtook its last turn's would bring the turn's trajectory back to life."""

    async def main() -> None:
        router = make(kv_tokens=4_000, servers=2)
        actor, rng = Actor(router, late=12, seed=seed), random.Random(seed)
        links = [RouterLink(actor, f"client{i}") for i in range(3)]

        async def trajectory(i: int) -> None:
            link, tokens = links[i % 3], rng.randint(20, 700)
            try:
                for number in range(rng.randint(1, 4)):
                    request, result = turn(i, number, tokens), None
                    try:
                        await link.acquire(request)
                        await passes(rng.randint(0, 3))
                        result = DONE
                    finally:
                        link.release(request.key, result)
                    tokens += 60
            finally:
                link.finish(TrajectoryId("g", i, 1))

        tasks = [asyncio.create_task(trajectory(i)) for i in range(200)]
        await passes(5)
        for task in rng.sample(tasks, 60):
            task.cancel()
            await passes(rng.randint(0, 2))
        results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 60.0)
        assert sum(result is None for result in results) >= 140
        assert all(result is None or isinstance(result, asyncio.CancelledError) for result in results)
        for link in links:
            await link.flush()
        assert "sched/unknown_releases" not in router.counters()
        assert nothing_is_held(router._shell)
        assert not any(box.grants for box in router._exchange._boxes.values())

    asyncio.run(main())


def test_what_happens_at_one_time_is_one_message():
    async def main() -> None:
        actor = Actor(make(kv_tokens=1_000_000))
        link = RouterLink(actor, "c")
        await asyncio.gather(*(link.acquire(turn(i, tokens=16)) for i in range(50)))
        for i in range(50):
            link.release(f"{i}/0", DONE)
            link.finish(TrajectoryId("g", i, 1))
        await link.flush()
        assert actor.calls == ["exchange", "exchange"]
        assert link.counters["router_events"] == 150 and link.counters["router_asks"] == 50

    asyncio.run(main())


def test_held_turns_share_one_waiting_call_and_stop_nobody():
    async def main() -> None:
        router = make(kv_tokens=200)
        actor = Actor(router, late=3)
        link = RouterLink(actor, "c")
        tasks = await held(link, 20)
        assert actor.calls.count("collect") == 1
        router.add_servers({"large": "later"})
        assert {(await task)[:2] for task in tasks} == {("large", "later")}
        assert actor.calls.count("collect") <= 2
        # While turns are held, others come and go.
        more = asyncio.create_task(link.acquire(turn(30, tokens=16)))
        assert (await more)[0] == "large"

    asyncio.run(main())


@pytest.mark.parametrize("when", [0, 1, 2, 4, 8])
def test_a_turn_cancelled_while_it_waits_leaves_nothing(when):
    async def main() -> None:
        router = make(kv_tokens=200)
        link = RouterLink(Actor(router, late=2, seed=when), "c")
        await link.acquire(turn(0))
        task = asyncio.create_task(link.acquire(turn(1)))
        await passes(when)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        link.release("1/0", None)
        link.release("0/0", DONE)
        for i in range(2):
            link.finish(TrajectoryId("g", i, 1))
        await link.flush()
        assert nothing_is_held(router._shell)
        assert not link._asked

    asyncio.run(main())


def test_a_client_taken_for_dead_hears_of_it_and_asks_again():
    async def main() -> None:
        router = make(kv_tokens=200)
        link = RouterLink(Actor(router, late=2), "c")
        (waiting,) = await held(link, 1)
        assert router.release_client("c") == 2
        with pytest.raises(LeaseExpired):
            await waiting
        assert (await link.acquire(turn(1)))[0] == "s0"
        link.release("0/0", DONE)  # it was not dead after all: harmless
        await link.flush()
        assert router.get_total_inflight() == 1

    asyncio.run(main())


def test_the_last_replicas_loss_fails_all_who_wait_and_who_come():
    async def main() -> None:
        router = make(kv_tokens=200)
        link = RouterLink(Actor(router, late=2), "c")
        tasks = await held(link, 3)
        router.lose_server("s0", "killed")
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(result, NoReplicaError) and "killed" in str(result)
        with pytest.raises(NoReplicaError):
            await link.acquire(turn(7))
        for i in (*range(4), 7):
            link.release(f"{i}/0", TurnResult(error="no replica"))
            link.finish(TrajectoryId("g", i, 1))
        await link.flush()
        assert nothing_is_held(router._shell)

    asyncio.run(main())


def test_a_refused_turn_takes_no_other_with_it():
    async def main() -> None:
        router = make()
        first, second = (RouterLink(Actor(router), name) for name in ("c", "d"))
        await first.acquire(turn(0))
        results = await asyncio.gather(
            second.acquire(turn(0)), second.acquire(turn(1)), second.acquire(turn(1)), return_exceptions=True
        )
        assert isinstance(results[0], ValueError) and "submitted before" in str(results[0])
        assert results[1][0] == "s0"
        assert isinstance(results[2], ValueError) and "asked for before" in str(results[2])

    asyncio.run(main())


def test_a_replica_that_comes_back_has_a_new_handle():
    async def main() -> None:
        router = make()
        link = RouterLink(Actor(router), "c")
        assert (await link.acquire(turn(0)))[:2] == ("s0", "handle0")
        assert await link.drafting_servers() == {"s0": "handle0"}
        router.remove_servers(["s0"])
        router.add_servers({"s0": "another"})
        assert (await link.acquire(turn(1)))[:2] == ("s0", "another")
        assert await link.drafting_servers() == {"s0": "another"}

    asyncio.run(main())


def test_the_feed_learns_of_its_servers_before_any_turn():
    async def main() -> None:
        router = Router({"s0": "handle0", "s1": "handle1"})
        info = {"kv_tokens": 1000, "block_size": 16}
        router.configure(to_dict(WarConfig()), {"s0": info, "s1": {**info, "can_draft": False}})
        assert await RouterLink(Actor(router), "c").drafting_servers() == {"s0": "handle0"}

    asyncio.run(main())


class Dead:
    """An actor that has died."""

    def exchange(self, *args):
        raise RayActorError

    collect = exchange


def test_a_dead_router_is_named_to_all_who_wait_and_to_nobody_else():
    async def main() -> None:
        router = make(kv_tokens=200)
        actor = Actor(router)
        link = RouterLink(actor, "c")
        tasks = await held(link, 2)
        actor.target = Dead()
        link.release("0/0", DONE)
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(result, RouterLost) and "gone" in str(result)
        with pytest.raises(RouterLost):
            await link.acquire(turn(8))
        link.finish(TrajectoryId("g", 0, 1))
        await link.flush()

    asyncio.run(main())


def test_a_link_serves_one_loop_after_the_other():
    router = make(kv_tokens=200)
    link = RouterLink(Actor(router), "c")

    async def first() -> None:
        await link.acquire(turn(0))
        await link.flush()

    asyncio.run(first())

    async def second() -> None:
        link.release("0/0", DONE)
        link.finish(TrajectoryId("g", 0, 1))
        assert (await link.acquire(turn(5)))[0] == "s0"

    asyncio.run(second())


def test_a_second_waiting_call_takes_the_place_of_the_first():
    async def main() -> None:
        router = make(kv_tokens=200)
        exchange: Exchange = router._exchange
        link = RouterLink(Actor(router), "c")
        await link.acquire(turn(0))
        lost = asyncio.create_task(exchange.collect("c"))
        await passes(2)
        task = asyncio.create_task(link.acquire(turn(1)))
        await passes()
        assert await lost == []
        link.release("0/0", DONE)
        link.finish(TrajectoryId("g", 0, 1))
        assert (await task)[0] == "s0"

    asyncio.run(main())
