# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from war_rl.types import (
    FeedItem,
    TrajectoryId,
    as_tokens,
    decode_feed,
    decode_request_id,
    encode_feed,
    encode_request_id,
    engine_priority,
)

texts = st.text(max_size=20)
trajectories = st.builds(
    TrajectoryId,
    uid=texts,
    session=st.integers(0, 10_000),
    step=st.integers(-1, 10**6),
    index=texts,
    validate=st.booleans(),
)
tokens = st.lists(st.integers(0, 2**31 - 1), max_size=50).map(as_tokens)


@given(trajectories, st.integers(0, 1000), st.text("0123456789abcdef", min_size=8, max_size=8))
def test_a_request_id_survives_the_suffix_that_engines_append(trajectory, turn, suffix):
    assert decode_request_id(f"{encode_request_id(trajectory, turn)}-{suffix}") == (trajectory, turn)


@pytest.mark.parametrize("text", ["", "war:", "5f2d", "war:t:x::0:0:u;", "war:t:1::0:0:u", "war:t:1:0:0:u;"])
def test_a_foreign_request_id_is_nobodys(text):
    assert decode_request_id(text) is None


@given(st.lists(st.builds(FeedItem, trajectories, st.integers(0, 10**6), tokens, st.booleans()), max_size=5))
def test_feed_messages_carry_every_token(items):
    back = decode_feed(encode_feed(items))
    assert [(i.trajectory, i.start, i.final) for i in back] == [(i.trajectory, i.start, i.final) for i in items]
    for ours, theirs in zip(items, back, strict=True):
        np.testing.assert_array_equal(ours.tokens, theirs.tokens)
        assert theirs.tokens.dtype == np.int32


def test_a_damaged_feed_message_is_refused():
    blob = encode_feed([FeedItem(TrajectoryId("u", 0, 1), 0, as_tokens(range(10)))])
    with pytest.raises(ValueError, match="cut short"):
        decode_feed(blob[:-4])
    with pytest.raises(ValueError, match="not a War-RL feed message"):
        decode_feed(b"\x80\x04" + blob)


def test_engine_priority_grows_with_the_turns_behind_a_trajectory():
    t = TrajectoryId("g", 0, 3)
    order = [engine_priority(encode_request_id(t, turn) + "-1a2b3c4d") for turn in (0, 1, 7)]
    assert order == [0, -1, -7]  # vLLM preempts the greatest first
    assert engine_priority("cmpl-123") == 0
