# SPDX-License-Identifier: Apache-2.0
"""Event data of a run: which trajectory ran where and when, as bounded JSON lines in the run's folder.

Each rollout is one header line (:class:`StepTrace` without its trajectories) and one line for each trajectory. The
file is bounded: at half of ``war.trace_mb`` it becomes the old one, whose predecessor goes, so that the newest steps
are always there. ``war-rl trace`` turns it into a Chrome trace, which Perfetto opens; ``war-rl report`` draws it.
"""

from __future__ import annotations

import heapq
import json
import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from war_rl.analysis import TurnTimes, turn_times
from war_rl.files import append_whole
from war_rl.types import TrajectoryId, TrajectoryRecord, TurnRecord

logger = logging.getLogger(__name__)

FILE = "trace.jsonl"
OLD_FILE = "trace.old.jsonl"
FORMAT = 1
MODES = ("off", "sampled", "full")
SAMPLED = 64
"""Trajectories of a rollout that ``sampled`` keeps; a quarter of them are the slowest."""


@dataclass(slots=True)
class StepTrace:
    """One rollout.

    Attributes:
        step: the trainer's global step.
        validate: whether it was a validation pass.
        began: unix seconds.
        seconds: length of the rollout.
        replicas: ids of all replicas, in the order that numbers them.
        total: trajectories that it had; more than ``records`` where it was sampled.
        prefill_s_per_token: measured seconds for each computed prompt token; 0 where unknown.
        records: the traced trajectories.
    """

    step: int
    validate: bool
    began: float
    seconds: float
    replicas: list[str]
    total: int
    prefill_s_per_token: float = 0.0
    records: list[TrajectoryRecord] = field(default_factory=list)


