# SPDX-License-Identifier: Apache-2.0
"""The default: cheapest in seconds, admitted by KV capacity, resumed before new, longest expected first."""

from __future__ import annotations

import math
from collections.abc import Iterator

from war_rl.rollout.context import UPROOTED, Context, Policy, ReplicaView, TurnView


class CostPolicy(Policy):
    """Order of service:

    1. Turns that return to their replica, those first whose trajectory came there first (a sandbox about to die first
       of all). They start while the KV of the running turns fits, and while their trajectory has a seat: where
       trajectories grew beyond what admission expected, those that came last wait until others have ended. Served in
       the order of return instead, each would find its text thrown out for the others', and none would gain from its
       cache. One that must wait moves if that saves ``migrate_margin_s`` and a factor ``migrate_ratio`` of waiting and
       prefill, in a tool gap, at most ``migrate_max`` times; or, however often, where its replica holds nothing of it
       any more, so that it would be computed anew anywhere.
    2. Turns whose replica is lost or draining: to the cheapest replica that admits them.
    3. New trajectories that have waited ``max_wait_s``, oldest first; then one probe per group; then longest expected
       first. Each goes to the cheapest replica that admits it; siblings count for more there where nobody drafts and
       lengths are unknown. Where the first finds no room, none overtakes it.

    In the tail (no new trajectory waits) a trajectory also moves, within the same bounds, from a replica that cannot
    draft to one that does, if its measured rates make that pay over the output still expected.

    Starvation bound: after ``max_wait_s`` a new trajectory is overtaken by turns of already admitted trajectories only,
    which are finite; the head of a replica's line starts at the latest when nothing runs there.
    Costs are in seconds.
    """

    def plan(self, context: Context) -> None:
        for replica in context.blocked_replicas():
            self._resume(replica, context)
        for turn in context.homeless():
            if not self._admit(turn, context, "home_gone"):
                return
        for turn, reason in self._fresh(context):
            if not self._admit(turn, context, reason):
                return

    def _resume(self, home: ReplicaView, context: Context) -> None:
        ahead = 0
        for turn in self._by_urgency(home, context):
            # Who stands behind a turn that must wait, waits too: otherwise small turns would starve a large one.
            if ahead == 0 and self._may_start(turn, home, context):
                drafter = self._drafter_for(turn, home, context)
                if drafter is None:
                    # Nothing is compared: the context is here, and it starts now. Costs are for those who look.
                    looked = self.config.explain > 0
                    costs = {r.id: context.cost(turn, r).total for r in context.replicas} if looked else None
                    context.place(turn, home, "sticky", costs)
                else:
                    context.place(turn, drafter[0], "to_drafter", drafter[1])
                continue
            if ahead == 0:
                context.still_blocked(home)
            if not context.look_around(home) or not (context.any_open or context.any_spare):
                return
            if (target := self._move(turn, home, ahead + 1, context)) is not None:
                context.place(turn, target[0], "migrated", target[1])
            elif (target := self._uproot(turn, home, context)) is not None:
                context.place(turn, target[0], UPROOTED, target[1])
            else:
                ahead += 1
                if ahead >= LOOK:
                    return

    def _may_start(self, turn: TurnView, home: ReplicaView, context: Context) -> bool:
        if not context.fits(turn, home):
            return False
        # Nothing runs: whoever has a seat is in a tool, and an engine that stands still helps nobody.
        return home.running == 0 or context.seated(turn, home) or self._is_urgent(turn, context)

    def _is_urgent(self, turn: TurnView, context: Context) -> bool:
        return self.config.sandbox_limit_s > 0 and context.sandbox_left(turn) < self.config.sandbox_urgency_s

    def _by_urgency(self, home: ReplicaView, context: Context) -> Iterator[TurnView]:
        if self.config.sandbox_limit_s <= 0:
            return context.resumed(home)
        turns = list(context.resumed(home))
        urgent = sorted((t for t in turns if self._is_urgent(t, context)), key=context.sandbox_left)
        return iter(urgent + [t for t in turns if not self._is_urgent(t, context)])

    def _move(
        self, turn: TurnView, home: ReplicaView, ahead: int, context: Context
    ) -> tuple[ReplicaView, dict[str, float]] | None:
        """A replica that is worth moving to, with the costs compared."""
        config = self.config
        if not context.any_open:
            return None
        # A busier target counts against moving, a less busy one not for it: moving only to even out decoding costs more
        # in recomputed prompts than it gains.
        if context.queue_cost(turn, home, ahead) <= config.migrate_margin_s or not context.may_migrate(turn):
            return None
        others = [
            (context.queue_cost(turn, r), i, r) for i, r in enumerate(context.open_replicas(turn)) if r is not home
        ]
        if not others:
            return None
        here = context.cost(turn, home, ahead)
        stay = here.wait
        for queue, _, replica in sorted(others, key=lambda entry: entry[:2])[:LOOK]:
            if queue + config.migrate_margin_s >= stay:
                return None
            if context.admits(turn, replica):
                cost = context.cost(turn, replica)
                there = cost.wait + max(0.0, cost.interference - here.interference)
                if stay - there > config.migrate_margin_s and stay > config.migrate_ratio * there:
                    return replica, {home.id: stay, replica.id: there}
        return None

    def _uproot(
        self, turn: TurnView, home: ReplicaView, context: Context
    ) -> tuple[ReplicaView, dict[str, float]] | None:
        """A replica with room for a turn whose text its own replica has lost: it would be computed anew in any case.

        This is what happens where more is promised than fits, so promises are no reason against it.
        """
        if not context.in_tool_gap(turn):
            return None
        spare = context.spare_replicas(turn)
        if not spare:
            return None
        held = context.cached(turn, home)
        loads = ((context.load_cost(turn, r), r.last_first, i, r) for i, r in enumerate(spare))
        for load, _, _, replica in sorted(loads):
            lost = (held - context.cached(turn, replica)) * replica.rates.prefill
            if lost <= UPROOT_SECONDS and context.fits(turn, replica):
                return replica, {replica.id: load}
        return None

    def _drafter_for(
        self, turn: TurnView, home: ReplicaView, context: Context
    ) -> tuple[ReplicaView, dict[str, float]] | None:
        """A drafting replica on which the rest of the trajectory would be enough faster to pay for moving there."""
        if home.can_draft or not context.any_drafter or not context.any_open or not context.may_migrate(turn):
            return None
        if next(context.fresh(), None) is not None:
            return None
        output = context.remaining(turn).output_tokens
        here = context.cost(turn, home)
        for replica in context.open_replicas(turn):
            saved = output * (home.rates.decode - replica.rates.decode)
            if not replica.can_draft or saved <= self.config.migrate_margin_s:
                continue
            cost = context.cost(turn, replica)
            price = cost.wait - here.wait + max(0.0, cost.interference - here.interference)
            pays = saved - price > self.config.migrate_margin_s and saved > self.config.migrate_ratio * price
            if pays and context.admits(turn, replica):
                return replica, {home.id: saved, replica.id: price}
        return None

    def _fresh(self, context: Context) -> Iterator[tuple[TurnView, str]]:
        aged = set()
        for turn in context.fresh_by_age():
            if context.now - turn.submitted < self.config.max_wait_s:
                break
            aged.add(turn.request.key)
            yield turn, "aged"
        for turn in context.fresh():
            if turn.request.key not in aged:
                yield turn, "first"

    def _admit(self, turn: TurnView, context: Context, reason: str) -> bool:
        """Place on the cheapest replica that admits it; False where none does."""
        if not context.any_open:
            return False
        room = context.open_replicas(turn)
        loads = context.load_costs(turn, room)
        costs: dict[str, float] = {}
        seen: list[tuple[bool, int, int, int, float, ReplicaView]] = []
        best = limit = math.inf
        order = sorted((load, r.last_first, i, r) for i, (load, r) in enumerate(zip(loads, room, strict=True)))
        for load, recent, i, replica in order:
            # The load alone already costs more than the best: so do all that follow.
            if load > limit:
                break
            total = load + context.prefill_cost(turn, replica)
            if total < best:
                if not context.admits(turn, replica):
                    continue
                # Differences smaller than what is known about costs are no reason to send everything to one replica.
                best, limit = total, total * (1.0 + TIE) + TIE_SECONDS
            if total <= limit:
                costs[replica.id] = total
                siblings = 0 if context.any_drafter else context.siblings(turn, replica)
                seen.append((not replica.can_draft, siblings, recent, i, total, replica))
        for _, _, _, _, total, replica in sorted(seen):
            if total <= limit and context.admits(turn, replica):
                context.place(turn, replica, reason, costs)
                return True
        return False


UPROOT_SECONDS = 0.05
"""Prefill that a turn which must wait may lose by a move that is free. Unit: seconds."""
TIE, TIE_SECONDS = 0.02, 0.002
"""Costs that differ by less than this share and these seconds are equal. Of equals, a replica that drafts takes it,
then, where no replica drafts, the one with the fewest siblings, then the one chosen longest ago.

Members of a group are alike in length: a long one that lives on one replica is what the step waits for. Where drafts
are made, spreading was tried: the replicas were more even, but siblings no longer saw each other's text as it was
written, and more engine steps were needed (500 against 475)."""
LOOK = 4
"""How many blocked turns of one replica, and how many targets for each, are looked at in one decision."""
