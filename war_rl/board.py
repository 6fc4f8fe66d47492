# SPDX-License-Identifier: Apache-2.0
"""The file through which a run's trainer tells its progress to the process that has the terminal.

The trainer lives in a Ray actor, maybe on another machine, without a terminal. The process with one makes the file in
the run folder and hands a token down in the environment; the trainer writes only into a file that holds this token. So
it knows that somebody looks at the same file; where nobody does, it prints plain lines. Readers see a whole file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from war_rl.progress import Progress

FILE = "progress.json"
TOKEN_VARIABLE = "WAR_RL_DISPLAY"
"""Environment variable: token of the display that the command has; unset where it has none."""

STARTING, ROLLOUT, BETWEEN = "starting", "rollout", "between"
"""Phases: no rollout yet; trajectories come in; the rollout is over and the trainer at work."""


@dataclass(frozen=True, slots=True)
class Post:
    """What stands on the board: the rollout's name, such as ``step 3``, its phase, and the last that was seen of it."""

    label: str
    phase: str
    state: Progress | None = None


class BoardGone(OSError):
    """The file is not there, or is another display's: nobody reads it."""


class Board:
    """One run's board. ``folder``: the run folder; ``token``: see :data:`TOKEN_VARIABLE`."""

    def __init__(self, folder: str | Path, token: str) -> None:
        self.path = Path(folder) / FILE
        self._token = token

    @classmethod
    def watched(cls, folder: str | Path, environment: Mapping[str, str] = os.environ) -> Board | None:
        """The board in ``folder`` if the command that started this process looks at it, else None."""
        token = environment.get(TOKEN_VARIABLE, "")
        board = cls(folder, token)
        return board if token and board.is_ours() else None

    def is_ours(self) -> bool:
        """Whether the file is there and holds this board's token."""
        return self._load().get("token") == self._token

    def open(self) -> None:
        """Make the file, in place of any that an earlier run left.

        Raises:
            OSError: the folder cannot be written.
        """
        self._replace(Post("", STARTING))

    def write(self, post: Post) -> None:
        """Put ``post`` there.

        Raises:
            BoardGone: nobody reads it (any more).
            OSError: it cannot be written.
        """
        if not self.is_ours():
            raise BoardGone(f"{self.path} is gone: nobody looks at it any more")
        self._replace(post)

    def read(self) -> Post | None:
        """What stands there; None without a file of this board."""
        data = self._load()
        if data.get("token") != self._token:
            return None
        state = data.get("state")
        return Post(data["label"], data["phase"], None if state is None else Progress(**state))

    def remove(self) -> None:
        """Take the file away."""
        self.path.unlink(missing_ok=True)

    def _load(self) -> dict[str, Any]:
        try:
            data = json.loads(self.path.read_text())
        except (OSError, ValueError):
            return {}
        return data if isinstance(data, dict) else {}

    def _replace(self, post: Post) -> None:
        part = self.path.with_name(f".{self.path.name}.{os.getpid()}.part")
        part.write_text(json.dumps({"token": self._token, **asdict(post)}))
        os.replace(part, self.path)
