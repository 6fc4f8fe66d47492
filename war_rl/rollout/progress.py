# SPDX-License-Identifier: Apache-2.0
"""How many turns and tokens a trajectory still has before it, learned from those that have finished.

A group's estimate starts from the same dataset index in earlier epochs, that one from the workload's, and each
finished member moves it by WAR's rule T <- alpha * T_obs + (1 - alpha) * T_old (arXiv 2607.17299). Training and
validation of one index share nothing: they sample differently.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from war_rl.types import GroupId

CENSORED = 0.02
"""Weight of a trajectory that is not over but already longer than expected, in the workload's estimate."""
MAX_INDICES = 100_000
"""Dataset indices remembered; the longest untouched are forgotten first."""
MAX_GROUPS = 50_000
"""Groups remembered. A group's life is one step, so this bounds memory only."""


@dataclass(slots=True)
class Running:
    """Exponentially weighted mean and variance. ``count`` observations so far; before the first the mean is a prior."""

    mean: float
    var: float = 0.0
    count: int = 0

    def add(self, value: float, alpha: float) -> None:
        """``mean <- alpha * value + (1 - alpha) * mean``; the variance follows the same weights."""
        delta = value - self.mean
        self.mean += alpha * delta
        self.var = (1.0 - alpha) * (self.var + alpha * delta * delta)
        self.count += 1

    def child(self) -> Running:
        """The prior of the level below: same mean and variance, no observation of its own."""
        return Running(self.mean, self.var)


@dataclass(slots=True)
class Estimate:
    """Whole-trajectory expectations at one level: assistant turns, generated tokens, tokens of the last context."""

    turns: Running
    output: Running
    context: Running

    def child(self) -> Estimate:
        return Estimate(self.turns.child(), self.output.child(), self.context.child())

    def add(self, turns: int, output: int, context: int, alpha: float) -> None:
        self.turns.add(turns, alpha)
        self.output.add(output, alpha)
        self.context.add(context, alpha)


@dataclass(frozen=True, slots=True)
class Remaining:
    """What is expected to come for one trajectory, with one standard deviation of the total.

    Attributes:
        turns, turns_std: assistant turns still to come, at least 1.
        output_tokens, output_std: tokens still to be generated, at least 1.
        context_tokens: growth of the context until the last turn, at least 0.
        source: "group", "index" or "workload": the lowest level with an observation.
    """

    turns: float
    turns_std: float
    output_tokens: float
    output_std: float
    context_tokens: float
    source: str


