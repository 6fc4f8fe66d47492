# SPDX-License-Identifier: Apache-2.0
"""``war-rl bench calibrate``: how long a real replica's engine steps take, for ``war-rl simulate``.

Made-up trajectories with nothing to reuse run on real engines, in batches of known size and length. Their seconds are
linear in the coefficients of :class:`war_rl.sim.times.StepTimes`, which are fitted to them with none below zero.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from war_rl.bench.options import ROLLOUTS, Options
from war_rl.bench.presets import KvPlan, Settings
from war_rl.bench.rollout import Bench
from war_rl.bench.stats import PlannedRun, SideRun, side_labels
from war_rl.progress import MODES
from war_rl.sim.times import StepTimes
from war_rl.traces.synthetic import SyntheticTokens, no_repeat_traces
from war_rl.traces.workload import Workload, WorkloadSpec, build_workload

VERSION = 1
COLUMNS = ("base", "per_token", "per_kv", "per_prefill", "per_prefill_kv", "turn")
"""What is fitted: the coefficients, and the seconds a turn spends outside of the engine."""


@dataclass(frozen=True, slots=True)
class Probe:
    """``running`` trajectories per replica at once, each of ``turns`` turns: lengths in tokens.

    ``alone``: one replica has them, and the others nothing to do.
    """

    running: int
    prompt: int
    generated: int
    turns: int = 1
    env: int = 0
    alone: bool = False


PROBES = (
    Probe(1, 64, 2, turns=10, env=14),
    Probe(1, 64, 48),
    Probe(2, 64, 48),
    Probe(4, 64, 32),
    Probe(8, 64, 32),
    Probe(16, 64, 24),
    Probe(4, 1024, 32),
    Probe(8, 512, 32),
    Probe(4, 2048, 32),
    Probe(2, 3072, 32),
    Probe(1, 256, 1),
    Probe(1, 768, 1),
    Probe(1, 1536, 1),
    Probe(1, 3072, 1),
    Probe(1, 64, 96, alone=True),
    Probe(1, 2048, 48, alone=True),
    Probe(1, 1536, 1, alone=True),
)


def row(probe: Probe, steps: float) -> list[float]:
    """The probe's seconds as sums over :data:`COLUMNS`, for one replica that took ``steps`` engine steps.

    Decode steps of a turn attend to its prompt and what it has generated; a later turn computes what the environment
    appended and the last token before it.
    """
    decoded = kv = prefill = prefill_kv = 0.0
    context = 0
    for turn in range(probe.turns):
        fresh = probe.prompt if turn == 0 else probe.env + 1
        prefill += fresh
        prefill_kv += fresh * (context + fresh / 2.0)
        context += fresh
        further = probe.generated - 1
        decoded += further
        kv += further * context + further * (further - 1) / 2.0
        context += further
    n = probe.running
    return [steps, n * decoded, n * kv, n * prefill, n * prefill_kv, float(probe.turns)]


def fit(rows: Sequence[Sequence[float]], seconds: Sequence[float]) -> tuple[list[float], list[float]]:
    """Least squares of the relative error, no coefficient below zero. Returns coefficients and relative errors."""
    matrix, target = np.array(rows, dtype=np.float64), np.array(seconds, dtype=np.float64)
    scaled = matrix / target[:, None]
    unit = np.maximum(np.abs(scaled).max(axis=0), 1e-30)
    active = list(range(matrix.shape[1]))
    found = np.zeros(matrix.shape[1])
    while active:
        found[:] = 0.0
        found[active] = np.linalg.lstsq((scaled / unit)[:, active], np.ones(len(target)), rcond=None)[0]
        worst = min(active, key=lambda i: found[i])
        if found[worst] >= 0.0:
            break
        active.remove(worst)
    found = found / unit
    return found.tolist(), (matrix @ found / target - 1.0).tolist()


def times_of(coefficients: Sequence[float], name: str, source: str, alone: float = 1.0) -> StepTimes:
    """Fitted coefficients as step times; the time outside of the engine is shared equally by both ways."""
    base, per_token, per_kv, per_prefill, per_prefill_kv, turn = coefficients
    outside = {"send_s": turn / 2.0, "return_s": turn / 2.0}
    return StepTimes(
        base, per_token, per_kv, per_prefill, per_prefill_kv, **outside, alone=alone, name=name, source=source
    )


class Calibration(Bench):
    """Starts the engines as the benchmark does and runs the probes on them."""

    def __init__(self, options: Options, repeats: int) -> None:
        super().__init__(options)
        self._repeats = repeats

    def calibrate(self) -> dict[str, Any]:
        """The calibration document.

        Raises:
            RuntimeError: engines could not be started, or failed on the way.
        """
        import asyncio

        from war_rl.bench.host import machine, versions
        from war_rl.bench.workloads import load_tokenizer

        _, vocabulary, limit = load_tokenizer(self._options.model)
        works = {probe: self._work(probe, vocabulary) for probe in PROBES}
        length = max(len(item.tokens()) for work in works.values() for item in work.items) + 64
        kv = KvPlan(self._settings.kv_tokens, 0, 0.0, False)
        asyncio.set_event_loop(self._loop)
        measured: dict[str, list[tuple[Probe, SideRun]]] = {label: [] for label in self._options.sides}
        self._planned = (len(PROBES) * self._repeats + 1) * len(measured)
        try:
            self._start(self._configs(min(limit, length), kv))
            for side in measured:
                self._one(side, works[PROBES[1]])
            for _ in range(self._repeats):
                for probe, work in works.items():
                    for side, runs in measured.items():
                        runs.append((probe, self._one(side, work)))
        finally:
            self._stop()
        return {
            "version": VERSION,
            "machine": machine(),
            "versions": versions(),
            "model": self._options.model,
            "replicas": self._settings.replicas,
            "sides": {side: self._fitted(side, runs) for side, runs in measured.items()},
        }

    def _work(self, probe: Probe, vocabulary: int) -> Workload:
        traces = no_repeat_traces(
            groups=probe.running * self._working(probe),
            n=1,
            turns=probe.turns,
            prompt_tokens=probe.prompt,
            model_tokens=probe.generated,
            env_tokens=probe.env,
            tokens=SyntheticTokens(min(256, vocabulary // 2), vocabulary, self._settings.seed),
        )
        return build_workload(traces, WorkloadSpec())

    def _working(self, probe: Probe) -> int:
        """Replicas that the probe keeps at work."""
        return 1 if probe.alone else self._settings.replicas

    def _one(self, side: str, work: Workload) -> SideRun:
        run = self._loop.run_until_complete(self._run(PlannedRun(side, 0), work))
        self._done += 1
        return run

    def _fitted(self, side: str, runs: Sequence[tuple[Probe, SideRun]]) -> dict[str, Any]:
        rows = [row(probe, run.counters["engine_steps"] / self._working(probe)) for probe, run in runs]
        seconds = [run.seconds for _, run in runs]
        beside = [i for i, (probe, _) in enumerate(runs) if not probe.alone]
        coefficients, _ = fit([rows[i] for i in beside], [seconds[i] for i in beside])
        expected = np.array(rows) @ np.array(coefficients)
        shares = [seconds[i] / expected[i] for i, (probe, _) in enumerate(runs) if probe.alone]
        alone = float(np.median(shares)) if self._settings.replicas > 1 else 1.0
        errors = [
            e * (alone if p.alone else 1.0) / s - 1.0 for e, s, (p, _) in zip(expected, seconds, runs, strict=True)
        ]
        times = times_of(coefficients, side, f"war-rl bench calibrate, {Path(self._options.model).name}", alone)
        probes = [
            {
                "probe": {name: getattr(probe, name) for name in Probe.__dataclass_fields__},
                "seconds": run.seconds,
                "engine_steps": run.counters["engine_steps"],
                "error": float(error),
            }
            for (probe, run), error in zip(runs, errors, strict=True)
        ]
        return {"times": times.to_json(), "worst_error": max(map(abs, errors)), "probes": probes}


def _parse(argv: Sequence[str]) -> tuple[Options, int]:
    from war_rl.prepare import default_model_dir

    parser = argparse.ArgumentParser(
        prog="war-rl bench calibrate", description=(__doc__ or "").split("\n")[0], allow_abbrev=False
    )
    parser.add_argument("--sides", default="vllm,war", help="rollouts whose engines are measured (%(default)s)")
    parser.add_argument("--model", default="", help="model folder or name (what `war-rl prepare` makes)")
    parser.add_argument("--replicas", type=int, default=2, help="engines of each side, run together (%(default)s)")
    parser.add_argument("--kv-tokens", type=int, default=16384, help="KV cache of each replica (%(default)s)")
    parser.add_argument("--repeats", type=int, default=1, help="how often each probe runs (%(default)s)")
    parser.add_argument("--json", required=True, metavar="FILE", help="where the result goes")
    parser.add_argument("--progress", choices=MODES, default="auto", help="progress lines (%(default)s)")
    parser.add_argument("--verbose", action="store_true", help="show what Ray and the engines print")
    args = parser.parse_args(list(argv))
    rollouts = [name.strip() for name in args.sides.split(",") if name.strip()]
    for name in rollouts:
        if name not in ROLLOUTS:
            parser.error(f"--sides {name}: not one of {', '.join(ROLLOUTS)}")
    model = args.model or str(default_model_dir())
    if not args.model and not Path(model).is_dir():
        parser.error(f"no model in {model}: make it with `war-rl prepare`, or give --model FOLDER")
    if not Path(args.json).absolute().parent.is_dir():
        parser.error(f"{args.json}: its folder does not exist")
    if args.repeats < 1:
        parser.error(f"--repeats {args.repeats}: must be at least 1")
    settings = replace(Settings(source="no-repeat"), replicas=args.replicas, kv_tokens=args.kv_tokens, max_context=None)
    sides = side_labels(rollouts)
    options = Options(
        settings=settings,
        preset="calibrate",
        sides=sides,
        overrides={side: [] for side in sides},
        model=model,
        trace=[],
        fmt="war",
        json=args.json,
        plot="",
        progress=args.progress,
        verbose=args.verbose,
    )
    return options, args.repeats


def main(argv: Sequence[str]) -> int:
    """Run the command; call it where leftover processes are taken care of."""
    options, repeats = _parse(argv)
    from war_rl.compat import IncompatibleError, check_versions
    from war_rl.config import ConfigError

    problems = check_versions()
    for problem in problems:
        print(f"war-rl bench: {problem}", file=sys.stderr)
    if problems:
        return 1
    try:
        document = Calibration(options, repeats).calibrate()
    except (ConfigError, ValueError, FileNotFoundError, ModuleNotFoundError) as error:
        print(f"war-rl bench: {error}", file=sys.stderr)
        return 2
    except (IncompatibleError, RuntimeError, OSError) as error:
        print(f"war-rl bench: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    Path(options.json).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    for side, found in document["sides"].items():
        t = found["times"]
        print(
            f"{side}: {1e3 * t['base']:.1f} ms a step + {1e3 * t['per_token']:.2f} ms a token + "
            f"{1e9 * t['per_kv']:.0f} ns a KV token, prefill {1e3 * t['per_prefill']:.2f} ms a token, "
            f"{1e3 * (t['send_s'] + t['return_s']):.0f} ms a turn outside; {t['alone']:.2f} of it while the "
            f"other replicas rest; worst error {found['worst_error']:.1%}"
        )
    print(f"result in {options.json}", flush=True)
    return 0
