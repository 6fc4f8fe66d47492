# SPDX-License-Identifier: Apache-2.0
"""`war-rl train` on the tiny model in a process of its own, and what there is to see of it afterwards."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tests.support.tiny_run import tiny_overrides

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

    def trained(self, step: int) -> list[dict[str, Any]]:
        """What tests/support/ordered.py recorded of a step, sorted by data-set index and session."""
        lines = (self.folder / "trained" / f"{step}.jsonl").read_text().splitlines()
        return sorted((json.loads(line) for line in lines), key=lambda row: (row["index"], row["session"]))

    def trajectories(self) -> list[dict[str, Any]]:
        files = sorted((self.folder / "trajectories").glob("*.jsonl"))
        return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def run_training(
    folder: Path,
    *overrides: str,
    loop: str = "GuessingLoop",
    when: str = "",
    act: Callable[[psutil.Process], None] | None = None,
    command: tuple[str, ...] = (sys.executable, "-m", "war_rl", "train"),
    environ: Mapping[str, str] | None = None,
) -> Run:
    """``command`` on the tiny model; once its output holds ``when``, ``act`` is called with its process.

    ``loop`` is the class of tests/support/loops.py that plays the data set's rows, ``environ`` is added to the
    environment.
    """
    loops = folder / "loops.yaml"
    loops.write_text(f"- name: textarena_agent\n  _target_: tests.support.loops.{loop}\n")
    overrides = (f"actor_rollout_ref.rollout.agent.agent_loop_config_path={loops}", *overrides)
    env = {**os.environ, "WANDB_MODE": "offline", "HYDRA_FULL_ERROR": "1", "PYTHONPATH": str(Path.cwd())}
    env.update(environ or {})
    shared_before = set(os.listdir("/dev/shm"))
    process = subprocess.Popen(
        [*command, *tiny_overrides(folder, *overrides)],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
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
