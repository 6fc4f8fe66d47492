# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import asyncio
import urllib.request
from types import SimpleNamespace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.trainers.verl.nearby import Actor
from war_rl.config import WarConfig, to_dict
from war_rl.trainers.verl import monitoring
from war_rl.trainers.verl import router as router_module
from war_rl.trainers.verl.link import RouterLink
from war_rl.trainers.verl.router import Router, RouterLost
from war_rl.types import TrajectoryId, TurnRequest, TurnResult

INFO = {"kv_tokens": 10_000, "block_size": 16, "max_running": 16, "can_draft": True}


def make(n: int = 2) -> tuple[Router, RouterLink]:
    servers = {f"s{i}": f"handle{i}" for i in range(n)}
    router = Router(servers, {"router_class": "x"})
    router.configure(to_dict(WarConfig()), dict.fromkeys(servers, INFO))
    return router, RouterLink(Actor(router), "worker-1")


def turn(uid: str, session: int, number: int, tokens: int = 100) -> TurnRequest:
    return TurnRequest(f"{uid}/{session}/{number}", TrajectoryId(uid, session, 1), number, tokens)


def test_a_trajectory_stays_where_it_started_and_others_start_elsewhere():
    async def main():
        router, link = make()
        home, handle, _ = await link.acquire(turn("a", 0, 0, tokens=1000))
        assert handle == f"handle{home[1:]}"
        assert (await link.acquire(turn("b", 0, 0, tokens=10)))[0] != home
        for number in range(1, 4):
            link.release(f"a/0/{number - 1}", TurnResult(generated_tokens=10))
            assert (await link.acquire(turn("a", 0, number, tokens=1000 + number)))[0] == home
        assert router.take_step_stats(False)["sched/sticky_rate"] == 1.0

    asyncio.run(main())


def test_a_lost_replica_is_forgotten_and_its_late_releases_are_harmless():
    async def main():
        router, link = make()
        home, _, _ = await link.acquire(turn("a", 0, 0))
        router.lose_server(home, "killed")
        link.release("a/0/0", TurnResult(error="dead"))
        again, _, _ = await link.acquire(turn("a", 0, 1))
        assert again != home
        router.lose_server(again, "killed")
        with pytest.raises(RuntimeError, match="No available servers"):
            await link.acquire(turn("a", 0, 2))

    asyncio.run(main())


def test_the_protocol_of_verl_is_served():
    async def main():
        router, _ = make()
        first, _ = await router.acquire_server("r", prompt_ids=[1, 2, 3])
        second, _ = await router.acquire_server("r", prompt_ids=[1, 2, 3, 4])
        assert first == second
        assert router.get_status()["total_inflight"] == 2
        assert router.get_inflight_count(first) == 2
        for _ in range(2):
            router.release_server(first, "r")
        router.release_server(first, "r")
        assert router.get_total_inflight() == 0
        assert router.require_acquire_fields() == ["prompt_ids"]
        router.remove_servers([first])
        assert router.get_all_servers() == [s for s in ("s0", "s1") if s != first]
        router.add_servers({first: "again"})
        assert first in router.get_all_servers()
        assert "server_loads" in router.clear_sticky_cache()

    asyncio.run(main())


def test_settings_cannot_change_under_running_turns():
    async def main():
        router, link = make()
        await link.acquire(turn("a", 0, 0))
        with pytest.raises(RuntimeError, match="while turns are running"):
            router.configure(to_dict(WarConfig()), {})

    asyncio.run(main())


def test_a_router_that_was_started_again_stops_the_run_with_a_clear_message():
    async def main():
        router = Router({"s0": "handle"}, {})
        assert not router.is_configured()
        link = RouterLink(Actor(router), "worker-1")
        # What is over may be told: nobody waits for it.
        link.finish(TrajectoryId("a", 0, 1))
        await link.flush()
        with pytest.raises(RouterLost, match="started again"):
            await link.acquire(turn("a", 0, 0))
        # verl's own calls, which know no trajectories, need no memory.
        assert (await router.acquire_server("r"))[0] == "s0"

    asyncio.run(main())


def test_what_a_dead_client_held_is_free_and_a_drained_replica_rests():
    async def main():
        router, link = make()
        home, _, _ = await link.acquire(turn("a", 0, 0))
        assert router.release_client("worker-1") == 1 and router.get_total_inflight() == 0
        router.drain_server(home)
        for i in range(3):
            assert (await link.acquire(turn("b", i, 0)))[0] != home
        router.resume_server(home)
        assert (await link.acquire(turn("c", 0, 0)))[0] == home

    asyncio.run(main())


def test_a_server_that_says_nothing_of_itself_is_not_held_back():
    async def main():
        router, link = make(1)
        router.remove_servers(["s0"])
        router.add_servers({"new": "handle"})
        for i in range(100):
            assert (await asyncio.wait_for(link.acquire(turn("a", i, 0)), 5.0))[0] == "new"

    asyncio.run(main())


def test_prometheus_reads_the_state_over_http(monkeypatch):
    monkeypatch.setattr(router_module.ray.util, "get_node_ip_address", lambda: "127.0.0.1")

    async def main():
        router, link = make()
        home, _, _ = await link.acquire(turn("a", 0, 0))
        address = await router.serve_metrics()
        assert address.startswith("127.0.0.1:") and await router.serve_metrics() == address

        def get():
            with urllib.request.urlopen(f"http://{address}/metrics", timeout=10.0) as answer:
                return answer.read().decode()

        families = {f.name: f for f in text_string_to_metric_families(await asyncio.to_thread(get))}
        running = {s.labels["replica"]: s.value for s in families["war_sched_running_turns"].samples}
        assert running == {"s0": 0, "s1": 0} | {home: 1}

    asyncio.run(main())


def test_the_router_is_scraped_beside_the_engines_where_verls_option_is_on(monkeypatch):
    written = []
    monkeypatch.setattr(monitoring, "ray", SimpleNamespace(get=lambda value, timeout: value))
    router = SimpleNamespace(serve_metrics=SimpleNamespace(remote=lambda: "10.0.0.9:4711"))
    rollout = SimpleNamespace(name="war", prometheus=SimpleNamespace(enable=False))

    def add():
        return monitoring.add_router(rollout, ["10.0.0.1:80"], router, write=lambda *args: written.append(args))

    assert add() == "" and written == []
    rollout.prometheus.enable = True
    assert add() == "10.0.0.9:4711"
    assert written == [(rollout.prometheus, ["10.0.0.1:80", "10.0.0.9:4711"], "war")]
