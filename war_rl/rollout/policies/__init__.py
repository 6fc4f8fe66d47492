# SPDX-License-Identifier: Apache-2.0
"""Policies by name. One file each; a user's own is named by its dotted path."""

from __future__ import annotations

import importlib

from war_rl.config import ConfigError, SchedulerConfig
from war_rl.rollout.context import Policy
from war_rl.rollout.policies.cache_aware import CacheAware
from war_rl.rollout.policies.cost import CostPolicy
from war_rl.rollout.policies.sticky import RoundRobin, StickyLeastInflight
from war_rl.rollout.policies.war import War

POLICIES: dict[str, type[Policy]] = {
    "cost": CostPolicy,
    "war": War,
    "sticky_least_inflight": StickyLeastInflight,
    "cache_aware": CacheAware,
    "round_robin": RoundRobin,
}


def make_policy(config: SchedulerConfig) -> Policy:
    """The policy that ``war.scheduler.policy`` names.

    Raises:
        ConfigError: no such name, or the dotted path does not lead to a subclass of Policy.
    """
    name = config.policy
    known = POLICIES.get(name)
    if known is not None:
        return known(config)
    module, _, attribute = name.rpartition(".")
    if not module:
        raise ConfigError(
            f"war.scheduler.policy={name!r}: not one of {', '.join(POLICIES)}, nor a dotted path (my_pkg.MyPolicy)"
        )
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"war.scheduler.policy={name!r}: {error}; built in are {', '.join(POLICIES)}") from error
    if not (isinstance(found, type) and issubclass(found, Policy)):
        raise ConfigError(f"war.scheduler.policy={name!r}: must be a subclass of war_rl.rollout.context.Policy")
    return found(config)
