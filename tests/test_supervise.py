# SPDX-License-Identifier: Apache-2.0
"""Process trees as nasty as Ray's and the engines': own sessions, orphans, deaf to SIGTERM. Real processes, no Ray."""

from __future__ import annotations

import contextlib
import mmap
import os
import pty
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from war_rl.leftovers import Leftovers

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="process supervision needs Linux")
ROOT = Path(__file__).parent.parent
FAR_S = 60.0
"""Bound on waiting for something that must happen; no test measures a duration against it."""

PRELUDE = """
import os, signal, subprocess, sys, time
from pathlib import Path
from war_rl.supervise import Limits, supervise
HERE = Path(sys.argv[1])

def note(name, text=""):
    part = HERE / f".{name}.{os.getpid()}"
    part.write_text(text or str(os.getpid()))
    part.rename(HERE / name)

DEAF = '''
import os, signal, sys, time
for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(s, signal.SIG_IGN)
if sys.argv[2] == "orphan" and os.fork():
    os._exit(0)
os.setsid() if sys.argv[2] == "orphan" else None
open(sys.argv[1] + ".part", "w").write(str(os.getpid()))
os.rename(sys.argv[1] + ".part", sys.argv[1])
time.sleep(1000)
'''

def nasty_tree():
    subprocess.Popen([sys.executable, "-c", DEAF, str(HERE / "deaf.pid"), "plain"], start_new_session=True)
    subprocess.run([sys.executable, "-c", DEAF, str(HERE / "orphan.pid"), "orphan"])
    while not all((HERE / n).exists() for n in ("deaf.pid", "orphan.pid")):
        time.sleep(0.01)
    note("work.pid")
    note("ready")

def unwinding():
    nasty_tree()
    try:
        time.sleep(1000)
    finally:
        note("unwound")

def stubborn():
    nasty_tree()
    while True:
        try:
            time.sleep(1000)
        except KeyboardInterrupt:
            note("refused")
"""


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + FAR_S
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


