# SPDX-License-Identifier: Apache-2.0
"""Starts a real training as a user does, does something to it on the way, and looks at what is left of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
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
    family: list[psutil.Process] = field(default_factory=list)
    left_shared_memory: list[str] = field(default_factory=list)

    @property
    def left_processes(self) -> list[str]:
        """What runs now of all that ran when the test acted."""
        return [line for line in map(_command_line, self.family) if line]

    @property
    def summary(self) -> dict[str, Any]:
        return dict(json.loads((self.folder / "run" / "summary.json").read_text()))

    def step(self, number: int) -> dict[str, float]:
        return dict(next(s["metrics"] for s in self.summary["steps"] if s["step"] == number))

    def trained(self, step: int) -> list[dict[str, Any]]:
        """What tests/support/ordered.py recorded of a step, sorted by data-set index and session."""
        lines = (self.folder / "trained" / f"{step}.jsonl").read_text().splitlines()
        return sorted((json.loads(line) for line in lines), key=lambda row: (row["index"], row["session"]))

    def trajectories(self, folder: str = "trajectories") -> list[dict[str, Any]]:
        files = sorted((self.folder / folder).glob("*.jsonl"))
        return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def run_training(
    folder: Path,
    *overrides: str,
    loop: str = "GuessingLoop",
    when: str = "",
    act: Callable[[psutil.Process], None] | None = None,
    environment: dict[str, str] | None = None,
    prefix: Sequence[str] = (),
    command: Sequence[str] = (sys.executable, "-m", "war_rl", "train"),
) -> Run:
    """``command`` on the tiny model; once its output holds ``when``, ``act`` is called with its process.

    ``loop`` is the class of tests/support/loops.py that plays the data set's rows. The command leads a process group of
    its own. ``prefix`` goes before it.
    """
    line = [*prefix, *command, *tiny_overrides(folder, loop_override(folder, loop), *overrides)]
    return run_command(folder, line, when=when, act=act, environment=environment)


def loop_override(folder: Path, loop: str) -> str:
    """Have the games played by one of ``tests.support.loops``."""
    loops = folder / "loops.yaml"
    loops.write_text(f"- name: textarena_agent\n  _target_: tests.support.loops.{loop}\n")
    return f"actor_rollout_ref.rollout.agent.agent_loop_config_path={loops}"


def run_command(
    folder: Path,
    command: Sequence[str],
    *,
    when: str = "",
    act: Callable[[psutil.Process], None] | None = None,
    environment: dict[str, str] | None = None,
) -> Run:
    """Any command of ours; see :func:`run_training`."""
    extra = {"WANDB_MODE": "offline", "HYDRA_FULL_ERROR": "1", "PYTHONPATH": str(Path.cwd())}
    env = {**os.environ, **extra, **(environment or {})}
    shared_before = set(os.listdir("/dev/shm"))
    process = subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    output: list[str] = []
    run = Run(folder, 0, "")
    acted: list[float] = []
    problems: list[BaseException] = []

    def do() -> None:
        me = psutil.Process(process.pid)
        run.family = [me, *me.children(recursive=True)]
        try:
            assert act is not None
            act(me)
        except BaseException as error:
            problems.append(error)
            process.send_signal(signal.SIGINT)
        acted.append(time.monotonic())

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            output.append(line)
            if act is not None and not acted and when in line:
                do()

    # What a killed run leaves may hold its output open: the command's own end counts, not that of its output.
    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        run.code = process.wait(TIMEOUT_S)
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()
    ended = time.monotonic()
    reader.join(timeout=10)
    run.output = "".join(output)
    (folder / "output.log").write_text(run.output)
    if problems:
        raise problems[0]
    run.seconds_after_action = ended - acted[0] if acted else 0.0
    run.left_shared_memory = sorted(set(os.listdir("/dev/shm")) - shared_before)
    return run


def _command_line(process: psutil.Process) -> str:
    """What a process runs; "" when it has ended, even if nobody has asked for its exit code yet."""
    try:
        if process.status() == psutil.STATUS_ZOMBIE:
            return ""
        return " ".join(process.cmdline())[:200]
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return ""


def find(process: psutil.Process, words: str) -> list[psutil.Process]:
    """Descendants of ``process`` whose command line holds ``words``, the oldest first."""
    found = []
    for child in process.children(recursive=True):
        line = _command_line(child)
        if words in line:
            found.append(child)
    assert found, f"no process called {words!r}"
    return sorted(found, key=lambda p: p.create_time())


def kill_group(process: psutil.Process) -> None:
    """SIGKILL the command and what shares its process group, its watcher included."""
    os.killpg(process.pid, signal.SIGKILL)
