# SPDX-License-Identifier: Apache-2.0
"""The run-length residency model against an obvious block-by-block cache with the engine's rules."""

from dataclasses import dataclass, field

from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from war_rl.rollout.blocks import block_hashes
from war_rl.rollout.residency import Residency
from war_rl.types import TrajectoryId

BLOCK = 4


@dataclass(eq=False)
class Block:
    hash: int | None = None
    refs: int = 0


@dataclass
class SlowCache:
    """vLLM v1's block pool in its plainest form: one free queue, one map from hash to block."""

    capacity: int
    queue: list = field(default_factory=list)
    by_hash: dict = field(default_factory=dict)
    held: dict = field(default_factory=dict)

    def __post_init__(self):
        self.queue = [Block() for _ in range(self.capacity)]

    def hits(self, hashes, prompt):
        found = []
        for h in hashes[: (prompt - 1) // BLOCK]:
            if h not in self.by_hash:
                break
            found.append(self.by_hash[h])
        return found

    def take(self):
        block = self.queue.pop(0)
        if block.hash is not None:
            del self.by_hash[block.hash]
            block.hash = None
        block.refs = 1
        return block

    def name(self, block, h):
        block.hash = h
        self.by_hash[h] = block

    def begin(self, key, hashes, prompt):
        blocks = self.hits(hashes, prompt)
        for block in blocks:
            if block.refs == 0:
                self.queue.remove(block)
            block.refs += 1
        cached = len(blocks)
        for h in hashes[cached:]:
            self.name(self.take(), h)
            blocks.append(self.by_hash[h])
        if prompt % BLOCK:
            blocks.append(self.take())
        self.held[key] = blocks
        return cached * BLOCK

    def end(self, key, tokens):
        """``tokens``: all that were computed, the last sampled one left out."""
        blocks = self.held.pop(key)
        hashes = block_hashes(tokens, BLOCK)
        while len(blocks) * BLOCK < len(tokens):
            blocks.append(self.take())
        for block, h in zip(blocks, hashes, strict=False):
            if block.hash is None:
                self.name(block, h)
        for block in reversed(blocks):
            block.refs -= 1
            if block.refs == 0:
                if block.hash is None:
                    self.queue.insert(0, block)
                else:
                    self.queue.append(block)


@dataclass
class Agent:
    id: TrajectoryId
    tokens: list
    key: str = ""
    turn: int = 0


class ResidencyMachine(RuleBasedStateMachine):
    """Agents of a few groups come, speak, wait and return; both caches must agree on every prompt at all times."""

    @initialize(capacity=st.integers(12, 60))
    def start(self, capacity):
        self.slow = SlowCache(capacity)
        self.model = Residency((capacity + 1) * BLOCK, BLOCK)
        self.agents = []
        self.next = 1000

    def fresh(self, count):
        self.next += count
        return list(range(self.next - count, self.next))

    def unaligned(self, tokens):
        # A prompt that ends on a block and is wholly cached makes the engine compute its last block twice;
        # that duplicate is not modelled.
        return tokens if len(tokens) % BLOCK else [*tokens, *self.fresh(1)]

    @rule(group=st.integers(0, 2), own=st.integers(1, 9))
    def new_agent(self, group, own):
        shared = list(range(10)) + [100 + group] * (3 + 6 * group)
        tokens = self.unaligned(shared + self.fresh(own))
        self.agents.append(Agent(TrajectoryId(f"g{group}", self.fresh(1)[0], 1), tokens))

    def idle(self):
        return [a for a in self.agents if not a.key]

    def busy(self):
        return [a for a in self.agents if a.key]

    @precondition(lambda self: self.idle())
    @rule(data=st.data())
    def begin(self, data):
        agent = data.draw(st.sampled_from(self.idle()))
        hashes = block_hashes(agent.tokens, BLOCK)
        if len(hashes) + 1 + 6 > len(self.slow.queue):
            return
        agent.key = f"{agent.id.session}/{agent.turn}"
        agent.turn += 1
        predicted = self.model.begin(agent.key, agent.id, hashes, len(agent.tokens))
        assert predicted == self.slow.begin(agent.key, hashes, len(agent.tokens))

    @precondition(lambda self: self.busy())
    @rule(data=st.data(), generated=st.integers(1, 17), heard=st.integers(0, 9))
    def end(self, data, generated, heard):
        agent = data.draw(st.sampled_from(self.busy()))
        if generated // BLOCK + 1 > len(self.slow.queue):
            return
        agent.tokens = agent.tokens + self.fresh(generated)
        self.slow.end(agent.key, agent.tokens[:-1])
        self.model.end(agent.key, generated, None)
        agent.key = ""
        agent.tokens = self.unaligned(agent.tokens + self.fresh(heard))

    @precondition(lambda self: self.idle())
    @rule(data=st.data())
    def forget(self, data):
        agent = data.draw(st.sampled_from(self.idle()))
        self.agents.remove(agent)
        self.model.forget(agent.id)

    @precondition(lambda self: not self.busy())
    @rule()
    def weights(self):
        self.slow = SlowCache(self.slow.capacity)
        self.model.clear()

    @invariant()
    def agree_on_every_prompt(self):
        if not hasattr(self, "slow"):
            return
        for agent in self.idle():
            hashes = block_hashes(agent.tokens, BLOCK)
            expected = BLOCK * len(self.slow.hits(hashes, len(agent.tokens)))
            assert self.model.match(hashes, len(agent.tokens), agent.id) == expected

    @invariant()
    def agree_on_occupancy(self):
        if hasattr(self, "slow"):
            used = sum(b.hash is not None for b in self.slow.queue)
            held = {id(b) for blocks in self.slow.held.values() for b in blocks}
            assert self.model.resident_blocks == used + len(held)


TestResidencyMachine = ResidencyMachine.TestCase
TestResidencyMachine.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, phases=(Phase.explicit, Phase.reuse, Phase.generate)
)


