# SPDX-License-Identifier: Apache-2.0
"""``war-rl simulate sweep``: the experiments of docs/scaling.md. Results go to a JSON file, pictures are made of it."""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from war_rl.config import SchedulerConfig, SpecConfig
from war_rl.sim.ablation import WrongProgress
from war_rl.sim.presets import Preset, presets
from war_rl.sim.simulator import Setup, Simulation
from war_rl.sim.work import Shape, SimTrajectory, make_work, working_set

ABLATION = "war_rl.sim.ablation"


@dataclass(frozen=True)
class Side:
    """Something to simulate: a scheduler policy, drafting, settings of either."""

    label: str
    policy: str
    draft: str = "off"
    scheduler: tuple[tuple[str, Any], ...] = ()
    feed: bool = True
    wrong: tuple[float, float] | None = None
    """Bias and sigma of wrong estimates."""


STOCK = Side("stock", "sticky_least_inflight")
PLAIN = (
    STOCK,
    Side("cost", "cost"),
    Side("war", "war"),
    Side("cache_aware", "cache_aware"),
)
DRAFTING = (Side("cost, drafts by budget", "cost", "budget"), Side("war, drafts as published", "war", "war"))
FULL = Side("all of it", "cost", "budget")
PARTS = (
    FULL,
    Side("without admission", "cost", "budget", (("admission_fill", 1e6),)),
    Side("without placement", f"{ABLATION}.WithoutPlacement", "budget"),
    Side("without order", f"{ABLATION}.WithoutOrder", "budget"),
    Side("without migration", "cost", "budget", (("migrate_max", 0),)),
    Side("without drafting", "cost", "off"),
    Side("without the in-step feed", "cost", "budget", feed=False),
)


@dataclass(frozen=True)
class Case:
    """One simulation: ``load`` sets the KV cache (None leaves the preset's)."""

    x: float
    side: Side
    preset: str
    shape: Shape
    replicas: int
    load: float | None
    seed: int
    at_once: int | None = None


SMALL = Shape(
    groups=16,
    n=8,
    turns=12.0,
    system=1335,
    prompt=672,
    model=129.0,
    model_sigma=0.43,
    env=410.0,
    env_sigma=1.5,
    likeness=0.63,
    tool=1.0,
)


SOME = (STOCK, PLAIN[1], PLAIN[2], FULL)


def _over(
    xs: Sequence[float], sides: Sequence[Side], seeds: int, shape: Callable[[float], Shape], load: float | None = 2.0
) -> Iterator[Case]:
    """Every side at every x on four replicas of WAR's setting; ``load`` None takes x for it."""
    for seed in range(seeds):
        for x in xs:
            for side in sides:
                yield Case(x, side, "war-paper", shape(x), 4, x if load is None else load, seed)


def load_cases(seeds: int) -> Iterator[Case]:
    return _over((0.3, 0.6, 1.0, 1.5, 2.0, 3.0, 4.5, 6.0), (*PLAIN, *DRAFTING), seeds, lambda x: SMALL, None)


def long_cases(seeds: int) -> Iterator[Case]:
    return _over((1.0, 2.0, 4.0), (*PLAIN[:4], FULL), seeds, lambda x: replace(SMALL, turns=30.0), None)


def part_cases(seeds: int) -> Iterator[Case]:
    return _over((0.3, 2.0, 4.5), (STOCK, *PARTS), seeds, lambda x: SMALL, None)


