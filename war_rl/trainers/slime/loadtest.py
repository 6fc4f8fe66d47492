# SPDX-License-Identifier: Apache-2.0
"""How much latency does the router add, and at what rate?

    python -m war_rl.trainers.slime.loadtest --rate 500 --seconds 10

Fake engines that answer after a fixed time, the router in a process of its own on one core, and an open-loop client:
requests start on schedule whether or not earlier ones have ended. Every other request goes straight to an engine, so
that both paths meet the same machine at the same moment; the difference of the medians is what the router adds.
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
from collections.abc import Sequence
from typing import Any

import aiohttp
import numpy as np
import psutil
from aiohttp import web

from war_rl.config import load_config
from war_rl.trainers.slime.corpus import CorpusConfig
from war_rl.trainers.slime.router import serve
from war_rl.trainers.slime.settings import RouterConfig


async def _engine(port: int, answer_s: float, tokens: int) -> None:
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
    await web.TCPSite(runner, "127.0.0.1", port).start()
    await asyncio.Event().wait()


def _run_engine(port: int, answer_s: float, tokens: int) -> None:
    _loop(_engine(port, answer_s, tokens))


def _run_router(config: RouterConfig, core: int | None) -> None:
    if core is not None:
        os.sched_setaffinity(0, {core})
    _loop(serve(config))


def _loop(coroutine: Any) -> None:
    try:
        import uvloop
    except ImportError:
        asyncio.run(coroutine)
    else:
        uvloop.run(coroutine)


async def _client(args: argparse.Namespace, router: str, engines: Sequence[str], pid: int) -> dict[str, float]:
    draw = random.Random(0)
    times: dict[str, list[float]] = {"router": [], "direct": []}
    failed = 0
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), trust_env=False) as session:
        for url in engines:
            await _until_up(session, url)
        await _until_up(session, router)
        for url in engines:
            async with session.post(f"{router}/workers", json={"url": url}) as response:
                assert response.status == 202

        async def one(kind: str, data: bytes, headers: dict[str, str], engine: str) -> None:
            nonlocal failed
            began = time.perf_counter()
            url = router if kind == "router" else engine
            try:
                async with session.post(f"{url}/generate", data=data, headers=headers) as response:
                    await response.read()
                    failed += response.status != 200
            except aiohttp.ClientError:
                failed += 1
            times[kind].append(time.perf_counter() - began)

        bodies = []
        for _ in range(256):
            ids = [draw.randrange(100_000) for _ in range(args.prompt_tokens)]
            bodies.append(json.dumps({"input_ids": ids, "sampling_params": {"max_new_tokens": 64}}).encode())
        tasks = []
        count = int(args.rate * args.seconds)
        process = psutil.Process(pid)
        before, start = process.cpu_times(), time.perf_counter()
        for i in range(count):
            # Through the router at the full rate; beside it, one in four goes direct.
            at = start + i / args.rate
            await asyncio.sleep(max(0.0, at - time.perf_counter()))
            body = bodies[i % len(bodies)]
            headers = {"X-SMG-Routing-Key": f"k{i % 512}", "Content-Type": "application/json"}
            tasks.append(asyncio.create_task(one("router", body, headers, "")))
            if i % 4 == 0:
                tasks.append(asyncio.create_task(one("direct", body, headers, engines[i % len(engines)])))
        await asyncio.gather(*tasks)
        took = time.perf_counter() - start
        after = process.cpu_times()
    through, direct = np.array(times["router"]) * 1e3, np.array(times["direct"]) * 1e3
    return {
        "requests": float(len(through)),
        "failed": float(failed),
        "rate_asked_per_s": args.rate,
        "rate_served_per_s": round(len(through) / took, 1),
        "direct_ms_p50": round(float(np.percentile(direct, 50)), 2),
        "direct_ms_p99": round(float(np.percentile(direct, 99)), 2),
        "router_ms_p50": round(float(np.percentile(through, 50)), 2),
        "router_ms_p99": round(float(np.percentile(through, 99)), 2),
        "added_ms_p50": round(float(np.percentile(through, 50) - np.percentile(direct, 50)), 2),
        "added_ms_p99": round(float(np.percentile(through, 99) - np.percentile(direct, 99)), 2),
        "router_cpu_ms_per_request": round(
            1e3 * (after.user + after.system - before.user - before.system) / max(1, len(through)), 3
        ),
        "load_average": round(os.getloadavg()[0], 1),
        "cores": float(os.cpu_count() or 0),
    }


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


def main(argv: Sequence[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=500.0, help="requests per second through the router")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--answer-s", type=float, default=0.05, help="how long a fake engine takes")
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--answer-tokens", type=int, default=64)
    parser.add_argument("--policy", default="least_tokens")
    parser.add_argument("--core", type=int, default=None, help="pin the router to this core")
    args = parser.parse_args(argv)
    context = multiprocessing.get_context("spawn")
    ports, port = [_free_port() for _ in range(args.engines)], _free_port()
    config = RouterConfig(
        port=port, scheduler=load_config({"scheduler": {"policy": args.policy}}).scheduler, corpus=CorpusConfig(False)
    )
    processes = [context.Process(target=_run_engine, args=(p, args.answer_s, args.answer_tokens)) for p in ports]
    processes.append(context.Process(target=_run_router, args=(config, args.core)))
    for process in processes:
        process.start()
    try:
        urls = [f"http://127.0.0.1:{p}" for p in ports]
        result: dict[str, float] = {}

        async def measure() -> None:
            result.update(await _client(args, f"http://127.0.0.1:{port}", urls, processes[-1].pid or 0))

        _loop(measure())
    finally:
        for process in processes:
            process.terminate()
            process.join()
    print(json.dumps({"policy": args.policy, **result}))
    return result


if __name__ == "__main__":
    main()
