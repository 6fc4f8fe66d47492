# SPDX-License-Identifier: Apache-2.0
"""Shared memory and socket files of processes that died too suddenly to remove them.

A shared-memory file says nothing about its owner, and several runs of one user may live on a machine. So a file is only
ours if it is new since the start, belongs to our user, and was seen open or mapped by one of our processes (or carries
the pid of one in its name, as torch does); and it is only removed when no living process has it any more.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TypeAlias

Identity: TypeAlias = tuple[int, int]
"""Device and inode of a file."""

SHM = Path("/dev/shm")
TMP = Path("/tmp")
SOCKETS = "rl-colocate-zmq-*"
"""Sockets over which verl sends weights to the engines."""

_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 60.0


class Leftovers:
    """Watches which new shared-memory files our processes use; removes those, and dead sockets, at the end."""

    def __init__(self, shm: Path = SHM, tmp: Path = TMP) -> None:
        self._shm = shm
        self._tmp = tmp
        self._before = _identities(shm.glob("*")) | _identities(tmp.glob(SOCKETS))
        self._ours: set[Identity] = set()
        self._pids: set[int] = set()
        self._pause = _FIRST_PAUSE_S
        self._next = 0.0
        self._unknown: set[Identity] = set()
        self._sockets: set[Identity] | None = None

    @classmethod
    def of_dead(
        cls,
        files: Mapping[str, Identity],
        used: set[Identity],
        before: set[Identity],
        shm: Path = SHM,
        tmp: Path = TMP,
    ) -> Leftovers:
        """Those of a run that was killed: what its watcher noted as :meth:`ours`, and what its processes had open.

        ``before``: what was there when it started (:attr:`before`), which is nobody's to remove.
        """
        found = cls(shm, tmp)
        noted = {i for path, i in files.items() if _own([Path(path)]).get(Path(path)) == i}
        found._before = before
        found._ours = found._sockets = noted | used
        return found

    @property
    def before(self) -> set[Identity]:
        """Device and inode of each file that was there at the start."""
        return set(self._before)

    def look(self, pids: Iterable[int], now: float, *, force: bool = False) -> None:
        """Find out which new files belong to ``pids``. ``now`` in seconds, monotonic.

        Reading every process' memory map is not free: it is done only while there are new files of unknown owner, and
        ever more rarely while it brings nothing (they may well be somebody else's).
        """
        pids = list(pids)
        self._pids.update(pids)
        unknown = set(self._new_files().values()) - self._ours
        if unknown - self._unknown:
            self._pause = _FIRST_PAUSE_S
        self._unknown = unknown
        if not unknown or (now < self._next and not force):
            return
        self._ours |= unknown & _used_by(pids, self._shm)
        self._next = now + self._pause
        self._pause = min(2 * self._pause, _LONGEST_PAUSE_S)

    def ours(self) -> dict[str, Identity]:
        """New files that are known to be ours, and new sockets, with device and inode."""
        files = {p: i for p, i in self._new_files().items() if i in self._ours or self._named_after_us(p)}
        sockets = {p: i for p, i in _own(self._tmp.glob(SOCKETS)).items() if i not in self._before}
        return {str(path): identity for path, identity in {**files, **sockets}.items()}

    def remove(self) -> tuple[list[str], list[str]]:
        """Remove what was ours; call it when our processes are gone.

        Returns:
            Paths removed, and paths that are new and in nobody's use but were never seen in use by us.
        """
        removed, left = [], []
        files = self._new_files()
        in_use = _used_by(_all_pids(), self._shm) if files else set()
        for path, identity in files.items():
            if identity in in_use:
                continue
            if identity not in self._ours and not self._named_after_us(path):
                left.append(str(path))
                continue
            with contextlib.suppress(OSError):
                path.unlink()
                removed.append(str(path))
        removed += self._remove_sockets()
        return removed, left

    def _new_files(self) -> dict[Path, Identity]:
        return {p: i for p, i in _own(self._shm.glob("*")).items() if i not in self._before}

    def _named_after_us(self, path: Path) -> bool:
        return any(int(number) in self._pids for number in re.findall(r"(?<=[_-])\d{2,10}(?=[_-]|$)", path.name))

    def _remove_sockets(self) -> list[str]:
        removed = []
        bound = _bound_sockets()
        for path, identity in _own(self._tmp.glob(SOCKETS)).items():
            if self._sockets is not None and identity not in self._sockets:
                continue
            # A socket file that nobody is bound to can never be connected to again.
            if identity not in self._before and str(path) not in bound:
                with contextlib.suppress(OSError):
                    path.unlink()
                    removed.append(str(path))
        return removed


def files_in_use(pids: Iterable[int], shm: Path = SHM) -> set[Identity]:
    """Device and inode of the shared-memory files that these processes have mapped or open."""
    return _used_by(pids, shm)


def _identities(paths: Iterable[Path]) -> set[Identity]:
    return set(_own(paths).values())


def _own(paths: Iterable[Path]) -> dict[Path, Identity]:
    """Our user's files among ``paths``, with device and inode."""
    out = {}
    for path in paths:
        with contextlib.suppress(OSError):
            stat = path.lstat()
            if stat.st_uid == os.getuid() and not path.is_dir():
                out[path] = (stat.st_dev, stat.st_ino)
    return out


def _all_pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _used_by(pids: Iterable[int], shm: Path) -> set[Identity]:
    """Device and inode of the files below ``shm`` that any of ``pids`` has mapped or open."""
    used: set[Identity] = set()
    needle = f"{shm}/".encode()
    for pid in pids:
        with contextlib.suppress(OSError), open(f"/proc/{pid}/maps", "rb") as file:
            for line in file.read().splitlines():
                if needle in line:
                    # address perms offset major:minor inode path
                    device, inode = line.split(maxsplit=5)[3:5]
                    major, minor = (int(part, 16) for part in device.split(b":"))
                    used.add((os.makedev(major, minor), int(inode)))
        used |= _open_files(pid, os.fsdecode(needle))
    return used


def _open_files(pid: int, prefix: str) -> set[Identity]:
    out = set()
    with contextlib.suppress(OSError):
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                if os.readlink(entry.path).startswith(prefix):
                    stat = os.stat(entry.path)
                    out.add((stat.st_dev, stat.st_ino))
    return out


def _bound_sockets() -> set[str]:
    """Paths of the Unix sockets that a living process is bound to."""
    with open("/proc/net/unix") as file:
        return {line.rstrip("\n").split(maxsplit=7)[7] for line in file if len(line.split(maxsplit=7)) == 8}
