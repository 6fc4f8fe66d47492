# SPDX-License-Identifier: Apache-2.0
"""Settings of the HTTP router, and its command line."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from war_rl.config import CHOICES, ConfigError, SchedulerConfig, load_config
from war_rl.trainers.slime.corpus import CorpusConfig


@dataclass(frozen=True)
class RouterConfig:
    """Settings of the HTTP router; each is a flag of the command line."""

    host: str = "127.0.0.1"
    """Address to bind, and no other."""
    port: int = 30000
    """Port to bind; 0 lets the system choose, the log says which."""
    worker_urls: tuple[str, ...] = ()
    """Engines to register at the start."""
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    """The policy and its settings (``war.scheduler``)."""
    corpus: CorpusConfig = field(default_factory=CorpusConfig)
    """The drafting feed."""
    seed: int = 0
    """Of the scheduler's ties."""
    block_size: int = 16
    """Grain at which prompts are compared. Unit: tokens."""
    retries: int = 3
    """How often a request that lost its worker is placed again."""
    request_timeout_s: float = 14_400.0
    """Longest time a worker may take for one request; slime's own default. 0: no limit. Unit: seconds."""
    connect_timeout_s: float = 5.0
    """Longest time to connect to a worker. Unit: seconds."""
    keepalive_s: float = 3.0
    """How long an idle connection to a worker is kept; below the 5 s after which uvicorn closes it. Unit: seconds."""
    health_path: str = "/v1/models"
    """Path of a worker that answers 200 while it lives, and generates nothing."""
    health_interval_s: float = 5.0
    """Unit: seconds."""
    health_timeout_s: float = 5.0
    """Unit: seconds."""
    health_failures: int = 3
    """Failed checks in a row until a worker is lost. A refused connection loses it at once."""
    health_abandon_failures: int = 12
    """Failed checks in a row until what still waits for the worker is placed elsewhere, since a machine that vanishes
    closes no connection. Far above ``health_failures``: it gives up what the worker may yet answer."""
    session_ttl_s: float = 1800.0
    """A trajectory whose end nobody announces ends after this long without a request. Unit: seconds."""
    max_body_mb: int = 512
    """Largest request; SGLang's own default. Unit: MiB."""
    shutdown_grace_s: float = 5.0
    """How long running requests may go on after SIGTERM. Unit: seconds."""


def parse_args(argv: Sequence[str] | None = None) -> RouterConfig:
    """The configuration from the command line.

    Raises:
        ConfigError: a ``--scheduler`` setting is unknown or out of range.
    """
    parser = argparse.ArgumentParser(
        prog="python -m war_rl.trainers.slime.router", description="War-RL's HTTP router for slime (docs/slime.md)."
    )
    parser.add_argument("--policy", default=None, help=f"{', '.join(CHOICES['scheduler.policy'])}, or a dotted path")
    parser.add_argument(
        "--scheduler", action="append", default=[], metavar="KEY=VALUE", help="any war.scheduler setting; repeatable"
    )
    parser.add_argument("--worker-urls", nargs="*", default=[], help="engines to register at the start")
    parser.add_argument("--no-corpus", action="store_true", help="publish no finished trajectories")
    for name, kind in _FLAGS.items():
        default = getattr(RouterConfig, name)
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, default=default, help=f"default {default}")
    for name, kind in _CORPUS_FLAGS.items():
        default = getattr(CorpusConfig, name)
        parser.add_argument(f"--corpus-{name.replace('_', '-')}", type=kind, default=default, help=f"default {default}")
    args = parser.parse_args(argv)
    settings = dict(_setting(text) for text in args.scheduler)
    if args.policy is not None:
        settings["policy"] = args.policy
    scheduler = load_config({"scheduler": settings}).scheduler
    if scheduler.engine_priority:
        raise ConfigError(
            "--scheduler engine_priority=true: SGLang's engines get no priority from this router; leave it out"
        )
    return RouterConfig(
        worker_urls=tuple(args.worker_urls),
        scheduler=scheduler,
        corpus=CorpusConfig(
            enabled=not args.no_corpus, **{name: getattr(args, f"corpus_{name}") for name in _CORPUS_FLAGS}
        ),
        **{name: getattr(args, name) for name in _FLAGS},
    )


_FLAGS: dict[str, Any] = {
    name: type(getattr(RouterConfig, name))
    for name in RouterConfig.__dataclass_fields__
    if name not in ("worker_urls", "scheduler", "corpus")
}
_CORPUS_FLAGS: dict[str, Any] = {
    name: type(getattr(CorpusConfig, name)) for name in CorpusConfig.__dataclass_fields__ if name != "enabled"
}


def _setting(text: str) -> tuple[str, Any]:
    key, found, value = text.partition("=")
    if not found:
        raise ConfigError(f"--scheduler {text!r}: expected KEY=VALUE, for example migrate_max=0")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value
