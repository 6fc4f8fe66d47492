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


def _publisher(client: Any) -> Any:
    return getattr(client, "publisher", None)
