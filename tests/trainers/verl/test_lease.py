# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import threading

from war_rl.trainers.verl.lease import Heartbeat, client_name


def test_it_beats_until_it_is_stopped():
    beats = threading.Semaphore(0)

    def beat() -> bool:
        beats.release()
        return True

    heart = Heartbeat(beat, 0.02)
    for _ in range(3):
        assert beats.acquire(timeout=10.0)
    heart.stop()
    heart.stop()
    assert not heart._thread.is_alive()


def test_it_ends_where_the_connection_ends_and_never_starts_without_a_lease():
    for answer in (lambda: False, lambda: 1 / 0):
        heart = Heartbeat(answer, 0.01)
        heart._thread.join(timeout=10.0)
        assert not heart._thread.is_alive()
    assert not Heartbeat(lambda: True, 0.0)._thread.is_alive()


def test_names_of_two_clients_differ():
    assert client_name() != client_name()