def group_cases(seeds: int) -> Iterator[Case]:
    return _over((1, 4, 16), SOME, seeds, lambda n: replace(SMALL, groups=128 // int(n), n=int(n)))


def tool_cases(seeds: int) -> Iterator[Case]:
    return _over((0.0, 1.0, 10.0), SOME, seeds, lambda tool: replace(SMALL, tool=tool))


def tail_cases(seeds: int) -> Iterator[Case]:
    return _over((0.0, 0.6, 1.2), SOME, seeds, lambda sigma: replace(SMALL, turns_sigma=sigma))


def replica_cases(seeds: int) -> Iterator[Case]:
    for seed in range(seeds):
        for replicas in (2, 8, 32, 128, 256):
            for side in (STOCK, PLAIN[1]):
                shape = replace(SMALL, groups=replicas, turns=6.0)
                yield Case(replicas, side, "war-paper", shape, replicas, 2.0, seed)


def draft_cases(seeds: int) -> Iterator[Case]:
    sides = (
        Side("no drafts", "round_robin"),
        Side("budget", "round_robin", "budget"),
        Side("published rule", "round_robin", "war"),
    )
    for seed in range(seeds):
        for preset in ("war-paper", "llama-70b"):
            for running in (1, 4, 16, 64):
                shape = replace(SMALL, groups=max(2, running), turns=4.0, tool=0.0)
                for side in sides:
                    # One KV cache holds everything: only drafting differs.
                    yield Case(running, side, preset, shape, 4, 0.02, seed, at_once=4 * running)


def progress_cases(seeds: int) -> Iterator[Case]:
    wrongs = [(f"bias {b:g}", (b, 0.0)) for b in (0.25, 1.0, 4.0)] + [
        (f"sigma {s:g}", (1.0, s)) for s in (0.5, 1.0, 2.0)
    ]
    for seed in range(seeds):
        yield Case(0.0, STOCK, "war-paper", SMALL, 4, 2.0, seed)
        for x, (label, wrong) in enumerate(wrongs):
            yield Case(float(x), Side(label, "cost", wrong=wrong), "war-paper", SMALL, 4, 2.0, seed)


def paper_cases(seeds: int) -> Iterator[Case]:
    shape = presets()["war-paper"].shape
    for seed in range(seeds):
        for groups in (4, 8, 16, 32, 64):
            for side in (STOCK, PLAIN[1], DRAFTING[1], DRAFTING[0]):
                yield Case(groups, side, "war-paper", replace(shape, groups=groups), 4, None, seed)


EXPERIMENTS: dict[str, tuple[str, Callable[[int], Iterator[Case]]]] = {
    "load": ("working set / KV cache", load_cases),
    "long": ("working set / KV cache, trajectories of 30 turns", long_cases),
    "parts": ("working set / KV cache", part_cases),
    "paper": ("prompts per step (WAR's batch), n=8", paper_cases),
    "drafting": ("running requests per replica", draft_cases),
    "groups": ("trajectories per group", group_cases),
    "tools": ("mean tool time, seconds", tool_cases),
    "tail": ("sigma of log turns", tail_cases),
    "progress": ("how estimates are wrong", progress_cases),
    "replicas": ("replicas", replica_cases),
}
"""Name -> what is varied, and the cases."""


def setup_of(case: Case, work: Sequence[SimTrajectory], preset: Preset, acceptance: dict[str, Any]) -> Setup:
    """The case as a setup; the KV cache is as large as its load asks for, and holds the longest trajectory."""
    engine = preset.engine
    if case.load is not None:
        wanted = int(working_set(work, engine.block_size) / case.load / case.replicas)
        engine = replace(engine, kv_tokens=max(wanted, max(t.context for t in work) + 2 * engine.block_size))
    side = case.side
    return Setup(
        case.replicas,
        engine,
        preset.times,
        SchedulerConfig(policy=side.policy, **dict(side.scheduler)),
        SpecConfig(policy=side.draft, feed=side.feed),
        acceptance.get(side.draft),
        at_once=case.at_once,
        seed=case.seed,
    )


def run_case(case: Case, acceptance: dict[str, Any]) -> dict[str, Any]:
    """One row of results."""
    preset = presets()[case.preset]
    work = make_work(case.shape, preset.engine.block_size, case.seed)
    setup = setup_of(case, work, preset, acceptance)
    simulation = Simulation(setup, clock=time.thread_time)
    if case.side.wrong is not None:
        scheduler = simulation.router.scheduler
        scheduler.progress = WrongProgress(scheduler.progress, *case.side.wrong)
    began = time.thread_time()
    result = simulation.run(work).to_json()
    load = working_set(work, 16) / (setup.engine.kv_tokens * case.replicas)
    keep = (
        "seconds",
        "throughput",
        "prefill_computed_tokens",
        "generated_tokens",
        "recomputed_tokens",
        "preemptions",
        "accepted_tokens",
        "draft_tokens",
        "migrations",
        "half_done_seconds",
        "busy_share",
        "turns",
        "replica_imbalance",
    )
    return {
        "x": case.x,
        "side": case.side.label,
        "preset": case.preset,
        "seed": case.seed,
        "load": load,
        "trajectories": len(work),
        **{name: result[name] for name in keep},
        "cpu_seconds": time.thread_time() - began,
        "scheduler_seconds": simulation.router.spent,
        "scheduler_longest": simulation.router.longest,
        "scheduler_events": simulation.router.events,
    }


def speedups(rows: Sequence[dict[str, Any]], base: str) -> dict[tuple[str, str], dict[float, float]]:
    """(preset, side) -> x -> throughput over that of ``base`` with the same x and seed; geometric mean over seeds.

    A base with one x only is that of all.
    """
    known = {(r["preset"], r["x"], r["seed"]): r["throughput"] for r in rows if r["side"] == base}
    any_x = {(preset, seed): value for (preset, _, seed), value in known.items()}
    found: dict[tuple[str, str], dict[float, list[float]]] = {}
    for r in rows:
        below = known.get((r["preset"], r["x"], r["seed"]), any_x.get((r["preset"], r["seed"])))
        if below:
            found.setdefault((r["preset"], r["side"]), {}).setdefault(r["x"], []).append(r["throughput"] / below)
    return {
        side: {x: math.exp(statistics.fmean(map(math.log, v))) for x, v in sorted(xs.items())}
        for side, xs in found.items()
    }


def main(argv: Sequence[str]) -> int:
    """``war-rl simulate sweep``."""
    parser = argparse.ArgumentParser(
        prog="war-rl simulate sweep",
        description="Run the experiments of docs/scaling.md in one process; what the JSON file already holds is kept.",
        epilog="experiments:\n" + "\n".join(f"  {name:<9} varies {about}" for name, (about, _) in EXPERIMENTS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("experiments", nargs="*", metavar="NAME", help="which (default: all)")
    parser.add_argument("--json", required=True, metavar="FILE", help="results; kept after every simulation")
    parser.add_argument("--seeds", type=int, default=2, help="workloads of each kind (%(default)s)")
    parser.add_argument("--plots", default="", metavar="FOLDER", help="write a picture per experiment")
    parser.add_argument("--plots-only", action="store_true", help="run nothing")
    args = parser.parse_args(list(argv))
    unknown = set(args.experiments) - set(EXPERIMENTS)
    if unknown:
        parser.error(f"no experiment {', '.join(sorted(unknown))}; there are {', '.join(EXPERIMENTS)}")
    from war_rl.sim.cli import load_acceptance

    file = Path(args.json)
    document: dict[str, Any] = {"version": 1, "experiments": {}}
    if args.plots:
        # Before the minutes of work: a folder that cannot be made is said at once.
        Path(args.plots).mkdir(parents=True, exist_ok=True)
    if file.exists():
        document = json.loads(file.read_text(encoding="utf-8"))
    acceptance = {policy: load_acceptance("", policy) for policy in ("war", "budget")}
    for name in () if args.plots_only else args.experiments or EXPERIMENTS:
        _run(name, args.seeds, document, file, acceptance)
    if args.plots:
        from war_rl.sim.plots import plot_experiment

        for name in document["experiments"]:
            plot_experiment(name, document["experiments"][name]["rows"], Path(args.plots))
    return 0


def _run(name: str, seeds: int, document: dict[str, Any], file: Path, acceptance: dict[str, Any]) -> None:
    about, cases = EXPERIMENTS[name]
    held = document["experiments"].setdefault(name, {"varies": about, "rows": []})
    rows = held["rows"]
    done = {(r["x"], r["side"], r["preset"], r["seed"]) for r in rows}
    for case in cases(seeds):
        key = (case.x, case.side.label, case.preset, case.seed)
        if key in done:
            continue
        row = run_case(case, acceptance)
        rows.append(row)
        file.write_text(json.dumps(document) + "\n", encoding="utf-8")
        print(
            f"{name} x={case.x:g} {case.side.label}, seed {case.seed}: {row['seconds']:.1f} s, "
            f"{row['throughput']:.0f} tok/s ({row['cpu_seconds']:.1f} s of CPU)",
            file=sys.stderr,
            flush=True,
        )
