# SPDX-License-Identifier: Apache-2.0
"""``war-rl simulate --check``: the simulation beside real engines, run by run.

Takes the JSON documents of ``war-rl bench rollout``; simulates each of their sides on the same work, cache and limits;
compares rollout seconds and computed prefill tokens, and the order of the sides.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from war_rl.bench.presets import WARMUP_TURNS, Settings
from war_rl.config import SchedulerConfig, SpecConfig, load_config
from war_rl.sim.engine import EngineSettings
from war_rl.sim.simulator import Setup, Simulation, StepResult
from war_rl.sim.times import StepTimes
from war_rl.sim.work import SimTrajectory

MEDIAN_GOAL, WORST_GOAL = 0.10, 0.20
SAME = 0.03
"""Sides whose seconds differ by less than this share of them are not ranked, beside those whose runs overlap."""


@dataclass(frozen=True, slots=True)
class Compared:
    """One side of one benchmark run: what was measured (median over its runs) and what was simulated."""

    bench: str
    side: str
    policy: str
    seconds: float
    spread: tuple[float, float]
    simulated_seconds: float
    computed: float | None
    simulated_computed: int

    @property
    def seconds_error(self) -> float:
        return self.simulated_seconds / self.seconds - 1.0

    @property
    def computed_error(self) -> float | None:
        return self.simulated_computed / self.computed - 1.0 if self.computed else None


def settings_of(report: Mapping[str, Any]) -> Settings:
    """The benchmark's settings from its report."""
    known = {item.name for item in fields(Settings)}
    return Settings(**{name: value for name, value in report["settings"].items() if name in known})


def side_setup(
    report: Mapping[str, Any],
    side: str,
    times: Mapping[str, StepTimes],
    stop_token_ids: frozenset[int],
    max_num_batched_tokens: int,
) -> tuple[str, Setup] | None:
    """(policy, setup) of one side; None for sides whose drafter is not modelled (vLLM's own).

    Raises:
        ValueError: no step times for the side's rollout.
    """
    given, rollout = report["settings"], report["settings"]["sides"][side]
    if rollout not in ("war", "vllm"):
        return None
    if rollout not in times:
        raise ValueError(f"no step times for {rollout}; there are {', '.join(times)}")
    settings = settings_of(report)
    war = load_config(war_section(given["overrides"].get(side, ())))
    scheduler, spec = war.scheduler, replace(war.spec, max_draft_tokens=settings.draft_tokens)
    policy = scheduler.policy
    if rollout == "vllm":
        policy, scheduler = "stock", SchedulerConfig(policy="sticky_least_inflight")
        spec = SpecConfig(policy="off")
    size = settings.block_size
    kv_tokens = int(min(given["kv_tokens_per_replica"][side])) - size
    setup = Setup(
        settings.replicas,
        EngineSettings(kv_tokens, size, settings.max_running, max_num_batched_tokens),
        times[rollout],
        scheduler,
        spec,
        at_once=settings.concurrency * settings.replicas if settings.concurrency else None,
        seed=settings.seed,
        stop_token_ids=stop_token_ids,
    )
    return policy, setup


def war_section(overrides: Sequence[str]) -> dict[str, Any]:
    """The ``war:`` section that Hydra overrides make; others do not concern the simulation."""
    section: dict[str, Any] = {}
    for text in overrides:
        key, _, value = text.lstrip("+").partition("=")
        parts = key.split(".")
        if parts[0] != "war" or len(parts) != 3:
            continue
        section.setdefault(parts[1], {})[parts[2]] = _value(value)
    return section


def _value(text: str) -> Any:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def compare(
    name: str,
    report: Mapping[str, Any],
    work: Sequence[SimTrajectory],
    times: Mapping[str, StepTimes],
    stop_token_ids: frozenset[int] = frozenset(),
    max_num_batched_tokens: int = 1024,
) -> list[Compared]:
    """Every modelled side of one report.

    Raises:
        ValueError: the work is not what the report says was replayed.
    """
    out = []
    for side, measured in report["sides"].items():
        made = side_setup(report, side, times, stop_token_ids, max_num_batched_tokens)
        if made is None:
            continue
        policy, setup = made
        runs = _as_benched(setup, settings_of(report), work)
        _same_work(name, side, measured["work"], runs[0])
        out.append(
            Compared(
                bench=name,
                side=side,
                policy=policy,
                seconds=measured["seconds"]["median"],
                spread=(measured["seconds"]["min"], measured["seconds"]["max"]),
                simulated_seconds=statistics.median(run.seconds for run in runs),
                computed=measured["counters"].get("prefill_computed_tokens"),
                simulated_computed=round(statistics.median(run.prefill_computed_tokens for run in runs)),
            )
        )
    return out


