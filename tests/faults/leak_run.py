# SPDX-License-Identifier: Apache-2.0
"""Does anything grow? Many cheap training steps, and after each one what every process of the run holds.

    python -m tests.faults.leak_run --steps 300

Resident memory (shared memory apart), file descriptors and shared memory of each process are read when a step is done.
The growth per step after the first ``--after`` steps is the median of the slopes between all pairs of steps, Theil and
Sen's, which a garbage collection or a buffer that doubles once does not move. The run fails on a slope above its bound,
on a growing number of processes, and on anything that is left at its end.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from tests.support.tiny_run import tiny_overrides
from tests.support.training import loop_override
from war_rl.processes import Process, descendants, lives, read_process

MEMORY_KIB = 64.0
"""Bound on the growth of one process. Unit: KiB per step; 6 GiB in a hundred thousand steps."""
SHARED_KIB = 16.0
"""Bound on the growth of one process's shared memory. Unit: KiB per step."""
DESCRIPTORS = 0.02
"""Bound on the growth of one process's open files, and of the number of processes. Unit: per step."""

SMALL_HISTORY = {"RAY_task_events_max_num_task_in_gcs": "1000"}
"""Ray's control process remembers the last hundred thousand tasks, 0.25 MiB of them in each step of this run, and is
flat only when it has as many. With a thousand it is flat from the first steps, unless something else of it grows."""

_DONE = re.compile(r"step (\d+) done: ")


@dataclass(frozen=True)
class Usage:
    """What one process holds: private and file-backed resident memory, resident shared memory (KiB), open files."""

    memory: int
    shared: int
    files: int


@dataclass
class Seen:
    """One process over the run; ``steps`` and ``usages`` belong together."""

    name: str
    steps: list[int] = field(default_factory=list)
    usages: list[Usage] = field(default_factory=list)


@dataclass(frozen=True)
class Verdict:
    """Growth per step of one process after the first steps; ``why`` is "" where all stays within its bound."""

    name: str
    pid: int
    first: Usage
    last: Usage
    memory: float
    shared: float
    files: float
    why: str


def cheap_overrides(folder: Path, steps: int) -> list[str]:
    """A step as cheap as it gets: two games of two moves by each of two players."""
    return tiny_overrides(
        folder,
        loop_override(folder, "GuessingLoop"),
        "data.train_batch_size=2",
        "data.max_response_length=128",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2",
        "actor_rollout_ref.rollout.n=2",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=2",
        "actor_rollout_ref.rollout.max_model_len=512",
        # A buffer of this size is filled anew for each update.
        "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes=8",
        "war.env.max_turns=2",
        "war.env.max_tokens_per_turn=8",
        "war.trace=off",
        "war.poll_interval_s=0.01",
        "war.spec.feed_interval_ms=1",
        "trainer.logger=[console]",
        "trainer.total_epochs=1000000",
        f"trainer.total_training_steps={steps}",
    )


def slope(steps: Sequence[float], values: Sequence[float]) -> float:
    """Theil-Sen: the median of the slopes between all pairs; 0 with fewer than two steps."""
    x, y = np.asarray(steps, dtype=float), np.asarray(values, dtype=float)
    first, second = np.triu_indices(len(x), 1)
    apart = x[second] - x[first]
    usable = apart > 0
    return float(np.median((y[second] - y[first])[usable] / apart[usable])) if usable.any() else 0.0


def read_usage(pid: int) -> Usage | None:
    """None for a process that has ended, or is about to."""
    try:
        fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        kib = {name: int(fields[name].split()[0]) for name in ("RssAnon", "RssFile", "RssShmem")}
        files = len(os.listdir(f"/proc/{pid}/fd"))
    except (OSError, KeyError):
        return None
    return Usage(kib["RssAnon"] + kib["RssFile"], kib["RssShmem"], files)


def name_of(pid: int) -> str:
    """What a process is, from its command line; "" for one that has ended."""
    try:
        arguments = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").split()
    except OSError:
        return ""
    if not arguments:
        return ""
    if arguments[0].startswith(("ray::", "VLLM::")):
        return arguments[0].partition(".")[0].partition("(")[0]
    script = next((a for a in arguments[1:3] if a.endswith(".py")), "")
    if "war_rl" in arguments[1:3]:
        return "war-rl"
    return Path(script or arguments[0]).name


class Watch:
    """Looks at everything below one process."""

    def __init__(self, root: int) -> None:
        self._root = root
        self.seen: dict[Process, Seen] = {}
        self.times: dict[int, float] = {}
        self.counts: dict[int, int] = {}

    def look(self, step: int) -> None:
        """Take one sample."""
        self.times[step] = time.monotonic()
        root = read_process(self._root)
        family = descendants([self._root]) + ([root[0]] if root else [])
        self.counts[step] = len(family)
        for process in family:
            usage, name = read_usage(process.pid), name_of(process.pid)
            if usage is None or not name:
                continue
            one = self.seen.setdefault(process, Seen(name))
            # Ray names a process anew for what it is doing; a class says more than "idle".
            one.name = name if one.name in ("ray::IDLE", "python") else one.name
            one.steps.append(step)
            one.usages.append(usage)

    def left(self) -> list[str]:
        """What still runs of all that was ever seen."""
        return [f"{one.name} (pid {process.pid})" for process, one in self.seen.items() if lives(process)]

    def seconds_per_step(self, after: int) -> float:
        steps = [step for step in self.times if step > after]
        return slope(steps, [self.times[step] for step in steps])


