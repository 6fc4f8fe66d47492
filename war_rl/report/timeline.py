# SPDX-License-Identifier: Apache-2.0
"""The timeline of one rollout as arrays: which trajectory ran where, in which lane, doing what. Pure."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from war_rl.trace import Stay, StepTrace, prefill_end, stays
from war_rl.types import TrajectoryRecord

KINDS = ("queue", "prefill", "decode", "environment")
MAX_TURNS = 200_000
"""Turns drawn in one page over all of its steps; the slowest and the newest steps come first."""
Segment = tuple[str, float, float, int, int]
"""Kind, begin and end in seconds of the rollout, record, index of the turn within the record."""


def _segments(trace: StepTrace, stay: Stay) -> Iterator[Segment]:
    record, last = trace.records[stay.record], None
    for i, times in stay.turns:
        turn = record.turns[i]
        asked, began, ended = (t - trace.began for t in (times.asked, times.began, times.ended))
        if last is not None and asked > last:
            yield "environment", last, asked, stay.record, i
        if began > asked:
            yield "queue", asked, began, stay.record, i
        middle = prefill_end(turn, times, trace.prefill_s_per_token) - trace.began
        if middle > began:
            yield "prefill", began, middle, stay.record, i
        yield "decode", middle, ended, stay.record, i
        last = ended


def packed(values: np.ndarray[Any, Any], dtype: str) -> dict[str, str]:
    """Numbers for a typed array of the page's script: little-endian, in base64."""
    array = np.asarray(values, dtype=np.dtype(dtype).newbyteorder("<"))
    return {"dtype": dtype, "bdata": base64.b64encode(array.tobytes()).decode()}


def _columns(segments: Sequence[tuple[float, float, int, int, int]]) -> dict[str, dict[str, str]]:
    table = np.asarray(segments, dtype=np.float64).reshape(-1, 5).T
    types = {"begin": "f4", "end": "f4", "row": "i4", "record": "i4", "turn": "i4"}
    return {name: packed(column, dtype) for (name, dtype), column in zip(types.items(), table, strict=True)}


def timeline(trace: StepTrace) -> dict[str, Any]:
    """Arrays of a rollout for the page's script.

    Each kind has one entry for each segment in ``begin`` and ``end`` (seconds of the rollout), ``row``, ``record`` and
    ``turn`` (its index within the record). ``replicas`` says which lanes (rows) belong to which replica.
    """
    placed = stays(trace.records)
    lanes: dict[str, int] = dict.fromkeys(trace.replicas, 1)
    for stay in placed:
        lanes[stay.replica] = max(lanes.get(stay.replica, 1), stay.lane + 1)
    base: dict[str, int] = {}
    top = 0
    for replica, count in lanes.items():
        base[replica] = top
        top += count + 1
    columns: dict[str, list[tuple[float, float, int, int, int]]] = {k: [] for k in KINDS}
    for stay in placed:
        row = base[stay.replica] + stay.lane
        for kind, begin, end, record, i in _segments(trace, stay):
            columns[kind].append((begin, end, row, record, i))
    return {
        "step": trace.step,
        "validate": trace.validate,
        "seconds": trace.seconds,
        "shown": len(trace.records),
        "total": trace.total,
        "rows": max(top, 1),
        "replicas": [{"name": name, "first": base[name], "lanes": lanes[name]} for name in lanes],
        "kinds": {kind: _columns(segments) for kind, segments in columns.items()},
        "records": [_about(record, trace) for record in trace.records],
    }


def _about(record: TrajectoryRecord, trace: StepTrace) -> list[Any]:
    """Name, start, end, environment seconds, reward, status, and of each turn prompt, cached, generated, reason."""
    t = record.trajectory
    turns = [[turn.prompt_tokens, turn.cached_tokens, turn.generated_tokens, turn.reason] for turn in record.turns]
    start, finish = (round(at - trace.began, 3) for at in (record.started, record.finished))
    name = f"{t.index or t.uid[:8]}/{t.session}"
    return [name, start, finish, round(record.env_seconds, 3), record.reward, record.status, turns]


def choose_steps(traces: Sequence[StepTrace], limit: int = MAX_TURNS) -> list[StepTrace]:
    """Rollouts for the page, in their order: the slowest training step first, then from the newest on, within
    ``limit`` turns together (one rollout at least)."""
    order = sorted(traces, key=lambda t: (t.validate, -t.seconds))[:1]
    order += [t for t in reversed(traces) if t not in order]
    kept: list[StepTrace] = []
    turns = 0
    for trace in order:
        turns += sum(len(r.turns) for r in trace.records)
        if kept and turns > limit:
            break
        kept.append(trace)
    return [t for t in traces if any(t is k for k in kept)]
