# SPDX-License-Identifier: Apache-2.0
"""Measures what drafting does on real text: the real drafter in the simulation, turn by turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from war_rl.sim.drafts import KINDS, Acceptance
from war_rl.sim.engine import Request
from war_rl.sim.simulator import Setup, Simulation
from war_rl.sim.work import SimTrajectory

LEAST_STEPS = 4
"""Turns with fewer verify steps say little about a rate."""


def measure(setup: Setup, work: Sequence[SimTrajectory], keep: int = 64, source: str = "") -> Acceptance:
    """Per turn, tokens committed and drafted per verify step, apart by whose text there was to draft from.

    Args:
        setup: with drafting on; its acceptance is not used.
        work: with text.
        keep: most turns kept of each kind, evenly over the sorted ones.
        source: what to say about it.

    Raises:
        ValueError: no turn of one of the kinds was long enough.
    """
    turns: dict[str, list[tuple[float, float, int]]] = {kind: [] for kind in KINDS}

    def look(now: float, event: str, what: Any, replica: str) -> None:
        if event == "turn" and isinstance(what, Request) and what.verified >= LEAST_STEPS:
            # The turn's first token comes from its prompt, not from a verify step.
            further = what.target - 1
            turns[what.kind].append((further / what.verified, what.drafted / what.verified, further))

    Simulation(replace(setup, acceptance=None), observe=look).run(work)
    kept = {kind: _spread(sorted(found), keep) for kind, found in turns.items()}
    return Acceptance(kept["own"], kept["sibling"], source)


def _spread(turns: list[tuple[float, float, int]], keep: int) -> tuple[tuple[float, float], ...]:
    """At most ``keep`` turns, evenly over all generated tokens: long turns differ from short ones."""
    total = sum(tokens for _, _, tokens in turns)
    count = min(keep, len(turns))
    chosen, seen, at = [], 0, 0
    for committed, drafted, tokens in turns:
        seen += tokens
        while at < count and seen * 2 * count >= (2 * at + 1) * total:
            chosen.append((committed, drafted))
            at += 1
    # Rounded so that never more is committed than drafted plus one.
    return tuple((int(m * 1000) / 1000, round(d, 3) + 0.001) for m, d in chosen)
