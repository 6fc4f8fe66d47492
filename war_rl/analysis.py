# SPDX-License-Identifier: Apache-2.0
"""Where a rollout's time went, from its records alone: time split, load regimes, replicas, recomputed tokens.

Pure. Times are unix seconds; a *record* is a :class:`~war_rl.types.TrajectoryRecord`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from war_rl.types import TrajectoryRecord, TurnRecord

TIME_KINDS = (
    "dispatch",
    "admission",
    "queue",
    "engine_queue",
    "prefill",
    "decode",
    "drafting",
    "env",
    "other",
    "idle_tail",
)
"""Kinds of the time split, in the order in which a trajectory meets them."""


@dataclass(frozen=True, slots=True)
class TurnTimes:
    """When a turn asked for a replica, when the replica got it, and when it ended. Unix seconds."""

    asked: float
    began: float
    ended: float


def clock_offset(record: TrajectoryRecord) -> float:
    """Seconds to add to a turn's ``started`` to get unix seconds.

    Where the recorder did not say, the first turn is taken to have begun with the trajectory.
    """
    if record.clock_offset or not record.turns:
        return record.clock_offset
    return record.started - record.turns[0].started


def turn_times(record: TrajectoryRecord) -> list[TurnTimes]:
    """Times of each turn of ``record``, in its order."""
    offset = clock_offset(record)
    out = []
    for turn in record.turns:
        asked = turn.started + offset
        began = asked + turn.queue_seconds
        out.append(TurnTimes(asked, began, began + turn.seconds))
    return out


def window(records: Sequence[TrajectoryRecord], began: float | None, seconds: float) -> tuple[float, float]:
    """Begin and end of the rollout; the first trajectory's start where ``began`` is None."""
    if began is None:
        began = min((r.started for r in records), default=0.0)
    return began, began + seconds


@dataclass(frozen=True, slots=True)
class EngineSeconds:
    """What the engines measured, in seconds summed over requests, and the drafters, summed over replicas.

    Attributes:
        prefill: from a request's scheduling to its first token (vllm:request_prefill_time_seconds).
        queue: waiting inside the engine (vllm:request_queue_time_seconds).
        drafting: spent in making drafts, per replica and therefore not multiplied by the requests it held up.
    """

    prefill: float = 0.0
    queue: float = 0.0
    drafting: float = 0.0


def time_split(
    records: Sequence[TrajectoryRecord], began: float | None, seconds: float, engine: EngineSeconds
) -> dict[str, float]:
    """Seconds by kind of the mean trajectory; the kinds add up to ``seconds`` (0 each without trajectories).

    A trajectory's share of the rollout that lies before its start is ``dispatch``, what lies after its end
    ``idle_tail``. ``env`` is what it says it spent in its environment, as far as it was not generating; what then is
    left (agent loop, tokenising, rewards) is ``other``. Turns that overlap are scaled to the trajectory's life.
    """
    total = dict.fromkeys(TIME_KINDS, 0.0)
    if not records or seconds <= 0:
        return total
    begin, end = window(records, began, seconds)
    in_engine = 0.0
    for record in records:
        start, finish = max(begin, min(record.started, end)), max(begin, min(record.finished, end))
        finish = max(start, finish)
        total["dispatch"] += start - begin
        total["idle_tail"] += end - finish
        life = finish - start
        first = record.turns[0].queue_seconds if record.turns else 0.0
        later = math.fsum(t.queue_seconds for t in record.turns[1:])
        engines = math.fsum(t.seconds for t in record.turns)
        scale = min(1.0, life / (first + later + engines)) if first + later + engines > 0 else 0.0
        rest = max(0.0, life - scale * (first + later + engines))
        env = min(record.env_seconds, rest)
        total["admission"] += scale * first
        total["queue"] += scale * later
        total["env"] += env
        total["other"] += rest - env
        in_engine += scale * engines
    total.update(_engine_split(records, in_engine, engine))
    return {kind: value / len(records) for kind, value in total.items()}


