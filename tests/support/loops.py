# SPDX-License-Identifier: Apache-2.0
"""Agent loops of the end-to-end runs: the game loop for a model that writes noise, and one that fails on purpose."""

from __future__ import annotations

import asyncio
import functools
import itertools
import subprocess
import sys
import time
from typing import Any

from war_rl.trainers.verl.context import CURRENT_EPISODE
from war_rl.trainers.verl.textarena_loop import TextArenaAgentLoop


class GuessingLoop(TextArenaAgentLoop):
    """Reads any text as a valid guess, so that a random model's games last several turns."""

    async def _in_time(self, game: Any, what: str, call: Any) -> Any:
        if what == "step":
            call = functools.partial(game.step, f"[{len(call.args[0]) % 20 + 1}]")
        return await super()._in_time(game, what, call)


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
