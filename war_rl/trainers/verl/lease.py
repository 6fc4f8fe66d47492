# SPDX-License-Identifier: Apache-2.0
"""A client process tells the router that it lives, so that the router can let go of what a dead one held.

The beat comes from a thread: an agent loop that blocks its event loop for minutes is slow, not dead.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from uuid import uuid4

BEATS_PER_LEASE = 4
"""So many beats must be lost before a lease ends."""


def client_name() -> str:
    """A name for this process that no other has, today or after a restart."""
    return f"{socket.gethostname()}-{os.getpid()}-{uuid4().hex[:8]}"


class Heartbeat:
    """Calls ``beat`` a few times per lease until it fails or :meth:`stop` is called.

    Args:
        beat: tells the router; returning False or raising ends the thread.
        lease_s: ``war.scheduler.lease_s``; 0 starts nothing. Unit: seconds.
    """

    def __init__(self, beat: Callable[[], bool], lease_s: float) -> None:
        self._beat = beat
        self._interval = lease_s / BEATS_PER_LEASE
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="war-lease", daemon=True)
        if lease_s > 0:
            self._thread.start()

    def stop(self) -> None:
        """No further beat. Safe to call again."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(self._interval):
            try:
                alive = self._beat()
            except Exception:
                # The connection is gone, and with it everything a lease is about.
                return
            if not alive:
                return
