# SPDX-License-Identifier: Apache-2.0
"""A step's rollout on modelled engines.

An engine step takes ``base + per_token * tokens`` seconds, decodes one token of each running request and computes a
chunk of the prompts that wait for it. The cache is taken to be as large as needed.
"""

import heapq
import random
from collections import deque
from dataclasses import dataclass, field

from war_rl.config import SchedulerConfig
from war_rl.rollout.scheduler import GlobalScheduler, ReplicaInfo
from war_rl.types import TrajectoryId, TurnRequest, TurnResult

BLOCK = 16
CHUNK = 512


@dataclass
class Machine:
    """Seconds of an engine step, and what the engine says of itself."""

    base: float = 0.023
    per_token: float = 0.0008
    kv_tokens: int = 1_000_000
    max_running: int = 256


@dataclass
class Load:
    """Lengths in tokens, times in seconds. Outputs are exponential: a few are much longer than the rest."""

    groups: int = 4
    n: int = 4
    turns: int = 5
    system: int = 256
    prompt: int = 400
    output: float = 60.0
    env: int = 80
    tool: float = 1.0
    long_group: float = 1.0


@dataclass
class Replica:
    clock: float = 0.0
    prefill: deque = field(default_factory=deque)
    decoding: dict = field(default_factory=dict)
    seen: set = field(default_factory=set)

    def step(self, machine):
        """One engine step: the keys of the turns that end with it."""
        budget, chunk = CHUNK, 0
        started = []
        while self.prefill and budget and len(self.decoding) + len(started) < machine.max_running:
            entry = self.prefill[0]
            part = min(budget, entry[1])
            entry[1] -= part
            budget -= part
            chunk += part
            if entry[1] == 0:
                started.append(self.prefill.popleft())
        self.clock += machine.base + machine.per_token * (len(self.decoding) + chunk)
        for key in self.decoding:
            self.decoding[key] -= 1
        ended = [key for key, left in self.decoding.items() if left <= 0]
        for key in ended:
            del self.decoding[key]
        self.decoding.update((key, output) for key, _, output in started)
        return ended


class Rollout:
    """Plays one or more steps of a load under a policy."""

    def __init__(self, policy, machine, load, replicas=2, seed=0, **config):
        self.machine, self.load = machine, load
        self.scheduler = GlobalScheduler(SchedulerConfig(policy=policy, **config), seed=seed)
        self.names = [f"r{i}" for i in range(replicas)]
        for name in self.names:
            self.scheduler.add_replica(ReplicaInfo(name, machine.kv_tokens, BLOCK, True, machine.max_running), 0.0)
        self.seed, self.now = seed, 0.0

    def step(self, number):
        """One whole step; its statistics, with ``seconds`` and the most trajectories any replica was given."""
        rng = random.Random(self.seed * 1000 + number)
        load, began = self.load, self.now
        self.scheduler.weights_updated(number, self.now)
        self.engines = {name: Replica(self.now) for name in self.names}
        self.tasks, self.events, self.serial = {}, [], 0
        self.placed = {}
        for g in range(load.groups):
            scale = load.long_group if g == 0 else 1.0
            for s in range(load.n):
                t = TrajectoryId(f"g{g}", s, number, f"i{g}")
                turns = [max(1, int(rng.expovariate(1 / (load.output * scale)))) for _ in range(load.turns)]
                self.tasks[t] = [0, load.system + load.prompt, turns, rng.random()]
                self.push(self.now, t)
        while self.events or any(e.prefill or e.decoding for e in self.engines.values()):
            self.advance()
        stats = self.scheduler.take_step_stats(False)
        homes = [sum(1 for first in self.placed.values() if first == name) for name in self.names]
        return stats | {"seconds": self.now - began, "most": max(homes), "least": min(homes)}

    def push(self, at, t):
        self.serial += 1
        heapq.heappush(self.events, (at, self.serial, t))

    def advance(self):
        busy = [(e.clock, name) for name, e in self.engines.items() if e.prefill or e.decoding]
        # All that comes before the next engine step begins is seen by it.
        if self.events and (not busy or self.events[0][0] <= min(busy)[0]):
            self.now, _, t = heapq.heappop(self.events)
            self.submit(t)
            return
        _, name = min(busy)
        for key in self.engines[name].step(self.machine):
            self.now = max(self.now, self.engines[name].clock)
            self.end(key)

    def hashes(self, t, tokens):
        group, own = (int(t.uid[1:]) + 1) << 20, ((int(t.uid[1:]) + 1) * 1000 + t.session) << 36
        shared, head = self.load.system // BLOCK, (self.load.system + self.load.prompt) // BLOCK
        base = t.step << 56
        return tuple(base + (i if i < shared else group + i if i < head else own + i) for i in range(tokens // BLOCK))

    def submit(self, t):
        done, tokens, _, _ = self.tasks[t]
        key = f"{t.uid}/{t.session}/{done}"
        self.scheduler.submit(TurnRequest(key, t, done, tokens, 0, self.hashes(t, tokens)), self.now)
        self.decide()

    def decide(self):
        for p in self.scheduler.decide(self.now):
            self.scheduler.reserve(p, self.now)
            request = self.scheduler._turns[p.key].request
            t, engine = request.trajectory, self.engines[p.replica_id]
            self.placed.setdefault(t, p.replica_id)
            hit = 0
            for block in request.block_hashes:
                if block not in engine.seen:
                    break
                hit += BLOCK
            hit = min(hit, (request.prompt_tokens - 1) // BLOCK * BLOCK)
            engine.seen.update(request.block_hashes)
            engine.clock = max(engine.clock, self.now) if not (engine.prefill or engine.decoding) else engine.clock
            engine.prefill.append([p.key, request.prompt_tokens - hit, self.tasks[t][2][request.turn]])
            self.tasks[t].append((hit, self.now))

    def end(self, key):
        t = self.scheduler._turns[key].request.trajectory
        task = self.tasks[t]
        hit, started = task.pop()
        output = task[2][task[0]]
        self.scheduler.release(key, TurnResult(output, hit, 0, self.now - started), self.now)
        tokens = task[1] + output
        self.engines[self.placed[t]].seen.update(self.hashes(t, tokens))
        task[0] += 1
        task[1] = tokens + self.load.env
        if task[0] < len(task[2]):
            self.push(self.now + self.load.tool * task[3], t)
        else:
            self.scheduler.finish(t, self.now)
        self.decide()
