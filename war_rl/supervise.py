# SPDX-License-Identifier: Apache-2.0
"""Runs the training so that nothing of it outlives the command: no process, no shared memory, no socket file.

Ray, its workers and the engines start processes in sessions of their own, ignore the terminal's signals, and are
orphaned when their parent dies. So the command forks before it imports anything heavy: the child trains, the parent
only watches, always able to react. The parent is the *subreaper* of everything below it (Linux): orphans come back to
it instead of escaping to process 1, which makes "all my descendants" complete. A Ray cluster that somebody else started
is not among the descendants and is never touched.

One Ctrl-C (or SIGTERM, SIGHUP) asks the child to stop, waits, terminates, then kills. A second one kills at once. What
a run left that was killed with its watcher is ended and removed by the next start (:mod:`war_rl.orphans`).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from war_rl.leftovers import Leftovers
from war_rl.orphans import RUN_VARIABLE, RunFile, run_name, sweep
from war_rl.processes import Process, descendants

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_SI_KERNEL = 0x80

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True, slots=True)
class Limits:
    """How long each stage of an ending may take, in seconds. Together they stay below the promised 20."""

    unwind_s: float = 8.0
    """From the first signal: time for the training to unwind by itself (close loggers, write its summary)."""
    terminate_s: float = 4.0
    """From SIGTERM to SIGKILL for what is left then."""
    kill_s: float = 4.0
    """From the first SIGKILL until giving up on processes that do not even die of that."""
    poll_s: float = 2.0
    """How often the watcher looks at shared memory while nothing happens."""


def supervise(
    work: Callable[[], int],
    *,
    limits: Limits | None = None,
    say: Callable[[str], None] | None = None,
    on_stop: Callable[[], None] | None = None,
    note: str = "",
    on_dead: Callable[[str], None] | None = None,
) -> int:
    """Run ``work`` in a forked child and return its exit code after everything it started has ended.

    Call it from the main thread of a process that has no other threads and no children yet (dead children are taken
    in here, whoever started them). Linux only: elsewhere ``work`` runs right here, without any of this.

    Args:
        work: what to run; returns an exit code.
        limits: how long each stage of an ending may take.
        say: takes a line for the user; the terminal's error stream if not given.
        on_stop: called once, in the watching process, at the first stop signal and before anything reacts to it.
        note: a file that the run may write into, for the next start if this run is killed together with its watcher.
        on_dead: called with what such a run had written into its note, once what it left has been removed.

    Returns:
        The child's exit code; 128 + n if the child died of signal n; 130 after Ctrl-C, 143 after SIGTERM, 129 after
        SIGHUP, whatever the child made of it. 1 if processes could not be ended.
    """
    say = say or _to_stderr
    if sys.platform != "linux":
        say(f"processes are not supervised on {sys.platform}: after Ctrl-C look for leftovers yourself")
        return work()
    sweep(say, on_dead or (lambda text: None))
    return _Supervisor(limits or Limits(), say, on_stop or (lambda: None), note).run(work)


def _to_stderr(text: str) -> None:
    # The terminal may be gone already: that must not stop the cleaning up.
    with contextlib.suppress(OSError, ValueError):
        print(f"war-rl: {text}", file=sys.stderr, flush=True)


class _Supervisor:
    def __init__(self, limits: Limits, say: Callable[[str], None], on_stop: Callable[[], None], note: str = "") -> None:
        self._limits = limits
        self._say = say
        self._tell = on_stop
        self._note = note
        self._child = 0
        self._child_status: int | None = None
        self._stop_signal: int | None = None
        self._hurry = False
        self._watched = {signal.SIGCHLD, *STOP_SIGNALS}

    def run(self, work: Callable[[], int]) -> int:
        become_subreaper()
        self._leftovers = Leftovers()
        self._strangers = set(descendants([os.getpid()]))
        name = run_name()
        self._file = RunFile(name, self._note, self._leftovers.before)
        if not self._file.kept:
            self._say("no private folder for notes below TMPDIR: if this run is killed, its shared memory will stay")
        # Whatever the run starts inherits its name, however far it gets from us.
        with _in_environment(RUN_VARIABLE, name):
            clean = self._fork_and_watch(work)
        if not clean:
            return 1
        self._file.remove()
        if self._stop_signal is not None:
            return 128 + self._stop_signal
        assert self._child_status is not None
        code = os.waitstatus_to_exitcode(self._child_status)
        return code if code >= 0 else 128 - code

    def _fork_and_watch(self, work: Callable[[], int]) -> bool:
        """Start the child, watch it, end what is left after it. False if some processes would not die."""
        parent = os.getpid()
        # Blocked before the fork, so that no signal falls between fork and wait.
        old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, self._watched)
        sys.stdout.flush()
        sys.stderr.flush()
        self._child = os.fork()
        if self._child == 0:
            _child_main(work, old_mask, parent)
        try:
            self._keep_notes(self._rest())
            self._watch()
            return self._end_the_rest()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)

    def _watch(self) -> None:
        """Until the child has ended, its time to unwind is over, or the user is in a hurry."""
        deadline: float | None = None
        while self._child_status is None and not self._hurry:
            if deadline is not None and time.monotonic() >= deadline:
                self._say(f"the run did not stop within {self._limits.unwind_s:g} s, ending it")
                return
            self._wait(self._limits.poll_s)
            if self._stop_signal is not None and deadline is None:
                deadline = time.monotonic() + self._limits.unwind_s

    def _wait(self, seconds: float) -> None:
        """Wait for a signal, handle it, take in the dead, look at shared memory."""
        info = signal.sigtimedwait(self._watched, seconds)
        if info is not None and info.si_signo in STOP_SIGNALS:
            self._on_stop(info)
        self._reap()
        rest = self._rest()
        self._leftovers.look(_pids(rest), time.monotonic())
        self._keep_notes(rest)

    def _keep_notes(self, rest: list[Process]) -> None:
        child = next((process for process in rest if process.pid == self._child), None)
        self._file.keep(child, rest, self._leftovers.ours())

    def _on_stop(self, info: signal.struct_siginfo) -> None:
        if self._stop_signal is not None:
            self._hurry = True
            self._say("second signal: killing everything now")
            return
        self._stop_signal = info.si_signo
        self._tell()
        self._leftovers.look(_pids(self._rest()), time.monotonic(), force=True)
        name = "Ctrl-C" if info.si_signo == signal.SIGINT else signal.Signals(info.si_signo).name
        self._say(f"{name}: stopping, at most 20 s (once more to kill at once)")
        # The terminal has sent its Ctrl-C to the child as well.
        if not (info.si_signo == signal.SIGINT and info.si_code == _SI_KERNEL):
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._child, signal.SIGINT)

    def _reap(self) -> None:
        """Take in every dead child, adopted orphans included, so that none stays a zombie."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self._child:
                self._child_status = status

    def _end_the_rest(self) -> bool:
        """End every descendant, then remove what they left behind. False if some would not die."""
        self._reap()
        rest = self._rest()
        if rest:
            self._leftovers.look(_pids(rest), time.monotonic(), force=True)
        if rest and not self._hurry:
            self._signal(rest, signal.SIGTERM)
            rest = self._until_gone(self._limits.terminate_s, lambda rest: None)
        if rest:
            # What is started while its parent is being killed is killed in the next round.
            rest = self._until_gone(self._limits.kill_s, lambda rest: self._signal(rest, signal.SIGKILL), True)
        if rest:
            self._say(f"processes that would not end: {', '.join(map(str, _pids(rest)))}")
        removed, left = self._leftovers.remove()
        if removed and self._stop_signal is None:
            self._say(f"removed {len(removed)} leftover shared-memory and socket files")
        if left:
            self._say(f"left alone, as it is not known whose they are: {', '.join(left)}")
        return not rest

    def _until_gone(
        self, seconds: float, again: Callable[[list[Process]], None], killing: bool = False
    ) -> list[Process]:
        deadline = time.monotonic() + seconds
        while (rest := self._rest()) and time.monotonic() < deadline and (killing or not self._hurry):
            again(rest)
            info = signal.sigtimedwait(self._watched, 0.05)
            if info is not None and info.si_signo in STOP_SIGNALS:
                self._hurry = self._stop_signal is not None
                self._stop_signal = self._stop_signal or info.si_signo
            self._reap()
        return rest

    def _rest(self) -> list[Process]:
        """Everything that ``work`` has started and that still lives."""
        return [process for process in descendants([os.getpid()]) if process not in self._strangers]

    def _signal(self, processes: list[Process], signum: int) -> None:
        for process in processes:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process.pid, signum)


