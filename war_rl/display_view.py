# SPDX-License-Identifier: Apache-2.0
"""What the progress display looks like: a :class:`~war_rl.board.Post` -> a rich renderable -> lines of text. Pure."""

from __future__ import annotations

import io

from rich.console import Console, Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from war_rl.board import BETWEEN, STARTING, Post
from war_rl.progress import MARK, Progress, regimes

NAMED_REPLICAS = 8
"""With more replicas than this they are counted by regime instead of named."""
_COLOURS = {"low": "green", "high": "yellow", "down": "red"}


def view(post: Post, age: float) -> RenderableType:
    """The display of ``post``, which was written ``age`` seconds ago."""
    state = post.state
    if post.phase == STARTING or state is None:
        return _headed(f"starting engines, models and workers, {duration(age)}")
    if post.phase == BETWEEN:
        took = f"{state.total} trajectories in {duration(state.elapsed)}, {state.tokens_per_s:,.0f} tok/s"
        return _headed(f"{post.label}: {took}; the trainer is at work, {duration(age)}")
    rows: list[RenderableType] = [_bar(post.label, state, age), _facts(state)]
    if state.regimes:
        rows.append(_replicas(state))
    return Group(*rows)


def _headed(text: str) -> Text:
    return Text.assemble((MARK, "bold"), " ", text, no_wrap=True, overflow="crop")


def _bar(label: str, state: Progress, age: float) -> Table:
    table = Table.grid(padding=(0, 1), expand=True)
    table.add_column(no_wrap=True, overflow="crop")
    table.add_column(ratio=1)
    table.add_column(no_wrap=True, overflow="crop", justify="right")
    times = duration(state.elapsed + age)
    if state.seconds_left is not None:
        times += f", about {duration(max(0.0, state.seconds_left - age))} left"
    counted = f"{state.finished}/{state.total} trajectories, {times}"
    head = Text.assemble((MARK, "bold"), " ", label)
    table.add_row(head, ProgressBar(total=max(1, state.total), completed=state.finished), Text(counted))
    return table


def _facts(state: Progress) -> Text:
    """What is known, in one line."""
    parts = [
        "" if state.running is None else f"{state.running} running",
        "" if not state.waiting else f"{state.waiting} held",
        "" if state.turns is None else f"{state.turns:,} turns",
        f"{state.tokens_per_s:,.0f} tok/s",
        "" if state.hit_rate is None else f"cache {state.hit_rate:.0%}",
        _drafts(state),
        *(f"{name} {value if isinstance(value, str) else f'{value:.3g}'}" for name, value in state.extra.items()),
    ]
    return Text("  " + ", ".join(part for part in parts if part), no_wrap=True, overflow="crop")


def _drafts(state: Progress) -> str:
    if state.acceptance_rate is None:
        return ""
    length = "" if state.acceptance_length is None else f" ({state.acceptance_length:.2f} tok/verify)"
    return f"drafts accepted {state.acceptance_rate:.0%}{length}"


def _replicas(state: Progress) -> Text:
    line = Text("  ", no_wrap=True, overflow="crop")
    if len(state.regimes) > NAMED_REPLICAS:
        return line.append(f"{len(state.regimes)} replicas: {regimes(state.regimes)}")
    for name, regime in state.regimes.items():
        line.append(f"{name} ").append(regime, _COLOURS.get(regime.partition("(")[0], "")).append("  ")
    line.rstrip()
    return line


def duration(seconds: float) -> str:
    """Seconds for people: ``8 s``, ``3 min 05 s``, ``2 h 10 min``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


class _Text(io.StringIO):
    """Text in memory that claims to have the terminal's encoding, by which rich chooses its characters."""

    def __init__(self, encoding: str) -> None:
        super().__init__()
        self._encoding = encoding

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._encoding


def render(renderable: RenderableType, width: int, colour: bool = True, encoding: str = "utf-8") -> list[str]:
    """``renderable`` as lines at most ``width`` columns wide, with ANSI colours or without."""
    text = _Text(encoding)
    console = Console(
        file=text,
        width=max(20, width),
        force_terminal=colour,
        color_system="standard" if colour else None,
        no_color=not colour,
        legacy_windows=False,
        highlight=False,
        markup=False,
        emoji=False,
    )
    console.print(renderable)
    return text.getvalue().splitlines()
