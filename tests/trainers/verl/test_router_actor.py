# SPDX-License-Identifier: Apache-2.0
"""The router as a real Ray actor."""

from __future__ import annotations

import asyncio
import random
import time
import urllib.request
from types import SimpleNamespace

import pytest

from war_rl.trainers.verl.health import check_router
from war_rl.trainers.verl.link import RouterLink
from war_rl.trainers.verl.monitoring import add_router
from war_rl.trainers.verl.router import RouterLost
from war_rl.trainers.verl.router_load import measure, start_router
from war_rl.types import TrajectoryId, TurnRequest, TurnResult

pytestmark = pytest.mark.extended

TURNS = 2000


@pytest.fixture(scope="module")
def ray():
    ray = pytest.importorskip("ray")
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    yield ray
    ray.shutdown()


def test_nothing_leaks_under_two_thousand_waiting_turns(ray):
    router = start_router(kv_tokens=20_000)
    links, rng = [RouterLink(router, f"client{i}") for i in range(4)], random.Random(0)

    async def one(i: int) -> str:
        identity = TrajectoryId("g", i, 1)
        request, result = TurnRequest(f"{i}/0", identity, 0, rng.randint(1, 500), 64), None
        link = links[i % 4]
        try:
            home, _, _ = await link.acquire(request)
            await asyncio.sleep(rng.random() / 100)
            result = TurnResult(generated_tokens=5, seconds=0.01)
        finally:
            link.release(request.key, result)
            link.finish(identity)
        return str(home)

    async def main() -> None:
        tasks = [asyncio.ensure_future(one(i)) for i in range(TURNS)]
        while ray.get(router.snapshot.remote())["waiting"] < TURNS * 0.8:
            await asyncio.sleep(0.05)
        cancelled = set(rng.sample(range(TURNS), 500))
        for i in cancelled:
            tasks[i].cancel()
        results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 120.0)
        served = [r for r in results if isinstance(r, str)]
        assert len(served) >= TURNS - 500
        for link in links:
            await link.flush()

    asyncio.run(main())
    counters = ray.get(router.counters.remote())
    # Each trajectory has ended after its turn: of two thousand, Ray alone lets a hundred overtake.
    assert "sched/unknown_releases" not in counters
    names = ("sched/waiting", "sched/running", "sched/admitted", "sched/trajectories")
    assert {counters[name] for name in names} == {0.0}
    assert ray.get(router.get_total_inflight.remote()) == 0


def test_the_load_test_drives_what_it_says(ray):
    result = measure(start_router(), rate=100.0, seconds=1.0, prompt_tokens=256, clients=2)
    assert result["turns"] > 50 and 0.0 < result["trip_p50_ms"] <= result["trip_p99_ms"] <= result["trip_max_ms"]
    assert 0.0 < result["router"]["loop_cores"] < result["router"]["cores"] and len(result["clients"]) == 2
    assert result["bottleneck"] and 0.0 < result["floor_p50_ms"] <= result["floor_p99_ms"]


def test_a_router_that_is_killed_is_found_out(ray):
    router = start_router()
    check_router(router, 30.0)
    ray.kill(router)
    with pytest.raises(RouterLost, match="gone"):
        # ray.kill does not wait; until it is carried out, the router may answer.
        for _ in range(1000):
            check_router(router, 30.0)
            time.sleep(0.01)


def test_verl_has_prometheus_scrape_the_router_beside_the_engines(ray, tmp_path):
    yaml = pytest.importorskip("yaml")
    pytest.importorskip("verl")
    file = tmp_path / "metrics" / "prometheus.yml"
    # Nobody listens on the discard port: there is no Prometheus to be told.
    rollout = SimpleNamespace(name="war", prometheus=SimpleNamespace(enable=True, port=9, file=str(file)))
    address = add_router(rollout, ["10.0.0.1:80"], start_router())
    (job,) = (job for job in yaml.safe_load(file.read_text())["scrape_configs"] if job["job_name"] == "rollout")
    assert job["static_configs"] == [{"targets": ["10.0.0.1:80", address]}]
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10.0) as answer:
        assert "war_sched_waiting_turns 0.0" in answer.read().decode()
