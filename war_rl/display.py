# SPDX-License-Identifier: Apache-2.0
"""Live progress on the terminal of ``war-rl train``, drawn from what the trainer puts on the :mod:`~war_rl.board`."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

from war_rl.board import TOKEN_VARIABLE, Board
from war_rl.progress import MARK
from war_rl.screen import Screen, printed_above

INTERVAL_S = 0.5
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def announce(mode: str) -> bool:
    """Decide whether this process shows a display, and hand that down to the processes it starts.

    Args:
        mode: ``war.progress``; ``off`` shows none.
    """
    os.environ.pop(TOKEN_VARIABLE, None)
    if mode == "off" or terminal() is None:
        return False
    os.environ[TOKEN_VARIABLE] = uuid.uuid4().hex
    return True


def terminal() -> TextIO | None:
    """The stream that a display can be drawn on, if any."""
    if os.environ.get("TERM", "dumb") in ("dumb", "unknown"):
        return None
    return next((stream for stream in (sys.stderr, sys.stdout) if stream is not None and stream.isatty()), None)


@contextlib.contextmanager
def shown(folder: Path) -> Iterator[None]:
    """Meanwhile the display is there, if :func:`announce` said so. A board that an earlier run left goes anyway."""
    board, stream = Board(folder, os.environ.get(TOKEN_VARIABLE, "")), terminal()
    if TOKEN_VARIABLE not in os.environ or stream is None:
        board.remove()
        yield
        return
    try:
        board.open()
    except OSError as error:
        print(f"{MARK} no progress display: {error}", file=stream, flush=True)
        yield
        return
    try:
        with Display(board, stream):
            yield
    finally:
        board.remove()


class Display:
    """Draws ``board`` on ``stream`` from a thread; a context manager.

    At the first signal to stop it draws no more and erases nothing: from then on the command's watching process writes
    to the terminal as well. Where drawing fails it says so once and takes the board away, upon which the trainer goes
    over to plain lines.
    """

    def __init__(self, board: Board, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._board = board
        self._stream = stream
        self._clock = clock
        self._screen = Screen(stream)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="war-display", daemon=True)
        self._last: object = None
        self._since = clock()
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Display:
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)
        self._stack.enter_context(printed_above(self._screen, self._stream))
        self._stack.enter_context(_signals_written_to(self._wake_write))
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stopped.set()
        with contextlib.suppress(OSError):
            os.write(self._wake_write, b"\0")
        self._thread.join()
        self._wait(0.0)
        self._screen.clear()
        self._stack.close()
        os.close(self._wake_read)
        os.close(self._wake_write)

    def _run(self) -> None:
        try:
            while not self._stopped.is_set():
                self._draw()
                self._wait()
        except Exception as error:
            self._board.remove()
            self._screen.clear()
            self._screen.above(f"{MARK} the progress display has stopped: {type(error).__name__}: {error}\n")

    def _wait(self, seconds: float = INTERVAL_S) -> None:
        """Until the next drawing is due, or a signal has come."""
        ready, _, _ = select.select([self._wake_read], [], [], seconds)
        if ready and any(number in STOP_SIGNALS for number in os.read(self._wake_read, 512)):
            self._screen.freeze()

    def _draw(self) -> None:
        from war_rl.display_view import render, view

        post = self._board.read()
        if post is None:
            self._screen.clear()
            return
        if post != self._last:
            self._last, self._since = post, self._clock()
        columns, lines = _size(self._stream)
        drawn = render(
            view(post, self._clock() - self._since),
            columns - 1,
            colour="NO_COLOR" not in os.environ,
            encoding=getattr(self._stream, "encoding", None) or "utf-8",
        )
        self._screen.draw(drawn[: max(1, lines - 1)])


def _size(stream: TextIO) -> tuple[int, int]:
    """Columns and lines of the terminal; 80 x 24 where it does not say."""
    try:
        size = os.get_terminal_size(stream.fileno())
    except (OSError, ValueError):
        return 80, 24
    return size.columns or 80, size.lines or 24


@contextlib.contextmanager
def _signals_written_to(fd: int) -> Iterator[None]:
    """Meanwhile each signal that this process handles is also written to ``fd`` as a byte, at the moment it comes: the
    main thread, which runs the handlers, may be inside of a library for a second. Only from the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.set_wakeup_fd(fd, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
