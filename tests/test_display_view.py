# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import re
from dataclasses import replace

import pytest

from war_rl.board import BETWEEN, ROLLOUT, STARTING, Post
from war_rl.display_view import duration, render, view
from war_rl.progress import Progress

STATE = Progress(
    finished=9,
    total=16,
    generated_tokens=4944,
    elapsed=12.0,
    regimes={"replica0": "low(3)", "replica1": "high"},
    extra={"failed": "1"},
    running=6,
    waiting=1,
    turns=41,
    hit_rate=0.784,
    acceptance_rate=0.31,
    acceptance_length=2.4,
    seconds_left=14.4,
)


def shown(post: Post, age: float = 0.0, width: int = 100) -> list[str]:
    return [line.rstrip() for line in render(view(post, age), width, colour=False)]


def test_a_rollout() -> None:
    head, facts, replicas = shown(Post("step 3", ROLLOUT, STATE))
    assert re.fullmatch(r"\[war-rl\] step 3 ━+ +9/16 trajectories, 12 s, about 14 s left", head) and len(head) == 100
    known = "6 running, 1 held, 41 turns, 412 tok/s, cache 78%, drafts accepted 31% (2.40 tok/verify), failed 1"
    assert facts == f"  {known}"
    assert replicas == "  replica0 low(3)  replica1 high"


def test_the_clock_goes_on_between_two_looks() -> None:
    assert shown(Post("step 3", ROLLOUT, STATE), age=2.0)[0].endswith("14 s, about 12 s left")
    assert shown(Post("step 3", ROLLOUT, STATE), age=60.0)[0].endswith("1 min 12 s, about 0 s left")


def test_what_is_not_known_is_not_shown() -> None:
    # The stock rollout before its first turn has ended.
    state = Progress(0, 16, 0, 1.0, running=16, turns=0)
    head, facts = shown(Post("validation", ROLLOUT, state))
    assert head.endswith("0/16 trajectories, 1 s") and "left" not in head
    assert facts == "  16 running, 0 turns, 0 tok/s"


def test_before_the_first_rollout_and_between_two() -> None:
    assert shown(Post("", STARTING), age=75.0) == ["[war-rl] starting engines, models and workers, 1 min 15 s"]
    between = Post("step 3", BETWEEN, replace(STATE, finished=16))
    told = "[war-rl] step 3: 16 trajectories in 12 s, 412 tok/s; the trainer is at work, 8 s"
    assert shown(between, age=8.0) == [told]


def test_many_replicas_are_counted() -> None:
    state = replace(STATE, regimes={f"replica{i}": f"low({i})" if i < 7 else "high" for i in range(9)})
    assert shown(Post("step 3", ROLLOUT, state))[2] == "  9 replicas: high 2 low 7"


@pytest.mark.parametrize("width", [20, 33, 60, 79, 200])
@pytest.mark.parametrize("colour", [True, False])
def test_no_line_is_wider_than_the_terminal_and_none_wraps(width: int, colour: bool) -> None:
    lines = render(view(Post("validation", ROLLOUT, STATE), 0.0), width, colour)
    assert len(lines) == 3
    assert all(len(re.sub(r"\x1b\[[0-9;]*m", "", line)) <= width for line in lines)
    # Colours only: nothing that would stay switched on.
    assert {match[-1] for match in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]", "".join(lines))} <= {"m"}
    assert colour == ("\x1b" in "".join(lines))


def test_a_terminal_without_unicode_gets_ascii() -> None:
    "".join(render(view(Post("step 3", ROLLOUT, STATE), 0.0), 80, encoding="ansi_x3.4-1968")).encode("ascii")


def test_durations() -> None:
    assert [duration(s) for s in (0.4, 59.4, 60, 185, 3600, 7800)] == [
        "0 s",
        "59 s",
        "1 min 00 s",
        "3 min 05 s",
        "1 h 00 min",
        "2 h 10 min",
    ]
