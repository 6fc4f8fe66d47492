# SPDX-License-Identifier: Apache-2.0
"""The ``war-rl`` command. Each subcommand imports what it needs when it runs, so that help and errors come at once."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

Run = Callable[[Sequence[str]], int]

DEFAULT_CONFIG = "war_ppo_trainer"


@dataclass(frozen=True, slots=True)
class Command:
    """A subcommand: ``run`` gets the arguments after its name and returns the exit code."""

    name: str
    help: str
    run: Run


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of ``war-rl`` and ``python -m war_rl``. Exit codes: 0 done, 1 failed, 2 wrong use, 130 Ctrl-C."""
    args = list(sys.argv[1:] if argv is None else argv)
    parser = _parser()
    # Everything after the subcommand's name belongs to the subcommand, --help included.
    at = next((i for i, arg in enumerate(args) if not arg.startswith("-")), len(args))
    known = parser.parse_args(args[: at + 1])
    if known.command is None:
        parser.print_help()
        return 2
    try:
        return COMMANDS[known.command].run(args[at + 1 :])
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of our output (head, less) has left: no error of ours. Keep the exit handler from flushing into it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _parser() -> argparse.ArgumentParser:
    width = max(map(len, COMMANDS))
    lines = [f"  {c.name:<{width}}  {c.help}" for c in COMMANDS.values()]
    parser = argparse.ArgumentParser(
        prog="war-rl",
        description="Workload-aware rollouts for synchronous agentic RL.",
        epilog="commands:\n" + "\n".join(lines) + "\n\n`war-rl COMMAND --help` tells more about one.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"war-rl {_version()}")
    parser.add_argument("command", nargs="?", choices=list(COMMANDS), metavar="COMMAND", help="what to do, see below")
    return parser


def _version() -> str:
    from importlib import metadata

    try:
        return metadata.version("war-rl")
    except metadata.PackageNotFoundError:
        return "(not installed)"


def _train_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="war-rl train",
        usage="war-rl train [--config-name NAME] [--cfg job] [KEY=VALUE ...]",
        description="Run the main job: a verl training whose rollouts War-RL does.",
        epilog="""\
examples:
  war-rl train --config-name war_demo                          the demo of `make demo`
  war-rl train --config-name war_demo trainer.rollout=vllm     the same with verl's stock rollout
  war-rl train actor_rollout_ref.model.path=... data.train_files=...

KEY=VALUE, +KEY=VALUE and ~KEY are Hydra overrides of verl's ppo_trainer and of the `war:` section. Ctrl-C stops the
run and everything it has started within 20 s; a second one kills it at once.""",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--config-name", default=DEFAULT_CONFIG, metavar="NAME", help="configuration (%(default)s)")
    parser.add_argument("--cfg", choices=["job"], help="print the composed configuration instead of training")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="Hydra overrides")
    return parser


def _train(argv: Sequence[str]) -> int:
    from war_rl.summary import NOTE_VARIABLE
    from war_rl.supervise import supervise

    parser = _train_parser()
    args = parser.parse_intermixed_args(list(argv))
    for override in args.overrides:
        if "=" not in override and not override.startswith("~"):
            parser.error(f"{override!r} is no override: expected KEY=VALUE, +KEY=VALUE or ~KEY")
    overrides = [*args.overrides, *(["--cfg", args.cfg] if args.cfg else [])]
    # Not a TemporaryDirectory: the forked child would remove it in its exit handlers.
    handle, note = tempfile.mkstemp(prefix="war-rl-")
    os.close(handle)
    os.environ[NOTE_VARIABLE] = note
    running_at_stop = []
    try:
        code = supervise(
            lambda: _run_training(overrides, args.config_name),
            on_stop=lambda: running_at_stop.append(_still_running(Path(note))),
            note=note,
            on_dead=_close_killed,
        )
        summary = Path(note).read_text()
    finally:
        del os.environ[NOTE_VARIABLE]
        os.unlink(note)
    if summary:
        _conclude(Path(summary), code, any(running_at_stop))
    return code


def _still_running(note: Path) -> bool:
    """Whether the run whose summary ``note`` names has not said yet how it ended."""
    from war_rl.summary import load_summary

    try:
        return bool(load_summary(note.read_text())["status"] == "running")
    except (OSError, ValueError, KeyError):
        return False


def _run_training(overrides: list[str], config_name: str) -> int:
    from war_rl.config import ConfigError

    try:
        from war_rl.compat import IncompatibleError
        from war_rl.trainers.verl.main_ppo import run
    except ModuleNotFoundError as error:
        print(f"war-rl train: {error}. `war-rl doctor` says what is missing and how to install it.", file=sys.stderr)
        return 1
    try:
        return run(overrides, config_name)
    except ConfigError as error:
        print(f"war-rl train: {error}", file=sys.stderr)
        return 2
    except IncompatibleError as error:
        print(f"war-rl train: {error}", file=sys.stderr)
        return 1


