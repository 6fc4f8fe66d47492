# SPDX-License-Identifier: Apache-2.0
"""A Ray actor with coroutines, as its callers see it, without Ray."""

from __future__ import annotations

import asyncio
import pickle
import random
from functools import partial
from types import SimpleNamespace
from typing import Any


class Actor:
    """Each call begins when it likes, whatever was called before it, and is answered when it likes.

    Args:
        target: the object behind it.
        late: most passes of the loop until a call begins, and again until its answer is there.
        seed: of both.
    """

    def __init__(self, target: Any, late: int = 0, seed: int = 0) -> None:
        self.target = target
        self.calls: list[str] = []
        self._late = late
        self._random = random.Random(seed)

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=partial(self._call, name))

    def _call(self, name: str, *args: Any) -> Any:
        self.calls.append(name)
        # Who stops waiting for an answer does not stop the call.
        return asyncio.shield(asyncio.ensure_future(self._run(name, pickle.dumps(args))))

    async def _run(self, name: str, args: bytes) -> Any:
        await self._pause()
        out = getattr(self.target, name)(*pickle.loads(args))
        if asyncio.iscoroutine(out):
            out = await out
        await self._pause()
        return pickle.loads(pickle.dumps(out))

    async def _pause(self) -> None:
        for _ in range(self._random.randint(0, self._late)):
            await asyncio.sleep(0)
