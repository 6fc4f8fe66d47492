# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
from pathlib import Path

import pytest

from war_rl.board import BETWEEN, ROLLOUT, STARTING, TOKEN_VARIABLE, Board, BoardGone, Post
from war_rl.progress import Progress

STATE = Progress(3, 8, 120, 4.5, {"replica0": "low(2)"}, {"failed": "1"}, running=5, hit_rate=0.5, seconds_left=9.0)


def test_what_the_trainer_writes_the_display_reads(tmp_path: Path) -> None:
    display = Board(tmp_path, "a")
    display.open()
    assert display.read() == Post("", STARTING)
    trainer = Board.watched(tmp_path, {TOKEN_VARIABLE: "a"})
    assert trainer is not None
    for post in (Post("step 3", ROLLOUT, STATE), Post("step 3", BETWEEN, STATE)):
        trainer.write(post)
        assert display.read() == post
    assert os.listdir(tmp_path) == ["progress.json"]


def test_nobody_writes_where_nobody_looks(tmp_path: Path) -> None:
    assert Board.watched(tmp_path, {TOKEN_VARIABLE: "a"}) is None  # no file
    Board(tmp_path, "other").open()
    assert Board.watched(tmp_path, {TOKEN_VARIABLE: "a"}) is None  # of a run that was killed
    assert Board.watched(tmp_path, {}) is None
    with pytest.raises(BoardGone, match=r"progress\.json is gone"):
        Board(tmp_path, "a").write(Post("step 1", ROLLOUT, STATE))
    assert Board(tmp_path, "a").read() is None and Board(tmp_path, "other").read() is not None


def test_a_removed_board_stays_removed(tmp_path: Path) -> None:
    display = Board(tmp_path, "a")
    display.open()
    display.remove()
    display.remove()
    with pytest.raises(BoardGone):
        Board(tmp_path, "a").write(Post("step 1", ROLLOUT, STATE))
    assert os.listdir(tmp_path) == []


def test_what_is_no_board_is_none(tmp_path: Path) -> None:
    for text in ("", "[]", "{", '{"token": 3}'):
        (tmp_path / "progress.json").write_text(text)
        assert Board(tmp_path, "a").read() is None and not Board(tmp_path, "a").is_ours()
