# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import io
import sys
from types import SimpleNamespace

import pytest

from war_rl.progress import MARK, Progress, ProgressLine, in_ray_worker, step_line


class Stream(io.StringIO):
    def __init__(self, tty: bool) -> None:
        super().__init__()
        self.tty = tty

    def isatty(self) -> bool:
        return self.tty


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def drive(tty: bool, count: int = 20, step_s: float = 1.0, **options: object) -> str:
    """One trajectory comes in per ``step_s`` seconds, and nothing changes for three more updates at the end."""
    clock, stream = Clock(), Stream(tty)
    line = ProgressLine("step 3", clock=clock, stream=stream, **options)  # type: ignore[arg-type]
    for i in [*range(count + 1), count, count, count]:
        line.update(Progress(i, count, 10 * i, i * step_s, {"r1": "high", "r0": "low"}, {"accepted": 0.25}))
        clock.now += step_s
    line.close()
    return stream.getvalue()


def test_a_log_gets_sparse_plain_lines_and_one_on_completion() -> None:
    lines = drive(tty=False, worker=False).splitlines()
    assert [x.split()[3] for x in lines] == ["0/20", "5/20", "10/20", "15/20", "20/20"]
    assert lines[1] == f"{MARK} step 3: 5/20 trajectories, 10 tok/s, 5 s, r0=low r1=high, accepted 0.25"


def test_completion_is_shown_although_the_last_line_is_fresh() -> None:
    clock, stream = Clock(), Stream(False)
    line = ProgressLine("s", clock=clock, stream=stream, worker=False)
    line.update(Progress(0, 2, 0, 0.0))
    for finished in (1, 2):
        clock.now += 0.1
        line.update(Progress(finished, 2, 0, 0.1))
    assert [x.split()[2] for x in stream.getvalue().splitlines()] == ["0/2", "2/2"]


def test_a_terminal_gets_one_line_redrawn_in_place() -> None:
    text = drive(tty=True, worker=False)
    assert text.count("\n") == 1 and text.endswith("\n")
    assert text.count("\r") == 21 and text.split("\r")[-1].startswith(f"{MARK} step 3: 20/20")


def test_a_terminal_is_not_redrawn_faster_than_the_eye() -> None:
    assert drive(tty=True, step_s=0.0625, worker=False).count("\r") == 6  # of 21 updates, one per 0.25 s


@pytest.mark.parametrize(
    ("options", "speaks"),
    [
        ({"mode": "off", "worker": False}, False),
        ({"mode": "off", "worker": True, "speaker": True}, False),
        ({"mode": "auto", "worker": True}, False),
        ({"mode": "auto", "worker": True, "speaker": True}, True),
        ({"mode": "on", "worker": True}, True),
    ],
)
def test_who_speaks(options: dict[str, object], speaks: bool) -> None:
    assert bool(drive(tty=False, **options)) is speaks


def test_unknown_mode_is_refused_with_the_choices() -> None:
    with pytest.raises(ValueError, match="'loud': not one of auto, on, off"):
        ProgressLine("x", clock=Clock(), mode="loud")


def test_many_replicas_are_counted_instead_of_named() -> None:
    clock, stream = Clock(), Stream(False)
    regimes = {f"r{i}": f"low({i})" if i < 6 else "high" for i in range(8)}
    ProgressLine("s", clock=clock, stream=stream, worker=False).update(Progress(0, 1, 0, 0.0, regimes))
    assert stream.getvalue() == f"{MARK} s: 0/1 trajectories, 0 tok/s, 0 s, high 2 low 6\n"


def test_worker_is_recognised_without_importing_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    assert in_ray_worker() is False and "ray" not in sys.modules
    for mode, expected in ((0, False), (1, True), (None, False)):
        worker = SimpleNamespace(global_worker=SimpleNamespace(mode=mode))
        monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(WORKER_MODE=1, _private=SimpleNamespace(worker=worker)))
        assert in_ray_worker() is expected


def test_a_display_elsewhere_gets_the_states_and_when_it_is_gone_lines_follow() -> None:
    clock, stream, taken = Clock(), Stream(False), []

    def take(state: Progress, complete: bool) -> None:
        if len(taken) == 3:
            raise FileNotFoundError("nobody looks")
        taken.append((state.finished, complete))

    line = ProgressLine("step 3", clock=clock, stream=stream, worker=False, elsewhere=take)
    for finished in (0, 1, 2, 2):
        line.update(Progress(finished, 2, 0, 0.0))
        clock.now += 0.3
    # Half a second must pass, but for the end, which is told at once and once only.
    assert taken == [(0, False), (2, True)] and stream.getvalue() == ""
    line = ProgressLine("step 4", clock=clock, stream=stream, worker=False, elsewhere=take)
    for finished in (0, 1, 2):
        line.update(Progress(finished, 9, 0, 0.0))
        clock.now += 6.0
    lines = stream.getvalue().splitlines()
    assert lines[0] == f"{MARK} progress goes on in plain lines: nobody looks"
    assert [x.split()[3] for x in lines[1:]] == ["1/9", "2/9"]


def test_what_is_off_is_quiet_for_everybody() -> None:
    told: list[Progress] = []
    line = ProgressLine("s", clock=Clock(), mode="off", worker=False, elsewhere=lambda s, _: told.append(s))
    line.update(Progress(0, 1, 0, 0.0))
    assert line.quiet and told == []


def test_end_of_step_line_names_failures_only_when_there_are_some() -> None:
    metrics = {
        "war/rollout/seconds": 12.34,
        "war/rollout/tokens_per_s": 1234.5,
        "war/cache/hit_rate": 0.5,
        "war/spec/drafts": 0.0,
        "war/spec/mean_acceptance_length": 1.0,
        "war/rollout/failed": 0.0,
    }
    quiet = f"{MARK} step 2 done: reward 0.250, 12.3 s rollout, 1,234 tok/s, cache 50%"
    assert step_line(2, metrics, 0.25) == quiet
    loud = step_line(2, {**metrics, "war/rollout/failed": 3.0, "war/spec/drafts": 5.0}, 0.25)
    assert loud == quiet + ", 1.00 tok/verify, 3 FAILED"