class Run:
    """A supervised script in ``folder``, and the pids it noted there."""

    def __init__(self, folder: Path, work: str, limits: str = "1, 0.5, 20", code: str = "") -> None:
        self.folder = folder
        script = f"{PRELUDE}\n{code}\nsys.exit(supervise({work}, limits=Limits({limits}, 0.1)))"
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        self.argv = [sys.executable, "-c", script, str(folder)]
        self.process = subprocess.Popen(self.argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def ready(self) -> Run:
        wait_for(lambda: (self.folder / "ready").exists() or self.process.poll() is not None)
        assert (self.folder / "ready").exists(), self.process.communicate()
        return self

    def end(self) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=FAR_S)
        return self.process.returncode, out, err

    def pids(self) -> list[int]:
        return [int(p.read_text()) for p in self.folder.glob("*.pid")]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def make(*args: str, **kwargs: str) -> Run:
        runs.append(Run(tmp_path, *args, **kwargs))
        return runs[-1]

    yield make
    for run in runs:
        for pid in [*run.pids(), run.process.pid]:
            if alive(pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        run.process.wait()


@pytest.mark.parametrize(
    ("work", "code"),
    [
        ("lambda: 0", 0),
        ("lambda: 7", 7),
        ("lambda: sys.exit(5)", 5),
        ("lambda: 1 / 0", 1),
        ("lambda: sys.exit('no')", 1),
    ],
)
def test_exit_code_is_the_works_own(start: Callable[..., Run], work: str, code: int) -> None:
    returned, _, err = start(work).end()
    assert returned == code
    assert ("ZeroDivisionError" in err) is ("1 / 0" in work) and ("no\n" in err) is ("'no'" in work)


def test_output_is_complete_and_exit_handlers_run(start: Callable[..., Run]) -> None:
    code = """
import atexit
def work():
    atexit.register(print, "handler")
    print("work")
    return 0
print("before")
"""
    assert start("work", code=code).end()[:2] == (0, "before\nwork\nhandler\n")


def test_processes_left_by_a_normal_end_are_ended(start: Callable[..., Run]) -> None:
    run = start("lambda: nasty_tree() or 4")
    assert run.end()[0] == 4
    assert len(run.pids()) == 3 and not any(map(alive, run.pids()))


@pytest.mark.parametrize(
    ("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)], ids=["INT", "TERM", "HUP"]
)
def test_one_signal_unwinds_the_work_and_ends_everything(start: Callable[..., Run], signum: int, code: int) -> None:
    run = start("unwinding", "600, 0.5, 20").ready()
    run.process.send_signal(signum)
    assert run.end()[0] == code
    assert (run.folder / "unwound").exists()
    assert len(run.pids()) == 3 and not any(map(alive, run.pids()))


def test_work_that_will_not_unwind_is_ended(start: Callable[..., Run]) -> None:
    run = start("stubborn").ready()
    run.process.send_signal(signal.SIGINT)
    code, _, err = run.end()
    assert code == 130 and (run.folder / "refused").exists() and "did not stop within 1 s" in err
    assert not any(map(alive, run.pids()))


def test_a_second_signal_kills_at_once(start: Callable[..., Run]) -> None:
    run = start("stubborn", "600, 600, 20").ready()
    run.process.send_signal(signal.SIGINT)
    wait_for((run.folder / "refused").exists)
    run.process.send_signal(signal.SIGINT)
    assert run.end()[0] == 130
    assert not any(map(alive, run.pids()))


def test_work_that_is_killed_leaves_nothing_either(start: Callable[..., Run]) -> None:
    run = start("unwinding").ready()
    os.kill(int((run.folder / "work.pid").read_text()), signal.SIGKILL)
    assert run.end()[0] == 128 + signal.SIGKILL
    assert len(run.pids()) == 3 and not any(map(alive, run.pids()))


def test_work_is_told_when_its_watcher_is_killed(start: Callable[..., Run]) -> None:
    run = start("unwinding").ready()
    run.process.kill()
    wait_for((run.folder / "unwound").exists)


def test_processes_that_are_not_descendants_are_left_alone(start: Callable[..., Run]) -> None:
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=True)
    try:
        run = start("unwinding").ready()
        run.process.send_signal(signal.SIGINT)
        assert run.end()[0] == 130
        assert alive(bystander.pid)
    finally:
        bystander.kill()
        bystander.wait()


def test_ctrl_c_typed_at_a_terminal_interrupts_the_work_once(start: Callable[..., Run], tmp_path: Path) -> None:
    code = """
def work():
    count = 0
    signal.signal(signal.SIGINT, lambda *a: note(f"int.{time.monotonic_ns()}"))
    note("ready")
    while not list(HERE.glob("int.*")):
        time.sleep(0.01)
    time.sleep(0.5)
    return 0
"""
    run = start("lambda: 0")
    run.end()
    argv = [*run.argv[:2], f"{PRELUDE}\n{code}\nsys.exit(supervise(work, limits=Limits(600, 0.5, 20)))", str(tmp_path)]
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ["PYTHONPATH"] = str(ROOT)
        os.execv(argv[0], argv)
    wait_for((tmp_path / "ready").exists)
    os.write(terminal, b"\x03")
    status: list[int] = []
    wait_for(lambda: status or status.extend(s for p, s in [os.waitpid(pid, os.WNOHANG)] if p))
    os.close(terminal)
    assert os.waitstatus_to_exitcode(status[0]) == 130
    assert len(list(tmp_path.glob("int.*"))) == 1


SEGMENTS = """
import mmap
def segment(name):
    with open(name, "wb+") as file:
        file.truncate(4096)
        return mmap.mmap(file.fileno(), 4096)
def work():
    kept = segment("/dev/shm/war-test-TAG-mapped")
    nasty_tree()
    time.sleep(1000)
"""


def test_shared_memory_of_the_run_is_removed_and_of_others_is_not(start: Callable[..., Run]) -> None:
    tag = uuid.uuid4().hex
    ours, theirs = Path(f"/dev/shm/war-test-{tag}-mapped"), Path(f"/dev/shm/war-test-{tag}-other")
    try:
        run = start("work", code=SEGMENTS.replace("TAG", tag)).ready()
        theirs.write_bytes(b"x")
        run.process.send_signal(signal.SIGINT)
        code, _, err = run.end()
        assert code == 130
        assert not ours.exists() and theirs.exists()
        assert theirs.name in err.partition("left alone")[2]
    finally:
        ours.unlink(missing_ok=True)
        theirs.unlink(missing_ok=True)


@pytest.fixture
def shm() -> Iterator[Path]:
    folder = Path(f"/dev/shm/war-test-{uuid.uuid4().hex}")
    folder.mkdir()
    yield folder
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()


def mapped(path: Path) -> mmap.mmap:
    with path.open("wb+") as file:
        file.truncate(4096)
        return mmap.mmap(file.fileno(), 4096)


def test_a_segment_is_ours_only_if_we_were_seen_using_it_and_nobody_does_now(shm: Path, tmp_path: Path) -> None:
    (shm / "old").write_bytes(b"x")
    leftovers = Leftovers(shm, tmp_path)
    view = mapped(shm / "mapped")
    (shm / "opened").write_bytes(b"x")
    (shm / "unseen").write_bytes(b"x")
    handle = (shm / "opened").open("rb")
    leftovers.look([os.getpid()], 0.0)
    assert leftovers.remove()[0] == []  # both still in use
    view.close()
    handle.close()
    removed, left = leftovers.remove()
    assert sorted(removed) == [str(shm / "mapped"), str(shm / "opened")] and left == [str(shm / "unseen")]
    assert sorted(os.listdir(shm)) == ["old", "unseen"]


def test_a_segment_named_after_one_of_our_processes_is_ours(shm: Path, tmp_path: Path) -> None:
    leftovers = Leftovers(shm, tmp_path)
    leftovers.look([4321], 0.0)
    for name in ("torch_4321_77", "torch_43210_77", "psm_x4321"):
        (shm / name).write_bytes(b"x")
    assert leftovers.remove()[0] == [str(shm / "torch_4321_77")]


def test_looking_grows_rare_while_it_brings_nothing_and_at_once_for_a_new_file(
    shm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[float] = []
    monkeypatch.setattr("war_rl.leftovers._used_by", lambda pids, shm: looks.append(now) or set())
    leftovers = Leftovers(shm, tmp_path)
    for now in range(5):
        leftovers.look([], float(now))
    assert looks == []
    (shm / "theirs").write_bytes(b"x")
    for now in range(20):
        leftovers.look([], float(now))
    assert looks == [0, 1, 3, 7, 15]
    now = 100
    leftovers.look([], 100.0)
    (shm / "another").write_bytes(b"x")
    now = 101
    leftovers.look([], 101.0, force=True)
    assert looks[-2:] == [100, 101]


def test_only_dead_sockets_that_are_new_are_removed(shm: Path, tmp_path: Path) -> None:
    def bound(name: str) -> socket.socket:
        out = socket.socket(socket.AF_UNIX)
        out.bind(str(shm / f"rl-colocate-zmq-{name}.sock"))
        return out

    bound("old").close()
    leftovers = Leftovers(tmp_path, shm)
    living = bound("living")
    bound("dead").close()
    (shm / "else.sock").write_bytes(b"")
    assert leftovers.remove()[0] == [str(shm / "rl-colocate-zmq-dead.sock")]
    living.close()
    assert sorted(os.listdir(shm)) == ["else.sock", "rl-colocate-zmq-living.sock", "rl-colocate-zmq-old.sock"]
