# SPDX-License-Identifier: Apache-2.0
"""How fast the scheduler decides: ``python -m war_rl.rollout.bench --replicas 64 --trajectories 10000``.

A closed loop keeps the wanted number of trajectories alive: each runs its turns with tool gaps between them, and is
replaced when it is done. Engine time is simulated, so only the scheduler's own time is measured. One decision is one
placement; ``decision_us`` is the time of the event that led to it, of ``decide`` and of ``reserve``, shared by the
placements of one event. ``decisions_per_s`` counts submit, decide and reserve; ``turns_per_s`` release and finish too.
"""

from __future__ import annotations

import argparse
import gc
import heapq
import json
import random
import time
from collections.abc import Sequence

import numpy as np

from war_rl.config import SchedulerConfig
from war_rl.rollout.policies import POLICIES
from war_rl.rollout.scheduler import GlobalScheduler, ReplicaInfo
from war_rl.types import TrajectoryId, TurnRequest, TurnResult

BLOCK = 16
SYSTEM_BLOCKS = 64
GROUP_BLOCKS = 32


class Loop:
    """The closed loop. Times in simulated seconds; ``spent`` collects real seconds per event kind."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.clock = time.thread_time if args.clock == "cpu" else time.perf_counter
        self.random = random.Random(args.seed)
        self.scheduler = GlobalScheduler(SchedulerConfig(policy=args.policy), seed=args.seed)
        for i in range(args.replicas):
            info = ReplicaInfo(f"replica-{i}", args.kv_tokens, BLOCK, max_running=256)
            self.scheduler.add_replica(info, 0.0)
        self.events: list[tuple[float, int, str, TrajectoryId]] = []
        self.state: dict[TrajectoryId, list[int]] = {}
        self.requests: dict[str, TurnRequest] = {}
        self.serial = 0
        self.now = 0.0
        self.spent: dict[str, list[float]] = {"submit": [], "decide": [], "reserve": [], "release": [], "finish": []}
        self.per_event: list[float] = []
        self.per_decision: list[float] = []

    def hashes(self, t: TrajectoryId, tokens: int) -> tuple[int, ...]:
        group, own = (int(t.uid) + 1) << 20, (int(t.uid) * 64 + t.session + 1) << 36
        head = SYSTEM_BLOCKS + GROUP_BLOCKS
        blocks = range(tokens // BLOCK)
        return tuple(i if i < SYSTEM_BLOCKS else (group if i < head else own) + i for i in blocks)

    def push(self, delay: float, kind: str, t: TrajectoryId) -> None:
        self.serial += 1
        heapq.heappush(self.events, (self.now + delay, self.serial, kind, t))

    def spawn(self, delay: float) -> None:
        group, session = divmod(len(self.state), self.args.group)
        t = TrajectoryId(str(group), session, 1, str(group % 500))
        turns = max(1, int(self.random.expovariate(1.0 / self.args.turns)))
        self.state[t] = [0, turns, (SYSTEM_BLOCKS + GROUP_BLOCKS) * BLOCK + 7]
        self.push(delay, "submit", t)

    def timed(self, kind: str, call: object, *args: object) -> object:
        start = self.clock()
        out = call(*args)  # type: ignore[operator]
        self.spent[kind].append(self.clock() - start)
        return out

    def submit(self, t: TrajectoryId) -> None:
        done, _, tokens = self.state[t]
        request = TurnRequest(f"{t.uid}/{t.session}/{done}", t, done, tokens, 512, self.hashes(t, tokens))
        self.requests[request.key] = request
        self.timed("submit", self.scheduler.submit, request, self.now)

    def release(self, t: TrajectoryId) -> None:
        state = self.state[t]
        key = f"{t.uid}/{t.session}/{state[0]}"
        request = self.requests.pop(key)
        generated = self.random.randint(20, 300)
        seconds = 0.02 * generated
        self.timed("release", self.scheduler.release, key, TurnResult(generated, None, 0, seconds), self.now)
        state[0] += 1
        state[2] = request.prompt_tokens + generated + self.random.randint(50, 400)
        if state[0] < state[1]:
            self.push(self.random.expovariate(1.0 / self.args.tool_seconds), "submit", t)
        else:
            self.timed("finish", self.scheduler.finish, t, self.now)
            self.state[t] = []
            self.spawn(0.0)

    def step(self) -> int:
        self.now, _, kind, t = heapq.heappop(self.events)
        start = self.clock()
        self.submit(t) if kind == "submit" else self.release(t)
        placements = self.timed("decide", self.scheduler.decide, self.now)
        assert isinstance(placements, list)
        for placement in placements:
            self.timed("reserve", self.scheduler.reserve, placement, self.now)
            owner = self.requests[placement.key].trajectory
            self.push(self.random.uniform(0.5, 4.0), "release", owner)
        spent = self.clock() - start
        self.per_event.append(spent)
        if placements:
            self.per_decision += [spent / len(placements)] * len(placements)
        return len(placements)

    def run(self) -> dict[str, float]:
        for _ in range(self.args.trajectories):
            self.spawn(self.random.uniform(0.0, self.args.turns * (2.0 + self.args.tool_seconds)))
        # Until the mix of young and old trajectories has settled.
        for _ in range(8 * self.args.trajectories):
            self.step()
        for values in self.spent.values():
            values.clear()
        self.per_event.clear()
        self.per_decision.clear()
        gc.collect()
        gc.freeze()
        placed = 0
        while placed < self.args.decisions and self.events:
            placed += self.step()
        return self.report(placed)

    def additions(self) -> float:
        """Seconds that a million additions take: about 0.03 on an idle core of 2020, more where others are at work."""
        start, total = self.clock(), 0
        for i in range(1_000_000):
            total += i
        return self.clock() - start

    def report(self, placed: int) -> dict[str, float]:
        total = sum(self.per_event)
        deciding = sum(sum(self.spent[k]) for k in ("submit", "decide", "reserve"))
        out = {
            "decisions": float(placed),
            "decisions_per_s": placed / deciding,
            "turns_per_s": placed / total,
            "million_additions_s": self.additions(),
        }
        for name, values in (("decision", self.per_decision), ("event", self.per_event), *self.spent.items()):
            if values:
                out[f"{name}_us_p50"], out[f"{name}_us_p99"] = (1e6 * float(v) for v in np.percentile(values, (50, 99)))
        counters = self.scheduler.counters()
        out |= {k: counters[f"sched/{k}"] for k in ("waiting", "running", "admitted", "trajectories")}
        return out


def main(argv: Sequence[str] | None = None) -> None:
    """Run and print one JSON object: times in microseconds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--policy", default="cost", choices=sorted(POLICIES))
    parser.add_argument("--replicas", type=int, default=64)
    parser.add_argument("--trajectories", type=int, default=10_000, help="alive at any time")
    parser.add_argument("--decisions", type=int, default=30_000, help="placements to measure")
    parser.add_argument("--kv-tokens", type=int, default=400_000, help="KV capacity of each replica")
    parser.add_argument("--turns", type=float, default=10.0, help="mean turns of a trajectory")
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--tool-seconds", type=float, default=2.0, help="mean simulated tool time")
    parser.add_argument("--clock", choices=("cpu", "wall"), default="cpu", help="cpu: a busy machine does not disturb")
    parser.add_argument("--seed", type=int, default=0)
    print(json.dumps({k: round(v, 2) for k, v in Loop(parser.parse_args(argv)).run().items()}, indent=1))


if __name__ == "__main__":
    main()
