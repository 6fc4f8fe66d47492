# SPDX-License-Identifier: Apache-2.0
"""``war-rl bench rollout``: the same recorded agent work under two rollouts or more, interleaved, on real engines."""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from war_rl.bench.options import Options, parse
from war_rl.bench.presets import WARMUP_TURNS, KvPlan, plan_kv
from war_rl.bench.report import build_report, render_table, write_report
from war_rl.bench.stats import PlannedRun, Sample, SideRun, exit_code, measure, plan_rounds
from war_rl.metrics import add_up, delta
from war_rl.progress import MARK
from war_rl.traces.workload import Workload, least_prefill_tokens

SAMPLE_S = 0.5
"""Seconds between two looks at the replicas."""


def main(argv: Sequence[str]) -> int:
    """Run the command. Returns its exit code; call it where leftover processes are taken care of."""
    options = parse(argv)
    from war_rl.compat import IncompatibleError, check_versions
    from war_rl.config import ConfigError

    problems = check_versions()
    if problems:
        for problem in problems:
            print(f"war-rl bench: {problem}", file=sys.stderr)
        return 1
    try:
        return Bench(options).run()
    except (ConfigError, ValueError, FileNotFoundError, ModuleNotFoundError) as error:
        print(f"war-rl bench: {error}", file=sys.stderr)
        return 2
    except (IncompatibleError, RuntimeError, OSError) as error:
        print(f"war-rl bench: {type(error).__name__}: {error}", file=sys.stderr)
        return 1


