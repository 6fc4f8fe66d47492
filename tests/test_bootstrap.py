# SPDX-License-Identifier: Apache-2.0
"""scripts/bootstrap.sh with a stand-in for uv: no network, no packages."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
UV = """#!/bin/sh
[ "$1" = --version ] && exit 0
echo "$@" >> "{log}"
[ ! -e "{fail}" ]
"""


class Sandbox:
    def __init__(self, root: Path) -> None:
        self.root, self.venv, self.log, self.fail = root, root / "env", root / "uv.log", root / "fail"
        (root / "scripts").mkdir()
        shutil.copy(ROOT / "scripts" / "bootstrap.sh", root / "scripts")
        (root / "war_rl").mkdir()
        (root / "war_rl" / "__init__.py").write_text("")
        (root / "pyproject.toml").write_text("[project]\n")
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(self.venv)], check=True)
        uv = self.venv / "bin" / "uv"
        uv.write_text(UV.format(log=self.log, fail=self.fail))
        uv.chmod(0o755)

    def run(self, **variables: str) -> subprocess.CompletedProcess[str]:
        env = {"PATH": os.environ["PATH"], "VENV": "env", "EXTRAS": "x", **variables}
        return subprocess.run(
            [str(self.root / "scripts" / "bootstrap.sh")], env=env, capture_output=True, text=True, timeout=120
        )

    def installs(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []


@pytest.fixture
def box(tmp_path: Path) -> Sandbox:
    return Sandbox(tmp_path)


def test_it_installs_once_and_again_when_something_changed(box: Sandbox) -> None:
    assert box.run().returncode == 0 and box.run().returncode == 0
    assert len(box.installs()) == 1 and box.installs()[0].endswith("-e .[x]")
    assert box.run().stdout == ""
    (box.root / "pyproject.toml").write_text("[project]\nname = 'new'\n")
    box.run()
    box.run(EXTRAS="x,y")
    assert [line.rpartition(" ")[2] for line in box.installs()] == [".[x]", ".[x]", ".[x,y]"]


def test_an_interrupted_install_is_done_again_from_the_ground(box: Sandbox) -> None:
    box.fail.write_text("")
    assert box.run().returncode != 0
    box.fail.unlink()
    done = box.run()
    assert done.returncode == 0 and "interrupted" in done.stdout
    assert ["--reinstall" in line for line in box.installs()] == [False, True]
    assert box.run().stdout == ""


def test_a_moved_or_broken_environment_is_made_again(box: Sandbox) -> None:
    box.run()
    box.venv.rename(box.root / "other")
    # PYTHON that cannot make environments: we only see that it is tried.
    fake = box.root / "python"
    fake.write_text(f'#!/bin/sh\n[ "$1" = -m ] && exit 1\nexec {sys.executable} "$@"\n')
    fake.chmod(0o755)
    for venv in ("other", "half"):
        (box.root / "half" / "bin").mkdir(parents=True, exist_ok=True)
        done = box.run(VENV=venv, PYTHON=str(fake))
        assert done.returncode == 1 and "making it again" in done.stdout and "python3-venv" in done.stderr


def test_an_unfit_python_is_refused_by_name(box: Sandbox) -> None:
    old = box.root / "old"
    old.write_text('#!/bin/sh\n[ "$1" = --version ] && echo Python 3.9.1 || exit 1\n')
    old.chmod(0o755)
    done = box.run(PYTHON=str(old))
    assert done.returncode == 1 and "Python 3.9.1" in done.stderr and str(old) in done.stderr
