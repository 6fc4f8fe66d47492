# SPDX-License-Identifier: Apache-2.0
"""Rules that look at a step's metrics and say what is silently broken. Pure; each cause is told once in a run."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

Metrics = Mapping[str, float]

MIN_DRAFTABLE = 256
"""Generated tokens of a step below which it says nothing about drafting. Unit: tokens."""
MIN_LOW_SHARE = 0.1
"""Share of replica time in the low regime from which on drafts are expected."""
MIN_DRAFTED = 200
"""Draft tokens of a step below which its acceptance says nothing. Unit: tokens."""
ACCEPTANCE_TOO_GOOD = 0.98
"""A verifier that keeps more than this of sampled text is not verifying."""
HIT_RATE_GOOD = 0.3
"""The hit rate can only collapse if it has been this good."""
HIT_RATE_DROP = 0.5
"""... and is below this share of the best so far."""
RESIDENCY_ERROR = 0.2
"""Prompt tokens whose residency the scheduler judges wrongly, as a share."""
MIN_RESIDENCY_TOKENS = 2000
"""Wrongly judged tokens below which the share says nothing (partly filled blocks). Unit: tokens."""
IMBALANCE = 1.5
"""Load of the busiest replica over the mean."""
REPLICA_BEHIND = 0.5
"""Tokens per second of the slowest replica over the fastest."""
MIN_TURNS_PER_REPLICA = 8
"""Turns for each replica below which imbalance says nothing. Unit: turns."""
PROBS_DIFF = 0.02
"""Mean difference of rollout and actor probabilities that bf16 alone does not explain."""
PROBS_DIFF_GROWTH = 3.0
"""Growth over the median of the steps before from which on it is told."""
FEED_LAG_S = 5.0
"""Age of text when it becomes draftable on the slowest replica. Unit: seconds."""
FAILED_SHARE = 0.1
"""Share of a step's trajectories that ended in an error."""
NET_LOSS_SHARE = 0.02
"""Share of the rollout by which drafting, by its own account, made it longer."""


@dataclass(frozen=True, slots=True)
class Alarm:
    """``cause`` identifies it within a run; ``text`` says what is wrong, with the figure, and what to do."""

    cause: str
    text: str


@dataclass(frozen=True, slots=True)
class Situation:
    """What the rules must know of the run.

    Attributes:
        drafting: whether drafts are expected at all (WAR rollout, ``war.spec.policy`` not off).
        replicas: how many there are.
    """

    drafting: bool
    replicas: int


@dataclass(slots=True)
class History:
    """What earlier steps showed."""

    best_hit_rate: float = 0.0
    probs_diffs: list[float] = field(default_factory=list)


def _no_drafts(m: Metrics, now: Situation, past: History) -> str:
    enough = m.get("war/rollout/generated_tokens", 0.0) >= MIN_DRAFTABLE
    low = m.get("war/regime/low_share", 0.0)
    if not now.drafting or not enough or low < MIN_LOW_SHARE or m.get("war/spec/drafts", 0.0) > 0:
        return ""
    return (
        f"no drafts although replicas spent {low:.0%} of the time at low load: the log says which sampling parameters "
        "the verifier does not support; with war.spec.policy=budget drafting may simply not pay"
    )


def _acceptance_too_good(m: Metrics, now: Situation, past: History) -> str:
    rate = m.get("war/spec/acceptance_rate", 0.0)
    if m.get("war/spec/draft_tokens", 0.0) < MIN_DRAFTED or rate < ACCEPTANCE_TOO_GOOD:
        return ""
    return (
        f"{rate:.1%} of the draft tokens were accepted: a forced or broken verifier (or temperature 0 on text that "
        "repeats); compare training/rollout_probs_diff_max with a run of war.spec.policy=off"
    )


def _drafting_loses(m: Metrics, now: Situation, past: History) -> str:
    speedup = m.get("war/spec/estimated_speedup", 1.0)
    if speedup >= 1.0 - NET_LOSS_SHARE:
        return ""
    return f"drafting makes the rollout longer ({speedup:.2f}x by its own account): war.spec.policy=budget, or off"


def _hit_rate_collapsed(m: Metrics, now: Situation, past: History) -> str:
    rate, best = m.get("war/cache/hit_rate"), past.best_hit_rate
    if rate is None or best < HIT_RATE_GOOD or rate >= HIT_RATE_DROP * best:
        return ""
    return (
        f"cache hit rate fell to {rate:.0%} from {best:.0%}: contexts are evicted between turns; fewer trajectories at "
        "once, more KV cache, or war.scheduler.policy=cost, which admits by KV capacity"
    )


def _residency_wrong(m: Metrics, now: Situation, past: History) -> str:
    error = m.get("war/sched/residency_error", 0.0)
    if error <= RESIDENCY_ERROR or m.get("war/sched/residency_abs_error_tokens", 0.0) < MIN_RESIDENCY_TOKENS:
        return ""
    return (
        f"the scheduler misjudged {error:.0%} of the prompt tokens' residency: traffic that is not ours, or a KV "
        "capacity that the engine did not report"
    )


