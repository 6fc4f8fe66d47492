# SPDX-License-Identifier: Apache-2.0
"""Names the code that blocks an event loop: from outside, a blocked agent-loop worker only falls silent.

An agent loop that calls something slow without ``await`` stops every trajectory of its process, and the time limits of
``war.fault`` and ``war.env`` with them.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import traceback
from collections.abc import Callable

BLOCKED_S = 30.0
"""A loop that has run nothing for this long is told of, once for each time that it happens."""


class LoopWatch:
    """Watches the running loop from a thread. Made on the loop's own thread.

    Args:
        say: takes the message; called in the watching thread.
        blocked_s: see :data:`BLOCKED_S`. Unit: seconds.
    """

    def __init__(self, say: Callable[[str], None], blocked_s: float = BLOCKED_S) -> None:
        self._loop = asyncio.get_running_loop()
        self._ident = threading.get_ident()
        self._say = say
        self._blocked_s = blocked_s
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="war-loop-watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Watch no more."""
        self._stopped.set()

    def _watch(self) -> None:
        while not self._stopped.is_set():
            turned = threading.Event()
            try:
                self._loop.call_soon_threadsafe(turned.set)
            except RuntimeError:
                # The loop is closed.
                return
            if not turned.wait(self._blocked_s):
                self._tell()
                while not (turned.wait(1.0) or self._stopped.is_set()):
                    pass
            self._stopped.wait(self._blocked_s / 4)

    def _tell(self) -> None:
        frame = sys._current_frames().get(self._ident)
        stack = "".join(traceback.format_stack(frame)) if frame is not None else "(no stack)"
        self._say(
            f"the event loop of this agent-loop worker has been blocked for {self._blocked_s:g} s: none of its "
            f"trajectories can go on, and no time limit works. Use await, or asyncio.to_thread, here:\n{stack}"
        )
