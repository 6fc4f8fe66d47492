# SPDX-License-Identifier: Apache-2.0
"""The game loop, but the first member of each group fails, each group in another way; its siblings play on."""

from __future__ import annotations

import asyncio
import itertools
import time
from typing import Any

from war_rl.trainers.verl.context import CURRENT_EPISODE
from war_rl.trainers.verl.textarena_loop import TextArenaAgentLoop

FAULTS = ("raises", "hangs", "never ends", "overflows")

# One agent-loop worker starts all trajectories of the tests' runs, so four groups a step see all four faults.
_next_fault = itertools.cycle(FAULTS)


class FaultyLoop(TextArenaAgentLoop):
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
            call = lambda: time.sleep(3600)  # noqa: E731
        return await super()._in_time(game, what, call)
