# SPDX-License-Identifier: Apache-2.0
"""Seats against a list that is added up one by one."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from war_rl.rollout.seats import Seats
from war_rl.rollout.state import IdleLedger
from war_rl.types import TrajectoryId

EVENTS = st.lists(
    st.tuples(st.sampled_from(("add", "add", "hold", "rest", "remove")), st.integers(0, 40), st.integers(0, 5000)),
    max_size=120,
)


@given(events=EVENTS, theta=st.floats(0.0, 60.0))
def test_who_sits_before_somebody_is_added_up(events, theta):
    seats, book, last = Seats(), {}, 0
    for kind, which, tokens in events:
        if kind == "add":
            last += 1 + which % 3
            seats.add(last)
            book[last] = (0, 0, 0.0)
        elif book:
            seat = sorted(book)[which % len(book)]
            if kind == "hold":
                seats.hold(seat, tokens)
                book[seat] = (tokens, 0, 0.0)
            elif kind == "rest":
                seats.rest(seat, tokens, float(which))
                book[seat] = (0, tokens, float(which))
            else:
                seats.remove(seat)
                del book[seat]
    assert len(seats) == len(book)
    for seat in (0, *book, last + 1):
        full = sum(t for s, (t, _, _) in book.items() if s < seat)
        fading = sum(t * math.exp(min(0.0, until - theta)) for s, (_, t, until) in book.items() if s < seat)
        assert seats.before(seat, theta, idle=False) == pytest.approx(full)
        assert seats.before(seat, theta, idle=True) == pytest.approx(full + fading)


def test_in_its_tool_a_trajectory_counts_as_the_ledger_says():
    ledger, seats, who = IdleLedger(2.0), Seats(), TrajectoryId("u", 0, 1)
    ledger.add(who, 1000, 5.0)
    seats.add(1)
    seats.rest(1, *ledger.promise(who))
    for theta in (5.0, 6.9, 7.0, 8.0, 12.5):
        assert seats.before(2, theta, idle=True) == pytest.approx(ledger.value(who, theta))
    assert ledger.promise(TrajectoryId("u", 1, 1)) == (0, 0.0)


def test_seats_grow_and_nobody_is_moved_who_is_not_there():
    seats = Seats()
    seats.add(3)
    with pytest.raises(ValueError, match="seat 3 comes after seat 3"):
        seats.add(3)
    for change in (lambda: seats.remove(4), lambda: seats.hold(2, 1), lambda: seats.rest(5, 1, 0.0)):
        with pytest.raises(KeyError, match="nobody sits in seat"):
            change()
