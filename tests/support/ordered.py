# SPDX-License-Identifier: Apache-2.0
"""A replay buffer for tests that compare two runs: batches in an order that both share, and a record of them.

What stands in the way of comparing: verl's batch is in the order in which trajectories were finished (the order of
TransferQueue's keys), under keys that begin with a fresh random uid. Everything after it follows that order: which rows
a rank gets and which of them form a mini-batch, and in which order their gradients are summed. That is verl's, under
either rollout, and no two runs of the same rollout agree in it either. Here the rows are sorted by data-set index and
session before verl goes on. It is verl's own extension point: ``trainer.v1.sampler.custom_sampler``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import transfer_queue as tq
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

FIELDS = ("index", "responses", "response_mask", "rm_scores", "advantages")


class RecordingReplayBuffer(ReplayBuffer):
    """verl's order; writes what each step trains on to ``sampler_kwargs.record``, one JSON line for each sample."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._folder = Path(kwargs["sampler_kwargs"]["record"])
        # The trainer hands in a method of its own; advantages exist only later, and nowhere outside of it.
        trainer = kwargs["refill_fn"].__self__
        compute_advantage = trainer._compute_advantage

        def and_record(batch: Any, metrics: dict[str, Any]) -> Any:
            done = compute_advantage(batch, metrics=metrics)
            self._record(trainer.global_steps, batch)
            return done

        trainer._compute_advantage = and_record

    def _record(self, step: int, batch: Any) -> None:
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=list(FIELDS))
        index = list(data["index"])
        columns = {name: [row.tolist() for row in data[name].unbind(0)] for name in FIELDS[1:]}
        self._folder.mkdir(parents=True, exist_ok=True)
        with (self._folder / f"{step}.jsonl").open("w") as file:
            for i, key in enumerate(batch.keys):
                line = {
                    "index": index[i],
                    "session": session_of(key),
                    "versions": [batch.tags[i]["min_global_steps"], batch.tags[i]["max_global_steps"]],
                    **{name: rows[i] for name, rows in columns.items()},
                }
                file.write(json.dumps(line) + "\n")


class OrderedReplayBuffer(RecordingReplayBuffer):
    """The same, with every batch sorted by data-set index and session."""

    def _materialize_batch(self, partition_id: str, *args: Any) -> Any:
        batch = super()._materialize_batch(partition_id, *args)
        data = tq.kv_batch_get(keys=batch.keys, partition_id=partition_id, select_fields=["index"])
        index = list(data["index"])
        batch.reorder(sorted(range(len(batch)), key=lambda i: (index[i], session_of(batch.keys[i]))))
        return batch


def session_of(key: str) -> list[int]:
    """Session and output number out of verl's key ``{uid}_{session}_{output}``."""
    _, session, output = key.rsplit("_", 2)
    return [int(session), int(output)]
