# SPDX-License-Identifier: Apache-2.0
"""The router's own process in front of two real vLLM CPU engines, and the rollout function through it.

Engines start once for the module (their imports take most of the time); the last test kills one. 78 s on two busy
cores, 54 of them for the start: too long for `make test`.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import httpx
import pytest

from tests.support.tiny_model import tiny_model_dir
from tests.trainers.slime import fake_slime
from tests.trainers.slime.seams import Prompts, arguments

# Neither vLLM nor torch is imported here: that takes as long as the tests.
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.extended,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]

HAS_SLIME = importlib.util.find_spec("slime") is not None
ROOT = Path(__file__).resolve().parents[3]
START_S = 240.0


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """(router port, engine processes, engine URLs); engines register themselves as slime's do."""
    logs = tmp_path_factory.mktemp("slime")
    env = os.environ | {"OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    env |= {"KMP_BLOCKTIME": "0", "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
    env |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    ports = [free_port(), free_port()]
    router_port = free_port()
    processes = []

    def start(name, *command):
        with open(logs / f"{name}.log", "w") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", *command],
                cwd=ROOT,
                env=env,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        processes.append(process)
        return process

    router = start(
        "router", "war_rl.trainers.slime.router", "--port", str(router_port), "--policy", "cost",
        "--health-interval-s", "1", "--scheduler", "migrate_max=0",
    )  # fmt: skip
    engines = [start(f"engine{i}", "tests.trainers.slime.vllm_server", str(p)) for i, p in enumerate(ports)]
    urls = [f"http://127.0.0.1:{p}" for p in ports]
    try:
        for name, process, url in zip(("engine0", "engine1"), engines, urls, strict=True):
            wait_for(url + "/v1/models", process, logs / f"{name}.log")
        wait_for(f"http://127.0.0.1:{router_port}/health", router, logs / "router.log")
        for url in urls:
            answer = httpx.post(
                f"http://127.0.0.1:{router_port}/workers", json={"url": url, "worker_type": "regular"}, timeout=30
            )
            assert answer.status_code == 202
        yield router_port, engines, urls, router
        router.send_signal(signal.SIGTERM)
        assert router.wait(30) == 0, "the router ends cleanly"
    finally:
        for process in processes:
            kill_group(process)


def wait_for(url: str, process: subprocess.Popen, log: Path) -> None:
    until = time.monotonic() + START_S
    while time.monotonic() < until:
        assert process.poll() is None, log.read_text()[-3000:]
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            time.sleep(0.2)
    raise AssertionError(log.read_text()[-3000:])


def kill_group(process: subprocess.Popen) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


def stats(port: int) -> dict[str, float]:
    return httpx.get(f"http://127.0.0.1:{port}/war/stats", timeout=30).json()["values"]


@pytest.fixture
def slime(monkeypatch):
    if not HAS_SLIME:
        fake_slime.install()
        yield
        fake_slime.uninstall()
        return
    from slime.rollout import sglang_rollout
    from slime.utils.misc import SingletonMeta

    SingletonMeta._instances.clear()
    monkeypatch.setattr(sglang_rollout, "load_processor", lambda *a, **k: None)
    yield


def test_a_rollout_of_64_prompts_times_4_with_two_turns(cluster, slime):
    from war_rl.trainers.slime.rollout import generate_rollout

    port, _, urls, _ = cluster
    args = arguments(
        ("127.0.0.1", port),
        hf_checkpoint=str(tiny_model_dir()) if HAS_SLIME else "none",
        rollout_batch_size=64,
        n_samples_per_prompt=4,
        rollout_max_response_len=4,
        custom_generate_function_path="tests.trainers.slime.seams.two_turns",
    )
    # Ids below the tiny model's vocabulary: the bytes of the text.
    output = generate_rollout(args, 1, Prompts(args))
    assert [len(g) for g in output.samples] == [4] * 64
    samples = [s for g in output.samples for s in g]
    assert [s.index for s in samples] == list(range(256))
    for s in samples:
        assert s.status.value in ("completed", "truncated") and s.reward is not None
        assert len(s.loss_mask) == len(s.rollout_log_probs) == s.response_length
        assert s.loss_mask.count(0) == 2 and all(p <= 0.0 for p in s.rollout_log_probs)
        assert s.tokens[: len(s.prompt)] == list(s.prompt.encode())
    metrics = output.metrics
    print(json.dumps({k: round(v, 4) for k, v in metrics.items()}))
    assert metrics["war/rollout/trajectories"] == 256 and metrics["war/rollout/turns"] == 512
    assert metrics["war/rollout/failed"] == 0 and metrics["war/cache/unreported_turns"] == 0
    assert metrics["war/sched/sticky_rate"] == 1.0
    assert metrics["war/cache/hit_rate"] > 0.3, "second turns and siblings find their KV cache"
    after = stats(port)
    assert after["sched/trajectories"] == 0 and after["router/inflight"] == 0
    assert all(after[f"sched/replica/{u}/decode_ms"] > 0 for u in urls)


def test_a_killed_engine_costs_no_request(cluster):
    port, engines, urls, _ = cluster

    async def main() -> None:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=120) as client:

            async def one(i: int) -> dict:
                body = {"input_ids": [i + 3] * 40, "sampling_params": {"max_new_tokens": 64, "stop_token_ids": []}}
                body["stream"] = i % 8 == 0 and i >= 32
                response = await client.post("/generate", json=body)
                assert response.status_code == 200, response.text
                if body["stream"]:
                    return json.loads(response.text.split("\n\n")[-3][6:])
                return response.json()

            await client.post("/war/step", json={"step": 2})
            tasks = [asyncio.create_task(one(i)) for i in range(32)]
            while True:
                running = stats_of((await client.get("/war/stats")).json(), urls)
                if all(n >= 4 for n in running):
                    break
                assert not all(t.done() for t in tasks), "too fast: no turn was running when the engine was to die"
                await asyncio.sleep(0.01)
            kill_group(engines[0])
            answers = await asyncio.gather(*tasks)
            assert all(a["meta_info"]["finish_reason"]["type"] in ("stop", "length") for a in answers)
            answers = await asyncio.gather(*(one(i) for i in range(32, 48)))
            assert all(a["output_ids"] for a in answers)

    def stats_of(body: dict, of: list[str]) -> list[float]:
        return [body["values"].get(f"sched/replica/{u}/running", 0.0) for u in of]

    asyncio.run(main())
    after = stats(port)
    print(json.dumps({k: v for k, v in after.items() if k.startswith("router/")}))
    assert after["router/workers_lost"] == 1 and after["router/workers_healthy"] == 1
    assert after["router/retries"] >= 1 and after["router/inflight"] == 0