class Progress:
    """Estimates by group, dataset index and workload.

    Args:
        alpha: weight of a new observation, in (0, 1].
        turns, output_tokens, context_tokens: priors for a whole trajectory until the first one finishes.
    """

    def __init__(self, alpha: float, turns: float, output_tokens: float, context_tokens: float) -> None:
        self._alpha = alpha
        prior = [Running(v, (0.5 * v) ** 2) for v in (turns, output_tokens, context_tokens)]
        self._workload = {flag: Estimate(*(r.child() for r in prior)) for flag in (False, True)}
        self._index: OrderedDict[tuple[bool, str], Estimate] = OrderedDict()
        self._group: OrderedDict[GroupId, Estimate] = OrderedDict()
        self.turn_output = {flag: Running(output_tokens / max(1.0, turns)) for flag in (False, True)}
        """Tokens generated in one turn, of training and of validation."""
        self.turn_growth = {flag: Running(context_tokens / max(1.0, turns)) for flag in (False, True)}
        """Tokens by which the context grows from one turn's prompt to the next, of training and of validation."""
        self._prior_output = output_tokens / max(1.0, turns)

    def group_turns(self, group: GroupId) -> float:
        """Expected turns of a whole trajectory of this group (WAR's T)."""
        return self._best(group)[0].turns.mean

    def known(self, validate: bool) -> bool:
        """Whether any trajectory of training, or of validation, has finished: before that all is a guess."""
        return self._workload[validate].turns.count > 0

    def whole_output(self, validate: bool) -> float:
        """Expected tokens of a whole trajectory of which nothing is known."""
        return self._workload[validate].output.mean

    def probed(self, group: GroupId) -> bool:
        """Whether a member of the group has finished."""
        known = self._group.get(group)
        return known is not None and known.turns.count > 0

    def remaining(
        self, group: GroupId, turns_done: int, output_done: int, context: int, max_tokens: int = 0
    ) -> Remaining:
        """What is still to come. ``context`` is the length of the trajectory's context now, ``max_tokens`` the most
        that its next turn may generate (0: unknown), in tokens.

        Until a trajectory has finished, the context is taken to grow as it has done from turn to turn so far.
        A trajectory past its estimate is a member of the tail; it is given half a standard deviation more.
        """
        estimate, source = self._best(group)
        turns = _left(estimate.turns, turns_done, 1.0)
        output = _left(estimate.output, output_done, 1.0)
        growth = _left(estimate.context, context, 0.0) if context else estimate.context.mean
        if source == "workload" and estimate.context.count == 0:
            growth = self._unseen_growth(group.validate, turns, growth, max_tokens)
        return Remaining(turns, estimate.turns.var**0.5, output, estimate.output.var**0.5, max(growth, 0.0), source)

    def observe_return(self, validate: bool, grown: int) -> None:
        """A trajectory's next turn has come, with a prompt that is so many tokens longer than the last one."""
        seen = self.turn_growth[validate]
        seen.add(max(0, grown), max(0.02, 1.0 / (1 + seen.count)))

    def observe_turn(self, group: GroupId, turns: int, output: int, context: int, generated_tokens: int) -> None:
        """A turn has ended; its trajectory has had ``turns`` turns, ``output`` generated tokens, and a ``context``.

        The first to finish are the short ones. A live trajectory that is already longer than the workload's estimate
        shows that it is too low, and raises it a little.
        """
        workload = self._workload[group.validate]
        for estimate, seen in ((workload.turns, turns), (workload.output, output), (workload.context, context)):
            if seen > estimate.mean:
                estimate.mean += CENSORED * (seen - estimate.mean)
        # The first observation replaces the prior; later ones move slowly, one turn says little about the next.
        lengths = self.turn_output[group.validate]
        lengths.add(generated_tokens, max(0.02, 1.0 / (1 + lengths.count)))

    def observe_finish(self, group: GroupId, turns: int, output_tokens: int, context_tokens: int) -> None:
        """A trajectory has finished with these totals."""
        own = self._group.get(group)
        if own is None:
            own = self._group[group] = self._best(group)[0].child()
        own.add(turns, output_tokens, context_tokens, self._alpha)
        workload = self._workload[group.validate]
        workload.add(turns, output_tokens, context_tokens, max(0.02, 1.0 / (1 + workload.turns.count)))
        if group.index:
            key = (group.validate, group.index)
            known = self._index.get(key)
            if known is None:
                known = self._index[key] = workload.child()
            known.add(turns, output_tokens, context_tokens, self._alpha)
            self._index.move_to_end(key)
        while len(self._index) > MAX_INDICES:
            self._index.popitem(last=False)
        while len(self._group) > MAX_GROUPS:
            self._group.popitem(last=False)

    def forget_before(self, step: int) -> None:
        """Groups of earlier steps are over; what they taught lives on under their dataset index."""
        for group in [g for g in self._group if g.step < step]:
            del self._group[group]

    def _unseen_growth(self, validate: bool, turns: float, prior: float, max_tokens: int) -> float:
        """Growth of a context, in tokens, while no trajectory has finished yet. ``prior``: what was believed before."""
        seen = self.turn_growth[validate]
        if seen.count:
            return turns * seen.mean
        # Turns that may write less than was guessed do not grow as was guessed.
        short = min(1.0, max_tokens / self._prior_output) if max_tokens > 0 else 1.0
        return min(prior, turns * seen.mean * short)

    def _best(self, group: GroupId) -> tuple[Estimate, str]:
        own = self._group.get(group)
        if own is not None:
            return own, "group"
        known = self._index.get((group.validate, group.index)) if group.index else None
        if known is not None:
            return known, "index"
        return self._workload[group.validate], "workload"


def _left(total: Running, done: float, floor: float) -> float:
    return max(total.mean - done, 0.5 * total.var**0.5 if done >= total.mean else 0.0, floor)