def _engine_split(records: Sequence[TrajectoryRecord], total: float, engine: EngineSeconds) -> dict[str, float]:
    """Engine seconds of all trajectories by kind; what the engines did not claim is decoding."""
    queue = min(engine.queue, total)
    prefill = min(engine.prefill, total - queue)
    decode = total - queue - prefill
    busy = math.fsum(busy_seconds(records).values())
    # A draft holds up everything that runs there: its share of the replica's busy time is that of each request's.
    drafting = min(decode, (total - queue) * engine.drafting / busy) if busy > 0 else 0.0
    return {"engine_queue": queue, "prefill": prefill, "decode": decode - drafting, "drafting": drafting}


def _sweep(intervals: Sequence[tuple[float, float]]) -> Iterator[tuple[float, int]]:
    """(length, how many of the intervals hold) for each stretch between two events."""
    events = sorted([(a, 1) for a, b in intervals if b > a] + [(b, -1) for a, b in intervals if b > a])
    level, last = 0, 0.0
    for at, change in events:
        if level:
            yield at - last, level
        level, last = level + change, at


def engine_intervals(records: Sequence[TrajectoryRecord]) -> dict[str, list[tuple[float, float]]]:
    """When each replica ran each of its turns, by replica id."""
    out: dict[str, list[tuple[float, float]]] = {}
    for record in records:
        for turn, times in zip(record.turns, turn_times(record), strict=True):
            if turn.replica:
                out.setdefault(turn.replica, []).append((times.began, times.ended))
    return out


def busy_seconds(records: Sequence[TrajectoryRecord]) -> dict[str, float]:
    """Seconds in which each replica ran at least one turn."""
    return {r: math.fsum(s for s, _ in _sweep(x)) for r, x in engine_intervals(records).items()}


def regime_shares(
    records: Sequence[TrajectoryRecord], replicas: Sequence[str], seconds: float, low_running: int
) -> dict[str, float]:
    """Shares of all replicas' time in the low regime (1 to ``low_running`` turns), the high one, and idle.

    They add up to 1 (each is 0 without a replica or without time).
    """
    intervals = engine_intervals(records)
    every = sorted({*replicas, *intervals})
    whole = len(every) * seconds
    if whole <= 0:
        return {"low": 0.0, "high": 0.0, "idle": 0.0}
    low = high = 0.0
    for mine in intervals.values():
        for length, level in _sweep(mine):
            if level <= low_running:
                low += length
            else:
                high += length
    used = max(low + high, whole)  # clocks of two machines may disagree by a little
    return {"low": low / used, "high": high / used, "idle": max(0.0, 1.0 - (low + high) / used)}


SLOWEST_COLUMNS = (
    "step",
    "trajectory",
    "replicas",
    "turns",
    "prompt tokens",
    "computed tokens",
    "generated tokens",
    "seconds",
    "admission s",
    "queue s",
    "prefill s",
    "decode s",
    "environment s",
    "other s",
    "reward",
    "status",
)
"""What :func:`slowest` says about a trajectory; its prefill seconds are estimated from the step's mean."""


def slowest(
    records: Sequence[TrajectoryRecord], replicas: Sequence[str], prefill_s_per_token: float, rows: int
) -> list[list[str | float | None]]:
    """The ``rows`` trajectories that took longest, longest first, as rows of :data:`SLOWEST_COLUMNS`."""
    numbers = {replica: str(i) for i, replica in enumerate(replicas)}
    out: list[list[str | float | None]] = []
    for record in sorted(records, key=lambda r: r.started - r.finished)[:rows]:
        t, turns = record.trajectory, record.turns
        computed = sum(turn.prompt_tokens - (turn.cached_tokens or 0) for turn in turns)
        admission = turns[0].queue_seconds if turns else 0.0
        queue = math.fsum(turn.queue_seconds for turn in turns[1:])
        engine = math.fsum(turn.seconds for turn in turns)
        prefill = min(engine, computed * prefill_s_per_token)
        life = record.finished - record.started
        visited = [numbers.get(turn.replica, turn.replica) for turn in turns]
        moves = [name for i, name in enumerate(visited) if i == 0 or name != visited[i - 1]]
        out.append(
            [
                t.step,
                f"{t.index or t.uid[:8]}/{t.session}",
                ">".join(moves),
                len(turns),
                sum(turn.prompt_tokens for turn in turns),
                computed,
                sum(turn.generated_tokens for turn in turns),
                life,
                admission,
                queue,
                prefill,
                engine - prefill,
                record.env_seconds,
                max(0.0, life - admission - queue - engine - record.env_seconds),
                record.reward,
                record.status if not record.error else f"{record.status}: {record.error[:200]}",
            ]
        )
    return out


