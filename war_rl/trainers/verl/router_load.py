# SPDX-License-Identifier: Apache-2.0
"""How fast the router answers, and who is the bottleneck: ``python -m war_rl.trainers.verl.router_load --rate 500``.

An open loop of turns through a real router actor, from client processes of their own as verl's agent-loop workers are;
the engines are imagined. Turns come when they are due, whether or not earlier ones were answered: on average ``rate``
per second, and in the time of one trajectory's share at most twice as many turns as a trajectory has. A round trip is
the time from asking for a replica to having it, for turns that may start at once. ``floor_*`` are those of the same
turns to an actor that decides nothing, measured first: what Ray and the machine take. Starts a Ray of its own unless
one runs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import psutil

from war_rl.trainers.verl.lease import client_name
from war_rl.trainers.verl.link import RouterLink
from war_rl.trainers.verl.router import MAX_CALLS, Router
from war_rl.types import TrajectoryId, TurnRequest, TurnResult

BLOCK = 16
TURNS = 4
"""Turns of a trajectory."""
TURN_EVERY_S = 0.25
"""Between the starts of a trajectory's turns. Unit: seconds."""
RUN_S = (0.02, 0.1)
"""Shortest and longest time that a turn runs. Unit: seconds."""
WARMUP_S = 1.0
"""Before anything is measured. Unit: seconds."""
TICK_S = 0.01
"""Between two looks at how late an event loop is. Unit: seconds."""
BUSY = 0.85
"""An event loop that works this share of its time, or a machine that does, is a bottleneck."""


@dataclass(frozen=True)
class Plan:
    """The turns of one client process: ``rate`` per second for ``seconds`` (both after the warm-up)."""

    rate: float
    seconds: float
    prompt_tokens: int = 1024
    client: int = 0


class Watch:
    """What the process and the event loop on which this is made do until :meth:`stop`."""

    def __init__(self) -> None:
        self._late: list[float] = []
        self._began = (time.perf_counter(), time.process_time(), time.thread_time())
        self._ticker = asyncio.get_running_loop().create_task(self._tick())

    async def _tick(self) -> None:
        while True:
            due = time.perf_counter() + TICK_S
            await asyncio.sleep(TICK_S)
            self._late.append(time.perf_counter() - due)

    def stop(self) -> dict[str, float]:
        """``cores``: of the whole process, ``loop_cores``: of the loop's thread; ``lag_*``: how late timers were."""
        self._ticker.cancel()
        seconds, process, thread = (
            now - then
            for now, then in zip(
                (time.perf_counter(), time.process_time(), time.thread_time()), self._began, strict=True
            )
        )
        return {"cores": process / seconds, "loop_cores": thread / seconds, **quantiles("lag", self._late)}


class WatchedRouter(Router):
    """The router, and what it costs."""

    async def watch(self) -> None:
        """Start to measure."""
        self._watch = Watch()

    async def watched(self) -> dict[str, float]:
        """What :meth:`Watch.stop` says."""
        return self._watch.stop()


class Echo:
    """An actor that decides nothing: what remains of a round trip is Ray's and the machine's."""

    async def answer(self, client: str, request: TurnRequest) -> str:
        """The turn's key."""
        return request.key


class EchoLink:
    """A :class:`RouterLink` to an :class:`Echo`: one call for each turn, nothing for its end."""

    def __init__(self, echo: Any, client: str) -> None:
        self._echo, self._client = echo, client
        self.counters: dict[str, float] = {}

    async def acquire(self, request: TurnRequest) -> None:
        await self._echo.answer.remote(self._client, request)

    def release(self, key: str, result: TurnResult) -> None: ...

    def finish(self, trajectory: TrajectoryId) -> None: ...

    async def flush(self) -> None: ...