class Bench:
    """One benchmark from loading its work to its report."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._settings = options.settings
        self._sides: dict[str, Any] = {}
        self._observers: dict[str, Any] = {}
        self._traces: tempfile.TemporaryDirectory[str] | None = None
        self._loop = asyncio.new_event_loop()
        self._step = 0
        self._planned = 0
        self._done = 0

    def run(self) -> int:
        """Do everything. Returns 0, or 3 when the sides' work differs.

        Raises:
            ValueError: settings, trace and model do not go together.
            RuntimeError: engines could not be started, or failed on the way.
        """
        from war_rl.bench.cluster import cluster

        work, length = self._load()
        kv = plan_kv(self._settings, work.items)
        self._say(_describe(self._options, work, kv))
        configs = self._configs(length, kv)
        asyncio.set_event_loop(self._loop)
        settings = self._settings
        warmups = 1 if settings.warmup_trajectories else 0
        rounds = plan_rounds(list(self._options.sides), settings.pairs, settings.rounds, warmups)
        self._planned = sum(map(len, rounds))
        runs: list[SideRun] = []
        for plan in rounds:
            try:
                self._start({run.side: configs[run.side] for run in plan})
                runs += self._measure(plan, work)
                kv_tokens = {
                    name: self._loop.run_until_complete(side.kv_tokens()) for name, side in self._sides.items()
                }
                where = cluster()
            finally:
                self._stop()
        self._report(runs, work, kv, kv_tokens, where)
        return exit_code(runs)

    def _load(self) -> tuple[Workload, int]:
        """The work, and the longest context its engines must hold."""
        from war_rl.bench.workloads import load_tokenizer, load_workload

        tokenizer, vocabulary, limit = load_tokenizer(self._options.model)
        work = load_workload(
            self._settings,
            trace=self._options.trace,
            fmt=self._options.fmt,
            tokenizer=tokenizer,
            vocabulary=vocabulary,
            limit=limit,
        )
        longest = max(len(item.tokens()) for item in work.items)
        block = self._settings.block_size
        return work, min(limit, -(-longest // block) * block + block)

    # ------------------------------------------------------------------ engines

    def _configs(self, length: int, kv: KvPlan) -> dict[str, Any]:
        from war_rl.bench.engines import compose_side, devices_per_replica, side_overrides

        options, settings = self._options, self._settings

        def composed(devices: int) -> dict[str, Any]:
            return {
                label: compose_side(
                    [
                        *side_overrides(
                            rollout, settings, model=options.model, max_model_len=length, kv_tokens=kv.kv_tokens
                        ),
                        *options.overrides[label],
                    ],
                    devices,
                )
                for label, rollout in options.sides.items()
            }

        configs = composed(len(options.sides) * settings.replicas)
        devices = settings.replicas * sum(devices_per_replica(config) for config in configs.values())
        return configs if devices == len(options.sides) * settings.replicas else composed(devices)

    def _start(self, configs: Mapping[str, Any]) -> None:
        from war_rl.bench.cluster import Slots, start_ray, threads_per_replica
        from war_rl.bench.engines import Side, can_share_engines, devices_per_replica
        from war_rl.bench.observe import SideObserver
        from war_rl.trainers.verl.plugin import assert_registered

        assert_registered()
        threads_per_replica(self._settings.replicas)
        began = time.monotonic()
        start_ray(next(iter(configs.values())), quiet=not self._options.verbose)
        first = 0
        for label, config in configs.items():
            twin = next((side for side in self._sides.values() if can_share_engines(side.config, config)), None)
            if twin is not None:
                self._say(f"{label} differs from {twin.label} in nothing that engines see: it runs on the same ones")
                self._sides[label] = self._loop.run_until_complete(twin.sharing(label, config))
                continue
            self._say(f"starting {label}: {self._settings.replicas} replicas")
            size = devices_per_replica(config)
            slots = Slots(self._settings.replicas, size)
            self._sides[label] = self._loop.run_until_complete(
                Side.start(label, config, slots, first, self._settings.replicas)
            )
            first += self._settings.replicas
        self._traces = tempfile.TemporaryDirectory(prefix="war-rl-bench-")
        for label, side in self._sides.items():
            self._observers[label] = SideObserver(side, Path(self._traces.name) / label, self._options.progress)
        self._say(f"engines are up after {time.monotonic() - began:.0f} s")

    def _stop(self) -> None:
        import ray

        self._observers.clear()
        self._sides.clear()
        if self._traces is not None:
            self._traces.cleanup()
        ray.shutdown()

    # ------------------------------------------------------------------ measuring

    def _measure(self, plan: Sequence[PlannedRun], work: Workload) -> list[SideRun]:
        return measure(plan, lambda planned: self._loop.run_until_complete(self._run(planned, work)), self._on_done)

    async def _run(self, planned: PlannedRun, work: Workload) -> SideRun:
        from war_rl.bench.driver import Replay, Sampling, replay, turn_counters, watch, work_of

        side, observer, settings = self._sides[planned.side], self._observers[planned.side], self._settings
        self._step += 1
        items = work.items
        if planned.warmup:
            items = [replace(i, turns=i.turns[:WARMUP_TURNS]) for i in items[: settings.warmup_trajectories]]
        at_once = settings.concurrency * settings.replicas if settings.concurrency and not planned.warmup else None
        await side.begin(self._step)
        before = await side.counters()
        state = Replay(len(items))
        samples: list[Sample] = []
        read = side.sampler(before, lambda: time.monotonic() - state.started)
        rollout = side.config.actor_rollout_ref.rollout
        sampling = Sampling(
            forced=settings.mode == "forced",
            temperature=settings.temperature,
            top_p=float(rollout.top_p),
            top_k=int(rollout.top_k),
            logprobs=bool(rollout.calculate_log_probs),
        )
        await observer.begin(self._label(planned), self._step, state)
        playing = asyncio.ensure_future(
            replay(side.client, items, sampling, step=self._step, at_once=at_once, state=state)
        )
        watching = asyncio.ensure_future(watch(read, SAMPLE_S, samples, observer.poll))
        try:
            await _first_failure(playing, watching, side)
        except BaseException:
            observer.abandon()
            raise
        observed, estimated = await observer.end()
        await side.settle()
        engine = add_up(delta(before[address], after) for address, after in (await side.counters()).items())
        samples.extend(await asyncio.to_thread(read))
        return SideRun(
            side=planned.side,
            pair=planned.pair,
            seconds=state.seconds,
            work=work_of(state.records),
            counters={**turn_counters(state.records, list(side.servers)), **engine_counters(engine), **observed},
            timeline=tuple(samples),
            estimated_speedup=estimated,
        )

    def _label(self, planned: PlannedRun) -> str:
        kind = "warm-up" if planned.warmup else f"pair {planned.pair + 1}/{self._settings.pairs}"
        return f"{self._done + 1}/{self._planned} {planned.side} {kind}"

    def _on_done(self, planned: PlannedRun, run: SideRun) -> None:
        self._say(f"{self._label(planned)}: {run.seconds:.2f} s, {run.throughput:.1f} generated tok/s")
        self._done += 1

    # ------------------------------------------------------------------ reporting

    def _report(
        self,
        runs: Sequence[SideRun],
        work: Workload,
        kv: KvPlan,
        kv_tokens: Mapping[str, Sequence[int]],
        where: Mapping[str, Any],
    ) -> None:
        from war_rl.bench.host import machine, versions

        options = self._options
        report = build_report(
            runs,
            list(options.sides),
            machine={**machine(), **where},
            versions=versions(),
            workload={
                **work.summary(),
                "least_prefill_tokens": least_prefill_tokens(work.items, self._settings.block_size),
                "source": _source(options),
                "kv_pressure": kv.pressure,
            },
            settings={
                **asdict(self._settings),
                "preset": options.preset,
                "sides": options.sides,
                "overrides": options.overrides,
                "model": options.model,
                "planned_kv_tokens": kv.kv_tokens,
                "kv_tokens_per_replica": dict(kv_tokens),
            },
        )
        print(render_table(report), flush=True)
        if options.json:
            write_report(report, options.json)
            self._say(f"result in {options.json}")
        if options.plot:
            from war_rl.bench.plot import plot_runs

            plot_runs(runs, list(options.sides), options.plot, f"{options.preset}, {_source(options)}")
            self._say(f"picture in {options.plot}")

    def _say(self, text: str) -> None:
        if self._options.progress != "off":
            print(f"{MARK} {text}", flush=True)


def engine_counters(change: Mapping[str, float]) -> dict[str, float]:
    """Those of :data:`~war_rl.bench.stats.COUNTERS` that the engines report, from their counters' change in a run."""
    names = ("scheduled_tokens", "drafts", "draft_tokens", "accepted_tokens", "preemptions", "engine_steps")
    # vLLM has the counters of drafting only where it drafts.
    return {name: change.get(name, 0.0) for name in names}


