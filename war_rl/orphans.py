# SPDX-License-Identifier: Apache-2.0
"""What a run left that was killed with its watcher (SIGKILL, the out-of-memory killer): the next start ends it.

Ray's processes and the engines notice that their parents are gone, and end. One that hangs does not, nor what an
environment has started in a session of its own; and nobody removes their shared memory.
Two traces lead to them. Every process of a run carries the run's name in its environment, and the name says which
watcher it belongs to. And the watcher keeps a small file of what it has seen: processes, files in shared memory. A run
is dead when its watcher is; names of another boot, or of another container's processes, are never judged.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from war_rl.files import write_whole
from war_rl.leftovers import Identity, Leftovers, files_in_use
from war_rl.processes import Process, descendants, kill_until_gone, lives, process_table, read_process

RUN_VARIABLE = "WAR_RL_RUN"
"""Environment variable of every process of a run: the run's name."""

UNWIND_S = 8.0
"""How long a run whose watcher was killed may take to end by itself: it is told when that happens."""
KILL_S = 4.0


def run_name() -> str:
    """The name of a run that this process watches: pid, start, and where and when pids mean anything."""
    me = read_process(os.getpid())
    assert me is not None
    return f"{me[0].pid}.{me[0].started}.{_place()}"


def _place() -> str:
    """The namespace of our pids and the boot of this kernel."""
    boot = ""
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip().replace("-", "")[:12]
    space = 0
    with contextlib.suppress(OSError):
        space = os.stat("/proc/self/ns/pid").st_ino
    return f"{space}.{boot}"


def is_dead(name: str) -> bool:
    """Whether the run's watcher has died. False for what cannot be judged from here."""
    pid, _, rest = name.partition(".")
    started, _, place = rest.partition(".")
    if not (pid.isdigit() and started.isdigit()) or place != _place():
        return False
    return not lives(Process(int(pid), int(started)))


class RunFile:
    """The watcher's notes on a living run. Kept below the temporary folder, readable by its user only.

    Args:
        name: :func:`run_name`.
        note: a file that the run fills in itself (where its summary is); "" for none.
        before: files that were there when the run started.
        folder: where; None for the usual place.
    """

    def __init__(self, name: str, note: str = "", before: Iterable[Identity] = (), folder: Path | None = None) -> None:
        self._base = {"name": name, "note": note, "before": sorted(before)}
        place = folder if folder is not None else notes_folder(create=True)
        self._path = place / f"{name}.json" if place is not None else None
        self._written: dict[str, Any] = {}

    def keep(self, child: Process | None, processes: Iterable[Process], files: Mapping[str, Identity]) -> None:
        """Write down what is there now, if it is news. A disk that refuses costs the note, never the run."""
        data = {
            **self._base,
            "child": [child.pid, child.started] if child is not None else None,
            "processes": [[p.pid, p.started] for p in sorted(processes, key=lambda p: p.pid)],
            "files": [[path, *identity] for path, identity in sorted(files.items())],
        }
        if self._path is None or data == self._written:
            return
        with contextlib.suppress(OSError):
            write_whole(self._path, json.dumps(data))
            self._written = data

    @property
    def kept(self) -> bool:
        """False where there is no place for notes."""
        return self._path is not None

    def remove(self) -> None:
        """The run has ended and nothing of it is left."""
        if self._path is not None:
            with contextlib.suppress(OSError):
                self._path.unlink()


def notes_folder(create: bool = False) -> Path | None:
    """Our user's folder of notes; None where it is not there, or is not ours alone."""
    folder = Path(tempfile.gettempdir()) / f"war-rl-{os.getuid()}"
    try:
        if create:
            folder.mkdir(mode=0o700, exist_ok=True)
        stat = folder.lstat()
    except OSError:
        return None
    # In a folder for everybody the name may have been taken by somebody else, or by a link to elsewhere.
    private = stat.st_uid == os.getuid() and not stat.st_mode & 0o077
    return folder if private and folder.is_dir() and not folder.is_symlink() else None


@dataclass
class DeadRun:
    """A killed run and what is known of it."""

    name: str
    note: str = ""
    child: Process | None = None
    processes: set[Process] = field(default_factory=set)
    files: dict[str, Identity] = field(default_factory=dict)
    before: set[Identity] = field(default_factory=set)
    path: Path | None = None