@contextlib.contextmanager
def _in_environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before


def _pids(processes: list[Process]) -> list[int]:
    return [process.pid for process in processes]


def become_subreaper() -> bool:
    """Have orphaned descendants handed to this process. False where the system cannot (not Linux)."""
    return sys.platform == "linux" and _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> bool:
    return bool(ctypes.CDLL(None).prctl(option, value, 0, 0, 0) == 0)


def _child_main(work: Callable[[], int], mask: set[signal.Signals] | set[int], parent: int) -> None:
    """The child's whole life; never returns."""
    code = 1
    try:
        if sys.platform == "linux":
            # If the watcher is killed, the run is told as by Ctrl-C, so that it does not train on unseen.
            _prctl(_PR_SET_PDEATHSIG, signal.SIGINT)
        signal.signal(signal.SIGINT, _first_interrupt_only)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if os.getppid() != parent:
            raise KeyboardInterrupt
        code = int(work() or 0)
    except KeyboardInterrupt:
        code = 130
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        if _interrupted.is_set():
            # The interrupt may have come while a library was in the middle of something and left it as another error.
            code = 130
        # Exit handlers run (Ray's and the loggers' are among them) before the parent ends what is left.
        _leave(code)


def _leave(code: int) -> None:
    import atexit

    with contextlib.suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]
    with contextlib.suppress(BaseException):
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(BaseException):
            stream.flush()
    os._exit(code & 0xFF)


_interrupted = threading.Event()


def interrupted() -> bool:
    """Whether this process, a supervised one, has been told to stop: what fails from then on is only an echo."""
    return _interrupted.is_set()


def _first_interrupt_only(signum: int, frame: object) -> None:
    """One KeyboardInterrupt: more of them would only break the unwinding; escalation is the parent's task."""
    _interrupted.set()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise KeyboardInterrupt
