# SPDX-License-Identifier: Apache-2.0
"""The ``war:`` section of the trainer's configuration as typed dataclasses.

Every field has a default and says its unit. :func:`load_config` turns a plain mapping into a :class:`WarConfig` and
refuses what it does not know, naming the key, the value and a working alternative.
"""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


class ConfigError(ValueError):
    """A configuration value that cannot work. The message names the key, the value and what would work."""


@dataclass(frozen=True)
class SpecConfig:
    """Drafting (``war.spec``)."""

    policy: str = "budget"
    """Who decides how many tokens to draft: ``budget`` (as many as pay by the fitted step time), ``war`` (the published
    rule: drafting is on while a replica runs at most ``max_running`` requests) or ``off``."""
    replicas: str = "all"
    """Which replicas can draft: ``all``, ``none``, or a number, the first so many. Being able to draft has a price in
    vLLM on GPUs even while nothing is drafted (`war-rl doctor`); a replica that cannot runs as verl's own would."""
    max_running: int = 16
    """Policy ``war``: most requests running on a replica for which it still drafts. With every policy: where the
    progress line begins to call a replica's load high. Unit: requests."""
    max_draft_tokens: int = 12
    """Most tokens drafted for one request in one engine step. Unit: tokens."""
    min_token_prob: float = 0.1
    """Policy ``war``: a draft ends where the next token's estimated chance falls below this. Unit: probability."""
    window_steps: int = 2
    """How many past steps' text stays draftable; 0 keeps the current step only. Unit: steps."""
    memory_mb: int = 1024
    """Hard bound of all text of one replica, oldest step evicted first. Unit: MiB."""
    ingest_ms: float = 2.0
    """Longest time that taking in or evicting text may hold one engine step. Unit: milliseconds."""
    feed: bool = True
    """Whether finished turns and trajectories are sent to the drafters of all other replicas."""
    feed_interval_ms: float = 50.0
    """How long the feed waits to batch messages. Unit: milliseconds."""
    feed_max_mb: int = 64
    """Most text waiting in one worker's feed; beyond it the oldest is dropped and counted. Unit: MiB."""

    def drafts_on(self, replica: int) -> bool:
        """Whether the replica of this rank, counted from 0, loads a drafter."""
        if self.policy == "off" or self.replicas == "none":
            return False
        return self.replicas == "all" or replica < int(self.replicas)


