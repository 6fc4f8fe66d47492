# SPDX-License-Identifier: Apache-2.0
"""Order of runs, ratios and the check that every side did the same work. Knows no engine."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

EXIT_WORK_DIFFERS = 3
"""Exit status of a benchmark whose sides did not do the same work."""

WORK_TOLERANCE = 0.01
"""Largest relative difference in any kind of work that still counts as equal."""


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """One run to do. ``pair`` is -1 for a warm-up, which is not measured."""

    side: str
    pair: int

    @property
    def warmup(self) -> bool:
        return self.pair < 0


def plan_rounds(sides: Sequence[str], pairs: int, rounds: int, warmups: int = 1) -> list[list[PlannedRun]]:
    """The plan of each round, from one start of the engines to their end; pairs are shared out and numbered through.

    Engines of equal configuration are not equally fast, by several percent and for as long as they live
    (docs/benchmark.md). So the order in which they are started is reversed from round to round; it is the order of the
    sides in each round's plan.

    Args:
        sides, pairs, warmups: as for :func:`plan_runs`; ``warmups`` in every round.
        rounds: how often the engines are started; no more often than there are pairs.

    Raises:
        ValueError: as :func:`plan_runs`, or ``rounds`` is below 1.
    """
    if rounds < 1:
        raise ValueError(f"--rounds {rounds}: must be at least 1")
    rounds = max(1, min(rounds, pairs))
    plans, first = [], 0
    for number in range(rounds):
        count = pairs // rounds + (number < pairs % rounds)
        order = sides if number % 2 == 0 else list(reversed(sides))
        plan = plan_runs(order, count, warmups)
        plans.append([replace(run, pair=run.pair + first) if not run.warmup else run for run in plan])
        first += count
    return plans


def plan_runs(sides: Sequence[str], pairs: int, warmups: int = 1) -> list[PlannedRun]:
    """Warm-ups of every side, then the measured runs with the order reversed from pair to pair: A B B A A B ...

    Reversing cancels a drift of the machine that is linear in time, over every two pairs.

    Args:
        sides: names, first the one whose throughput is the numerator; at least two. The same rollout may be compared
            with itself, so names need not differ: see :func:`side_labels`.
        pairs: how often every side is measured.
        warmups: unmeasured runs of every side before the first measured one.

    Raises:
        ValueError: fewer than two sides, ``pairs`` below 1, negative ``warmups``, or a repeated name.
    """
    if len(sides) < 2:
        raise ValueError(f"--sides {','.join(sides)}: a comparison needs two sides, such as war,vllm")
    if len(set(sides)) != len(sides):
        raise ValueError(f"sides {', '.join(sides)} are not all different; label them first")
    if pairs < 1 or warmups < 0:
        raise ValueError(f"pairs={pairs}, warmups={warmups}: need at least one pair and no negative warm-ups")
    plan = [PlannedRun(side, -1) for _ in range(warmups) for side in sides]
    for pair in range(pairs):
        order = sides if pair % 2 == 0 else list(reversed(sides))
        plan.extend(PlannedRun(side, pair) for side in order)
    return plan


def side_labels(rollouts: Sequence[str]) -> dict[str, str]:
    """Unique label -> rollout, in order; the second ``vllm`` becomes ``vllm#2``, so that a side can meet itself."""
    labels: dict[str, str] = {}
    for rollout in rollouts:
        count = sum(1 for known in labels.values() if known == rollout)
        labels[rollout if not count else f"{rollout}#{count + 1}"] = rollout
    return labels


@dataclass(frozen=True, slots=True)
class Work:
    """What a run was asked to do. Prompt tokens are those requested: whether cached or computed is a result."""

    turns: int
    generated_tokens: int
    requested_prompt_tokens: int


COUNTERS = {
    "prefill_computed_tokens": "prompt tokens the engines computed",
    "prefill_cached_tokens": "prompt tokens served from KV cache",
    "scheduled_tokens": "tokens the engines computed: prefill, decode and drafts, recomputation included",
    "drafts": "times an engine verified a draft",
    "draft_tokens": "tokens drafted",
    "accepted_tokens": "drafted tokens that were accepted",
    "preemptions": "requests an engine put back for want of KV cache",
    "engine_steps": "engine steps over all replicas",
    "replica_imbalance": "busiest replica's generated tokens over the mean replica's; 1 is even",
    "longest_trajectory_seconds": "from a trajectory's first request to its last token, the slowest one",
    "observer_seconds": "spent around the run on reading counters, adding up metrics and writing the trace, as a "
    "trainer does between rollouts; not in the run's seconds",
    "trace_seconds": "those of them that writing the trace took",
    "traced_trajectories": "trajectories whose events were written to the trace",
}
"""Results every run reports beside its time, with what they count."""


ROUTER = "router"
"""Stands among the replicas' samples for turns that no engine has yet."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One look at one replica during a run. Token counts are cumulative since the run began.

    Attributes:
        t: seconds since the run began.
        replica: its name, or :data:`ROUTER`.
        running: requests in the engine's batch.
        queued: requests waiting in the engine; of :data:`ROUTER`, those it holds back.
        prompt_tokens: requested prompt tokens.
        cached_tokens: those of them served from KV cache.
        generated_tokens: committed tokens.
    """

    t: float
    replica: str
    running: int
    queued: int
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int