def find_dead(folder: Path | None = None) -> list[DeadRun]:
    """Runs of our user that were killed with their watchers, with those of their processes that still live."""
    if sys.platform != "linux":
        return []
    runs = {run.name: run for run in _noted(folder if folder is not None else notes_folder())}
    table = process_table()
    for process in table:
        name = _run_of(process.pid)
        if name in runs or (name and is_dead(name)):
            runs.setdefault(name, DeadRun(name)).processes.add(process)
    spared = _ancestors(os.getpid(), table)
    for run in runs.values():
        family = {p for p in run.processes if p in table}
        family.update(descendants([p.pid for p in family], table))
        run.processes = {p for p in family if p.pid not in spared}
    return list(runs.values())


def _noted(folder: Path | None) -> list[DeadRun]:
    runs = []
    for path in sorted(folder.glob("*.json")) if folder is not None else []:
        try:
            run = _read_note(path)
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if is_dead(run.name):
            runs.append(run)
    return runs


def _read_note(path: Path) -> DeadRun:
    data = json.loads(path.read_text())
    child, *processes = (
        Process(int(entry[0]), int(entry[1])) if entry else None for entry in (data["child"], *data["processes"])
    )
    return DeadRun(
        str(data["name"]),
        str(data["note"]),
        child,
        {process for process in (child, *processes) if process is not None},
        {str(name): (int(device), int(inode)) for name, device, inode in data["files"]},
        {(int(device), int(inode)) for device, inode in data["before"]},
        path,
    )


def _run_of(pid: int) -> str:
    """The run that a process of our user belongs to; "" for none."""
    needle = RUN_VARIABLE.encode() + b"="
    try:
        if os.stat(f"/proc/{pid}").st_uid != os.getuid():
            return ""
        with open(f"/proc/{pid}/environ", "rb") as file:
            values = [entry for entry in file.read().split(b"\0") if entry.startswith(needle)]
    except OSError:
        return ""
    return values[0][len(needle) :].decode(errors="replace") if values else ""


def _ancestors(pid: int, table: Mapping[Process, int]) -> set[int]:
    """The process itself and everything above it: never ended, whatever its environment says."""
    parents = {process.pid: parent for process, parent in table.items()}
    found = {pid}
    while (pid := parents.get(pid, 0)) and pid not in found:
        found.add(pid)
    return found


def sweep(
    say: Callable[[str], None], on_dead: Callable[[str], None] = lambda note: None, folder: Path | None = None
) -> None:
    """End the processes of killed runs and remove their shared memory.

    Args:
        say: takes a line for the user.
        on_dead: called with what each dead run wrote into its note, where it did.
        folder: of the notes; None for the usual place.
    """
    for run in find_dead(folder):
        _let_unwind(run)
        # Without its note it is not known what was there before the run.
        used = files_in_use(p.pid for p in run.processes) if run.path is not None else set()
        living = [p for p in run.processes if lives(p)]
        rest = kill_until_gone(living, KILL_S)
        removed = Leftovers.of_dead(run.files, used, run.before).remove()[0]
        if living or removed:
            watcher = run.name.partition(".")[0]
            say(
                f"a run that was killed (pid {watcher}) had left {len(living)} processes and {len(removed)} "
                "shared-memory and socket files: ended and removed"
            )
        if rest:
            say(f"processes of it that would not end: {', '.join(str(p.pid) for p in rest)}")
            continue
        _forget(run, on_dead)


def _let_unwind(run: DeadRun) -> None:
    """Where only the watcher was killed, the run itself was told to stop, and is doing that right now."""
    deadline = time.monotonic() + UNWIND_S
    while run.child is not None and lives(run.child) and time.monotonic() < deadline:
        time.sleep(0.1)


def _forget(run: DeadRun, on_dead: Callable[[str], None]) -> None:
    note = Path(run.note) if run.note else None
    with contextlib.suppress(OSError):
        if note is not None and (text := note.read_text()):
            on_dead(text)
    for path in filter(None, (note, run.path)):
        with contextlib.suppress(OSError):
            path.unlink()
