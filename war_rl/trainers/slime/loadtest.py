# SPDX-License-Identifier: Apache-2.0
"""How much latency does the router add, and at what rate?

    python -m war_rl.trainers.slime.loadtest --rate 100 250 500 --seconds 10

The router runs in a process of its own on one core; fake engines that answer after a fixed time and an open-loop client
(requests start on schedule whether or not earlier ones have ended) share the others. Beside every fourth request
through the router, half an interval later, the same body goes straight to an engine: both paths meet the same machine
at the same moment. *Added* is the time through the router less the time of its direct neighbour; ``added_ms_p50`` is
the median of these differences, ``added_ms_p99`` the difference of the two 99th percentiles, because the 99th
percentile of the differences would count the direct path's own outliers for and against the router.

    python -m war_rl.trainers.slime.loadtest --cpu

measures what depends little on other processes: client, router and engine in one thread, and the CPU time of a request
through the router less that of a direct one, in alternating rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import socket
import time
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

import aiohttp
import numpy as np
import psutil
from aiohttp import web

from war_rl.config import load_config
from war_rl.trainers.slime.corpus import CorpusConfig
from war_rl.trainers.slime.router import serve
from war_rl.trainers.slime.settings import RouterConfig

_Result = dict[str, float]
_T = TypeVar("_T")


async def _engines(ports: Sequence[int], answer_s: float, tokens: int) -> None:
    pairs = [[-0.5, 100 + i, None] for i in range(tokens)]
    meta = {"finish_reason": {"type": "stop"}, "prompt_tokens": 0, "completion_tokens": tokens, "cached_tokens": 0}
    ids = [p[1] for p in pairs]
    body = json.dumps({"text": "x" * tokens, "output_ids": ids, "meta_info": {**meta, "output_token_logprobs": pairs}})

    async def generate(request: web.Request) -> web.Response:
        await request.read()
        await asyncio.sleep(answer_s)
        return web.Response(text=body, content_type="application/json")

    async def other(request: web.Request) -> web.Response:
        return web.json_response({"max_total_num_tokens": 1_000_000})

    app = web.Application(client_max_size=2**30)
    app.router.add_post("/generate", generate)
    app.router.add_route("*", "/{path:.*}", other)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    for port in ports:
        await web.TCPSite(runner, "127.0.0.1", port).start()
    await asyncio.Event().wait()


def _run_engines(ports: Sequence[int], answer_s: float, tokens: int) -> None:
    _loop(_engines(ports, answer_s, tokens))


def _run_router(config: RouterConfig, core: int, profile: str) -> None:
    os.sched_setaffinity(0, {core})
    if not profile:
        _loop(serve(config))
        return
    import cProfile

    with cProfile.Profile() as data:
        _loop(serve(config))
    data.dump_stats(profile)


def _loop(coroutine: Coroutine[Any, Any, _T]) -> _T:
    try:
        import uvloop
    except ImportError:
        return asyncio.run(coroutine)
    return uvloop.run(coroutine)


DIRECT_EVERY = 4
"""One direct request for so many through the router."""
WARM_UP_S = 2.0
"""Requests before the measurement: connections, caches, the interpreter's specialisation. Unit: seconds."""


async def _client(args: argparse.Namespace, rate: float, router: str, engines: Sequence[str], pid: int) -> _Result:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), trust_env=False) as session:
        for url in (*engines, router):
            await _until_up(session, url)
        for url in engines:
            async with session.post(f"{router}/workers", json={"url": url}) as response:
                assert response.status == 202
        bodies = _bodies(args.prompt_tokens)
        await _fire(session, rate, int(rate * WARM_UP_S), bodies, router, engines)
        process, machine = psutil.Process(pid), psutil.cpu_times()
        before, start = process.cpu_times(), time.perf_counter()
        own = _cpu_of(psutil.Process())
        through, direct, failed = await _fire(session, rate, int(rate * args.seconds), bodies, router, engines)
        took, after, end = time.perf_counter() - start, process.cpu_times(), psutil.cpu_times()
        others = (_busy(end) - _busy(machine) - (_cpu_of(psutil.Process()) - own)) / took
    return _summary(rate, through, direct, failed, took) | {
        "router_cpu_ms_per_request": round(
            1e3 * (after.user + after.system - before.user - before.system) / max(1, len(through)), 3
        ),
        "other_processes_cores": round(max(0.0, others), 2),
        "load_average": round(os.getloadavg()[0], 1),
        "cores": float(os.cpu_count() or 0),
    }