def _replica_behind(m: Metrics, now: Situation, past: History) -> str:
    if now.replicas < 2 or m.get("war/rollout/turns", 0.0) < MIN_TURNS_PER_REPLICA * now.replicas:
        return ""
    imbalance = m.get("war/sched/replica_tokens_max_over_mean", 1.0)
    slow, fast = m.get("war/replica/tokens_per_s_min", 0.0), m.get("war/replica/tokens_per_s_max", 0.0)
    if imbalance <= IMBALANCE and slow >= REPLICA_BEHIND * fast:
        return ""
    return (
        f"one replica is far behind: {slow:.0f} against {fast:.0f} generated tokens/s, load {imbalance:.2f} times the "
        "mean on the busiest; war-rl report shows which (a throttled machine, or long trajectories together)"
    )


def _probs_drift(m: Metrics, now: Situation, past: History) -> str:
    diff = m.get("training/rollout_probs_diff_mean")
    if diff is None or not diff > PROBS_DIFF:
        return ""
    usual = statistics.median(past.probs_diffs) if past.probs_diffs else 0.0
    if usual and diff < PROBS_DIFF_GROWTH * usual:
        return ""
    before = f", before it was {usual:.4f}" if usual else ""
    return (
        f"rollout and actor probabilities differ by {diff:.4f} in the mean{before}: a weight update that did not "
        "arrive, or another numerical path; see war/sync/* and compare with war.spec.policy=off"
    )


def _feed_late(m: Metrics, now: Situation, past: History) -> str:
    lag = m.get("war/spec/feed_lag_s", 0.0)
    return (
        ""
        if lag <= FEED_LAG_S
        else f"text becomes draftable {lag:.1f} s after it was written: raise war.spec.ingest_ms"
    )


FALLBACKS: tuple[tuple[str, str], ...] = (
    (
        "war/spec/requests_not_draftable",
        "requests were not drafted for: the verifier ignores their sampling parameters",
    ),
    ("war/spec/feed_errors", "feed messages were lost"),
    ("war/spec/feed_dropped_tokens", "tokens of text were dropped from a full feed"),
    ("war/sched/lost_turns", "turns lost their replica and ran again elsewhere"),
    ("war/cache/unreported_turns", "turns came back without a cached-token count"),
    ("war/sync/late_turns", "turns were asked for outside of their step, and refused"),
    ("war/fault/unrecorded_trajectories", "trajectories could not be recorded"),
    ("war/fault/unwritten_summaries", "times the summary could not be written"),
)
"""Counters of what went another way than it should, and how that is said."""


def _fallbacks(m: Metrics, now: Situation, past: History) -> str:
    happened = [f"{m[key]:.0f} {text}" for key, text in FALLBACKS if m.get(key, 0.0) > 0]
    return "fallbacks happened: " + "; ".join(happened) if happened else ""


def _many_failed(m: Metrics, now: Situation, past: History) -> str:
    failed, all_of_them = m.get("war/rollout/failed", 0.0), m.get("war/rollout/trajectories", 0.0)
    if not all_of_them or failed <= FAILED_SHARE * all_of_them:
        return ""
    return f"{failed:.0f} of {all_of_them:.0f} trajectories failed; the log names each with its error"


def _not_finite(m: Metrics, now: Situation, past: History) -> str:
    turns = m.get("war/fault/nonfinite_turns", 0.0)
    if not turns:
        return ""
    return (
        f"{turns:.0f} turns came back with log-probs that are NaN or infinite, and their trajectories were dropped; "
        "the log names the replica: one of several has a device that fails, all of them a policy that has diverged"
    )


RULES: dict[str, Callable[[Metrics, Situation, History], str]] = {
    "no_drafts": _no_drafts,
    "acceptance_too_good": _acceptance_too_good,
    "drafting_loses": _drafting_loses,
    "hit_rate_collapsed": _hit_rate_collapsed,
    "residency_wrong": _residency_wrong,
    "replica_behind": _replica_behind,
    "probs_drift": _probs_drift,
    "feed_late": _feed_late,
    "fallbacks": _fallbacks,
    "many_failed": _many_failed,
    "not_finite": _not_finite,
}
"""By cause: what is wrong, or "" where all is well."""


class Alarms:
    """The alarms of one run."""

    def __init__(self, situation: Situation) -> None:
        self._situation = situation
        self._past = History()
        self._told: set[str] = set()

    def check(self, metrics: Metrics) -> list[Alarm]:
        """Alarms that a training step's ``metrics`` give rise to and that this run has not told yet."""
        found = [
            Alarm(cause, text) for cause, rule in RULES.items() if (text := rule(metrics, self._situation, self._past))
        ]
        new = [alarm for alarm in found if alarm.cause not in self._told]
        self._told.update(alarm.cause for alarm in new)
        self._past.best_hit_rate = max(self._past.best_hit_rate, metrics.get("war/cache/hit_rate", 0.0))
        diff = metrics.get("training/rollout_probs_diff_mean")
        if diff is not None and diff == diff:
            self._past.probs_diffs.append(diff)
        return new
