# SPDX-License-Identifier: Apache-2.0
"""What a person at a terminal sees while a step's trajectories come in, and one line when the step is done.

On a terminal one line is redrawn in place; anywhere else (a log, the forwarded output of a Ray actor) plain lines
appear sparsely, each starting with :data:`MARK`. Ray workers stay quiet unless the one that speaks for the run says so.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TextIO

MARK = "[war-rl]"
"""Every line of ours starts with it, so that it can be found between the lines of a hundred workers."""

MODES = ("auto", "on", "off")
LIVE_INTERVAL_S = 0.2
PLAIN_INTERVAL_S = 5.0
DISPLAY_INTERVAL_S = 0.5


@dataclass(frozen=True, slots=True)
class Progress:
    """State of a step's rollout.

    Attributes:
        finished: trajectories that have come in.
        total: trajectories this step waits for.
        generated_tokens: tokens written so far, finished trajectories and running ones.
        elapsed: seconds since the step's rollout began.
        regimes: load regime per replica id ("low", "high", "down", ...).
        extra: further short facts, shown in the order given.
        running: trajectories under way; this and all that follow are None where not known.
        waiting: turns that the router holds.
        turns: finished turns.
        hit_rate: cached over prompt tokens so far.
        acceptance_rate: accepted over draft tokens so far.
        acceptance_length: tokens committed per verify step so far.
        seconds_left: until the last trajectory ends, as the scheduler estimates it.
    """

    finished: int
    total: int
    generated_tokens: int
    elapsed: float
    regimes: Mapping[str, str] = field(default_factory=dict)
    extra: Mapping[str, float | str] = field(default_factory=dict)
    running: int | None = None
    waiting: int | None = None
    turns: int | None = None
    hit_rate: float | None = None
    acceptance_rate: float | None = None
    acceptance_length: float | None = None
    seconds_left: float | None = None

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens per second since the rollout began."""
        return self.generated_tokens / self.elapsed if self.elapsed > 0 else 0.0


def format_progress(label: str, state: Progress) -> str:
    """One line without the mark, such as ``step 3: 5/16 trajectories, 412 tok/s, 12 s, low 2``."""
    parts = [
        f"{state.finished}/{state.total} trajectories",
        f"{state.tokens_per_s:,.0f} tok/s",
        f"{state.elapsed:.0f} s",
    ]
    if state.regimes:
        parts.append(regimes(state.regimes))
    parts += [f"{name} {_short(value)}" for name, value in state.extra.items()]
    return f"{label}: " + ", ".join(parts)


def regimes(by_replica: Mapping[str, str]) -> str:
    """Each replica by name while they fit on a line, else how many are in which regime."""
    if len(by_replica) <= 4:
        return " ".join(f"{name}={regime}" for name, regime in sorted(by_replica.items()))
    counts: dict[str, int] = {}
    for regime in by_replica.values():
        # "low(3)" is low, with three turns running.
        kind = regime.partition("(")[0]
        counts[kind] = counts.get(kind, 0) + 1
    return " ".join(f"{regime} {count}" for regime, count in sorted(counts.items()))


def _short(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.3g}"


def in_ray_worker() -> bool:
    """Whether this process is a Ray worker; never imports Ray."""
    ray = sys.modules.get("ray")
    worker = getattr(getattr(getattr(ray, "_private", None), "worker", None), "global_worker", None)
    mode, worker_mode = getattr(worker, "mode", None), getattr(ray, "WORKER_MODE", 1)
    return mode is not None and mode == worker_mode