async def _fire(
    session: aiohttp.ClientSession,
    rate: float,
    count: int,
    bodies: Sequence[bytes],
    router: str,
    engines: Sequence[str],
) -> tuple[list[float], dict[int, float], int]:
    """Seconds of each request through the router, of the direct neighbours by its index, and how many failed."""
    through, direct, failed = [0.0] * count, {}, 0

    async def one(i: int, base: str, straight: bool) -> None:
        nonlocal failed
        headers = {"X-SMG-Routing-Key": f"k{i % 512}", "Content-Type": "application/json"}
        began = time.perf_counter()
        try:
            async with session.post(f"{base}/generate", data=bodies[i % len(bodies)], headers=headers) as response:
                await response.read()
                failed += response.status != 200
        except aiohttp.ClientError:
            failed += 1
        (direct if straight else through)[i] = time.perf_counter() - began  # type: ignore[index]

    tasks, start = [], time.perf_counter()
    for i in range(count):
        await asyncio.sleep(max(0.0, start + i / rate - time.perf_counter()))
        tasks.append(asyncio.create_task(one(i, router, False)))
        if i % DIRECT_EVERY == 0:
            await asyncio.sleep(max(0.0, start + (i + 0.5) / rate - time.perf_counter()))
            tasks.append(asyncio.create_task(one(i, engines[i % len(engines)], True)))
    await asyncio.gather(*tasks)
    return through, direct, failed


def _summary(rate: float, through: Sequence[float], direct: dict[int, float], failed: int, took: float) -> _Result:
    routed, straight = np.array(through) * 1e3, np.array(list(direct.values())) * 1e3
    added = np.array([through[i] - seconds for i, seconds in direct.items()]) * 1e3

    def of(values: Any, percentile: float) -> float:
        return round(float(np.percentile(values, percentile)), 2)

    return {
        "requests": float(len(through)),
        "failed": float(failed),
        "rate_asked_per_s": rate,
        "rate_served_per_s": round(len(through) / took, 1),
        "direct_ms_p50": of(straight, 50),
        "direct_ms_p99": of(straight, 99),
        "router_ms_p50": of(routed, 50),
        "router_ms_p99": of(routed, 99),
        "added_ms_p50": of(added, 50),
        "added_ms_p90": of(added, 90),
        "added_ms_p99": round(of(routed, 99) - of(straight, 99), 2),
    }


def _bodies(tokens: int) -> list[bytes]:
    draw = random.Random(0)
    prompts = ([draw.randrange(100_000) for _ in range(tokens)] for _ in range(256))
    return [json.dumps({"input_ids": ids, "sampling_params": {"max_new_tokens": 64}}).encode() for ids in prompts]


def _cpu_of(process: psutil.Process) -> float:
    """CPU seconds of a process and its children so far."""
    times = [p.cpu_times() for p in (process, *process.children(recursive=True))]
    return float(sum(t.user + t.system for t in times))


def _busy(times: Any) -> float:
    """CPU seconds of the whole machine so far, idle ones and those of its hypervisor left out."""
    return float(sum(times) - times.idle - getattr(times, "iowait", 0.0) - getattr(times, "guest", 0.0))


CPU_ROUNDS, CPU_REQUESTS, CPU_AT_ONCE = 5, 400, 8


