# SPDX-License-Identifier: Apache-2.0
"""Three real training runs, shared by the tests that look at them; engines and trainers take a minute to start.

- ``grpo_war``: a validation with verl's own agent loop, then two GRPO steps with the WAR worker group.
- ``ppo_war``: PPO with a critic; some of its agent loops fail in every way they can; Ctrl-C in the second step.
- ``grpo_vllm``: GRPO with verl's stock rollout; an engine is killed in the second step.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.tiny_run import stock_loop_validation, tiny_model, tiny_overrides

TIMEOUT_S = 900


@dataclass
class Run:
    """A finished run: exit code, output, summary, recorded trajectories, and what was seen around its end."""

    folder: Path
    code: int
    output: str
    seconds_after_action: float = 0.0
    left_processes: list[str] = field(default_factory=list)
    left_shared_memory: list[str] = field(default_factory=list)

    @property
    def summary(self) -> dict[str, Any]:
        return dict(json.loads((self.folder / "run" / "summary.json").read_text()))

    def step(self, number: int) -> dict[str, float]:
        return dict(next(s["metrics"] for s in self.summary["steps"] if s["step"] == number))

    def trajectories(self) -> list[dict[str, Any]]:
        files = sorted((self.folder / "trajectories").glob("*.jsonl"))
        return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def run_training(
    folder: Path,
    *overrides: str,
    loop: str = "GuessingLoop",
    when: str = "",
    act: Callable[[psutil.Process], None] | None = None,
) -> Run:
    """`war-rl train` on the tiny model; once its output holds ``when``, ``act`` is called with its process."""
    loops = folder / "loops.yaml"
    loops.write_text(f"- name: textarena_agent\n  _target_: tests.support.loops.{loop}\n")
    overrides = (f"actor_rollout_ref.rollout.agent.agent_loop_config_path={loops}", *overrides)
    command = [sys.executable, "-m", "war_rl", "train", *tiny_overrides(folder, *overrides)]
    env = {**os.environ, "WANDB_MODE": "offline", "HYDRA_FULL_ERROR": "1", "PYTHONPATH": str(Path.cwd())}
    shared_before = set(os.listdir("/dev/shm"))
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    watchdog = threading.Timer(TIMEOUT_S, process.kill)
    watchdog.start()
    output, acted, family = [], 0.0, set()
    assert process.stdout is not None
    for line in process.stdout:
        output.append(line)
        if act is not None and not acted and when in line:
            family = {p for p in [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]}
            act(psutil.Process(process.pid))
            acted = time.monotonic()
    code = process.wait()
    watchdog.cancel()
    text = "".join(output)
    (folder / "output.log").write_text(text)
    return Run(
        folder,
        code,
        text,
        seconds_after_action=time.monotonic() - acted if acted else 0.0,
        left_processes=[line for line in map(_command_line, family) if line],
        left_shared_memory=sorted(set(os.listdir("/dev/shm")) - shared_before),
    )


def _command_line(process: psutil.Process) -> str:
    """What a process runs; "" when it has ended, even if nobody has asked for its exit code yet."""
    try:
        return " ".join(process.cmdline())[:200]
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return ""


@pytest.fixture(scope="session")
def grpo_war(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("grpo_war")
    return run_training(
        folder,
        "trainer.rollout=war",
        *stock_loop_validation(folder),
        f"war.record_trajectories={folder}/trajectories",
        "trainer.save_freq=2",
        "actor_rollout_ref.actor.checkpoint.save_contents=[model,hf_model]",
    )


@pytest.fixture(scope="session")
def ppo_war(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("ppo_war")
    return run_training(
        folder,
        "trainer.rollout=war",
        "algorithm.adv_estimator=gae",
        f"critic.model.path={tiny_model()}",
        "critic.ppo_micro_batch_size_per_gpu=4",
        "critic.optim.lr=1e-3",
        "war.env.step_timeout_s=2",
        "war.fault.trajectory_timeout_s=20",
        "trainer.total_training_steps=5",
        loop="FaultyLoop",
        when="] step 2:",
        act=lambda process: process.send_signal(signal.SIGINT),
    )


@pytest.fixture(scope="session")
def grpo_vllm(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run_training(
        tmp_path_factory.mktemp("grpo_vllm"),
        "trainer.rollout=vllm",
        "trainer.total_training_steps=5",
        when="step 1 done",
        act=_kill_an_engine,
    )


def _kill_an_engine(process: psutil.Process) -> None:
    engines = [p for p in process.children(recursive=True) if "VLLM::EngineCore" in " ".join(p.cmdline())]
    assert engines, "no engine process found"
    engines[0].kill()
