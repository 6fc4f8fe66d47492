# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from war_rl.files import append_whole, write_whole


def short_writer(room: int) -> Callable[[int, bytes], int]:
    """``os.write`` of a disk with ``room`` bytes left: it writes what fits, and only then refuses."""
    left = [room]
    real = os.write

    def write(fd: int, data: bytes) -> int:
        if not left[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        count = real(fd, bytes(data[: left[0]]))
        left[0] -= count
        return count

    return write


def test_lines_are_appended_and_the_file_is_made(tmp_path: Path) -> None:
    for line in (b"a\n", b"b\n"):
        append_whole(tmp_path / "f", line)
    assert (tmp_path / "f").read_bytes() == b"a\nb\n"


def test_a_full_disk_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    append_whole(tmp_path / "f", b"whole\n")
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", short_writer(3))
        with pytest.raises(OSError, match="No space left"):
            append_whole(tmp_path / "f", b"too long\n")
    append_whole(tmp_path / "f", b"next\n")
    assert (tmp_path / "f").read_bytes() == b"whole\nnext\n"


def test_what_a_killed_writer_cut_short_costs_no_other_line(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"whole\ncut sho")
    append_whole(tmp_path / "f", b"next\n")
    assert (tmp_path / "f").read_bytes() == b"whole\ncut sho\nnext\n"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_device_that_is_full_is_said_as_such() -> None:
    with pytest.raises(OSError, match="No space left"):
        append_whole("/dev/full", b"x\n")


def test_replacing_fails_without_a_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_whole(tmp_path / "f", "old")
    monkeypatch.setattr(os, "fsync", lambda fd: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        write_whole(tmp_path / "f", "new")
    assert (tmp_path / "f").read_text() == "old" and os.listdir(tmp_path) == ["f"]
