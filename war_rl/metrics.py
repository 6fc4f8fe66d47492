# SPDX-License-Identifier: Apache-2.0
"""One step's records and engine counters -> one flat dict of ``war/...`` values.

Pure: the caller measures seconds and reads the engines, this module only adds up. What each value means, its healthy
range and what to do about it stands in :mod:`war_rl.metrics_registry`, from which docs/metrics.md is made.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence

from war_rl.analysis import (
    EngineSeconds,
    estimated_speedup,
    prefill_seconds_per_token,
    recomputed_tokens,
    regime_shares,
    replica_values,
    time_split,
)
from war_rl.types import SOURCES, TrajectoryRecord, TurnRecord

ENGINE_COUNTERS = (
    "spec_decode_num_drafts",
    "spec_decode_num_draft_tokens",
    "spec_decode_num_accepted_tokens",
    "prefix_cache_queries",
    "prefix_cache_hits",
    "generation_tokens",
    "prompt_tokens",
    "num_preemptions",
)
"""vLLM's counters that :func:`step_metrics` reads, without vLLM's ``vllm:`` prefix and Prometheus' ``_total``."""

ENGINE_SUMS = ("request_prefill_time_seconds", "request_queue_time_seconds")
"""vLLM's histograms whose sums :func:`step_metrics` reads beside the counters."""

NOT_FINITE = "NonFiniteLogProbs"
"""How the error of a turn begins whose log-probs were NaN or infinite (``trainers.verl.client``)."""


def step_metrics(
    records: Sequence[TrajectoryRecord],
    *,
    seconds: float,
    engine: Mapping[str, float],
    sched: Mapping[str, float],
    spec: Mapping[str, float],
    validate: bool = False,
    began: float | None = None,
    replicas: Sequence[str] = (),
    low_running: int = 16,
    saved: Mapping[str, float] | None = None,
) -> dict[str, float]:
    """All ``war/...`` values of one step's rollout, or ``war_val/...`` ones of a validation pass.

    Args:
        records: trajectories that ended in this step; those of the other kind (``trajectory.validate`` differs from
            ``validate``) are left out, so a caller may pass everything it has.
        seconds: wall time of the rollout, from the first submitted trajectory to the last one in.
        engine: change of each of :data:`ENGINE_COUNTERS` and :data:`ENGINE_SUMS` over this rollout, summed over
            replicas (:func:`delta`, :func:`add_up`). Missing counters count as 0.
        sched: ``GlobalScheduler.take_step_stats(validate)``; keys with or without the leading ``sched/``. Stickiness
            and balance are taken from the records where the scheduler does not give them (stock rollout).
        spec: change of ``Drafter.counters()`` over this rollout, summed over replicas. Keys that start with ``val/``
            belong to validation and are used only then, the others only for training.
        validate: whether this was a validation pass.
        began: unix seconds at which the rollout began; the first trajectory's start when None.
        replicas: ids of all replicas, those that ran nothing included; their order numbers them.
        low_running: most running turns of a replica in the low load regime (``war.spec.max_running``).
        saved: by replica, engine seconds saved by drafts (:func:`war_rl.analysis.estimated_speedup`).

    Returns:
        Flat dict of finite floats. Ratios without a denominator take their neutral value: rates 0, lengths and
        imbalances 1.
    """
    mine = [r for r in records if r.trajectory.validate == validate]
    turns = [t for r in mine for t in r.turns]
    values = {
        **_rollout(mine, turns, seconds, engine),
        **_cache(turns, engine),
        **_spec(engine, spec, validate),
        **_sched(mine, turns, sched),
        **_time(mine, turns, began, seconds, engine, spec, validate),
        **{f"regime/{k}_share": v for k, v in regime_shares(mine, replicas, seconds, low_running).items()},
        **replica_values(mine, replicas, seconds),
        "spec/saved_seconds": math.fsum((saved or {}).values()),
        "spec/estimated_speedup": estimated_speedup(mine, began, seconds, saved or {}),
        "env/seconds": math.fsum(r.env_seconds for r in mine),
        "env/seconds_max": max((r.env_seconds for r in mine), default=0.0),
    }
    prefix = "war_val" if validate else "war"
    return {f"{prefix}/{name}": float(value) for name, value in values.items()}


