# SPDX-License-Identifier: Apache-2.0
"""The display on a terminal: a small one in memory, and a real one (a pseudo terminal) with a process behind it."""

from __future__ import annotations

import io
import os
import signal
import sys
from pathlib import Path

import pytest

from tests.support.terminal import OnTerminal, Terminal
from war_rl import display
from war_rl.board import FILE, TOKEN_VARIABLE
from war_rl.screen import Above, Screen


def test_the_block_stays_below_what_is_printed() -> None:
    terminal = Terminal()
    screen = Screen(terminal)
    screen.above("before\n")
    screen.draw(["one", "two"])
    screen.above("a log line\nand another\n")
    screen.draw(["three", "four", "five"])
    assert terminal.lines == ["before", "a log line", "and another", "three", "four", "five", ""]
    assert (terminal.row, terminal.column) == (6, 0)
    screen.draw(["six"])
    screen.clear()
    screen.above("after\n")
    assert terminal.lines == ["before", "a log line", "and another", "after", ""] and terminal.modes == []


def test_after_a_signal_nothing_is_drawn_or_erased() -> None:
    terminal = Terminal()
    screen = Screen(terminal)
    screen.draw(["one", "two"])
    terminal.write("written by another process\n")
    screen.freeze()
    screen.draw(["three"])
    screen.clear()
    screen.above("a last line\n")
    assert terminal.lines == ["one", "two", "written by another process", "a last line", ""]


def test_parts_of_lines_wait_for_their_end() -> None:
    terminal = Terminal()
    screen = Screen(terminal)
    screen.draw(["block"])
    stream = Above(terminal, screen)
    print("half", end="", file=stream, flush=True)
    assert terminal.lines == ["block", ""]
    print(" and half", file=stream)
    for percent in (1, 50, 100):
        stream.write(f"\r{percent} %")
    stream.writelines(["\nx", "\r\n"])
    stream.write("the rest")
    assert terminal.lines == ["half and half", "100 %", "x", "block", ""]
    stream.finish()
    stream.finish()
    assert terminal.lines == ["half and half", "100 %", "x", "the rest", "block", ""]
    assert stream.isatty() and stream.closed is False


def test_a_terminal_that_is_gone_stops_nothing() -> None:
    terminal = Terminal()
    screen = Screen(terminal)
    terminal.flush = lambda: (_ for _ in ()).throw(OSError("Input/output error"))  # type: ignore[method-assign]
    screen.draw(["one"])
    screen.above("two\n")


def test_no_display_without_a_terminal_or_when_it_is_off(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "of a run around this one")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert display.announce("on") is False and TOKEN_VARIABLE not in os.environ
    (tmp_path / FILE).write_text("left by a run that was killed")
    with display.shown(tmp_path):
        assert not (tmp_path / FILE).exists()
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert display.announce("off") is False and TOKEN_VARIABLE not in os.environ
    monkeypatch.setenv("TERM", "dumb")
    assert display.announce("auto") is False
    monkeypatch.setenv("TERM", "xterm")
    assert display.announce("auto") is True and os.environ[TOKEN_VARIABLE]


COMMAND = """
import logging, signal, sys
from pathlib import Path
from war_rl import display
from war_rl.board import ROLLOUT, Board, Post
from war_rl.progress import Progress

folder = Path(sys.argv[1])
log = logging.getLogger("a library")
log.addHandler(logging.StreamHandler())  # holds the stream that is there now
print("before", flush=True)
assert display.announce("auto")
with display.shown(folder):
    trainer = Board.watched(folder)
    trainer.write(Post("step 3", ROLLOUT, Progress(5, 16, 100, 2.0, {"replica0": "high"})))
    assert sys.stdin.readline() == "shown\\n"
    print("to standard output")
    print("to standard error", file=sys.stderr)
    log.warning("to a log")
    assert sys.stdin.readline() == "end\\n"
    if "break" in sys.argv:
        trainer.write(Post("step 4", ROLLOUT, "no progress"))
        assert sys.stdin.readline() == "broken\\n"
    if "fail" in sys.argv:
        raise RuntimeError("the training failed")
print("after")
"""


def test_on_a_terminal_everything_else_goes_above_and_nothing_stays(tmp_path: Path) -> None:
    run = OnTerminal("-c", COMMAND, str(tmp_path))
    run.until("step 3")
    run.say("shown")
    run.until("to a log")
    lines = run.screen().lines
    assert lines[:4] == ["before", "to standard output", "to standard error", "to a log"]
    assert lines[4].startswith("[war-rl] step 3 ") and lines[4].endswith("left") is False
    assert lines[5:] == ["  50 tok/s", "  replica0 high", ""]
    run.say("end")
    assert run.end() == 0
    assert run.screen().lines == ["before", "to standard output", "to standard error", "to a log", "after", ""]
    assert run.screen().modes == [] and os.listdir(tmp_path) == []


def test_a_training_that_fails_leaves_its_error_and_no_display(tmp_path: Path) -> None:
    run = OnTerminal("-c", COMMAND, str(tmp_path), "fail")
    run.until("step 3")
    run.say("shown")
    run.say("end")
    assert run.end() == 1
    lines = run.screen().lines
    assert lines[-2:] == ["RuntimeError: the training failed", ""] and not any("step 3" in line for line in lines)
    assert run.screen().modes == [] and os.listdir(tmp_path) == []


def test_a_display_that_cannot_go_on_says_so_and_frees_the_trainer_to_print(tmp_path: Path) -> None:
    run = OnTerminal("-c", COMMAND, str(tmp_path), "break")
    run.until("step 3")
    run.say("shown")
    run.say("end")
    run.until("the progress display has stopped")
    assert not (tmp_path / FILE).exists()
    run.say("broken")
    assert run.end() == 0 and not any("step 3" in line for line in run.screen().lines)


SUPERVISED = """
import sys, time
from pathlib import Path
from war_rl import display
from war_rl.supervise import supervise

def work():
    display.announce("auto")
    with display.shown(Path(sys.argv[1])):
        if "die" in sys.argv:
            sys.stdin.readline()
            import os, signal
            os.kill(os.getpid(), signal.SIGKILL)
        while True:
            time.sleep(0.05)

code = supervise(work)
print("the watcher's last line")
sys.exit(code)
"""


def test_ctrl_c_keeps_what_the_watching_process_says(tmp_path: Path) -> None:
    run = OnTerminal("-c", SUPERVISED, str(tmp_path))
    run.until("starting engines")
    # To the watching process only: it passes it on, after having said what it does.
    run.process.send_signal(signal.SIGINT)
    assert run.end() == 130
    lines = run.screen().lines
    assert [line for line in lines if "Ctrl-C: stopping" in line] and lines[-2:] == ["the watcher's last line", ""]
    assert run.screen().modes == []


def test_a_killed_run_leaves_a_usable_terminal(tmp_path: Path) -> None:
    run = OnTerminal("-c", SUPERVISED, str(tmp_path), "die")
    run.until("starting engines")
    run.say("now")
    assert run.end() == 137
    lines = run.screen().lines
    assert lines[-2:] == ["the watcher's last line", ""]
    assert [line[:25] for line in lines if "war-rl" in line][:1] == ["[war-rl] starting engines"]
    assert run.screen().modes == []