class LoadClient:
    """One client process."""

    async def run(self, router: Any, plan: Plan, echo: bool = False) -> dict[str, Any]:
        """Play the plan. Returns ``trips`` and ``late`` (seconds), ``watch``, and what the link counted.

        ``echo``: the router is an :class:`Echo`.
        """
        link: RouterLink | EchoLink = (EchoLink if echo else RouterLink)(router, client_name())
        began = time.perf_counter()
        tasks = [asyncio.ensure_future(_trajectory(link, plan, n, at + began)) for n, at in enumerate(starts(plan))]
        await asyncio.sleep(WARMUP_S)
        before, watch = dict(link.counters), Watch()
        await asyncio.sleep(plan.seconds)
        seen, counted = watch.stop(), {name: value - before[name] for name, value in link.counters.items()}
        turns = [turn for played in await asyncio.gather(*tasks) for turn in played]
        await link.flush()
        window = (began + WARMUP_S, began + WARMUP_S + plan.seconds)
        return {
            "trips": [got - asked for due, asked, got in turns if window[0] <= due < window[1]],
            "late": [asked - due for due, asked, got in turns if window[0] <= due < window[1]],
            "served": sum(window[0] <= got < window[1] for _, _, got in turns) / plan.seconds,
            "watch": seen,
            "counted": counted,
        }


def starts(plan: Plan) -> list[float]:
    """When trajectories start, in seconds: evenly, to the end. The first one's last turn is due within the warm-up,
    from where on the rate is the whole one."""
    every = TURNS / plan.rate
    return [i * every for i in range(int((WARMUP_S + plan.seconds) / every))]


