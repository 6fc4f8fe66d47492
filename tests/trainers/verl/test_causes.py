# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
from ray.exceptions import RayActorError, RayTaskError

from war_rl.metrics_registry import undocumented
from war_rl.trainers.verl import causes
from war_rl.trainers.verl.causes import FAULTS, CheckpointFailed, describe, innermost, shared_memory_note
from war_rl.trainers.verl.health import ReplicaDead, ReplicaHealth, raise_if_dead
from war_rl.trainers.verl.router import RouterLost
from war_rl.trainers.verl.workers import WorkerSilent


def remote_error(cause: Exception) -> Exception:
    text = f"Traceback (most recent call last):\n  File 'x'\n{type(cause).__name__}: {cause}\n"
    return RayTaskError("f", text, cause, "worker", 1, "10.0.0.1").as_instanceof_cause()


def disk(monkeypatch: pytest.MonkeyPatch, free: int, total: int) -> None:
    """Free and total size of /dev/shm in MiB."""
    stat = SimpleNamespace(f_bavail=free << 8, f_blocks=total << 8, f_frsize=4096)
    monkeypatch.setattr(causes.os, "statvfs", lambda path: stat)


def test_a_remote_error_is_its_last_line_and_a_local_one_its_text():
    error = remote_error(ValueError("no such thing"))
    assert isinstance(error, ValueError) and innermost(error) == "ValueError: no such thing"
    assert innermost(RuntimeError("over\n two lines")) == "over two lines"
    assert innermost(KeyError("x")) == "KeyError: 'x'"
    assert innermost(RuntimeError()) == "RuntimeError"


def test_every_loss_is_a_documented_metric():
    with pytest.raises(ReplicaDead) as two:
        raise_if_dead([ReplicaHealth("a", "x"), ReplicaHealth("b", ""), ReplicaHealth("c", "y")])
    assert describe(two.value)[1] == {"war/fault/replica_lost": 2.0}
    assert describe(RouterLost("gone"))[1] == {"war/fault/router_lost": 1.0}
    assert describe(WorkerSilent("worker 1", 5.0))[1] == {"war/fault/worker_lost": 1.0}
    assert describe(CheckpointFailed("full"))[1] == {"war/fault/checkpoint_failed": 1.0}
    assert describe(RuntimeError("else"))[1] == {}
    assert not undocumented(f"war/fault/{name}" for name in FAULTS.values())


def test_a_death_while_shared_memory_is_full_is_explained(monkeypatch):
    disk(monkeypatch, free=0, total=64)
    text, _ = describe(RayActorError())
    assert "0 of 64 MiB free" in text and "--shm-size" in text
    assert "--shm-size" in describe(ReplicaDead("rollout replica a is dead: EngineCore was killed by SIGBUS"))[0]
    assert "--shm-size" not in describe(ReplicaDead("rollout replica a is dead: EngineCore was killed by SIGKILL"))[0]
    disk(monkeypatch, free=40, total=64)
    assert "--shm-size" not in describe(RayActorError())[0]


def test_a_machine_without_shared_memory_needs_no_note(tmp_path):
    assert shared_memory_note(tmp_path / "none") == ""
    assert os.path.isdir("/dev/shm") or shared_memory_note() == ""