async def _cpu(config: RouterConfig, engine: int, args: argparse.Namespace) -> _Result:
    """Milliseconds of CPU per request, in one thread."""
    serving = [asyncio.create_task(_engines([engine], 0.0, args.answer_tokens)), asyncio.create_task(serve(config))]
    straight, router = f"http://127.0.0.1:{engine}", f"http://127.0.0.1:{config.port}"
    bodies, spent = _bodies(args.prompt_tokens), {straight: [0.0], router: [0.0]}
    async with aiohttp.ClientSession(trust_env=False) as session:
        for url in spent:
            await _until_up(session, url)
        async with session.post(f"{router}/workers", json={"url": straight}) as response:
            assert response.status == 202

        async def some(base: str, first: int) -> None:
            for i in range(first, CPU_REQUESTS, CPU_AT_ONCE):
                headers = {"X-SMG-Routing-Key": f"k{i % 512}", "Content-Type": "application/json"}
                async with session.post(f"{base}/generate", data=bodies[i % len(bodies)], headers=headers) as response:
                    await response.read()
                    assert response.status == 200

        for _ in range(CPU_ROUNDS + 1):
            for base, rounds in spent.items():
                began = time.thread_time()
                await asyncio.gather(*(some(base, first) for first in range(CPU_AT_ONCE)))
                rounds.append((time.thread_time() - began) * 1e3 / CPU_REQUESTS)
    for task in serving:
        task.cancel()
    await asyncio.gather(*serving, return_exceptions=True)
    # The first round warms up.
    added = [r - d for r, d in zip(spent[router][2:], spent[straight][2:], strict=True)]
    return {"cpu_added_ms_p50": round(float(np.median(added)), 3), "cpu_added_ms_max": round(max(added), 3)}


async def _until_up(session: aiohttp.ClientSession, url: str) -> None:
    for _ in range(300):
        try:
            async with session.get(f"{url}/health"):
                return
        except aiohttp.ClientError:
            await asyncio.sleep(0.1)
    raise RuntimeError(f"{url} did not start")


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def main(argv: Sequence[str] | None = None) -> list[_Result]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, nargs="+", default=[500.0], help="requests per second through the router")
    parser.add_argument("--seconds", type=float, default=10.0, help="of measurement, for each rate")
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--answer-s", type=float, default=0.05, help="how long a fake engine takes")
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--answer-tokens", type=int, default=64)
    parser.add_argument("--policy", default=RouterConfig().scheduler.policy)
    parser.add_argument("--core", type=int, default=None, help="of the router; the default is the last one")
    parser.add_argument("--cpu", action="store_true", help="CPU time per request only, in one thread")
    parser.add_argument("--profile", default="", help="write the router's cProfile data to this file")
    args = parser.parse_args(argv)
    allowed = sorted(os.sched_getaffinity(0))
    core = allowed[-1] if args.core is None else args.core
    context = multiprocessing.get_context("spawn")
    ports, port = [_free_port() for _ in range(args.engines)], _free_port()
    config = RouterConfig(
        port=port, scheduler=load_config({"scheduler": {"policy": args.policy}}).scheduler, corpus=CorpusConfig(False)
    )
    if args.cpu:
        results = [_loop(_cpu(config, ports[0], args))]
        print(json.dumps({"policy": args.policy, **results[0]}), flush=True)
        return results
    engines = context.Process(target=_run_engines, args=(ports, args.answer_s, args.answer_tokens))
    router = context.Process(target=_run_router, args=(config, core, args.profile))
    # Inherited by the engines; the router moves to its own core by itself.
    os.sched_setaffinity(0, set(allowed) - {core} or {core})
    results = []
    try:
        engines.start()
        router.start()
        urls = [f"http://127.0.0.1:{p}" for p in ports]
        for rate in args.rate:
            results.append(_loop(_client(args, rate, f"http://127.0.0.1:{port}", urls, router.pid or 0)))
            print(json.dumps({"policy": args.policy, **results[-1]}), flush=True)
    finally:
        os.sched_setaffinity(0, set(allowed))
        for process in (engines, router):
            process.terminate()
            process.join()
    return results


if __name__ == "__main__":
    main()