async def _trajectory(
    link: RouterLink | EchoLink, plan: Plan, number: int, start: float
) -> list[tuple[float, float, float]]:
    """All turns of one trajectory: when each was due, asked for and granted."""
    rng = random.Random(f"{plan.client}/{number}")
    name = f"{plan.client}-{number // 8}"
    identity = TrajectoryId(name, number % 8, 1, f"p{number // 8 % 100}")
    group, own = hash((plan.client, number // 8)) & 0xFFFFFF, (plan.client << 24) + number
    tokens, shared, turns = plan.prompt_tokens, plan.prompt_tokens // 2 // BLOCK, []
    for turn in range(TURNS):
        due = start + turn * TURN_EVERY_S + rng.uniform(0.0, TURNS / plan.rate)
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        blocks = tuple(((group << 20) if i < shared else (own << 36)) + i for i in range(tokens // BLOCK))
        request = TurnRequest(f"{plan.client}/{number}/{turn}", identity, turn, tokens, 256, blocks)
        asked = time.perf_counter()
        await link.acquire(request)
        turns.append((due, asked, time.perf_counter()))
        await asyncio.sleep(rng.uniform(*RUN_S))
        link.release(request.key, TurnResult(100, None, 0, 0.1))
        tokens += 150
    link.finish(identity)
    return turns


def start_router(replicas: int = 2, kv_tokens: int = 10_000_000, **scheduler: Any) -> Any:
    """A configured router actor over imagined replicas; Ray must run."""
    import ray

    from war_rl.config import SchedulerConfig, WarConfig, to_dict

    info = {"kv_tokens": kv_tokens, "block_size": BLOCK, "max_running": 256, "can_draft": False}
    servers = {f"replica-{i}": f"handle-{i}" for i in range(replicas)}
    router = ray.remote(num_cpus=0, max_concurrency=MAX_CALLS)(WatchedRouter).remote(servers, {})
    war = to_dict(WarConfig(scheduler=SchedulerConfig(**scheduler)))
    ray.get(router.configure.remote(war, dict.fromkeys(servers, info), 0))
    return router


def measure(router: Any, rate: float, seconds: float, prompt_tokens: int = 1024, clients: int = 2) -> dict[str, Any]:
    """Drive ``rate`` turns per second from ``clients`` processes, first to an actor that decides nothing (``floor_*``:
    its round trips), then to the router; the report, see the module."""
    import ray

    workers = [ray.remote(num_cpus=0)(LoadClient).remote() for _ in range(clients)]
    plans = [Plan(rate / clients, seconds, prompt_tokens, i) for i in range(clients)]
    echo = ray.remote(num_cpus=0, max_concurrency=MAX_CALLS)(Echo).remote()
    # Processes are there and have imported everything before the first turn.
    ray.get([actor.__ray_ready__.remote() for actor in (*workers, echo)])
    floor = ray.get([worker.run.remote(echo, plan, True) for worker, plan in zip(workers, plans, strict=True)])
    ray.kill(echo)
    runs = [worker.run.remote(router, plan) for worker, plan in zip(workers, plans, strict=True)]
    time.sleep(WARMUP_S)
    ray.get(router.watch.remote())
    before = psutil.cpu_times()
    time.sleep(seconds)
    after = psutil.cpu_times()
    watched = ray.get(router.watched.remote())
    trips = quantiles("floor", [trip for client in floor for trip in client["trips"]])
    return report(rate, ray.get(runs), watched, _busy_cores(before, after)) | trips


def report(
    rate: float, clients: Sequence[Mapping[str, Any]], router: Mapping[str, float], machine: float
) -> dict[str, Any]:
    """Everything that was measured, and who is the bottleneck. Times in milliseconds, processor time in cores."""
    counted = {name: sum(c["counted"][name] for c in clients) for name in clients[0]["counted"]}
    trips = [trip for c in clients for trip in c["trips"]]
    loops = {"router": router["loop_cores"], **{f"client {i}": c["watch"]["loop_cores"] for i, c in enumerate(clients)}}
    return {
        "asked_per_s": rate,
        "served_per_s": sum(c["served"] for c in clients),
        "turns": len(trips),
        **quantiles("trip", trips),
        **quantiles("late", [late for c in clients for late in c["late"]]),
        "calls_per_turn": counted["router_calls"] / max(1.0, counted["router_asks"]),
        "events_per_message": counted["router_events"] / max(1.0, counted["router_messages"]),
        "machine_cores_busy": machine,
        "router": dict(router),
        "clients": [dict(c["watch"]) for c in clients],
        "bottleneck": bottleneck(loops, machine, os.cpu_count() or 1),
    }


def bottleneck(loops: Mapping[str, float], machine: float, cores: int) -> str:
    """Who has no time left. ``loops``: by process, the share of time that its event loop works."""
    name, most = max(loops.items(), key=lambda entry: entry[1])
    if most >= BUSY:
        return f"{name}: its event loop works {most:.0%} of the time"
    if machine >= BUSY * cores:
        return f"the machine: {machine:.2f} of {cores} cores are busy; the busiest event loop is {name}'s, {most:.0%}"
    return f"nobody; the busiest event loop is {name}'s, {most:.0%}"


def quantiles(name: str, seconds: Sequence[float]) -> dict[str, float]:
    """``{name}_p50_ms``, ``{name}_p99_ms`` and ``{name}_max_ms``; zeros for no values."""
    p50, p99, most = np.percentile(seconds, (50, 99, 100)) * 1e3 if len(seconds) else (0.0, 0.0, 0.0)
    return {f"{name}_p50_ms": float(p50), f"{name}_p99_ms": float(p99), f"{name}_max_ms": float(most)}


def _busy_cores(before: Any, after: Any) -> float:
    spent = {field: getattr(after, field) - getattr(before, field) for field in after._fields}
    # Guests are counted in user time as well.
    total = sum(v for field, v in spent.items() if not field.startswith("guest"))
    idle = spent["idle"] + spent.get("iowait", 0.0)
    return (os.cpu_count() or 1) * (1.0 - idle / total) if total > 0 else 0.0


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 3)
    if isinstance(value, dict):
        return {k: _rounded(v) for k, v in value.items()}
    return [_rounded(v) for v in value] if isinstance(value, list) else value


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print one JSON object."""
    import ray

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=500.0, help="turns per second of all clients (%(default)s)")
    parser.add_argument("--seconds", type=float, default=10.0, help="of measuring (%(default)s)")
    parser.add_argument("--clients", type=int, default=2, help="client processes (%(default)s)")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--prompt-tokens", type=int, default=1024, help="of a first turn (%(default)s)")
    args = parser.parse_args(argv)
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, ignore_reinit_error=True)
    try:
        result = measure(start_router(args.replicas), args.rate, args.seconds, args.prompt_tokens, args.clients)
    finally:
        ray.shutdown()
    print(json.dumps(_rounded(result), indent=1))


if __name__ == "__main__":
    main()
