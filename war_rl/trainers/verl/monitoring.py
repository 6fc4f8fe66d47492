# SPDX-License-Identifier: Apache-2.0
"""Prometheus: the router's endpoint beside the engines', where verl's own option is on.

verl (0.9.1) writes the list of servers to scrape as soon as the engines are up, before there is a router; so it is
written once more, by the same function, with the router in it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import ray

_CALL_TIMEOUT_S = 60.0


def add_router(
    rollout: Any, servers: Sequence[str], router: Any, write: Callable[[Any, list[str], str], None] | None = None
) -> str:
    """Have the router's state scraped as well.

    Args:
        rollout: verl's ``actor_rollout_ref.rollout``.
        servers: ``host:port`` of the engines' servers.
        router: War-RL's router actor.
        write: takes Prometheus' settings, all targets and the rollout's name; verl's own function when None.

    Returns:
        ``host:port`` of the router's endpoint; "" where ``rollout.prometheus.enable`` is off.
    """
    if not rollout.prometheus.enable:
        return ""
    address = str(ray.get(router.serve_metrics.remote(), timeout=_CALL_TIMEOUT_S))
    if write is None:
        from verl.workers.rollout.utils import update_prometheus_config as write
    write(rollout.prometheus, [*servers, address], rollout.name)
    return address
