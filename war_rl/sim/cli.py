# SPDX-License-Identifier: Apache-2.0
"""``war-rl simulate``: reads files and flags, runs the simulation, writes tables, JSON and pictures."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from importlib import resources
from pathlib import Path
from typing import Any

from war_rl.config import ConfigError, SchedulerConfig, SpecConfig, load_config
from war_rl.sim.drafts import Acceptance
from war_rl.sim.engine import EngineSettings
from war_rl.sim.presets import Preset, presets
from war_rl.sim.simulator import Setup, Simulation
from war_rl.sim.times import StepTimes
from war_rl.sim.work import Shape, SimTrajectory, from_items, make_work, working_set

STOCK = "stock"
"""verl's own router, no drafting."""
BLOCK = 16


def main(argv: Sequence[str]) -> int:
    """Run the command. Exit codes: 0 done, 1 the check failed, 2 wrong use."""
    args = list(argv)
    try:
        if args[:1] == ["sweep"]:
            from war_rl.sim.sweep import main as sweep

            return sweep(args[1:])
        if args[:1] == ["acceptance"]:
            return _acceptance(args[1:])
        options = _parser().parse_args(args)
        return _check(options) if options.check else _simulate(options)
    except (ValueError, ConfigError, OSError, RuntimeError) as error:
        print(f"war-rl simulate: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    known = presets()
    listed = "\n".join(f"  {name:<10} {preset.about}" for name, preset in known.items())
    parser = argparse.ArgumentParser(
        prog="war-rl simulate",
        usage="war-rl simulate [--preset NAME] [--trace FILE --format NAME] [--policy A,B] [FLAG ...]\n"
        "       war-rl simulate --check [--bench FILE ...] --times FILE\n"
        "       war-rl simulate sweep --help\n"
        "       war-rl simulate acceptance --help",
        description="What a rollout step would take on a cluster: War-RL's scheduler over modelled engines.",
        epilog=f"presets:\n{listed}\n\nWhat is modelled, checked and found: docs/scaling.md",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--preset", choices=list(known), default="war-paper", help="engines, and work unless there is a --trace")
    add(
        "--policy",
        default="stock,cost",
        help="schedulers to compare; stock is verl's router without drafts (%(default)s)",
    )
    add("--draft", choices=("off", "war", "budget"), default="off", help="drafting of all but stock (%(default)s)")
    add("--replicas", type=int, help="number of engines")
    add("--kv-tokens", type=int, help="KV cache of each replica")
    add("--max-running", type=int, help="most requests an engine batches")
    add("--max-batched-tokens", type=int, help="most tokens of one engine step")
    add("--load", type=float, help="working set over all KV caches; sets --kv-tokens")
    add("--times", default="", metavar="FILE[:SIDE]", help="step times from war-rl bench calibrate")
    add("--acceptance", default="", metavar="FILE", help="from war-rl simulate acceptance (default: tau-bench's)")
    _add_trace(parser)
    add("--repeat", type=int, default=1, help="take each recorded group so many times")
    add("--at-once", type=int, help="most trajectories under way (default: all)")
    add("--steps", type=int, default=1, help="steps, weights updated in between (%(default)s)")
    add("--update-seconds", type=float, default=0.0, help="between two steps (%(default)s)")
    add("--seed", type=int, default=0)
    add("--scheduler", action="append", default=[], metavar="KEY=VALUE", help="a setting of war.scheduler")
    add("--json", default="", metavar="FILE")
    add("--plot", default="", metavar="FILE", help="picture of the policies (.png, .svg)")
    shape = parser.add_argument_group("made-up work, where there is no --trace")
    for item in fields(Shape):
        shape.add_argument(f"--{item.name.replace('_', '-')}", type=type(item.default), dest=f"shape_{item.name}")
    check = parser.add_argument_group("comparison with real engines")
    check.add_argument("--check", action="store_true", help="compare with war-rl bench rollout")
    check.add_argument("--bench", action="append", default=[], metavar="FILE", help="its JSON; without, it is run now")
    check.add_argument("--bench-presets", default="low-load,high-load", help="presets to run (%(default)s)")
    check.add_argument(
        "--bench-policies", default="cost,war,sticky_least_inflight,cache_aware", help="policies to run (%(default)s)"
    )
    return parser


def _add_trace(parser: argparse.ArgumentParser) -> None:
    from war_rl.traces.readers import READERS

    parser.add_argument("--trace", action="append", default=[], help="file or folder of recorded trajectories")
    parser.add_argument("--format", choices=list(READERS), dest="fmt", help="format of --trace")
    parser.add_argument("--tokenizer", default="", help="model folder that has the tokenizer (default: the demo model)")
    parser.add_argument("--tasks", type=int, help="groups of the recording to take (default: all)")
    parser.add_argument("--trials", type=int, help="members of each to take (default: all)")
    parser.add_argument("--tool-seconds", default="recorded", help="recorded, zero, or a factor such as 0.5x")


# ---- files


def load_times(text: str) -> dict[str, StepTimes]:
    """Step times by side from a file of ``war-rl bench calibrate``; ``FILE:SIDE`` takes one.

    Raises:
        ValueError: not such a file, or no such side.
    """
    file, _, side = text.partition(":")
    data = json.loads(Path(file).read_text(encoding="utf-8"))
    if "base" in data:
        return {"": StepTimes.from_json(data)}
    if "sides" not in data:
        raise ValueError(f"{file}: neither step times nor a document of war-rl bench calibrate")
    found = {name: StepTimes.from_json(entry["times"]) for name, entry in data["sides"].items()}
    if side:
        if side not in found:
            raise ValueError(f"--times {text}: there is no side {side}; sides are {', '.join(found)}")
        return {side: found[side]}
    return found


def load_acceptance(file: str, policy: str) -> Acceptance:
    """The measured acceptance of a drafting policy; "" takes the one that ships with the package."""
    if file:
        data = json.loads(Path(file).read_text(encoding="utf-8"))
    else:
        data = json.loads((resources.files("war_rl.sim") / "data" / "acceptance.json").read_text(encoding="utf-8"))
    return Acceptance.from_json(data.get(policy, data))


def load_items(options: argparse.Namespace) -> tuple[Any, Any, str]:
    """(workload, tokenizer, model) of --trace."""
    from war_rl.bench.presets import Settings
    from war_rl.bench.workloads import load_tokenizer, load_workload
    from war_rl.prepare import default_model_dir

    if not options.fmt:
        raise ValueError("--trace and --format belong together: --trace FILE --format NAME")
    model = options.tokenizer or str(default_model_dir())
    tokenizer, vocabulary, _ = load_tokenizer(model)
    settings = Settings(groups=options.tasks, n=options.trials, max_context=None, tool_seconds=options.tool_seconds)
    work = load_workload(
        settings, trace=options.trace, fmt=options.fmt, tokenizer=tokenizer, vocabulary=vocabulary, limit=1 << 24
    )
    return work, tokenizer, model


# ---- one comparison


def _simulate(options: argparse.Namespace) -> int:
    preset = presets()[options.preset]
    work, source = _work(options, preset)
    engine = _engine(options, preset, work)
    rows = {}
    for policy in [name.strip() for name in options.policy.split(",") if name.strip()]:
        setup = _setup(options, preset, engine, policy, text=work[0].text is not None)
        began = time.thread_time()
        simulation = Simulation(setup, clock=time.perf_counter)
        results = [simulation.run(work) for _ in range(options.steps)]
        rows[policy] = {
            **results[-1].to_json(),
            "steps": [r.to_json() for r in results],
            "cpu_seconds": time.thread_time() - began,
            "scheduler_seconds": simulation.router.spent,
        }
    ratio = working_set(work, engine.block_size) / (engine.kv_tokens * (options.replicas or preset.replicas))
    document = {
        "version": 1,
        "preset": options.preset,
        "source": source,
        "times": preset.times.to_json(),
        "engine": asdict(engine),
        "replicas": options.replicas or preset.replicas,
        "load": ratio,
        "trajectories": len(work),
        "draft": options.draft,
        "seed": options.seed,
        "policies": rows,
    }
    print(_table(document))
    if options.json:
        Path(options.json).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    if options.plot:
        from war_rl.sim.plots import plot_policies

        plot_policies(document, options.plot)
    return 0


def _work(options: argparse.Namespace, preset: Preset) -> tuple[list[SimTrajectory], str]:
    given = {
        f.name: getattr(options, f"shape_{f.name}")
        for f in fields(Shape)
        if getattr(options, f"shape_{f.name}") is not None
    }
    if options.trace:
        if given:
            raise ValueError(
                f"--{next(iter(given))} shapes made-up work and contradicts --trace: use --tasks and --trials"
            )
        work, _, _ = load_items(options)
        return from_items(work.items, BLOCK, options.repeat), f"{options.fmt}: {', '.join(options.trace)}"
    return make_work(replace(preset.shape, **given), preset.engine.block_size, options.seed), "made up"


def _engine(options: argparse.Namespace, preset: Preset, work: Sequence[SimTrajectory]) -> EngineSettings:
    engine = preset.engine
    changes = {
        "kv_tokens": options.kv_tokens,
        "max_num_seqs": options.max_running,
        "max_num_batched_tokens": options.max_batched_tokens,
    }
    engine = replace(engine, **{name: value for name, value in changes.items() if value is not None})
    if options.load:
        if options.kv_tokens:
            raise ValueError("--load and --kv-tokens say the same thing twice: give one")
        replicas = options.replicas or preset.replicas
        wanted = int(working_set(work, engine.block_size) / options.load / replicas)
        least = max(t.context for t in work) + 2 * engine.block_size
        if wanted < least:
            raise ValueError(
                f"--load {options.load}: {wanted} KV tokens per replica do not hold a trajectory of {least}"
            )
        engine = replace(engine, kv_tokens=wanted)
    return engine


def _setup(options: argparse.Namespace, preset: Preset, engine: EngineSettings, policy: str, text: bool) -> Setup:
    from war_rl.sim.check import war_section

    times = preset.times
    if options.times:
        found = load_times(options.times)
        wanted = "vllm" if policy == STOCK else "war"
        times = found.get(wanted, next(iter(found.values())))
    stock = policy == STOCK
    changes = [] if stock else [f"war.scheduler.{text}" for text in options.scheduler]
    changes.append(f"war.scheduler.policy={'sticky_least_inflight' if stock else policy}")
    scheduler = load_config(war_section(changes)).scheduler
    draft = "off" if stock else options.draft
    acceptance = None if draft == "off" or text else load_acceptance(options.acceptance, draft)
    return Setup(
        options.replicas or preset.replicas,
        engine,
        times,
        scheduler,
        SpecConfig(policy=draft),
        acceptance,
        at_once=options.at_once,
        update_s=options.update_seconds,
        seed=options.seed,
    )


def _table(document: dict[str, Any]) -> str:
    rows = document["policies"]
    first = next(iter(rows.values()))["seconds"]
    lines = [
        f"{document['trajectories']} trajectories on {document['replicas']} replicas of "
        f"{document['engine']['kv_tokens']:,} KV tokens, working set {document['load']:.2f} times all of it; "
        f"{document['times']['source']}",
        f"{'policy':<22} {'seconds':>9} {'speed-up':>8} {'tokens/s':>9} {'computed prefill':>16} {'preempted':>9} "
        f"{'accepted':>9} {'half done':>9}",
    ]
    for name, row in rows.items():
        lines.append(
            f"{name:<22} {row['seconds']:>9.1f} {first / row['seconds']:>8.3f} {row['throughput']:>9.0f} "
            f"{row['prefill_computed_tokens']:>16,} {row['preemptions']:>9,} {row['accepted_tokens']:>9,.0f} "
            f"{row['half_done_seconds']:>9.1f}"
        )
    return "\n".join(lines)


# ---- acceptance


def _acceptance(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="war-rl simulate acceptance",
        description="Measure what War-RL's drafter does on recorded text, for simulations of work without text.",
        allow_abbrev=False,
    )
    parser.add_argument("--preset", choices=list(presets()), default="war-paper", help="whose step times decide")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--at-once", type=int, default=16, help="trajectories under way (%(default)s)")
    parser.add_argument("--json", required=True, metavar="FILE")
    _add_trace(parser)
    options = parser.parse_args(list(argv))
    from war_rl.sim.acceptance import measure

    preset = presets()[options.preset]
    items, tokenizer, _ = load_items(options)
    work = from_items(items.items, BLOCK)
    longest = max(t.context for t in work)
    setup = Setup(
        options.replicas,
        EngineSettings(options.at_once * (longest + BLOCK)),
        preset.times,
        SchedulerConfig(policy="round_robin"),
        at_once=options.at_once,
        stop_token_ids=_stops(tokenizer),
    )
    source = f"{options.fmt}, {len(work)} trajectories, {options.at_once} at once, step times of {options.preset}"
    document = {
        policy: measure(replace(setup, spec=SpecConfig(policy=policy)), work, source=source).to_json()
        for policy in ("war", "budget")
    }
    Path(options.json).write_text(json.dumps(document) + "\n", encoding="utf-8")
    for policy, found in document.items():
        for kind in ("own", "sibling"):
            rates = found[kind]
            print(
                f"{policy}, {kind}: {len(rates) / sum(1 / m for m, _ in rates):.2f} tokens committed per step, "
                f"{sum(d / m for m, d in rates) / sum(1 / m for m, _ in rates):.2f} drafted"
            )
    return 0


def _stops(tokenizer: Any) -> frozenset[int]:
    found = tokenizer.convert_tokens_to_ids("<|im_end|>")
    return frozenset([found]) if isinstance(found, int) else frozenset()


# ---- check


def _check(options: argparse.Namespace) -> int:
    from war_rl.bench.workloads import load_tokenizer, load_workload
    from war_rl.sim.check import compare, settings_of, summary, table

    if not options.times:
        raise ValueError("--check needs --times FILE, made on the same machine by war-rl bench calibrate")
    times = load_times(options.times)
    rows = []
    for file in options.bench or _run_bench(options):
        report = json.loads(Path(file).read_text(encoding="utf-8"))
        settings = settings_of(report)
        tokenizer, vocabulary, limit = load_tokenizer(options.tokenizer or report["settings"]["model"])
        trace, fmt = _source(report, options)
        work = load_workload(settings, trace=trace, fmt=fmt, tokenizer=tokenizer, vocabulary=vocabulary, limit=limit)
        batched = options.max_batched_tokens or (8192 if report["machine"].get("accelerators") else 1024)
        simulated = from_items(work.items, settings.block_size)
        rows += compare(Path(file).stem, report, simulated, times, _stops(tokenizer), batched)
    found = summary(rows)
    print(table(rows, found))
    if options.json:
        document = {"version": 1, "rows": [asdict(row) for row in rows], "summary": found}
        Path(options.json).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 0 if found["met"] else 1


def _source(report: dict[str, Any], options: argparse.Namespace) -> tuple[list[str], str]:
    if options.trace:
        return options.trace, options.fmt or "war"
    fmt, colon, files = str(report["workload"]["source"]).partition(": ")
    return (files.split(", "), fmt) if colon else ([], "war")


def _run_bench(options: argparse.Namespace) -> list[str]:
    """Real runs, one benchmark for each preset and policy: the engines of two sides at a time fit a small machine."""
    import subprocess

    folder = tempfile.mkdtemp(prefix="war-rl-check-")
    files = []
    for preset in options.bench_presets.split(","):
        for policy in options.bench_policies.split(","):
            file = f"{folder}/{preset}-{policy}.json"
            command = [sys.executable, "-m", "war_rl", "bench", "rollout", "--preset", preset, "--sides", "war,vllm"]
            command += ["--json", file, "--progress", "on", f"war:war.scheduler.policy={policy}"]
            for trace in options.trace:
                command += ["--trace", trace]
            command += ["--format", options.fmt] if options.fmt else []
            command += ["--model", options.tokenizer] if options.tokenizer else []
            code = subprocess.run(command, check=False).returncode
            if code:
                raise RuntimeError(f"{' '.join(command)} ended with exit code {code}")
            files.append(file)
    print(f"reports of the real runs in {folder}", flush=True)
    return files
