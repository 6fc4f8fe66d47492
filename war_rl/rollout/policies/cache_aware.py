# SPDX-License-Identifier: Apache-2.0
"""SGLang's ``cache_aware`` router, with its documented thresholds."""

from __future__ import annotations

from collections.abc import Mapping

from war_rl.rollout.context import Context, PerTurnPolicy, ReplicaView, TurnView


class CacheAware(PerTurnPolicy):
    """Each turn on its own, without stickiness and without waiting:

    1. imbalanced (max - min > balance_abs_threshold and max > balance_rel_threshold * min, in running requests):
       shortest queue;
    2. else, best prefix match > cache_threshold of the prompt: that replica;
    3. else the replica with the smallest tree.

    Two differences from the original, both in its favour: it matches KV blocks instead of characters, and its tree is
    the residency model, so that it forgets what the engine evicts and what a weight update voids.
    """

    def choose(self, turn: TurnView, context: Context) -> tuple[ReplicaView, str, Mapping[str, float]]:
        config, replicas = self.config, context.replicas
        longest = max(r.running for r in replicas)
        shortest = min(r.running for r in replicas)
        gap = longest - shortest
        if gap > config.balance_abs_threshold and longest > config.balance_rel_threshold * shortest:
            queues = {r.id: float(r.running) for r in replicas}
            return min(replicas, key=lambda r: (r.running, r.last_first)), "imbalanced", queues
        prompt = max(1, turn.request.prompt_tokens)
        matches = {r.id: context.cached(turn, r) / prompt for r in replicas}
        best = max(replicas, key=lambda r: matches[r.id])
        if matches[best.id] > config.cache_threshold:
            return best, "cache_hit", matches
        return min(replicas, key=lambda r: (context.tree_size(r), r.last_first)), "smallest_tree", matches
