# SPDX-License-Identifier: Apache-2.0
"""What ended a run, in one line and as a metric: the errors of verl and Ray say it at length, if at all."""

from __future__ import annotations

import os
from pathlib import Path

from ray.exceptions import RayActorError, RayTaskError

from war_rl.trainers.verl.health import ReplicaDead, UpdateStuck
from war_rl.trainers.verl.router import RouterLost
from war_rl.trainers.verl.workers import WorkerLost

SHM = Path("/dev/shm")
FULL_BYTES = 16 << 20
"""With less free shared memory than this, a process that dies of nothing else most likely died of that."""


class CheckpointFailed(RuntimeError):
    """A checkpoint could not be written. The message names the disk's free space and the last whole checkpoint."""


class WeightsNotFinite(RuntimeError):
    """The engines hold weights that are not numbers: the policy is lost since some step before."""


FAULTS: dict[type[Exception], str] = {
    ReplicaDead: "replica_lost",
    RouterLost: "router_lost",
    WorkerLost: "worker_lost",
    CheckpointFailed: "checkpoint_failed",
    WeightsNotFinite: "weights_not_finite",
    UpdateStuck: "update_stuck",
}
"""Errors that end a run, and the ``war/fault/...`` value that says so."""

NAMED = tuple(FAULTS)


def innermost(error: BaseException) -> str:
    """The line that says most: the last one of an error that comes with a remote traceback, else the whole text."""
    if isinstance(error, RayTaskError):
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return lines[-1] if lines else type(error).__name__
    text = " ".join(str(error).split())
    if isinstance(error, RuntimeError) and text:
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def describe(error: BaseException) -> tuple[str, dict[str, float]]:
    """What ended the run, for its summary: the cause, and ``war/fault/...`` values for what was lost."""
    text = innermost(error)
    died = isinstance(error, RayActorError) or "SIGBUS" in text
    note = shared_memory_note() if died else ""
    return f"{text}. {note}" if note and note not in text else text, _faults(error)


def _faults(error: BaseException) -> dict[str, float]:
    name = next((name for kind, name in FAULTS.items() if isinstance(error, kind)), "")
    return {f"war/fault/{name}": float(getattr(error, "count", 1))} if name else {}


def shared_memory_note(shm: Path = SHM) -> str:
    """What to know of a full /dev/shm, whose writers are killed by SIGBUS; "" where there is room."""
    try:
        stat = os.statvfs(shm)
    except OSError:
        return ""
    free, total = stat.f_bavail * stat.f_frsize, stat.f_blocks * stat.f_frsize
    if free >= min(FULL_BYTES, total // 2):
        return ""
    return (
        f"{shm} is full ({free >> 20} of {total >> 20} MiB free), which kills processes that write to it (SIGBUS): "
        f"mount -o remount,size=8G {shm}, or docker run --shm-size=8g"
    )
