# SPDX-License-Identifier: Apache-2.0
"""How long a rollout still takes, as far as the estimates of its trajectories and the fitted speeds tell.

For people: no decision rests on it. It is the longer of two times: that of the trajectory with most before it, and that
of the replica with most work. Prefill and a queue that is still to form are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from war_rl.rollout.progress import Progress
from war_rl.rollout.state import ReplicaState, TrajectoryState, TurnState


def seconds_left(
    trajectories: Iterable[TrajectoryState],
    turns: Mapping[str, TurnState],
    replicas: Sequence[ReplicaState],
    progress: Progress,
    *,
    tool_seconds: float,
    validate: bool,
    to_come: int,
    now: float,
) -> float | None:
    """Seconds until the last trajectory of the newest step ends; None before any has ended, or without a replica.

    Args:
        trajectories: all live ones.
        turns: by key, those that wait or run.
        replicas: those that take turns.
        progress: the estimates.
        tool_seconds: usual time between two turns of a trajectory.
        validate: whether the rollout is a validation pass.
        to_come: trajectories of the rollout that have not ended; those of them that are not live have not begun.
        now: seconds.
    """
    if not replicas or not progress.known(validate):
        return None
    mine = [t for t in trajectories if t.id.validate == validate]
    newest = max((t.id.step for t in mine), default=0)
    mine = [t for t in mine if t.id.step == newest]
    work = dict.fromkeys((r.id for r in replicas), 0.0)
    members = dict.fromkeys(work, 0)
    # What has no replica yet is shared out evenly.
    wanderers = max(0, to_come - len(mine))
    homeless, longest = wanderers * progress.whole_output(validate), 0.0
    for trajectory in mine:
        home = trajectory.home if trajectory.home is not None and trajectory.home.id in work else None
        tokens, gaps = _before(trajectory, turns, progress, tool_seconds, now)
        if home is None:
            homeless, wanderers = homeless + tokens, wanderers + 1
        else:
            work[home.id] += tokens
            members[home.id] += 1
        # Half of the present company: the rest has ended by the time the last one does.
        longest = max(longest, tokens * _pace(home or replicas[0], 0.5) + gaps)
    share = wanderers / len(replicas)
    busiest = max(
        (work[r.id] + homeless / len(replicas)) / _tokens_per_second(r, members[r.id] + share) for r in replicas
    )
    return max(longest, busiest, 0.0)


def _before(
    trajectory: TrajectoryState, turns: Mapping[str, TurnState], progress: Progress, tool_seconds: float, now: float
) -> tuple[float, float]:
    """What a trajectory still has before it: tokens to generate, and seconds in its tools."""
    left = progress.remaining(trajectory.group, trajectory.turns, trajectory.output, trajectory.context)
    tokens, gaps = left.output_tokens, (left.turns - 1.0) * tool_seconds
    if trajectory.running and trajectory.home is not None:
        started = min(turns[key].started for key in trajectory.running)
        tokens = max(0.0, tokens - (now - started) / max(1e-9, _pace(trajectory.home)))
    elif not trajectory.waiting and trajectory.idle_since >= 0.0:
        gaps = max(0.0, gaps + tool_seconds - (now - trajectory.idle_since))
    return tokens, gaps


def _pace(replica: ReplicaState, company: float = 1.0) -> float:
    """Seconds per token of one turn beside that share of the other turns that run there now."""
    return replica.rates.decode + company * replica.rates.interference * max(0, replica.running - 1)


def _tokens_per_second(replica: ReplicaState, members: float) -> float:
    """Of all that live there, as far as the engine runs them at once."""
    running = min(max(1.0, members), float(replica.slots))
    return running / max(1e-9, replica.rates.decode + replica.rates.interference * (running - 1.0))
