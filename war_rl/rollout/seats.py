# SPDX-License-Identifier: Apache-2.0
"""Who came to live on a replica in which order, and the KV that those before somebody take."""

from __future__ import annotations

from bisect import bisect_left

import numpy as np
from numpy.typing import NDArray


class Seats:
    """KV tokens of the trajectories that live on one replica, by seat.

    A seat is a number that grows with each trajectory that comes. One that runs, or waits to run, takes its tokens in
    full; one in its tool takes them in full until ``until`` and then less by e per usual tool time, as in
    :class:`war_rl.rollout.state.IdleLedger`. Kept in arrays, because a decision adds up hundreds of them.
    """

    def __init__(self) -> None:
        self._seats: list[int] = []
        self._full: NDArray[np.float64] = np.zeros(16)
        self._idle: NDArray[np.float64] = np.zeros(16)
        self._until: NDArray[np.float64] = np.zeros(16)

    def __len__(self) -> int:
        return len(self._seats)

    def add(self, seat: int) -> None:
        """Somebody comes, and takes nothing yet.

        Raises:
            ValueError: the seat is not higher than all that are taken.
        """
        if self._seats and seat <= self._seats[-1]:
            raise ValueError(f"seat {seat} comes after seat {self._seats[-1]}")
        at = len(self._seats)
        if at == len(self._full):
            self._full, self._idle, self._until = (
                np.concatenate((a, np.zeros(at))) for a in (self._full, self._idle, self._until)
            )
        self._seats.append(seat)
        self._full[at] = self._idle[at] = self._until[at] = 0.0

    def remove(self, seat: int) -> None:
        """Somebody leaves."""
        at = self._at(seat)
        del self._seats[at]
        end = len(self._seats)
        for values in (self._full, self._idle, self._until):
            values[at:end] = values[at + 1 : end + 1]

    def hold(self, seat: int, tokens: int) -> None:
        """Who sits there runs, or waits to run."""
        at = self._at(seat)
        self._full[at], self._idle[at] = tokens, 0.0

    def rest(self, seat: int, tokens: int, until: float) -> None:
        """Who sits there is in its tool. ``until``: in usual tool times, as ``theta`` of :meth:`before`."""
        at = self._at(seat)
        self._full[at], self._idle[at], self._until[at] = 0.0, tokens, until

    def before(self, seat: int, theta: float, *, idle: bool) -> float:
        """KV tokens of all in lower seats. ``idle``: whether those in their tools count."""
        at = bisect_left(self._seats, seat)
        total = float(self._full[:at].sum())
        if idle:
            fading = np.exp(np.minimum(self._until[:at] - theta, 0.0))
            total += float((self._idle[:at] * fading).sum())
        return total

    def _at(self, seat: int) -> int:
        at = bisect_left(self._seats, seat)
        if at == len(self._seats) or self._seats[at] != seat:
            raise KeyError(f"nobody sits in seat {seat}")
        return at