@dataclass(frozen=True)
class SchedulerConfig:
    """Which turn runs where and when (``war.scheduler``)."""

    policy: str = "cost"
    """``cost``: cheapest replica in seconds, admission by KV capacity; where everything fits, nothing waits.
    ``war``: the published rules of WAR. ``sticky_least_inflight``: verl's router. ``cache_aware``: SGLang's router.
    ``round_robin``: first replicas in turn, where trajectories stay. Or a dotted path to a policy class."""
    progress_alpha: float = 0.5
    """Weight of a finished trajectory in its group's estimate, T <- alpha * T_obs + (1 - alpha) * T_old. Unit: none."""
    prior_turns: float = 4.0
    """Turns of a trajectory, believed until the first one finishes. Unit: turns."""
    prior_turn_tokens: float = 128.0
    """Tokens generated in one turn, believed until the first one ends. Unit: tokens."""
    prior_context_tokens: float = 2048.0
    """Context of a trajectory's last turn, believed until the first one finishes. Unit: tokens."""
    prior_prefill_tokens_per_s: float = 4000.0
    """Prompt tokens a replica computes per second, believed until measured. Unit: tokens per second."""
    prior_decode_ms: float = 25.0
    """Time per generated token of a turn that runs alone, believed until measured. Unit: milliseconds."""
    prior_interference_ms: float = 1.5
    """Time that each further running turn adds to each generated token, believed until measured. Unit: milliseconds."""
    rate_forgetting: float = 0.98
    """Weight of a replica's past turns after each new one in the fit of its rates. Unit: none."""
    admission_fill: float = 1.0
    """Policy ``cost``: share of a replica's KV cache that may be promised to trajectories. Unit: fraction."""
    admission_growth: float = 0.35
    """Policy ``cost``: share of a trajectory's expected further growth that admission reserves; none where the whole
    cache could be computed anew within about the time of one turn. Unit: fraction."""
    idle_patience: float = 2.0
    """A trajectory in a tool call keeps its full KV promise for this many usual tool times, unless computing its text
    anew costs less than what could run in its place. Unit: usual tool times."""
    idle_prior_s: float = 1.0
    """Usual time between two turns of a trajectory, believed until measured. Unit: seconds."""
    max_wait_s: float = 60.0
    """Policy ``cost``: a new trajectory that has waited this long is served before younger ones. Unit: seconds."""
    migrate_margin_s: float = 1.0
    """Policy ``cost``: a trajectory moves only if that saves at least this much. Unit: seconds."""
    migrate_ratio: float = 2.0
    """Policy ``cost``: a trajectory moves only if staying costs this many times as much. Unit: none."""
    migrate_max: int = 2
    """Policy ``cost``: most moves of one trajectory; 0 forbids moving. Unit: moves."""
    migrate_rest_turns: int = 2
    """Policy ``cost``: turns a trajectory stays after a move before it may move again. Unit: turns."""
    sandbox_limit_s: float = 0.0
    """Policy ``cost``: a trajectory's sandbox dies this long after its first turn; 0 means never. Unit: seconds."""
    sandbox_urgency_s: float = 60.0
    """Policy ``cost``: with less sandbox time left than this, a returning turn goes first. Unit: seconds."""
    cache_threshold: float = 0.5
    """Policy ``cache_aware``: share of the prompt that must match to follow the cache (SGLang). Unit: fraction."""
    balance_abs_threshold: int = 32
    """Policy ``cache_aware``: imbalance needs more than this difference of running turns (SGLang). Unit: requests."""
    balance_rel_threshold: float = 1.0001
    """Policy ``cache_aware``: imbalance needs more than this ratio of running turns (SGLang). Unit: none."""
    war_threshold: int = 64
    """Policy ``war``: with fewer requests in the system, least requests and sticky; else priority. Unit: requests."""
    war_wait_s: float = 10.0
    """Policy ``war``: a request that has waited longer comes before all that have not. Unit: seconds."""
    war_window: float = 16.0
    """Policy ``war``: initial concurrency window of a replica. Unit: requests."""
    war_hit_target: float = 0.5
    """Policy ``war``: cache hit rate at which the window turns. Unit: fraction."""
    war_increase: float = 1.0
    """Policy ``war``: the window grows by this over one window of finished turns. Unit: requests."""
    war_decrease: float = 0.5
    """Policy ``war``: the window shrinks to this share of itself. Unit: fraction."""
    war_published_direction: bool = False
    """Policy ``war``: raise the window when the hit rate is low, as published; False lowers it then."""
    war_scan: int = 256
    """Policy ``war``: most waiting requests scored per decision, oldest first. Unit: requests."""
    engine_priority: bool = False
    """Let vLLM's own scheduler prefer trajectories that have had more turns, so that it preempts the one that is least
    far along. Needs ``actor_rollout_ref.rollout.scheduling_policy=priority``."""
    lease_s: float = 60.0
    """What a client process holds is released when it has not been heard of for this long; 0 means never.
    Unit: seconds."""
    explain: int = 0
    """How many of the last decisions are kept with reason and costs for inspection; above 0 each one is also compared
    with its alternatives and written to the router's log. Costs time. Unit: decisions."""


@dataclass(frozen=True)
class EnvConfig:
    """Environments (``war.env``)."""

    step_timeout_s: float = 60.0
    """Longest time one environment call may take before its trajectory fails. Unit: seconds."""
    max_turns: int = 20
    """Most assistant turns of one trajectory in the built-in agent loops. Unit: turns."""
    max_tokens_per_turn: int = 128
    """Most tokens the built-in agent loops let the model write in one turn. Unit: tokens."""


@dataclass(frozen=True)
class FaultConfig:
    """Bounds on everything that can hang (``war.fault``)."""

    trajectory_timeout_s: float = 0.0
    """Longest time one trajectory may take before it fails, as a raising agent loop would; 0 means no bound.
    Unit: seconds."""
    health_interval_s: float = 2.0
    """How often replicas are asked for their health while a step's trajectories come in. Unit: seconds."""
    health_timeout_s: float = 30.0
    """A replica that does not answer for this long is dead. Unit: seconds."""
    worker_timeout_s: float = 600.0
    """An agent-loop worker that does not answer for this long is lost, and the run ends: an agent loop blocks its event
    loop, which is named in the log after half a minute. Unit: seconds."""
    stall_s: float = 300.0
    """When nothing has come in for this long, the trajectories that are waited for are named; after as long again the
    run ends if an engine has made no step meanwhile. 0 means never. Unit: seconds."""
    update_timeout_s: float = 1800.0
    """A weight update that takes longer hangs, and the run ends; 0 means no bound. Unit: seconds."""


