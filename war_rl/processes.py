# SPDX-License-Identifier: Apache-2.0
"""The process table of Linux, read from /proc. A pid alone is no identity: numbers are used again."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Process:
    """A process for certain: ``started`` is the kernel's clock tick of its start, so a reused pid is another one."""

    pid: int
    started: int


def read_process(pid: int) -> tuple[Process, int] | None:
    """The living process with this pid and its parent's pid; None where there is none, or only a zombie."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            stat = file.read()
    except OSError:
        return None
    # The command name in parentheses may hold spaces and parentheses of its own.
    fields = stat[stat.rindex(b")") + 2 :].split()
    if fields[0] in (b"Z", b"X"):
        return None
    return Process(pid, int(fields[19])), int(fields[1])


def process_table() -> dict[Process, int]:
    """All living processes with their parents' pids, from one pass over /proc."""
    found = (read_process(int(name)) for name in os.listdir("/proc") if name.isdigit())
    return dict(entry for entry in found if entry is not None)


def descendants(ancestors: Iterable[int], table: dict[Process, int] | None = None) -> list[Process]:
    """All living descendants of these pids, themselves left out."""
    children: dict[int, list[Process]] = {}
    for process, parent in (process_table() if table is None else table).items():
        children.setdefault(parent, []).append(process)
    found: list[Process] = []
    todo = list(ancestors)
    while todo:
        fresh = children.get(todo.pop(), [])
        found += fresh
        todo += [process.pid for process in fresh]
    return found


def lives(process: Process) -> bool:
    """Whether it still does, and is no zombie."""
    now = read_process(process.pid)
    return now is not None and now[0] == process


def send(processes: Iterable[Process], signum: int) -> None:
    """Signal those that live and may be signalled."""
    for process in processes:
        if lives(process):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process.pid, signum)


def kill_until_gone(processes: Iterable[Process], seconds: float) -> list[Process]:
    """SIGKILL processes that are not our children. Returns those that have not even died of that in ``seconds``."""
    rest = list(processes)
    deadline = time.monotonic() + seconds
    send(rest, signal.SIGKILL)
    while (rest := [process for process in rest if lives(process)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    return rest