def choose(records: Sequence[TrajectoryRecord], limit: int = SAMPLED) -> list[TrajectoryRecord]:
    """At most ``limit`` of ``records``, in their order: the slowest quarter, the others evenly over their starts."""
    if len(records) <= limit:
        return list(records)
    by_length = sorted(range(len(records)), key=lambda i: (records[i].started - records[i].finished, i))
    slowest = by_length[: max(1, limit // 4)]
    others = sorted(by_length[len(slowest) :], key=lambda i: (records[i].started, i))
    rest = limit - len(slowest)
    kept = {*slowest, *(others[k * len(others) // rest] for k in range(rest))}
    return [records[i] for i in sorted(kept)]


def encode_step(trace: StepTrace) -> str:
    """The rollout as JSON lines, each ended by a newline. Times are relative to ``began``, to a tenth of a ms."""
    numbers = {replica: i for i, replica in enumerate(trace.replicas)}
    head = {
        "format": FORMAT,
        "step": trace.step,
        "validate": trace.validate,
        "began": trace.began,
        "seconds": round(trace.seconds, 4),
        "replicas": trace.replicas,
        "total": trace.total,
        "prefill_s_per_token": trace.prefill_s_per_token,
    }
    lines = [head, *(_encode_record(r, trace.began, numbers) for r in trace.records)]
    return "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)


def _encode_record(record: TrajectoryRecord, began: float, numbers: dict[str, int]) -> dict[str, Any]:
    t = record.trajectory
    out: dict[str, Any] = {
        "t": [t.uid, t.session, t.index],
        "s": round(record.started - began, 4),
        "f": round(record.finished - began, 4),
        "env": round(record.env_seconds, 4),
        "turns": [
            [
                turn.turn,
                numbers.get(turn.replica, turn.replica),
                round(times.asked - began, 4),
                round(turn.queue_seconds, 4),
                round(turn.seconds, 4),
                turn.prompt_tokens,
                turn.cached_tokens,
                turn.generated_tokens,
                turn.preemptions,
                turn.reason,
                turn.error[:200],
            ]
            for turn, times in zip(record.turns, turn_times(record), strict=True)
        ],
    }
    if record.reward is not None:
        out["reward"] = record.reward
    if record.status != "finished":
        out["status"], out["error"] = record.status, record.error[:200]
    return out


def decode(lines: Iterable[str]) -> Iterator[StepTrace]:
    """Inverse of :func:`encode_step` for many rollouts. A line that a dying writer cut short ends its rollout.

    Raises:
        ValueError: a header of another format.
    """
    current: StepTrace | None = None
    for line in lines:
        try:
            data = json.loads(line)
        except json.JSONDecodeError:
            continue
        if "format" in data:
            if current is not None:
                yield current
            if data.pop("format") != FORMAT:
                raise ValueError(f"not a trace of format {FORMAT}")
            current = StepTrace(**data)
        elif current is not None:
            current.records.append(_decode_record(data, current))
    if current is not None:
        yield current


def _decode_record(data: dict[str, Any], trace: StepTrace) -> TrajectoryRecord:
    uid, session, index = data["t"]
    turns = []
    for number, replica, started, queue, seconds, prompt, cached, generated, preempted, reason, error in data["turns"]:
        name = trace.replicas[replica] if isinstance(replica, int) else replica
        turns.append(TurnRecord(number, name, prompt, cached, generated, started, queue, seconds, preempted))
        turns[-1].reason, turns[-1].error = reason, error
    return TrajectoryRecord(
        TrajectoryId(uid, session, trace.step, index, trace.validate),
        started=trace.began + data["s"],
        finished=trace.began + data["f"],
        turns=turns,
        env_seconds=data["env"],
        reward=data.get("reward"),
        status=data.get("status", "finished"),
        error=data.get("error", ""),
        clock_offset=trace.began,
    )


class TraceWriter:
    """Appends rollouts to ``folder``'s trace.

    Args:
        folder: the run's folder.
        mode: ``war.trace``.
        limit_bytes: most that both files hold together.

    Raises:
        ValueError: unknown mode.
    """

    def __init__(self, folder: str | Path, mode: str, limit_bytes: int) -> None:
        if mode not in MODES:
            raise ValueError(f"war.trace={mode!r}: not one of {', '.join(MODES)}")
        self._folder = Path(folder)
        self._mode = mode
        self._half = limit_bytes // 2
        self._said: set[str] = set()

    def clear(self) -> None:
        """Remove what an earlier run left in the folder; for a run that does not go on with it."""
        for name in (FILE, OLD_FILE):
            (self._folder / name).unlink(missing_ok=True)

    def add(self, trace: StepTrace) -> int:
        """Write one rollout, whose ``records`` are all of its trajectories; returns how many of them were traced.

        A rollout that is larger than half of the bound is sampled; a disk that refuses costs the trace of this rollout,
        never the run. Both are said once.
        """
        if self._mode == "off":
            return 0
        whole = trace.records
        trace.records = choose(whole) if self._mode == "sampled" else whole
        text = encode_step(trace)
        if len(text) > self._half and len(trace.records) > SAMPLED:
            self._say_once(
                "a rollout's trace is larger than half of war.trace_mb, so it is sampled; raise war.trace_mb"
            )
            trace.records = choose(whole)
            text = encode_step(trace)
        if len(text) > self._half:
            self._say_once("a rollout's sampled trace is larger than half of war.trace_mb: not written")
            return 0
        try:
            self._append(text)
        except OSError as error:
            self._say_once(f"the trace cannot be written: {error}")
            return 0
        return len(trace.records)

    def _append(self, text: str) -> None:
        path = self._folder / FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and path.stat().st_size + len(text) > self._half:
            os.replace(path, self._folder / OLD_FILE)
        # JSON as json.dumps writes it is ASCII, so characters are bytes.
        append_whole(path, text.encode("ascii"))

    def _say_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            logger.warning("%s", text)


def read(folder: str | Path) -> list[StepTrace]:
    """The rollouts that ``folder`` has traces of, oldest first; of a step that was done again, the last.

    Raises:
        FileNotFoundError: no trace there; says how to get one.
    """
    files = [Path(folder) / name for name in (OLD_FILE, FILE)]
    found = [file for file in files if file.is_file()]
    if not found:
        raise FileNotFoundError(f"no trace in {folder}: the run had war.trace=off, or has not finished a rollout yet")
    out: dict[tuple[bool, int], StepTrace] = {}
    for file in found:
        with file.open(encoding="ascii") as lines:
            for trace in decode(lines):
                out.pop((trace.validate, trace.step), None)
                out[trace.validate, trace.step] = trace
    return list(out.values())


@dataclass(frozen=True, slots=True)
class Stay:
    """Turns of one trajectory in a row on one replica, in a lane of their own there.

    ``turns`` are (index of the turn in its record, its times); ``lane`` counts from 0 on each replica.
    """

    record: int
    replica: str
    lane: int
    turns: tuple[tuple[int, TurnTimes], ...]


def stays(records: Sequence[TrajectoryRecord]) -> list[Stay]:
    """Where each trajectory stayed, so placed that no two stays in one lane of a replica overlap in time."""
    found: list[tuple[float, float, int, str, tuple[tuple[int, TurnTimes], ...]]] = []
    for number, record in enumerate(records):
        run: list[tuple[int, TurnTimes]] = []
        for i, (turn, times) in enumerate(zip(record.turns, turn_times(record), strict=True)):
            if run and record.turns[run[-1][0]].replica != turn.replica:
                found.append((run[0][1].asked, run[-1][1].ended, number, record.turns[run[-1][0]].replica, tuple(run)))
                run = []
            run.append((i, times))
        if run:
            found.append((run[0][1].asked, run[-1][1].ended, number, record.turns[run[-1][0]].replica, tuple(run)))
    free: dict[str, list[tuple[float, int]]] = {}
    lanes: dict[str, int] = {}
    out = []
    for begin, end, number, replica, turns in sorted(found, key=lambda stay: stay[:4]):
        waiting = free.setdefault(replica, [])
        if waiting and waiting[0][0] <= begin:
            lane = heapq.heappop(waiting)[1]
        else:
            lane = lanes.get(replica, 0)
            lanes[replica] = lane + 1
        heapq.heappush(waiting, (end, lane))
        out.append(Stay(number, replica, lane, turns))
    return out


def prefill_end(turn: TurnRecord, times: TurnTimes, prefill_s_per_token: float) -> float:
    """When the turn's prefill ended, estimated from the step's mean: unix seconds between ``began`` and ``ended``."""
    computed = turn.prompt_tokens - (turn.cached_tokens or 0)
    return min(times.ended, times.began + computed * prefill_s_per_token)


def chrome_trace(traces: Sequence[StepTrace]) -> dict[str, Any]:
    """Chrome's trace event format (JSON object form), times in microseconds from the first rollout's begin on.

    Each replica is a process whose threads are lanes; queueing, prefill (estimated), decode and environment time are
    slices with the trajectory's identity and the turn's counts as arguments.
    """
    events: list[dict[str, Any]] = []
    names: dict[str, int] = {}
    zero = min((t.began for t in traces), default=0.0)
    for trace in traces:
        for replica in [*trace.replicas, *(turn.replica for r in trace.records for turn in r.turns)]:
            if replica not in names:
                names[replica] = len(names) + 1
                about = {"name": f"replica {names[replica] - 1} {replica}".strip()}
                events.append({"ph": "M", "name": "process_name", "pid": names[replica], "args": about})
        for stay in stays(trace.records):
            events.extend(_stay_events(trace, stay, names[stay.replica], zero))
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _stay_events(trace: StepTrace, stay: Stay, pid: int, zero: float) -> Iterator[dict[str, Any]]:
    record = trace.records[stay.record]
    name = f"{record.trajectory.index or record.trajectory.uid[:8]}/{record.trajectory.session}"

    def slice_of(kind: str, begin: float, end: float, **args: Any) -> dict[str, Any]:
        return {
            "ph": "X",
            "name": kind,
            "cat": "validation" if trace.validate else "rollout",
            "pid": pid,
            "tid": stay.lane,
            "ts": round((begin - zero) * 1e6),
            "dur": max(0, round((end - begin) * 1e6)),
            "args": {"trajectory": name, "step": trace.step, **args},
        }

    last = None
    for i, times in stay.turns:
        turn = record.turns[i]
        if last is not None and times.asked > last:
            yield slice_of("environment", last, times.asked)
        if turn.queue_seconds > 0:
            yield slice_of("queue", times.asked, times.began, turn=turn.turn, reason=turn.reason)
        middle = prefill_end(turn, times, trace.prefill_s_per_token)
        counts = {"turn": turn.turn, "prompt": turn.prompt_tokens, "cached": turn.cached_tokens}
        if middle > times.began:
            yield slice_of("prefill", times.began, middle, **counts)
        yield slice_of("decode", middle, times.ended, **counts, generated=turn.generated_tokens)
        last = times.ended


def main(argv: Sequence[str] | None = None) -> int:
    """``war-rl trace``."""
    import argparse
    import sys

    parser = argparse.ArgumentParser(
        prog="war-rl trace",
        description="Write a run's event data as a Chrome trace, which chrome://tracing and ui.perfetto.dev open.",
    )
    parser.add_argument("run", metavar="RUN_DIR", help="the run's folder")
    parser.add_argument("--step", type=int, metavar="N", help="only this step (default: all that are there)")
    parser.add_argument("--out", required=True, metavar="FILE", help="file to write, such as trace.json")
    args = parser.parse_args(argv)
    try:
        traces = [t for t in read(args.run) if args.step is None or t.step == args.step]
    except (OSError, ValueError) as error:
        print(f"war-rl trace: {error}", file=sys.stderr)
        return 1
    if not traces:
        print(f"war-rl trace: step {args.step} is not in the trace of {args.run}", file=sys.stderr)
        return 1
    Path(args.out).write_text(json.dumps(chrome_trace(traces)))
    print(f"{args.out}: {sum(len(t.records) for t in traces)} trajectories of {len(traces)} rollouts")
    return 0
