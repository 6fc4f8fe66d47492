# SPDX-License-Identifier: Apache-2.0
"""Ready settings of the rollout benchmark; each field is also a flag that overrides it."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import UnionType
from typing import Any

from war_rl.traces.synthetic import SyntheticTokens, no_repeat_traces
from war_rl.traces.tokenise import TokenTrace
from war_rl.traces.workload import WorkItem, WorkloadSpec, parse_tool_seconds, working_set_tokens

MODES = ("forced", "free")
SOURCES = ("recorded", "no-repeat")
WARMUP_TURNS = 2
"""Turns of a trajectory that is replayed to warm up: a first one and one that finds a cache."""


@dataclass(frozen=True)
class Settings:
    """Everything about a benchmark but its sides and its trace file."""

    source: str = "recorded"
    """``recorded`` replays the trace; ``no-repeat`` makes up text with nothing to reuse."""
    mode: str = "forced"
    """``forced`` commits the recorded tokens; ``free`` the model's own samples, with recorded lengths."""
    temperature: float = 1.0
    """Sampling temperature; in forced mode it decides only which sampling code runs. Unit: none."""
    replicas: int = 2
    """Number of engines. Unit: replicas."""
    concurrency: int | None = None
    """Most trajectories under way at once, per replica; without it all start at once. Unit: trajectories."""
    kv_tokens: int | None = None
    """KV cache of each replica; overrides ``kv_share``. Unit: tokens."""
    kv_share: float | None = None
    """KV cache of all replicas together, as a share of the working set; 0 lets the engine decide. Unit: none."""
    block_size: int = 16
    """Tokens per KV block. Unit: tokens."""
    max_running: int = 64
    """Most requests an engine batches. Unit: requests."""
    draft_tokens: int = 8
    """Most tokens that any drafting side drafts for a request in one engine step. Unit: tokens."""
    groups: int | None = 4
    """How many groups are replayed; 0 takes all. Unit: groups."""
    n: int | None = 4
    """Trajectories of each group; 0 takes all. Unit: trajectories."""
    turns: int | None = None
    """Most turns of a trajectory; longer ones are cut. Unit: turns."""
    max_context: int | None = 2560
    """Longest prompt plus generation; longer trajectories are cut, and the cut reported. Unit: tokens."""
    tool_seconds: str = "zero"
    """``recorded``, ``zero``, a factor on the recorded times such as ``0.5x``, or made-up seconds such as ``0-2``."""
    pairs: int = 2
    """How often each side is measured. Unit: runs."""
    rounds: int = 2
    """How often the engines are started, each time in reversed order, while pairs last. Unit: starts."""
    warmup_trajectories: int = 2
    """Trajectories of which each side replays the first two turns before it is measured. Unit: trajectories."""
    seed: int = 0
    """Seed of made-up tokens."""
    prompt_tokens: int = 256
    """``no-repeat`` only: length of the first prompt. Unit: tokens."""
    model_tokens: int = 64
    """``no-repeat`` only: generated per turn. Unit: tokens."""
    env_tokens: int = 64
    """``no-repeat`` only: appended after each turn. Unit: tokens."""

    def __post_init__(self) -> None:
        _one_of("source", self.source, SOURCES)
        _one_of("mode", self.mode, MODES)
        parse_tool_seconds(self.tool_seconds)
        for name in ("groups", "n", "turns", "max_context", "concurrency", "kv_tokens", "kv_share"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ValueError(f"--{_flag(name)} {value}: must not be negative (0 means no limit)")
            object.__setattr__(self, name, value or None)
        for name in (
            "replicas",
            "block_size",
            "max_running",
            "draft_tokens",
            "pairs",
            "rounds",
            "prompt_tokens",
            "model_tokens",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"--{_flag(name)} {getattr(self, name)}: must be at least 1")
        for name in ("temperature", "warmup_trajectories", "seed", "env_tokens"):
            if getattr(self, name) < 0:
                raise ValueError(f"--{_flag(name)} {getattr(self, name)}: must not be negative")

    def workload_spec(self, limit: int | None = None) -> WorkloadSpec:
        """What of the recordings is replayed; ``limit`` is the model's own longest context in tokens."""
        tools = parse_tool_seconds(self.tool_seconds)
        return WorkloadSpec(
            groups=self.groups,
            n=self.n,
            turns=self.turns,
            max_context=min((c for c in (self.max_context, limit) if c), default=None),
            tool_scale=1.0 if isinstance(tools, tuple) else tools,
            tool_range=tools if isinstance(tools, tuple) else None,
        )

    def no_repeat(self, tokens: SyntheticTokens) -> list[TokenTrace]:
        """Trajectories for ``source="no-repeat"``; fields without a limit fall back to 4 groups, 4 members, 4 turns."""
        return no_repeat_traces(
            groups=self.groups or 4,
            n=self.n or 4,
            turns=self.turns or 4,
            prompt_tokens=self.prompt_tokens,
            model_tokens=self.model_tokens,
            env_tokens=self.env_tokens,
            tokens=tokens,
        )


def _flag(name: str) -> str:
    return name.replace("_", "-")


def _one_of(name: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ValueError(f"--{_flag(name)} {value}: not one of {', '.join(choices)}")


PRESETS: dict[str, tuple[str, Settings]] = {
    "low-load": (
        "one running trajectory per replica, groups of 4: where drafting pays",
        # A bound well above what is needed: engines on CPUs fill their whole cache with zeros at the start.
        Settings(concurrency=1, groups=2, n=4, turns=6, max_context=3072, kv_share=4.0),
    ),
    "high-load": (
        "all at once, working set 3 to 4 times the KV cache: where scheduling pays",
        Settings(groups=4, n=4, turns=5, kv_share=0.29),
    ),
    "mixed": (
        "a whole step, full house first and tail last, KV cache for about half of it",
        Settings(groups=4, n=4, kv_share=0.5),
    ),
    "no-repeat": (
        "text with nothing to reuse: what War-RL costs where it cannot help",
        Settings(source="no-repeat", concurrency=2, groups=8, n=1, turns=4, kv_share=4.0),
    ),
    "fits-in-cache": (
        # Every replica could hold all of it, so no placement can overflow one.
        "all at once, everything fits into each replica's KV cache",
        Settings(groups=2, n=4, turns=5, kv_share=3.0),
    ),
}
"""Name -> what it shows, and its settings. Sized for two replicas of a 135M model on two cores in ten minutes."""

PACKAGED_GROUPS = {"low-load": 4, "high-load": 12, "mixed": 12, "fits-in-cache": 8}
"""Groups that a preset takes of the packaged recording, whose games are short beside what agents do elsewhere."""


def make_settings(preset: str, overrides: Mapping[str, Any] | None = None, *, packaged: bool = False) -> Settings:
    """A preset with some fields replaced; ``packaged`` sizes it for the packaged recording.

    Raises:
        ValueError: unknown preset or field, or a value that cannot work.
    """
    if preset not in PRESETS:
        raise ValueError(f"--preset {preset}: not one of {', '.join(PRESETS)}")
    known = [f.name for f in dataclasses.fields(Settings)]
    for name in overrides or {}:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            raise ValueError(f"unknown setting {name}" + (f"; did you mean {close[0]}?" if close else ""))
    sized = {"groups": PACKAGED_GROUPS[preset]} if packaged and preset in PACKAGED_GROUPS else {}
    return dataclasses.replace(PRESETS[preset][1], **{**sized, **(overrides or {})})


def add_flags(parser: argparse.ArgumentParser) -> None:
    """``--preset`` and one flag per field of :class:`Settings`; a flag that is not given stays out of the namespace."""
    parser.add_argument("--preset", choices=list(PRESETS), default="mixed", help="; ".join(_preset_help()))
    hints = typing.get_type_hints(Settings)
    for item in dataclasses.fields(Settings):
        hint = hints[item.name]
        kind = next(t for t in typing.get_args(hint) if t is not type(None)) if isinstance(hint, UnionType) else hint
        # No help per flag here: the class's docstrings are the reference, and argparse cannot see them.
        parser.add_argument(f"--{_flag(item.name)}", dest=item.name, type=kind, default=argparse.SUPPRESS)


def _preset_help() -> list[str]:
    return [f"{name}: {about}" for name, (about, _) in PRESETS.items()]


def settings_from_args(args: argparse.Namespace) -> Settings:
    """Settings from the flags of :func:`add_flags`; of other attributes only ``trace`` counts: without it the packaged
    recording is replayed."""
    names = {f.name for f in dataclasses.fields(Settings)}
    given = {name: value for name, value in vars(args).items() if name in names}
    return make_settings(args.preset, given, packaged=not getattr(args, "trace", None))


@dataclass(frozen=True, slots=True)
class KvPlan:
    """How much KV cache each replica gets.

    Attributes:
        kv_tokens: tokens, a multiple of the block size; None leaves it to the engine.
        working_set: tokens that hold all trajectories at once.
        pressure: working set over the KV cache of all replicas; 0 when the engine decides.
        raised: the wanted cache was too small for the longest trajectory and was raised to hold it.
    """

    kv_tokens: int | None
    working_set: int
    pressure: float
    raised: bool


def plan_kv(settings: Settings, items: Sequence[WorkItem]) -> KvPlan:
    """KV cache per replica that puts the wanted pressure on it.

    A cache that cannot hold the longest trajectory could not finish it, so a share is raised to that and said so; an
    explicit ``kv_tokens`` is refused instead.

    Raises:
        ValueError: ``kv_tokens`` is smaller than the longest trajectory.
    """
    block = settings.block_size
    working_set = working_set_tokens(items, block)
    # One block beyond the longest context: engines reserve a slot for the token being generated.
    least = (-(-max(len(item.tokens()) for item in items) // block) + 1) * block
    if settings.kv_tokens is not None:
        wanted = settings.kv_tokens // block * block
        if wanted < least:
            raise ValueError(
                f"--kv-tokens {settings.kv_tokens}: the longest trajectory needs {least}; "
                f"give at least that, or a smaller --max-context"
            )
    elif settings.kv_share is not None:
        wanted = -(-int(settings.kv_share * working_set / settings.replicas) // block) * block
    else:
        return KvPlan(None, working_set, 0.0, False)
    tokens = max(wanted, least)
    return KvPlan(tokens, working_set, working_set / (tokens * settings.replicas), tokens > wanted)