@dataclass(frozen=True, slots=True)
class SideRun:
    """One finished run.

    Attributes:
        side: the side's label.
        pair: index of the pair; -1 for a warm-up.
        seconds: from the first request to the last trajectory's end.
        work: what it was asked to do.
        counters: values of :data:`COUNTERS`; a missing one was not reported.
        timeline: samples in time order; may be empty.
        estimated_speedup: how many times as long the run would have taken without drafts, by the step-time model of the
            side that drafted; None for one that does not draft, or cannot tell.
    """

    side: str
    pair: int
    seconds: float
    work: Work
    counters: Mapping[str, float] = field(default_factory=dict)
    timeline: tuple[Sample, ...] = ()
    estimated_speedup: float | None = None

    def __post_init__(self) -> None:
        if not 0 < self.seconds < float("inf"):
            raise ValueError(f"run of {self.side} took {self.seconds} seconds: not a measurement")
        unknown = set(self.counters) - set(COUNTERS)
        if unknown:
            raise ValueError(f"unknown counters {', '.join(sorted(unknown))}; known: {', '.join(COUNTERS)}")

    @property
    def throughput(self) -> float:
        """Generated tokens per second."""
        return self.work.generated_tokens / self.seconds


def measure(
    plan: Iterable[PlannedRun],
    run: Callable[[PlannedRun], SideRun],
    on_done: Callable[[PlannedRun, SideRun], None] | None = None,
) -> list[SideRun]:
    """Do the planned runs one after another and return the measured ones.

    Args:
        plan: from :func:`plan_runs`.
        run: does one run on the right engines, with caches reset before it.
        on_done: called after every run, warm-ups included.

    Raises:
        ValueError: ``run`` returned another side or pair than it was asked for.
    """
    measured = []
    for planned in plan:
        result = run(planned)
        if (result.side, result.pair) != (planned.side, planned.pair):
            raise ValueError(f"asked for {planned.side}, pair {planned.pair}; got {result.side}, pair {result.pair}")
        if on_done is not None:
            on_done(planned, result)
        if not planned.warmup:
            measured.append(result)
    return measured


@dataclass(frozen=True, slots=True)
class Spread:
    """Median, least and greatest of some values, and the values in order of measurement."""

    median: float
    min: float
    max: float
    values: tuple[float, ...]

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """Raises ValueError for no values."""
        known = tuple(values)
        if not known:
            raise ValueError("no values")
        return cls(statistics.median(known), min(known), max(known), known)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "values": list(self.values)}


def throughput_ratio(runs: Sequence[SideRun], first: str, second: str) -> Spread:
    """First side's throughput over the second's, pair by pair; above 1 the first is faster.

    With equal work this is the second's seconds over the first's.

    Raises:
        ValueError: a pair has not exactly one run of each side, or a side generated nothing.
    """
    by_side = {side: {run.pair: run for run in runs if run.side == side} for side in (first, second)}
    counts = {side: sum(1 for run in runs if run.side == side) for side in (first, second)}
    pairs = set(by_side[first])
    whole = all(counts[side] == len(by_side[side]) for side in counts)
    if not pairs or pairs != set(by_side[second]) or not whole:
        raise ValueError(f"{first} and {second} were not measured in pairs: {counts[first]} and {counts[second]} runs")
    if any(run.work.generated_tokens < 1 for side in by_side.values() for run in side.values()):
        raise ValueError("a run generated no tokens: no ratio")
    return Spread.of(by_side[first][p].throughput / by_side[second][p].throughput for p in sorted(pairs))


CONFIDENCE = 0.95
"""Of :func:`ratio_interval`."""


def ratio_interval(runs: Sequence[SideRun], first: str, second: str) -> tuple[float, float] | None:
    """Where the ratio lies by the spread of both sides' runs.

    Student's two-sample interval of the mean log throughputs. Two runs a side already give one, if a wide one; a
    pairwise interval would need more. What drifts between pairs counts as spread: rather too wide than too narrow.

    Returns:
        Its two ends, at :data:`CONFIDENCE`; None for fewer than two runs of a side.
    """
    from scipy.stats import t

    a, b = ([math.log(run.throughput) for run in runs if run.side == side] for side in (first, second))
    if min(len(a), len(b)) < 2:
        return None
    freedom = len(a) + len(b) - 2
    squares = sum((x - statistics.fmean(side)) ** 2 for side in (a, b) for x in side)
    error = math.sqrt(squares / freedom * (1 / len(a) + 1 / len(b)))
    middle, reach = statistics.fmean(a) - statistics.fmean(b), float(t.ppf((1 + CONFIDENCE) / 2, freedom)) * error
    return math.exp(middle - reach), math.exp(middle + reach)


def work_spread(runs: Sequence[SideRun]) -> dict[str, float]:
    """Per kind of work, how far the runs lie apart: (most - least) / most, over all sides and pairs; 0 is equal."""
    out = {}
    for kind in Work.__dataclass_fields__:
        values = [getattr(run.work, kind) for run in runs]
        most = max(values, default=0)
        out[kind] = (most - min(values)) / most if most else 0.0
    return out


def work_equal(runs: Sequence[SideRun], tolerance: float = WORK_TOLERANCE) -> bool:
    """Whether no kind of work differs by more than ``tolerance`` between any two runs."""
    return all(spread <= tolerance for spread in work_spread(runs).values())


def exit_code(runs: Sequence[SideRun]) -> int:
    """0 for equal work, :data:`EXIT_WORK_DIFFERS` otherwise."""
    return 0 if work_equal(runs) else EXIT_WORK_DIFFERS


def imbalance(per_replica: Iterable[float]) -> float:
    """Busiest over mean, at least 1; 1 when nothing was done."""
    values = list(per_replica)
    total = sum(values)
    return max(values) * len(values) / total if total > 0 else 1.0