def _as_benched(setup: Setup, settings: Settings, work: Sequence[SimTrajectory]) -> list[StepResult]:
    """The measured runs of one start of the engines: a scheduler learns from the warm-up, and from run to run."""
    simulation = Simulation(setup)
    if settings.warmup_trajectories:
        simulation.run([replace(t, turns=t.turns[:WARMUP_TURNS]) for t in work[: settings.warmup_trajectories]])
    return [simulation.run(work) for _ in range(max(1, settings.pairs // max(1, settings.rounds)))]


def _same_work(name: str, side: str, measured: Mapping[str, int], result: StepResult) -> None:
    for kind in ("turns", "generated_tokens", "requested_prompt_tokens"):
        if measured[kind] != getattr(result, kind):
            raise ValueError(
                f"{name}, {side}: {kind} measured {measured[kind]}, simulated {getattr(result, kind)}: "
                "not the recording that was replayed; name that with --trace and --format"
            )


def summary(rows: Sequence[Compared]) -> dict[str, Any]:
    """Errors and ranking over all rows, and whether the goals are met."""
    seconds = [abs(r.seconds_error) for r in rows]
    computed = [abs(r.computed_error) for r in rows if r.computed_error is not None]
    pairs, agreed = _ranking(rows)
    out: dict[str, Any] = {
        "rows": len(rows),
        "policies": sorted({r.policy for r in rows}),
        "ranked_pairs": pairs,
        "pairs_in_the_same_order": agreed,
    }
    for kind, errors in (("seconds", seconds), ("computed", computed)):
        if errors:
            out[f"{kind}_median_error"], out[f"{kind}_worst_error"] = statistics.median(errors), max(errors)
    out["met"] = bool(
        rows
        and all(
            out.get(f"{kind}_median_error", 0.0) <= MEDIAN_GOAL and out.get(f"{kind}_worst_error", 0.0) <= WORST_GOAL
            for kind in ("seconds", "computed")
        )
        and agreed == pairs
    )
    return out


def _ranking(rows: Sequence[Compared]) -> tuple[int, int]:
    """(pairs of sides of one run that were measured to differ, pairs that the simulation puts in the same order)."""
    pairs = agreed = 0
    for i, a in enumerate(rows):
        for b in rows[i + 1 :]:
            overlap = a.spread[0] <= b.spread[1] and b.spread[0] <= a.spread[1]
            if a.bench != b.bench or overlap or abs(a.seconds - b.seconds) < SAME * max(a.seconds, b.seconds):
                continue
            pairs += 1
            agreed += (a.seconds < b.seconds) == (a.simulated_seconds < b.simulated_seconds)
    return pairs, agreed


def table(rows: Sequence[Compared], found: Mapping[str, Any]) -> str:
    """For the terminal."""
    head = ("run", "side", "policy", "seconds", "simulated", "error", "computed", "simulated", "error")
    lines = [head]
    for r in rows:
        error = r.computed_error
        lines.append(
            (
                r.bench,
                r.side,
                r.policy,
                f"{r.seconds:.2f}",
                f"{r.simulated_seconds:.2f}",
                f"{r.seconds_error:+.1%}",
                "-" if r.computed is None else f"{r.computed:,.0f}",
                f"{r.simulated_computed:,}",
                "-" if error is None else f"{error:+.1%}",
            )
        )
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    text = [
        "  ".join(
            cell.rjust(w) if i > 2 else cell.ljust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    ]
    for kind in ("seconds", "computed"):
        if f"{kind}_median_error" in found:
            text.append(
                f"{kind}: median error {found[f'{kind}_median_error']:.1%} (goal {MEDIAN_GOAL:.0%}), worst "
                f"{found[f'{kind}_worst_error']:.1%} (goal {WORST_GOAL:.0%})"
            )
    text.append(f"ranking: {found['pairs_in_the_same_order']} of {found['ranked_pairs']} pairs in the measured order")
    text.append("goals met" if found["met"] else "GOALS NOT MET")
    return "\n".join(text)