@dataclass(frozen=True)
class WandbConfig:
    """Weights & Biases (``war.wandb``), where ``trainer.logger`` has it."""

    slowest_every: int = 10
    """The slowest trajectories are logged as a table every so many steps; 0 never. Unit: steps."""
    slowest_rows: int = 20
    """Rows of that table. Unit: trajectories."""
    alerts: bool = True
    """Whether alarms are also sent as W&B alerts; they are in the log in any case."""


@dataclass(frozen=True)
class WarConfig:
    """The whole ``war:`` section."""

    spec: SpecConfig = field(default_factory=SpecConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    env: EnvConfig = field(default_factory=EnvConfig)
    fault: FaultConfig = field(default_factory=FaultConfig)
    wandb: WandbConfig = field(default_factory=WandbConfig)
    trace: str = "sampled"
    """Event data in the run folder, for ``war-rl report`` and ``war-rl trace``: ``full``, ``sampled`` (at most 64
    trajectories of each rollout, the slowest among them) or ``off``."""
    trace_mb: int = 64
    """Most that the trace may hold on disk; the oldest steps go first. Unit: MiB."""
    progress: str = "auto"
    """Live progress while trajectories come in: ``auto`` (a display on a terminal, sparse lines in a log), ``on``,
    ``off``. See docs/monitoring.md."""
    poll_interval_s: float = 0.05
    """How often the trainer looks for finished trajectories; stock verl's 2 s quantises ``timing_s/gen``.
    Unit: seconds."""
    record_trajectories: str = ""
    """Folder that receives each finished trajectory as JSON lines; "" records nothing. Unit: path."""


CHOICES: dict[str, tuple[str, ...]] = {
    "spec.policy": ("budget", "war", "off"),
    "scheduler.policy": (
        "cost",
        "war",
        "sticky_least_inflight",
        "cache_aware",
        "round_robin",
    ),
    "spec.replicas": ("all", "none"),
    "progress": ("auto", "on", "off"),
    "trace": ("off", "sampled", "full"),
}
"""Values a string field may take, by key below ``war.``."""

COUNTS = ("spec.replicas",)
"""Keys that also take a whole number from 0 on, in place of one of their words."""

DOTTED = ("scheduler.policy",)
"""Keys that also take the dotted path of a class of the user's own."""

BOUNDS: dict[str, tuple[float, float]] = {
    "spec.max_running": (1, 1_000_000),
    "spec.max_draft_tokens": (1, 64),
    "spec.min_token_prob": (0.0, 1.0),
    "spec.window_steps": (0, 1000),
    "spec.memory_mb": (1, 1_000_000),
    "spec.ingest_ms": (0.1, 1000.0),
    "spec.feed_interval_ms": (0.0, 10_000.0),
    "spec.feed_max_mb": (1, 100_000),
    "scheduler.progress_alpha": (0.001, 1.0),
    "scheduler.prior_turns": (1.0, 100_000.0),
    "scheduler.prior_turn_tokens": (1.0, 10_000_000.0),
    "scheduler.prior_context_tokens": (1.0, 100_000_000.0),
    "scheduler.prior_prefill_tokens_per_s": (1.0, 100_000_000.0),
    "scheduler.prior_decode_ms": (0.001, 100_000.0),
    "scheduler.prior_interference_ms": (0.000_01, 100_000.0),
    "scheduler.rate_forgetting": (0.5, 1.0),
    "scheduler.admission_fill": (0.1, 10.0),
    "scheduler.admission_growth": (0.0, 2.0),
    "scheduler.idle_patience": (0.0, 1000.0),
    "scheduler.idle_prior_s": (0.001, 86_400.0),
    "scheduler.max_wait_s": (0.0, 864_000.0),
    "scheduler.migrate_margin_s": (0.0, 86_400.0),
    "scheduler.migrate_ratio": (1.0, 1000.0),
    "scheduler.migrate_max": (0, 1000),
    "scheduler.migrate_rest_turns": (0, 1000),
    "scheduler.sandbox_limit_s": (0.0, 864_000.0),
    "scheduler.sandbox_urgency_s": (0.0, 864_000.0),
    "scheduler.cache_threshold": (0.0, 1.0),
    "scheduler.balance_abs_threshold": (0, 1_000_000),
    "scheduler.balance_rel_threshold": (1.0, 1000.0),
    "scheduler.war_threshold": (0, 1_000_000),
    "scheduler.war_wait_s": (0.0, 86_400.0),
    "scheduler.war_window": (1.0, 1_000_000.0),
    "scheduler.war_hit_target": (0.0, 1.0),
    "scheduler.war_increase": (0.0, 1000.0),
    "scheduler.war_decrease": (0.01, 1.0),
    "scheduler.war_scan": (1, 1_000_000),
    "scheduler.lease_s": (0.0, 864_000.0),
    "scheduler.explain": (0, 1_000_000),
    "env.step_timeout_s": (0.01, 86_400.0),
    "env.max_turns": (1, 100_000),
    "env.max_tokens_per_turn": (1, 1_000_000),
    "fault.trajectory_timeout_s": (0.0, 864_000.0),
    "fault.health_interval_s": (0.1, 3600.0),
    "fault.health_timeout_s": (1.0, 3600.0),
    "fault.worker_timeout_s": (1.0, 86_400.0),
    "fault.stall_s": (0.0, 86_400.0),
    "fault.update_timeout_s": (0.0, 86_400.0),
    "poll_interval_s": (0.001, 60.0),
    "trace_mb": (1, 1_000_000),
    "wandb.slowest_every": (0, 1_000_000),
    "wandb.slowest_rows": (1, 10_000),
}
"""Inclusive range of each number, by key below ``war.``."""


def load_config(values: Mapping[str, Any] | None) -> WarConfig:
    """Typed configuration from the plain mapping under ``war:``.

    Raises:
        ConfigError: unknown key, wrong type, value out of range, or contradicting values.
    """
    config: WarConfig = _build(WarConfig, dict(values or {}), "")
    _check_contradictions(config)
    return config


def _build(cls: type[Any], values: Mapping[str, Any], prefix: str) -> Any:
    hints = typing.get_type_hints(cls)
    known = {f.name: f for f in dataclasses.fields(cls)}
    kwargs: dict[str, Any] = {}
    for name, value in values.items():
        key = f"{prefix}{name}"
        if name not in known:
            close = difflib.get_close_matches(str(name), known, n=1)
            hint = f"; did you mean war.{prefix}{close[0]}?" if close else ""
            raise ConfigError(f"war.{key}={value!r}: unknown key{hint} Known keys here: {', '.join(known)}")
        kwargs[name] = _convert(key, value, hints[name])
    return cls(**kwargs)


def _convert(key: str, value: Any, hint: Any) -> Any:
    if dataclasses.is_dataclass(hint):
        if not isinstance(value, Mapping):
            raise ConfigError(f"war.{key}={value!r}: expected a section (mapping)")
        return _build(typing.cast(type[Any], hint), value, f"{key}.")
    if isinstance(hint, types.UnionType) and value is None:
        return None
    if hint is bool:
        return _expect(key, value, bool, "true or false")
    if hint is int:
        number = _expect(key, value, int, "a whole number")
        return _in_bounds(key, number)
    if hint is float:
        return _in_bounds(key, float(_expect(key, value, (int, float), "a number")))
    choices = CHOICES.get(key)
    if key in COUNTS:
        return _count_or_word(key, value, CHOICES[key])
    if isinstance(value, bool) and choices and ("on" if value else "off") in choices:
        # YAML 1.1 reads an unquoted on/off as a boolean.
        value = "on" if value else "off"
    text = str(_expect(key, value, str, "a string"))
    if choices and text not in choices and not (key in DOTTED and "." in text):
        raise ConfigError(f"war.{key}={text!r}: not one of {', '.join(choices)}")
    return text


def _count_or_word(key: str, value: Any, words: tuple[str, ...]) -> str:
    text = str(value).strip()
    if text not in words and (isinstance(value, bool) or not (text.isascii() and text.isdigit())):
        raise ConfigError(f"war.{key}={value!r}: expected {', '.join(words)} or a whole number, such as 1")
    return text


def _expect(key: str, value: Any, kind: Any, words: str) -> Any:
    if isinstance(value, bool) and kind is not bool:
        raise ConfigError(f"war.{key}={value!r}: expected {words}")
    if not isinstance(value, kind):
        raise ConfigError(f"war.{key}={value!r}: expected {words}, got {type(value).__name__}")
    return value


def _in_bounds(key: str, value: Any) -> Any:
    low, high = BOUNDS[key]
    if not low <= value <= high:
        raise ConfigError(f"war.{key}={value!r}: must lie in [{low:g}, {high:g}]")
    return value


def _check_contradictions(config: WarConfig) -> None:
    fault = config.fault
    if fault.trajectory_timeout_s and fault.trajectory_timeout_s < config.env.step_timeout_s:
        raise ConfigError(
            f"war.fault.trajectory_timeout_s={fault.trajectory_timeout_s:g} is shorter than "
            f"war.env.step_timeout_s={config.env.step_timeout_s:g}, which could then never apply: lower the latter"
        )


def to_dict(config: WarConfig) -> dict[str, Any]:
    """Plain nested dict, the inverse of :func:`load_config`."""
    return dataclasses.asdict(config)
