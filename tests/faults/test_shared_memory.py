# SPDX-License-Identifier: Apache-2.0
"""/dev/shm fills up in the middle of a run, in a mount namespace of its own: nobody else's is touched."""

from __future__ import annotations

import contextlib
import subprocess
from pathlib import Path

import psutil
import pytest

from tests.support.training import Run, run_training

pytestmark = [pytest.mark.e2e, pytest.mark.faults, pytest.mark.extended]

MOUNT = 'mount -t tmpfs -o size=256m tmpfs /dev/shm && exec "$@"'
NAMESPACE = ("unshare", "-m", "sh", "-c", MOUNT, "sh")


def fill(process: psutil.Process) -> None:
    """Take all room that the run's own /dev/shm has left."""
    with contextlib.suppress(OSError), Path(f"/proc/{process.pid}/root/dev/shm/filler").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(1 << 16))


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Run:
    if subprocess.run([*NAMESPACE, "true"], capture_output=True).returncode:
        pytest.skip("needs the right to mount")
    return run_training(
        tmp_path_factory.mktemp("full"),
        "trainer.total_training_steps=5",
        when="step 1 done",
        act=fill,
        prefix=NAMESPACE,
    )


def test_the_run_ends_in_time_and_names_the_cause(full: Run):
    assert full.code not in (0, 130), full.output[-5000:]
    assert 0 < full.seconds_after_action < 60
    assert full.summary["status"] == "failed"
    assert "/dev/shm is full (0 of 256 MiB free)" in full.summary["error"]
    assert "--shm-size" in full.summary["error"]


def test_it_leaves_no_process(full: Run):
    assert full.left_processes == []
