# SPDX-License-Identifier: Apache-2.0
"""Command line of ``war-rl bench rollout``. Wrong use is refused here, before anything heavy is imported."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from war_rl.bench.presets import PRESETS, Settings, add_flags, settings_from_args
from war_rl.bench.stats import plan_rounds, side_labels
from war_rl.progress import MODES
from war_rl.traces.readers import READERS

ROLLOUTS = ("war", "vllm", "vllm+suffix", "vllm+ngram")
"""What a side may be: War-RL, verl's stock rollout, or the latter with one of vLLM's own drafting methods."""


@dataclass(frozen=True)
class Options:
    """A parsed command line.

    Attributes:
        settings: preset and flags resolved.
        preset: its name.
        sides: label -> rollout, in the user's order.
        overrides: label -> Hydra overrides of that side.
        model: folder or name.
        trace: files or folders of the trace; empty for the packaged recording.
        fmt: their format.
        json, plot: files to write; "" writes none.
        progress: ``auto``, ``on`` or ``off``.
        verbose: show what the engines print.
    """

    settings: Settings
    preset: str
    sides: dict[str, str]
    overrides: dict[str, list[str]]
    model: str
    trace: list[str]
    fmt: str
    json: str
    plot: str
    progress: str
    verbose: bool


def parser() -> argparse.ArgumentParser:
    """The command's flags."""
    presets = "\n".join(f"  {name:<14} {about}" for name, (about, _) in PRESETS.items())
    made = argparse.ArgumentParser(
        prog="war-rl bench rollout",
        usage="war-rl bench rollout [--preset NAME] [--trace FILE --format NAME] [--sides A,B] [FLAG ...] "
        "[[SIDE:]KEY=VALUE ...]",
        description="Replay recorded agent trajectories on real engines under two rollouts, interleaved, and compare "
        "their throughput on work that is equal to the token.",
        epilog=f"""\
presets:
{presets}

sides: war, vllm (stock), vllm+suffix, vllm+ngram. A rollout may be named twice: war,war gives the sides war and war#2.
KEY=VALUE is a Hydra override of all sides' training configuration, SIDE:KEY=VALUE of one side's:
  war-rl bench rollout --preset high-load --sides war,war,vllm war#2:war.scheduler.policy=cost

exit codes: 0 done, 1 failed, 2 wrong use, 3 the sides did not do the same work.
What each figure means: docs/benchmark.md""",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    made.add_argument(
        "--sides", default="war,vllm", help="rollouts to compare, the first over each other (%(default)s)"
    )
    made.add_argument("--trace", action="append", default=[], help="file or folder to replay; may be repeated")
    made.add_argument("--format", choices=list(READERS), dest="fmt", help="format of --trace")
    made.add_argument("--model", default="", help="model folder or name (what `war-rl prepare` makes)")
    made.add_argument("--json", default="", metavar="FILE", help="write the result as JSON")
    made.add_argument("--plot", default="", metavar="FILE", help="write a picture of each side's replicas (.png, .svg)")
    made.add_argument("--progress", choices=MODES, default="auto", help="progress lines (%(default)s)")
    made.add_argument("--verbose", action="store_true", help="show what Ray and the engines print")
    add_flags(made)
    made.add_argument("overrides", nargs="*", metavar="[SIDE:]KEY=VALUE", help="Hydra overrides")
    return made


def parse(argv: Sequence[str]) -> Options:
    """Options of a command line; wrong use ends the process with exit code 2 and a message."""
    flags = parser()
    args = flags.parse_intermixed_args(list(argv))
    try:
        return _options(args)
    except ValueError as error:
        flags.error(str(error))


def _options(args: argparse.Namespace) -> Options:
    from war_rl.prepare import default_model_dir

    rollouts = [name.strip() for name in args.sides.split(",") if name.strip()]
    for name in rollouts:
        if name not in ROLLOUTS:
            raise ValueError(f"--sides {name}: not one of {', '.join(ROLLOUTS)}")
    sides = side_labels(rollouts)
    settings = settings_from_args(args)
    plan_rounds(list(sides), settings.pairs, settings.rounds)  # refuses what cannot be compared
    if bool(args.trace) != bool(args.fmt):
        raise ValueError("--trace and --format belong together: --trace FILE --format NAME")
    if args.trace and settings.source != "recorded":
        raise ValueError(f"--trace contradicts --source {settings.source}: add --source recorded, or leave it out")
    model = args.model or str(default_model_dir())
    if not args.model and not os.path.isdir(model):
        raise ValueError(f"no model in {model}: make it with `war-rl prepare`, or give --model FOLDER")
    for file in filter(None, (args.json, args.plot)):
        # Minutes later would be a bad moment to find out.
        if not Path(file).absolute().parent.is_dir():
            raise ValueError(f"{file}: its folder does not exist")
    return Options(
        settings=settings,
        preset=args.preset,
        sides=sides,
        overrides=split_overrides(args.overrides, list(sides)),
        model=model,
        trace=args.trace,
        fmt=args.fmt or "war",
        json=args.json,
        plot=args.plot,
        progress=args.progress,
        verbose=args.verbose,
    )


def split_overrides(overrides: Sequence[str], sides: Sequence[str]) -> dict[str, list[str]]:
    """Hydra overrides of each side, in order: ``KEY=VALUE`` belongs to all, ``SIDE:KEY=VALUE`` to one.

    Raises:
        ValueError: no override, or one of a side that is not there.
    """
    out: dict[str, list[str]] = {side: [] for side in sides}
    for text in overrides:
        key, equals, _ = text.partition("=")
        side, colon, rest = text.partition(":")
        if not equals and not text.startswith("~"):
            raise ValueError(f"{text!r} is no override: expected KEY=VALUE or SIDE:KEY=VALUE")
        if colon and len(side) < len(key):
            if side not in out:
                raise ValueError(f"{text!r}: there is no side {side}; sides are {', '.join(sides)}")
            out[side].append(rest)
        else:
            for mine in out.values():
                mine.append(text)
    return out
