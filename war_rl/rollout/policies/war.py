# SPDX-License-Identifier: Apache-2.0
"""The scheduler of WAR as published (arXiv 2607.17299), edge cases made safe."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import islice

from war_rl.config import SchedulerConfig
from war_rl.rollout.context import Context, Policy, ReplicaView, TurnView

WAITING, TURNS, CACHE, INFLIGHT = 1000.0, 100.0, 10.0, 1.0
"""Weights of the score's terms. The paper gives their order only; each term lies in [0, 1], so the order is strict."""


class War(Policy):
    """Fewer than ``war_threshold`` requests in the system: least requests, sticky. Otherwise a replica with room in its
    concurrency window takes the waiting request with the highest

        score = WAITING * [waited > war_wait_s] - TURNS * T_group / max T + CACHE * hit rate - INFLIGHT * inflight / W

    Made safe, where the published rules would stall or leave open:

    - W = min(max(1, W_hat), inflight + queue / N) is 0 when idle and below inflight + 1 when the queue is shorter than
      the number of replicas, so that nothing would ever start: it is rounded up and at least 1.
    - The window follows the cache hit rate by additive increase and multiplicative decrease. The paper raises it when
      the hit rate is low, which feeds a thrashing replica; by default it is lowered then. ``war_published_direction``
      restores the published direction.
    - The number of running requests is bounded by the window, KV is not looked at.
    - At most ``war_scan`` waiting requests, oldest first, are scored in one decision.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(config)
        self._windows: dict[str, float] = {}

    def plan(self, context: Context) -> None:
        if context.in_system < self.config.war_threshold:
            for turn in context.waiting():
                self._least_request(turn, context)
        else:
            self._by_priority(context)

    def window(self, replica: ReplicaView, queue: int, replicas: int) -> int:
        """W of one replica, in requests, at least 1. ``queue``: requests that wait in the whole system."""
        estimate = self._windows.get(replica.id, self.config.war_window)
        return max(1, math.ceil(min(max(1.0, estimate), replica.running + queue / replicas)))

    def observe(self, replica: ReplicaView, prompt_tokens: int, cached_tokens: int | None) -> None:
        if cached_tokens is None:
            return
        window = self._windows.get(replica.id, self.config.war_window)
        low = replica.hit_rate < self.config.war_hit_target
        if low == self.config.war_published_direction:
            window += self.config.war_increase / window
        else:
            # One decrease per window of finished turns, spread over its turns.
            window *= self.config.war_decrease ** (1.0 / max(1.0, window))
        self._windows[replica.id] = min(max(1.0, window), 1e6)

    def forget(self, replica_id: str) -> None:
        self._windows.pop(replica_id, None)

    def gauges(self) -> Mapping[str, float]:
        values = self._windows.values()
        return {"window_mean": sum(values) / len(values)} if values else {}

    def _least_request(self, turn: TurnView, context: Context) -> None:
        home = context.home(turn)
        if home is not None:
            context.place(turn, home, "sticky", {home.id: float(home.running)})
            return
        replica = min(context.replicas, key=lambda r: (r.running, r.last_first))
        reason = "home_gone" if context.has_run(turn) else "first"
        context.place(turn, replica, reason, {r.id: float(r.running) for r in context.replicas})

    def _by_priority(self, context: Context) -> None:
        longest = max((context.group_turns(t) for t in islice(context.waiting(), self.config.war_scan)), default=1.0)
        while turns := list(islice(context.waiting(), self.config.war_scan)):
            room = {r.id: self.window(r, context.queued, len(context.replicas)) for r in context.replicas}
            open_replicas = [r for r in context.replicas if r.running < room[r.id]]
            if not open_replicas:
                return
            best: tuple[float, TurnView, ReplicaView] | None = None
            for turn in turns:
                # A trajectory with a turn running stays with it: only a tool gap lets it move.
                home = context.home(turn)
                bound = home is not None and not context.in_tool_gap(turn)
                for replica in open_replicas:
                    if bound and replica is not home:
                        continue
                    score = self.score(turn, replica, room[replica.id], longest, context)
                    if best is None or score > best[0]:
                        best = (score, turn, replica)
            if best is None:
                return
            score, turn, replica = best
            moved = context.has_run(turn) and context.home(turn) is not replica
            context.place(turn, replica, "priority_moved" if moved else "priority", {replica.id: -score})

    def score(self, turn: TurnView, replica: ReplicaView, window: int, longest: float, context: Context) -> float:
        """Higher is served first. ``longest``: the largest T_group among the candidates, in turns."""
        late = 1.0 if context.now - turn.submitted > self.config.war_wait_s else 0.0
        turns = context.group_turns(turn) / max(longest, 1e-9)
        hit = context.cached(turn, replica) / max(1, turn.request.prompt_tokens)
        return WAITING * late - TURNS * turns + CACHE * hit - INFLIGHT * replica.running / window
