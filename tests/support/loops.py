# SPDX-License-Identifier: Apache-2.0
"""Agent loops of the end-to-end runs: the game loop for a model that writes noise, and some with a peculiarity."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import itertools
import random
import subprocess
import sys
import time
from typing import Any, ClassVar
from uuid import uuid4

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput

from tests.support.reward import share_of_vowels
from tests.support.tiny_model import WORDS
from war_rl.trainers.verl.context import CURRENT_EPISODE
from war_rl.trainers.verl.textarena_loop import TextArenaAgentLoop


class GuessingLoop(TextArenaAgentLoop):
    """Reads any text as a valid guess, so that a random model's games last several turns."""

    async def _in_time(self, game: Any, what: str, call: Any) -> Any:
        if what == "step":
            call = functools.partial(game.step, f"[{len(call.args[0]) % 20 + 1}]")
        return await super()._in_time(game, what, call)


class SessionLoop(GuessingLoop):
    """Sampled greedily, siblings would all be alike: here the game says something else to each of them.

    The reward is the share of vowels in what the model wrote, which tells siblings apart where the game's would not.
    """

    name = ""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> Any:
        self.name = f"{kwargs['index']}/{kwargs['session_id']}"
        output = await super().run(sampling_params, **kwargs)
        pairs = zip(output.response_ids, output.response_mask, strict=True)
        tokenizer: Any = self.tokenizer
        text = tokenizer.decode([token for token, mine in pairs if mine], skip_special_tokens=True)
        output.reward_score = share_of_vowels(text)
        return output

    async def _observe(self, episode: Any, action: str, observation: str) -> bool:
        draw = random.Random(f"{self.name}/{episode.turns}")
        words = " ".join(draw.choice(WORDS.split()) for _ in range(12))
        return await super()._observe(episode, action, f"{observation} {words}")


class LateLoop(GuessingLoop):
    """The first trajectory of step 2 also asks for a turn in the name of one of step 1, as a background task would."""

    of_step_1: ClassVar[contextvars.Context | None] = None

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> Any:
        if kwargs["global_steps"] == 1 and LateLoop.of_step_1 is None:
            LateLoop.of_step_1 = contextvars.copy_context()
        elif kwargs["global_steps"] == 2 and LateLoop.of_step_1 is not None:
            context, LateLoop.of_step_1 = LateLoop.of_step_1, None
            late = self.server_manager.generate("late", prompt_ids=[10] * 20, sampling_params={"max_tokens": 4})
            task = context.run(asyncio.ensure_future, late)
            try:
                await task
            except Exception as error:
                print(f"late turn: {type(error).__mro__} {error}", flush=True)
            else:
                print("late turn: answered", flush=True)
        return await super().run(sampling_params, **kwargs)


class SlowLoop(GuessingLoop):
    """Each move takes a second: a rollout is long enough to be hit in its middle."""

    async def _in_time(self, game: Any, what: str, call: Any) -> Any:
        await asyncio.sleep(1.0)
        return await super()._in_time(game, what, call)


SANDBOX = """
import mmap, os, time
if os.fork():
    os._exit(0)
os.setsid()
with open(f"/dev/shm/war-test-sandbox-{os.getpid()}", "wb+") as file:
    file.truncate(4096)
    view = mmap.mmap(file.fileno(), 4096)
time.sleep(100_000)
"""
_started: list[Any] = []


class SandboxLoop(GuessingLoop):
    """Has a helper that is nobody's child, in a session of its own, with shared memory: as sandboxes have."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> Any:
        if not _started:
            _started.append(subprocess.Popen([sys.executable, "-c", SANDBOX, "sandbox"]))
        return await super().run(sampling_params, **kwargs)


class BlockingLoop(GuessingLoop):
    """Calls something slow without await: nothing else of its process can go on."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> Any:
        time.sleep(3600)


FAULTS = ("raises", "hangs", "never ends", "overflows")

# One agent-loop worker starts all trajectories of the tests' runs, so four groups a step see all four faults.
_next_fault = itertools.cycle(FAULTS)


class FaultyLoop(GuessingLoop):
    """The first member of each group fails, each group in another way; its siblings play on."""

    fault: str | None = None

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> Any:
        episode = CURRENT_EPISODE.get()
        assert episode is not None
        self.fault = next(_next_fault) if episode.trajectory.session == 0 else None
        if self.fault == "raises":
            raise KeyError("the loop's own error")
        if self.fault == "never ends":
            await asyncio.sleep(3600)
        if self.fault == "overflows":
            # Longer than rollout.max_model_len: what an agent loop sends that does not count its tokens.
            await self.server_manager.generate("r", prompt_ids=[10] * 2000, sampling_params=dict(sampling_params))
        return await super().run(sampling_params, **kwargs)

    async def _in_time(self, game: Any, what: str, call: Any) -> Any:
        if self.fault == "hangs" and what == "step":
            return await TextArenaAgentLoop._in_time(self, game, what, lambda: time.sleep(3600))
        return await super()._in_time(game, what, call)


class TwoOutputsLoop(AgentLoopBase):
    """Two turns, each with a request id and a history of its own, and a sample for each of them."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> list[AgentLoopOutput]:
        prompt = await self.ct_build_initial_tokens(list(kwargs["raw_prompt"]))
        outputs: list[AgentLoopOutput] = []
        for _ in range(2):
            output = await self.server_manager.generate(
                request_id=uuid4().hex, prompt_ids=prompt, sampling_params={**sampling_params, "max_tokens": 16}
            )
            outputs.append(
                AgentLoopOutput(
                    prompt_ids=prompt,
                    response_ids=output.token_ids,
                    response_mask=[1] * len(output.token_ids),
                    response_logprobs=output.log_probs,
                    multi_modal_data={},
                    num_turns=2,
                    metrics=AgentLoopMetrics(),
                    extra_fields={**output.extra_fields, "turn_scores": [], "tool_rewards": []},
                )
            )
            # A summary of its own making instead of what was said before.
            prompt = [*prompt[:8], *output.token_ids, *prompt[8:]]
        return outputs