async def _first_failure(playing: asyncio.Future[None], watching: asyncio.Future[None], side: Any) -> None:
    """Wait until the run is over; a failure of either stops both, and a dead replica is named as the cause."""
    try:
        await asyncio.wait({playing, watching}, return_when=asyncio.FIRST_COMPLETED)
        failed = next((task for task in (playing, watching) if task.done() and task.exception()), None)
        if failed is not None:
            await side.raise_if_dead()
            await failed
    finally:
        for task in (playing, watching):
            task.cancel()
        await asyncio.gather(playing, watching, return_exceptions=True)


def _source(options: Options) -> str:
    if options.settings.source != "recorded":
        return options.settings.source
    return f"{options.fmt}: {', '.join(options.trace)}" if options.trace else "packaged recording"


def _describe(options: Options, work: Workload, kv: KvPlan) -> str:
    facts = work.summary()
    cache = f"{kv.kv_tokens:,} KV tokens per replica" if kv.kv_tokens else "KV cache as the engine decides"
    pressure = f", working set {kv.pressure:.1f} times all of it" if kv.kv_tokens else ""
    raised = " (raised to hold the longest trajectory)" if kv.raised else ""
    return (
        f"{options.preset}, {options.settings.mode}, {_source(options)}: {facts['trajectories']} trajectories in "
        f"{facts['groups']} groups, {facts['turns']} turns, {facts['generated_tokens']:,} tokens to generate, "
        f"{facts['requested_prompt_tokens']:,} prompt tokens requested; {cache}{pressure}{raised}"
    )