def judge(watch: Watch, after: int, memory_kib: float = MEMORY_KIB) -> list[Verdict]:
    """Every process that was there in most steps after the first ``after``, and at the end, worst first."""
    last = max(watch.times, default=0)
    wanted = sum(step > after for step in watch.times)
    verdicts = []
    for process, one in watch.seen.items():
        late = [i for i, step in enumerate(one.steps) if step > after]
        if 2 * len(late) < wanted or one.steps[-1] != last:
            continue
        steps = [one.steps[i] for i in late]
        grown = {
            kind: slope(steps, [getattr(one.usages[i], kind) for i in late]) for kind in ("memory", "shared", "files")
        }
        bounds = {"memory": memory_kib, "shared": SHARED_KIB, "files": DESCRIPTORS}
        why = ", ".join(kind for kind, bound in bounds.items() if grown[kind] > bound)
        verdicts.append(Verdict(one.name, process.pid, one.usages[late[0]], one.usages[late[-1]], **grown, why=why))
    return sorted(verdicts, key=lambda v: (not v.why, -v.memory))


def table(verdicts: Sequence[Verdict]) -> str:
    """One row for each process."""
    head = (
        "process",
        "pid",
        "MiB first",
        "MiB last",
        "KiB/step",
        "shared KiB/step",
        "files first",
        "last",
        "files/step",
    )
    rows = [[*head, ""]]
    for v in verdicts:
        sizes = [f"{v.first.memory / 1024:.1f}", f"{v.last.memory / 1024:.1f}", f"{v.memory:.2f}", f"{v.shared:.2f}"]
        rows.append([v.name, str(v.pid), *sizes, str(v.first.files), str(v.last.files), f"{v.files:.4f}", v.why])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:-1], widths[1:-1], strict=True)), row[-1]]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


@dataclass
class Result:
    """How it went; ``problems`` is empty where nothing grows and nothing is left."""

    code: int
    verdicts: list[Verdict]
    problems: list[str]
    seconds_per_step: float
    output: str


def leak_run(folder: Path, steps: int, after: int, *extra: str, memory_kib: float = MEMORY_KIB) -> Result:
    """Train ``steps`` cheap steps below ``folder`` and judge those after the first ``after``."""
    command = [sys.executable, "-m", "war_rl", "train", *cheap_overrides(folder, steps), *extra]
    env = {**os.environ, "WANDB_MODE": "offline", "PYTHONPATH": str(Path(__file__).parents[2]), **SMALL_HISTORY}
    before = set(os.listdir("/dev/shm"))
    lines = []
    with subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as process:
        watch = Watch(process.pid)
        assert process.stdout is not None
        try:
            for line in process.stdout:
                lines.append(line)
                if (done := _DONE.search(line)) is not None:
                    watch.look(int(done.group(1)))
        except KeyboardInterrupt:
            process.terminate()
            raise
    (folder / "output.log").write_text("".join(lines))
    verdicts = judge(watch, after, memory_kib)
    problems = [f"{v.name} (pid {v.pid}) grows: {v.why}" for v in verdicts if v.why]
    counted = [step for step in watch.counts if step > after]
    if slope(counted, [watch.counts[step] for step in counted]) > DESCRIPTORS:
        problems.append("the number of processes grows")
    problems += [f"still running: {line}" for line in watch.left()]
    problems += [f"left in /dev/shm: {name}" for name in sorted(set(os.listdir("/dev/shm")) - before)]
    if process.returncode or max(watch.times, default=0) != steps:
        problems.append(f"exit code {process.returncode} after {max(watch.times, default=0)} of {steps} steps")
    return Result(process.returncode, verdicts, problems, watch.seconds_per_step(after), "".join(lines))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300, help="steps to train (%(default)s)")
    parser.add_argument("--after", type=int, default=50, help="steps before growth counts (%(default)s)")
    parser.add_argument("--folder", help="where the run's files go (a new folder below TMPDIR)")
    parser.add_argument("--json", help="write the figures there")
    parser.add_argument("overrides", nargs="*", help="Hydra overrides")
    args = parser.parse_args(argv)
    folder = Path(args.folder or tempfile.mkdtemp(prefix="war-rl-leaks-"))
    folder.mkdir(parents=True, exist_ok=True)
    result = leak_run(folder, args.steps, args.after, *args.overrides)
    print(table(result.verdicts))
    print(
        f"{args.steps} steps, {result.seconds_per_step:.2f} s each; growth after step {args.after}; bounds: memory "
        f"{MEMORY_KIB:g} KiB, shared memory {SHARED_KIB:g} KiB, files {DESCRIPTORS:g} for each step and process"
    )
    for problem in result.problems:
        print(f"PROBLEM: {problem}")
    print(f"output in {folder}/output.log")
    if args.json:
        Path(args.json).write_text(json.dumps([asdict(v) for v in result.verdicts], indent=1))
    return 1 if result.problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
