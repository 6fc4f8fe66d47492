# SPDX-License-Identifier: Apache-2.0
"""A block of lines at the bottom of a terminal, with everything else that is printed above it.

Nothing is switched on that would have to be switched off again: no cursor is hidden, no mode changed, and the cursor
rests in the first column below the block. So a process that dies at any moment leaves a usable terminal.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TextIO


class Screen:
    """Draws on ``stream``, which is a terminal. Calls from several threads take turns."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._lock = threading.RLock()
        self._block: list[str] = []
        self._frozen = False

    def draw(self, lines: Sequence[str]) -> None:
        """Show ``lines``, none of them wider than the terminal, in place of the block that is there."""
        with self._lock:
            if not self._frozen:
                self._put(self._erased() + _text(lines))
                self._block = list(lines)

    def above(self, text: str) -> None:
        """Print whole lines above the block."""
        with self._lock:
            self._put(text if self._frozen else self._erased() + text + _text(self._block))

    def freeze(self) -> None:
        """Leave the terminal as it is from now on: somebody else writes there as well."""
        with self._lock:
            self._frozen = True

    def clear(self) -> None:
        """Take the block away."""
        self.draw([])

    def _erased(self) -> str:
        """Moves to the block's first line and erases from there to the end of the screen."""
        return f"\x1b[{len(self._block)}F\x1b[J" if self._block else ""

    def _put(self, text: str) -> None:
        # A terminal that has gone is no reason to stop a training.
        with contextlib.suppress(OSError, ValueError):
            self._stream.write(text)
            self._stream.flush()


def _text(lines: Iterable[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


class Above:
    """Stands for a stream that writes to the screen's terminal: whole lines go above the block, the rest waits."""

    def __init__(self, original: TextIO, screen: Screen) -> None:
        self._original = original
        self._screen = screen
        # Reentrant: a signal handler may print in the middle of a write.
        self._lock = threading.RLock()
        self._rest = ""

    def write(self, text: str) -> int:
        """As a text stream's."""
        with self._lock:
            whole, newline, self._rest = (self._rest + text).rpartition("\n")
            # Of a line that is written over again and again only the last state is kept.
            _, returned, last = self._rest.rpartition("\r")
            self._rest = last if returned and last else self._rest
            if newline:
                self._screen.above(whole + newline)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """As a text stream's."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Whole lines are out already; part of a line has no place above a block."""

    def finish(self) -> None:
        """Write out what waits, as a line."""
        if self._rest:
            self.write("\n")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


@contextlib.contextmanager
def printed_above(screen: Screen, terminal: TextIO) -> Iterator[None]:
    """Meanwhile what this process prints to ``terminal``, through ``sys.stdout``, ``sys.stderr`` or a log handler that
    holds one of them, goes above the screen's block. What goes elsewhere, to a file, is left alone."""
    originals = {name: getattr(sys, name) for name in ("stdout", "stderr")}
    stands = {name: Above(s, screen) for name, s in originals.items() if same_terminal(s, terminal)}
    for name, stand in stands.items():
        originals[name].flush()
        setattr(sys, name, stand)
    moved = [
        (handler, handler.stream, stands[name])
        for handler in _handlers()
        for name in stands
        if handler.stream is originals[name]
    ]
    for handler, _, stand in moved:
        handler.setStream(stand)
    try:
        yield
    finally:
        for handler, original, stand in moved:
            if handler.stream is stand:
                handler.setStream(original)
        for name, stand in stands.items():
            stand.finish()
            if getattr(sys, name) is stand:
                setattr(sys, name, originals[name])


def _handlers() -> list[logging.StreamHandler[Any]]:
    """All handlers of all loggers that write to a stream."""
    loggers = [logging.root, *list(logging.root.manager.loggerDict.values())]
    found = {id(h): h for logger in loggers for h in getattr(logger, "handlers", ())}
    return [h for h in found.values() if isinstance(h, logging.StreamHandler)]


def same_terminal(stream: Any, terminal: TextIO) -> bool:
    """Whether both write to one terminal."""
    try:
        one, other = os.fstat(stream.fileno()), os.fstat(terminal.fileno())
        return bool(stream.isatty() and (one.st_dev, one.st_ino) == (other.st_dev, other.st_ino))
    except (AttributeError, OSError, ValueError):
        return False