def _rollout(
    records: Sequence[TrajectoryRecord], turns: Sequence[TurnRecord], seconds: float, engine: Mapping[str, float]
) -> dict[str, float]:
    generated = sum(t.generated_tokens for t in turns)
    tail = tail_seconds([r.finished for r in records])
    preempted = engine.get("num_preemptions", sum(t.preemptions for t in turns))
    return {
        "rollout/seconds": seconds,
        "rollout/tokens_per_s": _ratio(generated, seconds),
        "rollout/trajectories": len(records),
        "rollout/trajectories_per_s": _ratio(len(records), seconds),
        "rollout/turns": len(turns),
        "rollout/turns_max": max((len(r.turns) for r in records), default=0),
        "rollout/generated_tokens": generated,
        "rollout/failed": sum(r.status == "failed" for r in records),
        "rollout/truncated": sum(r.status == "truncated" for r in records),
        "rollout/turn_errors": sum(bool(t.error) for t in turns),
        "fault/nonfinite_turns": sum(t.error.startswith(NOT_FINITE) for t in turns),
        "rollout/preemptions": preempted,
        "rollout/tail_seconds": tail,
        "rollout/tail_share": _ratio(tail, seconds),
        "rollout/trajectory_seconds_max": max((r.finished - r.started for r in records), default=0.0),
        "rollout/queue_seconds": math.fsum(t.queue_seconds for t in turns),
    }


def _time(
    records: Sequence[TrajectoryRecord],
    turns: Sequence[TurnRecord],
    began: float | None,
    seconds: float,
    engine: Mapping[str, float],
    spec: Mapping[str, float],
    validate: bool,
) -> dict[str, float]:
    """The time split, and what was computed twice with the seconds it took."""
    prefill = engine.get("request_prefill_time_seconds", 0.0)
    spent = EngineSeconds(
        prefill=prefill,
        queue=engine.get("request_queue_time_seconds", 0.0),
        drafting=spec.get("val/propose_seconds" if validate else "propose_seconds", 0.0),
    )
    split = time_split(records, began, seconds, spent)
    recomputed = sum(recomputed_tokens(r.turns) for r in records)
    return {
        **{f"time/{kind}_seconds": value for kind, value in split.items()},
        "cache/recomputed_tokens": recomputed,
        "cache/recomputed_seconds": recomputed * prefill_seconds_per_token(turns, prefill),
    }


def _cache(turns: Sequence[TurnRecord], engine: Mapping[str, float]) -> dict[str, float]:
    prompt = sum(t.prompt_tokens for t in turns)
    known = [t for t in turns if t.cached_tokens is not None]
    cached = sum(t.cached_tokens or 0 for t in known)
    out: dict[str, float] = {
        "cache/prompt_tokens": prompt,
        "cache/cached_tokens": cached,
        "cache/computed_tokens": prompt - cached,
        "cache/hit_rate": _ratio(cached, sum(t.prompt_tokens for t in known)),
        "cache/unreported_turns": len(turns) - len(known),
    }
    if engine.get("prefix_cache_queries"):
        out["cache/engine_hit_rate"] = engine.get("prefix_cache_hits", 0.0) / engine["prefix_cache_queries"]
    return out


_ENGINE_SPEC = {
    "drafts": "spec_decode_num_drafts",
    "draft_tokens": "spec_decode_num_draft_tokens",
    "accepted_tokens": "spec_decode_num_accepted_tokens",
}


def _spec(engine: Mapping[str, float], spec: Mapping[str, float], validate: bool) -> dict[str, float]:
    drafts, drafted, accepted = (engine.get(name, 0.0) for name in _ENGINE_SPEC.values())
    out = {
        "spec/drafts": drafts,
        "spec/draft_tokens": drafted,
        "spec/accepted_tokens": accepted,
        "spec/acceptance_rate": _ratio(accepted, drafted),
        # vLLM's convention: the bonus token of each verify step counts, so no draft at all reads 1.
        "spec/mean_acceptance_length": 1.0 + _ratio(accepted, drafts),
        "spec/wasted_tokens": drafted - accepted,
    }
    for key, value in spec.items():
        if key.startswith("val/") != validate:
            continue
        name = key.removeprefix("val/").removeprefix("spec/")
        # The verifier's own count is the truth; what the proposer believes stands beside it under another name.
        out[f"spec/proposer_{name}" if f"spec/{name}" in out else f"spec/{name}"] = value
    for source in SOURCES:
        if out.get(f"spec/draft_tokens_{source}"):
            right = out.get(f"spec/accepted_tokens_{source}", 0.0)
            out[f"spec/acceptance_rate_{source}"] = right / out[f"spec/draft_tokens_{source}"]
    if "spec/step_per_token_s" in out:
        out["spec/wasted_seconds"] = out["spec/wasted_tokens"] * out["spec/step_per_token_s"]
    return out


