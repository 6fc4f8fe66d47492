# SPDX-License-Identifier: Apache-2.0
"""What surrounds one trajectory, whoever plays it: the agent-loop worker in training, the replayer in the benchmark."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from war_rl.trainers.verl.context import CURRENT_EPISODE, Episode
from war_rl.types import FeedItem, TrajectoryId, TrajectoryRecord, as_tokens


@contextmanager
def running_episode(identity: TrajectoryId, client: Any) -> Iterator[Episode]:
    """Every turn that ``client`` generates inside belongs to this trajectory.

    On leaving, the record is complete (failed, with the error, if one passed through) and the router of a client that
    has one for trajectories is told that no further turn will come.
    """
    now = time.time()
    episode = Episode(TrajectoryRecord(identity, started=now, clock_offset=now - time.monotonic()))
    token = CURRENT_EPISODE.set(episode)
    try:
        yield episode
    except BaseException as error:
        episode.record.status = "failed"
        episode.record.error = f"{type(error).__name__}: {error}"[:2000]
        raise
    finally:
        CURRENT_EPISODE.reset(token)
        episode.record.finished = time.time()
        if _publisher(client) is not None:
            client.finish_trajectory(identity)


def announce_text(client: Any, episode: Episode, tokens: Sequence[int]) -> None:
    """Feed the whole text of a trajectory that has ended: its siblings may draft from all of it from now on.

    ``tokens`` are the prompt and everything after it. What was fed turn by turn is not sent again. A client without a
    feed (the stock rollout) does nothing.
    """
    publisher = _publisher(client)
    if publisher is None:
        return
    start = episode.fed_tokens if list(tokens[: episode.fed_tokens][-16:]) == episode.fed_tail else 0
    rest = as_tokens(tokens[start:])
    publisher.publish(FeedItem(episode.trajectory, start, rest, final=True, sent=time.time()))


def count_progress(finished: Sequence[TrajectoryRecord], running: Sequence[TrajectoryRecord]) -> dict[str, Any]:
    """Counts of a rollout so far: trajectories finished, failed and running, finished turns, tokens generated, prompt
    and cached tokens of turns whose engine told the latter, first errors."""
    turns = [turn for record in (*finished, *running) for turn in tuple(record.turns)]
    told = [turn for turn in turns if turn.cached_tokens is not None]
    return {
        "finished": len(finished),
        "failed": sum(record.status == "failed" for record in finished),
        "running": len(running),
        "turns": len(turns),
        "generated_tokens": sum(turn.generated_tokens for turn in turns),
        "prompt_tokens": sum(turn.prompt_tokens for turn in told),
        "cached_tokens": sum(turn.cached_tokens or 0 for turn in told),
        "errors": [record.error for record in finished if record.error][:3],
    }


def _publisher(client: Any) -> Any:
    return getattr(client, "publisher", None)
