# SPDX-License-Identifier: Apache-2.0
"""A terminal in memory, and a process on a pseudo terminal."""

from __future__ import annotations

import codecs
import io
import os
import pty
import re
import select
import subprocess
import sys
import time

_PIECE = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])|(\r\n|\n|\r)|([^\x1b\r\n]+)")


class Terminal(io.StringIO):
    """Understands what is used here: text, new lines, going up to a line's start, erasing below, colours."""

    def __init__(self) -> None:
        super().__init__()
        self.lines, self.row, self.column, self.modes = [""], 0, 0, []

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        for number, letter, newline, plain in _PIECE.findall(text):
            if letter == "F":
                self.row, self.column = max(0, self.row - int(number)), 0
            elif letter == "J":
                self.lines[self.row] = self.lines[self.row][: self.column]
                del self.lines[self.row + 1 :]
            elif letter and letter != "m":
                self.modes.append(number + letter)
            elif newline == "\r":
                self.column = 0
            elif newline:
                self.row, self.column = self.row + 1, 0
                self.lines += [""] * (self.row + 1 - len(self.lines))
            else:
                old = self.lines[self.row].ljust(self.column)
                self.lines[self.row] = old[: self.column] + plain + old[self.column + len(plain) :]
                self.column += len(plain)
        return len(text)


class OnTerminal:
    """A Python process on a pseudo terminal, from its arguments."""

    def __init__(self, *argv: str, **environment: str) -> None:
        self.master, slave = pty.openpty()
        env = {**os.environ, "TERM": "xterm", "PYTHONPATH": os.getcwd(), "COLUMNS": "", "LINES": "", **environment}
        self.process = subprocess.Popen(
            [sys.executable, *argv],
            stdin=subprocess.PIPE,
            stdout=slave,
            stderr=slave,
            env=env,
            text=True,
        )
        os.close(slave)
        self.raw = ""
        self._rest = ""
        self._terminal = Terminal()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def say(self, word: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(word + "\n")
        self.process.stdin.flush()

    def until(self, text: str, timeout_s: float = 60.0) -> None:
        """Read until the terminal shows ``text``."""
        until = time.monotonic() + timeout_s
        while text not in "\n".join(self.screen().lines):
            assert time.monotonic() < until, self.raw[-5000:]
            if select.select([self.master], [], [], 0.2)[0]:
                self._read()

    def end(self, timeout_s: float = 60.0) -> int:
        """Read until the process has ended; its exit code."""
        until = time.monotonic() + timeout_s
        while self.process.poll() is None:
            assert time.monotonic() < until, self.raw[-5000:]
            if select.select([self.master], [], [], 0.2)[0]:
                self._read()
        while select.select([self.master], [], [], 0.2)[0] and self._read():
            pass
        os.close(self.master)
        return int(self.process.returncode)

    def _read(self) -> bool:
        try:
            data = os.read(self.master, 65536)
        except OSError:
            return False
        text = self._decoder.decode(data)
        self.raw += text
        # A control sequence may be cut in two.
        whole = self._rest + text
        cut = re.search(r"\x1b(\[[0-9;?]*)?\Z", whole)
        self._rest = cut.group() if cut else ""
        self._terminal.write(whole[: len(whole) - len(self._rest)])
        return bool(data)

    def screen(self) -> Terminal:
        """The terminal as it is now."""
        return self._terminal