def _sched(
    records: Sequence[TrajectoryRecord], turns: Sequence[TurnRecord], sched: Mapping[str, float]
) -> dict[str, float]:
    out = {
        "sched/sticky_rate": _observed_sticky_rate(records),
        "sched/replica_tokens_max_over_mean": _observed_imbalance(turns),
    }
    for key, value in sched.items():
        out[f"sched/{key.removeprefix('sched/')}"] = value
    return out


def _observed_sticky_rate(records: Sequence[TrajectoryRecord]) -> float:
    """Share of turns after a trajectory's first that ran where the turn before it ran; 1 where there is none."""
    pairs = [(a.replica, b.replica) for r in records for a, b in zip(r.turns, r.turns[1:], strict=False)]
    return sum(a == b for a, b in pairs) / len(pairs) if pairs else 1.0


def _observed_imbalance(turns: Sequence[TurnRecord]) -> float:
    """Computed and generated tokens of the busiest replica over the mean of those that ran anything."""
    work: dict[str, int] = {}
    for turn in turns:
        spent = turn.prompt_tokens - (turn.cached_tokens or 0) + turn.generated_tokens
        work[turn.replica] = work.get(turn.replica, 0) + spent
    total = sum(work.values())
    return max(work.values()) * len(work) / total if total else 1.0


def tail_seconds(finished: Sequence[float]) -> float:
    """Seconds from the moment 90 % of the trajectories had finished to the last one.

    ``finished`` holds finish times in seconds on one clock, in any order. With fewer than 10 of them the 90 % mark is
    the last but one finish or earlier, so that the tail of a small step is seen as well.
    """
    if len(finished) < 2:
        return 0.0
    times = sorted(finished)
    done = min(math.ceil(0.9 * len(times)), len(times) - 1)
    return times[-1] - times[done - 1]


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


_PAGE_LINES = re.compile(r"^(?:# TYPE )?vllm:(?!\w+_bucket\b).*$", re.MULTILINE)


def parse_prometheus(text: str) -> dict[str, float]:
    """Counters of a vLLM ``/metrics`` page and the sums of :data:`ENGINE_SUMS`, each summed over its labels.

    Names come without ``vllm:``, ``_total`` and ``_sum``; gauges, other histograms and counters of anything but vLLM
    are left out.

    Raises:
        ValueError: the text is not in Prometheus' exposition format.
    """
    from prometheus_client.parser import text_string_to_metric_families

    out: dict[str, float] = {}
    # Most of a page is buckets and help; parsing them would take five times as long.
    for family in text_string_to_metric_families("\n".join(_PAGE_LINES.findall(text)) + "\n"):
        name = family.name.removeprefix("vllm:")
        if name == family.name or not (family.type == "counter" or name in ENGINE_SUMS):
            continue
        # Beside the value a counter may carry the time of its creation, a histogram has buckets.
        wanted = (family.name, f"{family.name}_total") if family.type == "counter" else (f"{family.name}_sum",)
        for sample in family.samples:
            if sample.name in wanted:
                out[name] = out.get(name, 0.0) + float(sample.value)
    return out


def delta(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """What one engine counted between two readings; keys of ``after``.

    A counter that went down means that the engine was started again in between, so all its counters began at 0.
    (A restart that has already counted past every old value cannot be told from none.)
    """
    restarted = any(value < before.get(name, 0.0) for name, value in after.items())
    start: Mapping[str, float] = {} if restarted else before
    return {name: value - start.get(name, 0.0) for name, value in after.items()}


def add_up(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Sum of counters over replicas; a name may be missing in some."""
    out: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            out[name] = out.get(name, 0.0) + value
    return out
