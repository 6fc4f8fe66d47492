# SPDX-License-Identifier: Apache-2.0
"""What a run leaves that is killed together with its watcher, and that the next start ends. Real processes, no Ray."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.test_supervise import ROOT, SEGMENTS, Run, alive, start, wait_for  # noqa: F401 - start is a fixture
from war_rl import orphans
from war_rl.leftovers import Leftovers
from war_rl.orphans import RUN_VARIABLE, RunFile, find_dead, is_dead, notes_folder, run_name, sweep
from war_rl.processes import Process, read_process

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="process supervision needs Linux")

Start = Callable[..., Run]
SLEEP = "import time; time.sleep(1000)"


@pytest.fixture(autouse=True)
def own_notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Notes of this test only: the command reads TMPDIR, this process has it cached."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(orphans.tempfile, "tempdir", str(folder))
    return folder / f"war-rl-{os.getuid()}"


@pytest.fixture
def process() -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []

    def make(**environment: str) -> subprocess.Popen[bytes]:
        env = {**os.environ, **environment}
        started.append(subprocess.Popen([sys.executable, "-c", SLEEP], env=env, start_new_session=True))
        # Until it has become the new program it shows our environment.
        wait_for(lambda: SLEEP.encode() in Path(f"/proc/{started[-1].pid}/cmdline").read_bytes())
        return started[-1]

    yield make
    for one in started:
        one.kill()
        one.wait()


def dead_name() -> str:
    """The name of a run whose watcher, a process of this boot and namespace, has ended."""
    code = "from war_rl.orphans import run_name; print(run_name())"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
    ).stdout.strip()


def kill_watcher_and_work(run: Run) -> None:
    """As the out-of-memory killer or a SIGKILL of the process group does; sessions of their own live on."""
    run.process.kill()
    os.kill(int((run.folder / "work.pid").read_text()), signal.SIGKILL)
    run.process.wait()


def test_the_next_start_ends_what_a_killed_run_left(start: Start, tmp_path: Path, own_notes: Path) -> None:  # noqa: F811
    tag = uuid.uuid4().hex
    segment = Path(f"/dev/shm/war-test-{tag}-mapped")
    try:
        run = start("work", code=SEGMENTS.replace("TAG", tag)).ready()
        # The watcher has seen whose the segment is.
        wait_for(lambda: any(str(segment) in note.read_text() for note in own_notes.glob("*.json")))
        kill_watcher_and_work(run)
        # A killed process takes a moment to die.
        wait_for(lambda: sum(map(alive, run.pids())) <= 2)
        left = [pid for pid in run.pids() if alive(pid)]
        assert len(left) == 2 and segment.exists()
        (tmp_path / "next").mkdir()
        code, _, err = Run(tmp_path / "next", "lambda: 7").end()
        assert code == 7
        assert not any(map(alive, left)) and not segment.exists(), err
        assert not list(own_notes.iterdir())
    finally:
        segment.unlink(missing_ok=True)


def test_a_process_is_found_by_the_name_that_it_inherited(process: Callable[..., subprocess.Popen[bytes]]) -> None:
    name = dead_name()
    orphan = process(**{RUN_VARIABLE: name})
    (run,) = [run for run in find_dead() if run.name == name]
    assert [p.pid for p in run.processes] == [orphan.pid]
    said: list[str] = []
    sweep(said.append)
    assert orphan.wait(timeout=60) == -signal.SIGKILL
    assert any("had left 1 processes" in text for text in said)


def test_processes_of_living_runs_and_of_other_places_are_nobodys_orphans(
    process: Callable[..., subprocess.Popen[bytes]],
) -> None:
    pid, started, space, boot = dead_name().split(".")
    names = [run_name(), f"{pid}.{started}.{int(space) + 1}.{boot}", f"{pid}.{started}.{space}.another", "nonsense", ""]
    spared = [process(**{RUN_VARIABLE: name}) for name in names]
    assert not any(map(is_dead, names)) and is_dead(f"{pid}.{started}.{space}.{boot}")
    # A pid that is in use again, by another process, is a dead watcher's.
    assert is_dead(f"{os.getpid()}.{int(started) + 12345}.{space}.{boot}")
    found = {p.pid for run in find_dead() for p in run.processes}
    assert not found & {one.pid for one in spared}


def test_whoever_sweeps_spares_itself_and_what_started_it(tmp_path: Path) -> None:
    """A shell that a killed run has left, in which somebody works on."""
    inner = "from war_rl.orphans import sweep; sweep(print); print('alive')"
    outer = f"import subprocess, sys; sys.exit(subprocess.run([sys.executable, '-c', {inner!r}]).returncode)"
    env = {**os.environ, RUN_VARIABLE: dead_name(), "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", outer], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "alive" in done.stdout, done.stderr


def test_what_the_dead_run_wrote_into_its_note_is_told_once(own_notes: Path, tmp_path: Path) -> None:
    note = tmp_path / "note"
    note.write_text("/runs/a/summary.json")
    RunFile(dead_name(), str(note), folder=notes_folder(create=True)).keep(None, [], {})
    told: list[str] = []
    sweep(print, told.append)
    sweep(print, told.append)
    assert told == ["/runs/a/summary.json"]
    assert not note.exists() and not list(own_notes.iterdir())


def test_a_pid_that_is_in_use_again_is_not_the_one_that_was_noted(
    process: Callable[..., subprocess.Popen[bytes]], own_notes: Path
) -> None:
    stranger = process()
    known = read_process(stranger.pid)
    assert known is not None
    RunFile(dead_name()).keep(None, [Process(stranger.pid, known[0].started - 1)], {})
    sweep(print)
    assert stranger.poll() is None


def test_notes_that_are_no_notes_are_left_alone(own_notes: Path) -> None:
    assert notes_folder(create=True) == own_notes
    (own_notes / "a.json").write_text("{")
    (own_notes / "b.json").write_text(json.dumps({"name": dead_name(), "processes": 3}))
    assert find_dead(own_notes) == [] or all(run.path is None for run in find_dead(own_notes))


@pytest.mark.parametrize("taken", ["by a link", "by a file", "by everybody"])
def test_a_folder_that_is_not_ours_alone_is_not_used(own_notes: Path, tmp_path: Path, taken: str) -> None:
    if taken == "by a link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        own_notes.symlink_to(tmp_path / "elsewhere")
    elif taken == "by a file":
        own_notes.write_text("")
    else:
        own_notes.mkdir()
        own_notes.chmod(0o777)
    assert notes_folder(create=True) is None
    notes = RunFile(run_name())
    notes.keep(None, [], {})
    notes.remove()
    assert not notes.kept and list((tmp_path / "elsewhere").glob("*") if taken == "by a link" else []) == []


def test_files_that_were_there_before_the_dead_run_are_nobodys_to_remove(tmp_path: Path) -> None:
    before, ours, moved = (tmp_path / name for name in ("before", "ours", "moved"))
    for path in (before, ours, moved):
        path.write_text("x")
    identity = {path: (path.stat().st_dev, path.stat().st_ino) for path in (before, ours, moved)}
    noted = {str(ours): identity[ours], str(tmp_path / "another name"): identity[moved]}
    dead = Leftovers.of_dead(noted, {identity[before]}, {identity[before]}, shm=tmp_path, tmp=tmp_path / "none")
    assert dead.remove()[0] == [str(ours)]
    assert before.exists() and moved.exists()