MAX_NAMED_REPLICAS = 32
"""With more replicas than this only the slowest and the fastest are logged."""


def replica_values(records: Sequence[TrajectoryRecord], replicas: Sequence[str], seconds: float) -> dict[str, float]:
    """``replica/...`` values: generated tokens per second and busy share, each by number, least and most.

    Replicas are numbered in the order given (those that the records alone know follow), because their addresses change
    from run to run.
    """
    busy = busy_seconds(records)
    tokens: dict[str, int] = {}
    for record in records:
        for turn in record.turns:
            tokens[turn.replica] = tokens.get(turn.replica, 0) + turn.generated_tokens
    names = [*replicas, *sorted(set(busy) - set(replicas))]
    rates = [tokens.get(name, 0) / seconds if seconds > 0 else 0.0 for name in names]
    shares = [min(1.0, busy.get(name, 0.0) / seconds) if seconds > 0 else 0.0 for name in names]
    out = {
        "replica/tokens_per_s_min": min(rates, default=0.0),
        "replica/tokens_per_s_max": max(rates, default=0.0),
        "replica/busy_share_min": min(shares, default=0.0),
    }
    if len(names) <= MAX_NAMED_REPLICAS:
        for number, (rate, share) in enumerate(zip(rates, shares, strict=True)):
            out[f"replica/{number}/tokens_per_s"] = rate
            out[f"replica/{number}/busy_share"] = share
    return out


def recomputed_tokens(turns: Sequence[TurnRecord]) -> int:
    """Prompt tokens of one trajectory's ``turns`` that an earlier turn had computed already and a later one again.

    The context of a turn (its prompt and what it generated, but for the last token, which no step has computed) could
    have been cached when the next turn asks. The last, unfilled KV block of each turn counts too: engines keep whole
    blocks only. Turns without a cached-token count are left out.
    """
    total = 0
    for before, after in pairwise(turns):
        if after.cached_tokens is None:
            continue
        known = before.prompt_tokens + max(0, before.generated_tokens - 1)
        total += max(0, min(known, after.prompt_tokens) - after.cached_tokens)
    return total


def prefill_seconds_per_token(turns: Sequence[TurnRecord], prefill_seconds: float) -> float:
    """Measured seconds for each computed prompt token; 0 where nothing was computed or measured."""
    computed = sum(t.prompt_tokens - (t.cached_tokens or 0) for t in turns)
    return prefill_seconds / computed if computed > 0 else 0.0


def estimated_speedup(
    records: Sequence[TrajectoryRecord], began: float | None, seconds: float, saved: Mapping[str, float]
) -> float:
    """How many times as long the rollout would have taken without drafts, by the step-time model's account.

    ``saved`` holds, by replica, the engine seconds that the same committed tokens would have cost more without drafts
    than they did with them, net of the time spent on making drafts. A replica's last turn would have ended that much
    later, and the rollout with the last of them. Below 1: drafting cost more than it gave. 1 without drafts.
    """
    if seconds <= 0 or not saved:
        return 1.0
    begin, _ = window(records, began, seconds)
    ends: dict[str, float] = {}
    for replica, mine in engine_intervals(records).items():
        ends[replica] = max(end for _, end in mine) - begin
    if not ends:
        return 1.0
    with_drafts = max(ends.values())
    without = max(end + saved.get(replica, 0.0) for replica, end in ends.items())
    return max(0.0, seconds + without - with_drafts) / seconds
