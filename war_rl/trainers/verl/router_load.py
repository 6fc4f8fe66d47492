# SPDX-License-Identifier: Apache-2.0
"""How fast the router actor answers: ``python -m war_rl.trainers.verl.router_load --rate 500``.

An open loop of turns through a real Ray actor, from several client threads of execution on one event loop, as an
agent-loop worker has them. A round trip is the time from asking for a replica to having it, for turns that may start at
once; the engines are imagined. Starts a Ray of its own unless one runs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from war_rl.types import TrajectoryId, TurnRequest, TurnResult

BLOCK = 16


def start_router(replicas: int = 2, kv_tokens: int = 10_000_000, **scheduler: Any) -> Any:
    """A configured router actor over imagined replicas."""
    import ray

    from war_rl.config import SchedulerConfig, WarConfig, to_dict
    from war_rl.trainers.verl.router import WarRouter

    info = {"kv_tokens": kv_tokens, "block_size": BLOCK, "max_running": 256, "can_draft": False}
    servers = {f"replica-{i}": f"handle-{i}" for i in range(replicas)}
    router = WarRouter.remote(servers, {})
    war = to_dict(WarConfig(scheduler=SchedulerConfig(**scheduler)))
    ray.get(router.configure.remote(war, dict.fromkeys(servers, info), 0))
    return router


async def load(router: Any, rate: float, seconds: float, prompt_tokens: int, turns: int = 4) -> dict[str, float]:
    """Drive ``rate`` turns per second for ``seconds`` (both after a second of warm-up).

    Returns:
        ``turns``, ``turns_per_s``, and the round trip's ``p50_ms``, ``p99_ms`` and ``max_ms``.
    """
    rng = random.Random(0)
    trips: list[float] = []
    began = time.perf_counter()

    async def trajectory(number: int) -> None:
        identity = TrajectoryId(f"g{number // 8}", number % 8, 1, f"p{number // 8 % 100}")
        tokens, shared = prompt_tokens, prompt_tokens // 2 // BLOCK
        for turn in range(turns):
            base = (number // 8 << 20, number << 36)
            blocks = tuple((base[0] if i < shared else base[1]) + i for i in range(tokens // BLOCK))
            request = TurnRequest(f"{number}/{turn}", identity, turn, tokens, 256, blocks)
            asked = time.perf_counter()
            await router.acquire_turn.remote(request, "load")
            if asked - began > 1.0:
                trips.append(time.perf_counter() - asked)
            await asyncio.sleep(rng.uniform(0.02, 0.1))
            router.release_turn.remote(request.key, TurnResult(100, None, 0, 0.1))
            tokens += 150
            await asyncio.sleep(rng.uniform(0.0, 0.1))
        router.finish_trajectory.remote(identity)

    tasks = []
    for number in range(int(rate / turns * (seconds + 1.0))):
        wait = began + number * turns / rate - time.perf_counter()
        if wait > 0:
            await asyncio.sleep(wait)
        tasks.append(asyncio.ensure_future(trajectory(number)))
    await asyncio.gather(*tasks)
    spent = time.perf_counter() - began - 1.0
    p50, p99, most = (1e3 * float(v) for v in np.percentile(trips, (50, 99, 100)))
    return {
        "turns": float(len(trips)),
        "turns_per_s": len(trips) / spent,
        "p50_ms": p50,
        "p99_ms": p99,
        "max_ms": most,
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print one JSON object."""
    import ray

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=500.0, help="turns per second (%(default)s)")
    parser.add_argument("--seconds", type=float, default=10.0, help="of measuring (%(default)s)")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--prompt-tokens", type=int, default=1024, help="of a first turn (%(default)s)")
    args = parser.parse_args(argv)
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, ignore_reinit_error=True)
    try:
        router = start_router(args.replicas)
        result = asyncio.run(load(router, args.rate, args.seconds, args.prompt_tokens))
    finally:
        ray.shutdown()
    print(json.dumps({k: round(v, 2) for k, v in result.items()}))


if __name__ == "__main__":
    main()