def traj(i):
    return TrajectoryId("g", i, 1)


def run(model, key, trajectory, tokens, generated=0, reported=None):
    cached = model.begin(key, trajectory, block_hashes(tokens, BLOCK), len(tokens))
    model.end(key, generated, reported)
    return cached


def test_whole_prompt_is_never_served():
    model = Residency(100 * BLOCK, BLOCK)
    tokens = list(range(16))
    assert run(model, "a", traj(0), tokens) == 0
    assert run(model, "b", traj(1), tokens) == 12


def test_last_block_of_the_oldest_goes_first():
    model = Residency(9 * BLOCK, BLOCK)  # 8 usable
    a, b = list(range(13)), list(range(100, 113))  # 3 full blocks each, 1 for the next token
    run(model, "a", traj(0), a)
    run(model, "b", traj(1), b)
    run(model, "c", traj(2), list(range(200, 213)))  # needs 4 with 2 blank: a loses its last two
    assert model.match(block_hashes(a, BLOCK), 13) == 4
    assert model.match(block_hashes(b, BLOCK), 13) == 12
    assert model.evicted_blocks == 2


def test_fewer_hits_than_predicted_moves_the_frontier():
    model = Residency(1000 * BLOCK, BLOCK)
    prompts = [[i * 1000 + j for j in range(13)] for i in range(3)]
    for i, prompt in enumerate(prompts):
        run(model, f"k{i}", traj(i), prompt)
    assert model.match(block_hashes(prompts[0], BLOCK), 13) == 12
    # The engine had nothing left of the second prompt: the first, older, must be gone too; the third is younger.
    assert run(model, "again", traj(1), prompts[1], reported=0) == 12
    assert model.match(block_hashes(prompts[0], BLOCK), 13) == 0
    assert model.match(block_hashes(prompts[1], BLOCK), 13) == 12
    assert model.match(block_hashes(prompts[2], BLOCK), 13) == 12
    assert model.frontier_corrections == 1


def test_rewritten_history_is_not_taken_for_eviction():
    model = Residency(1000 * BLOCK, BLOCK)
    other = list(range(500, 513))
    run(model, "o", traj(9), other)
    prompt = list(range(13))
    run(model, "a", traj(0), prompt, generated=8)
    rewritten = [*prompt, *range(700, 712)]
    assert model.begin("b", traj(0), block_hashes(rewritten, BLOCK), len(rewritten)) == 20
    model.end("b", 1, 12)
    assert model.divergences == 1 and model.frontier_corrections == 0
    assert model.match(block_hashes(other, BLOCK), 13) == 12


def test_a_miss_on_blocks_in_use_evicts_nothing():
    model = Residency(1000 * BLOCK, BLOCK)
    old, prompt = list(range(900, 913)), list(range(13))
    run(model, "o", traj(9), old)
    hashes = block_hashes(prompt, BLOCK)
    model.begin("a", traj(0), hashes, 13)
    assert model.begin("b", traj(1), hashes, 13) == 12
    model.end("b", 1, 0)  # it came before the first one's prefill was done
    assert model.match(block_hashes(old, BLOCK), 13) == 12


def test_growth_of_running_turns_evicts_before_they_end():
    model = Residency(9 * BLOCK, BLOCK)
    old = list(range(13))
    run(model, "a", traj(0), old)
    model.begin("b", traj(1), block_hashes(list(range(100, 105)), BLOCK), 5)
    assert model.match(block_hashes(old, BLOCK), 13) == 12
    model.grow(5 * BLOCK)  # 8 usable = 3 old + 2 held + 3 blank; five more evict two
    assert model.match(block_hashes(old, BLOCK), 13) == 4
    model.end("b", 5 * BLOCK, None)
    assert model.match(block_hashes(old, BLOCK), 13) == 4


def test_paths_stay_short_over_many_turns():
    model = Residency(100_000 * BLOCK, BLOCK)
    tokens = list(range(10))
    for turn in range(50):
        run(model, f"t{turn}", traj(0), tokens, generated=9)
        tokens += [10_000 + 100 * turn + i for i in range(15)]
    depth, node = 0, model._unnamed[traj(0)]
    while node is not None:
        depth, node = depth + 1, node.parent
    assert depth <= 5