class ProgressLine:
    """Progress of one step's rollout.

    Args:
        label: start of the line, such as ``step 3`` or ``validation``.
        mode: ``war.progress``: ``auto``, ``on`` or ``off``. ``auto`` says nothing in a Ray worker unless ``speaker``.
        clock: seconds, monotonic; only differences count.
        stream: where lines go; standard error on a terminal, standard output (which Ray forwards) otherwise.
        speaker: this process speaks for the run although it is a Ray worker (the trainer's actor).
        worker: whether this is a Ray worker; asked of Ray when None.
        interval_s: least seconds between two lines; None takes the default of the kind of stream.
        elsewhere: takes the state, and whether all has come in, in place of a line: a display in another process. An
            OSError from it means that it is gone; plain lines follow.

    Raises:
        ValueError: unknown mode.
    """

    def __init__(
        self,
        label: str,
        *,
        clock: Callable[[], float],
        mode: str = "auto",
        stream: TextIO | None = None,
        speaker: bool = False,
        worker: bool | None = None,
        interval_s: float | None = None,
        elsewhere: Callable[[Progress, bool], None] | None = None,
    ) -> None:
        if mode not in MODES:
            raise ValueError(f"war.progress={mode!r}: not one of {', '.join(MODES)}")
        self._label = label
        self._clock = clock
        self._stream = stream or (sys.stderr if sys.stderr.isatty() else sys.stdout)
        self._live = self._stream.isatty()
        is_worker = in_ray_worker() if worker is None else worker
        self._quiet = mode == "off" or (mode == "auto" and is_worker and not speaker)
        self._elsewhere = elsewhere
        self._fixed_interval = interval_s
        self._last: float | None = None
        self._shown: Progress | None = None
        self._drawn = False

    @property
    def quiet(self) -> bool:
        """Whether nothing is ever shown: then nobody need look."""
        return self._quiet

    def update(self, state: Progress) -> None:
        """Show ``state`` if it is time to; the moment everything has come in is always shown."""
        if self._quiet:
            return
        now = self._clock()
        complete = state.finished >= state.total
        was_complete = self._shown is not None and self._shown.finished >= self._shown.total
        due = self._last is None or now - self._last >= self._interval() or (complete and not was_complete)
        if not due or (complete and was_complete):
            return
        self._last, self._shown = now, state
        if not self._told(state, complete):
            self._write(format_progress(self._label, state))

    def close(self) -> None:
        """End the live line, so that whatever is printed next starts on a line of its own."""
        if self._drawn:
            self._stream.write("\n")
            self._stream.flush()
            self._drawn = False

    def _interval(self) -> float:
        if self._fixed_interval is not None:
            return self._fixed_interval
        if self._elsewhere is not None:
            return DISPLAY_INTERVAL_S
        return LIVE_INTERVAL_S if self._live else PLAIN_INTERVAL_S

    def _told(self, state: Progress, complete: bool) -> bool:
        """Whether a display elsewhere has taken the state."""
        if self._elsewhere is None:
            return False
        try:
            self._elsewhere(state, complete)
        except OSError as error:
            self._elsewhere = None
            self._write(f"progress goes on in plain lines: {error}")
            return False
        return True

    def _write(self, text: str) -> None:
        line = f"{MARK} {text}"
        # Carriage return and "erase to the end of the line": the line is redrawn in place.
        self._stream.write(f"\r{line}\x1b[K" if self._live else f"{line}\n")
        self._stream.flush()
        self._drawn = self._live


def step_line(step: int, metrics: Mapping[str, float], reward: float | None = None) -> str:
    """One line for a finished step, from what it logged; facts that are not there are left out."""
    facts: list[tuple[str, str, str]] = [
        ("war/rollout/trajectories", "{:.0f} trajectories", ""),
        ("war/rollout/seconds", "{:.1f} s rollout", ""),
        ("war/rollout/tokens_per_s", "{:,.0f} tok/s", ""),
        ("war/cache/hit_rate", "cache {:.0%}", ""),
        ("war/spec/mean_acceptance_length", "{:.2f} tok/verify", "war/spec/drafts"),
        ("war/rollout/failed", "{:.0f} FAILED", "war/rollout/failed"),
        ("war/rollout/truncated", "{:.0f} truncated", "war/rollout/truncated"),
    ]
    parts = [] if reward is None else [f"reward {reward:.3f}"]
    for key, form, only_if in facts:
        if key in metrics and (not only_if or metrics.get(only_if)):
            parts.append(form.format(metrics[key]))
    return f"{MARK} step {step} done: " + ", ".join(parts)