def _close_killed(summary: str) -> None:
    """Say in its summary that an earlier run, whose processes had to be swept up, was killed."""
    from war_rl.summary import mark_ended

    try:
        mark_ended(summary, "failed", "killed: it ended without saying how")
    except (OSError, ValueError, KeyError):
        # Its folder is gone, or somebody else has made something of it.
        return


def _conclude(path: Path, code: int, running_at_stop: bool) -> None:
    """Close the summary of a run that could not do it, and show the run at a glance.

    While a run is being stopped its processes see each other die, and one of them may call that a failure: what was
    running when the signal came was interrupted, whatever they say.
    """
    from war_rl.summary import format_table, load_summary, mark_ended

    try:
        if code in (129, 130, 143):
            instead_of = ("running", "failed") if running_at_stop else ("running",)
            mark_ended(path, "interrupted", "stopped by a signal", instead_of=instead_of)
        else:
            mark_ended(path, "failed", f"the run ended with exit code {code} without saying how")
        print(f"\n{format_table(load_summary(path))}\n{path}", flush=True)
    except (OSError, ValueError, KeyError) as error:
        print(f"war-rl train: the run's summary cannot be shown: {error}", file=sys.stderr)


def _prepare(argv: Sequence[str]) -> int:
    from war_rl.prepare import main as prepare

    return prepare(argv)


def _doctor(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="war-rl doctor",
        description="Check Python, package versions, the platform and the seams War-RL hangs on; name the command that "
        "mends each trouble. Exit code 1 if there is any.",
    )
    parser.parse_args(list(argv))
    from war_rl.doctor import main as doctor

    return doctor()


def _report(argv: Sequence[str]) -> int:
    from war_rl.report.build import main as report

    return report(argv)


def _trace(argv: Sequence[str]) -> int:
    from war_rl.trace import main as trace

    return trace(argv)


def _wandb_workspace(argv: Sequence[str]) -> int:
    from war_rl.wandb_layout import main as wandb_workspace

    return wandb_workspace(argv)


def _replay(argv: Sequence[str]) -> int:
    from war_rl.replay import main as replay

    return replay(argv)


def _bench_rollout(argv: Sequence[str]) -> int:
    from war_rl.supervise import supervise

    return supervise(lambda: _run_bench_rollout(argv))


def _run_bench_rollout(argv: Sequence[str]) -> int:
    # Only in the child: this imports numpy, which starts threads.
    from war_rl.bench.rollout import main as bench_rollout

    return bench_rollout(argv)


def _bench_calibrate(argv: Sequence[str]) -> int:
    from war_rl.supervise import supervise

    return supervise(lambda: _run_bench_calibrate(argv))


def _run_bench_calibrate(argv: Sequence[str]) -> int:
    from war_rl.bench.calibrate import main as bench_calibrate

    return bench_calibrate(argv)


def _simulate(argv: Sequence[str]) -> int:
    from war_rl.sim.cli import main as simulate

    return simulate(argv)


def _bench_drafter(argv: Sequence[str]) -> int:
    from war_rl.spec.bench import main as bench_drafter

    return bench_drafter(argv)


BENCHES: dict[str, Command] = {
    command.name: command
    for command in (
        Command(
            "rollout", "replay recorded trajectories under two rollouts and compare their throughput", _bench_rollout
        ),
        Command("calibrate", "measure a replica's engine steps, for `war-rl simulate`", _bench_calibrate),
        Command(
            "drafter", "time the drafter itself against the library's suffix cache, without an engine", _bench_drafter
        ),
    )
}
"""What ``war-rl bench`` can measure, in the order of its help."""


def _bench(argv: Sequence[str]) -> int:
    width = max(map(len, BENCHES))
    parser = argparse.ArgumentParser(
        prog="war-rl bench",
        description="Measure. `war-rl bench KIND --help` tells more.",
        epilog="kinds:\n" + "\n".join(f"  {c.name:<{width}}  {c.help}" for c in BENCHES.values()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("kind", choices=list(BENCHES), metavar="KIND", help="what to measure, see below")
    kind = parser.parse_args(list(argv[:1])).kind
    return BENCHES[kind].run(argv[1:])


COMMANDS: dict[str, Command] = {
    command.name: command
    for command in (
        Command("train", "run a training whose rollouts War-RL does (Hydra overrides pass through)", _train),
        Command(
            "bench", "measure: whole rollouts (rollout), engine steps (calibrate), the drafter alone (drafter)", _bench
        ),
        Command("replay", "what drafting would bring on recorded trajectories, without an engine", _replay),
        Command(
            "simulate", "what a rollout would take on a cluster: the real scheduler over modelled engines", _simulate
        ),
        Command("report", "write one HTML page about a run, or comparing two", _report),
        Command("trace", "write a run's event data as a Chrome trace, for chrome://tracing or Perfetto", _trace),
        Command("wandb-workspace", "make the W&B workspace of War-RL's panels, or write its layout", _wandb_workspace),
        Command("prepare", "make the demo's model folder and data set", _prepare),
        Command("doctor", "check versions, platform and seams; say what is missing and how to mend it", _doctor),
    )
}
"""All subcommands, in the order of the help. A new one is a new entry."""
