# SPDX-License-Identifier: Apache-2.0
"""Files that stay whole when the disk is full or the writer is killed. Local disks; one writer for each file."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path


def write_whole(path: str | Path, text: str) -> None:
    """Replace a file at once: a reader sees the old text or the new one, whatever happens in between.

    Raises:
        OSError: it could not be written; the old file is untouched and nothing else is left.
    """
    target = Path(path)
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        with part.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, target)
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink()
        raise


def append_whole(path: str | Path, data: bytes) -> None:
    """Append lines to a file, made if missing: all of ``data``, or nothing of it.

    A last line that an earlier writer's death cut short is ended first, so that it costs no line but itself.

    Raises:
        OSError: not all of it could be written (a full disk writes as much as fits); the file is as it was.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
    try:
        size = os.fstat(fd).st_size
        if size and os.pread(fd, 1, size - 1) != b"\n":
            data = b"\n" + data
        try:
            _write_all(fd, data)
        except OSError:
            # A device has no length to go back to.
            with contextlib.suppress(OSError):
                os.ftruncate(fd, size)
            raise
    finally:
        os.close(fd)


def _write_all(fd: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        written = os.write(fd, rest)
        if not written:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        rest = rest[written:]
