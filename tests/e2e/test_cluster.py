# SPDX-License-Identifier: Apache-2.0
"""Training in a Ray cluster that somebody else has started, by our command and by verl's own entry point."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.training import run_training

pytestmark = [pytest.mark.e2e, pytest.mark.extended]

START_S = 120
TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
"""What Ray asks for on its own where the user has a token; these tests must not depend on whether that is so."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Cluster:
    """A one-node cluster below a session, a port and a folder of its own, so that it is no other's."""

    def __init__(self) -> None:
        # Not pytest's folder: the paths of Ray's sockets must stay short.
        self._folder = tempfile.mkdtemp(prefix="war-ray-")
        self.address = f"127.0.0.1:{free_port()}"
        self.dashboard = f"127.0.0.1:{free_port()}"
        ports = ("--ray-client-server-port", "--dashboard-agent-listen-port", "--metrics-export-port")
        command = [str(Path(sys.executable).with_name("ray")), "start", "--head", "--block"]
        command += ["--node-ip-address=127.0.0.1", f"--port={self.address.partition(':')[2]}"]
        command += [f"--temp-dir={self._folder}", "--num-cpus=16", "--num-gpus=2"]
        command += ["--include-dashboard=true", "--dashboard-host=127.0.0.1"]
        command += [f"--dashboard-port={self.dashboard.partition(':')[2]}"]
        command += ["--disable-usage-stats", *(f"{name}={free_port()}" for name in ports)]
        self._log = Path(self._folder, "start.log")
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True, env={**os.environ, **TOKEN}
            )

    def wait(self) -> None:
        until = time.monotonic() + START_S
        while "Ray runtime started" not in self.log():
            assert self.process.poll() is None and time.monotonic() < until, self.log()
            time.sleep(0.2)

    def log(self) -> str:
        return self._log.read_text()

    def stop(self) -> None:
        """Only this cluster: the processes that this one started, by their ids."""
        try:
            mine = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            mine = []
        self.process.terminate()
        _, alive = psutil.wait_procs([psutil.Process(self.process.pid), *mine], timeout=20)
        for process in alive:
            process.kill()
        psutil.wait_procs(alive, timeout=10)
        self.process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    made = Cluster()
    try:
        made.wait()
        yield made
    finally:
        made.stop()


def in_cluster() -> list[str]:
    return [
        "trainer.rollout=war",
        # Its processes do not inherit ours; this is where the tests' agent loops are found.
        f"+ray_kwargs.ray_init.runtime_env.env_vars.PYTHONPATH={Path.cwd()}",
    ]


def test_a_cluster_that_asks_for_a_token_says_what_to_do(cluster, tmp_path):
    run = run_training(
        tmp_path, *in_cluster(), environment={"RAY_ADDRESS": cluster.address, "RAY_AUTH_MODE": "disabled"}
    )
    assert run.code not in (0, 130)
    assert "it asks for a token. Set RAY_AUTH_MODE=token for this command" in run.output[-3000:]
    assert cluster.process.poll() is None


def test_our_command_joins_it_and_leaves_it_running(cluster, tmp_path):
    run = run_training(tmp_path, *in_cluster(), environment={**TOKEN, "RAY_ADDRESS": cluster.address})
    assert run.code == 0, run.output[-5000:]
    # Ray replaces a loopback address by the machine's own.
    assert re.search(rf"joining the Ray cluster at \S+:{cluster.address.partition(':')[2]}\n", run.output)
    assert run.summary["status"] == "finished"
    assert run.step(2)["war/spec/accepted_tokens"] > 0
    assert cluster.process.poll() is None


def test_verls_own_entry_point_trains_with_the_war_worker_group(cluster, tmp_path):
    command = (sys.executable, "-m", "verl.trainer.main_ppo")
    command += ("--config-path", "pkg://war_rl.configs", "--config-name", "war_ppo_trainer")
    run = run_training(
        tmp_path,
        *in_cluster(),
        "trainer.total_training_steps=1",
        "trainer.logger=[console]",
        # The CPU platform's sizes are for a cluster of its own.
        "ray_kwargs.ray_init.num_cpus=null",
        "ray_kwargs.ray_init.num_gpus=null",
        f"hydra.run.dir={tmp_path}/hydra",
        command=command,
        environment={**TOKEN, "RAY_ADDRESS": cluster.address, "WAR_PLATFORM": "cpu", "VERL_PLATFORM": "cpu"},
    )
    assert run.code == 0, run.output[-5000:]
    assert run.step(1)["war/sync/replicas"] == 2
    assert cluster.process.poll() is None


def test_a_submitted_job_trains(cluster, tmp_path):
    command = [str(Path(sys.executable).with_name("ray")), "job", "submit", "--address", f"http://{cluster.dashboard}"]
    command += [
        "--runtime-env-json",
        json.dumps({"env_vars": {"PYTHONPATH": str(Path.cwd()), "WANDB_MODE": "offline"}}),
    ]
    command += ["--", sys.executable, "-m", "war_rl", "train"]
    # The job brings the environment itself; Ray refuses to be told a variable twice.
    overrides = ("trainer.rollout=war", "trainer.total_training_steps=1", "trainer.logger=[console]")
    run = run_training(tmp_path, *overrides, command=command, environment=TOKEN)
    assert run.code == 0, run.output[-5000:]
    assert re.search(r"joining the Ray cluster at \S+\n", run.output)
    assert run.summary["status"] == "finished"
    assert run.step(1)["war/sync/replicas"] == 2
    assert cluster.process.poll() is None
