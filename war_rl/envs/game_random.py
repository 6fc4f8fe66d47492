# SPDX-License-Identifier: Apache-2.0
"""One random stream per game, for a library whose games all draw from the process-wide ``random`` module.

textarena seeds and draws from the global ``random`` (a few games from ``numpy.random``). Two games played at once would
eat each other's numbers, and seeding would reach into the trainer, which draws from the same module. So the names
``random`` and ``np`` inside textarena's own modules are bound to stand-ins that draw from the stream of the game whose
call is running. No lock is needed, a hung game holds up nobody, and the process-wide state is never touched.
Outside a game's call the stand-ins are the ordinary modules.
"""

from __future__ import annotations

import contextlib
import random
import sys
import types
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import numpy as np


class GameRandom:
    """The two streams of one game, both started from one seed."""

    def __init__(self, seed: int) -> None:
        self.python = random.Random(seed)
        self.numpy = np.random.RandomState(seed % 2**32)


_current: ContextVar[GameRandom | None] = ContextVar("war_game_random", default=None)


@contextlib.contextmanager
def drawing_from(streams: GameRandom) -> Iterator[None]:
    """Within the block, textarena code run by this thread (or task) draws from ``streams``."""
    token = _current.set(streams)
    try:
        yield
    finally:
        _current.reset(token)


class _RandomStandIn(types.ModuleType):
    """Looks like the ``random`` module; its functions draw from the running game's stream."""

    def __getattr__(self, name: str) -> Any:
        streams = _current.get()
        # Only the module's functions are methods of its hidden generator; classes and constants pass through.
        if streams is not None and callable(getattr(random.Random, name, None)):
            return getattr(streams.python, name)
        return getattr(random, name)


class _NumpyRandomStandIn(types.ModuleType):
    """Looks like ``numpy.random``; unseeded generators and the legacy functions draw from the running game's stream."""

    def __getattr__(self, name: str) -> Any:
        streams = _current.get()
        if streams is None:
            return getattr(np.random, name)
        if name == "default_rng":
            return lambda seed=None: np.random.default_rng(streams.numpy.randint(2**31) if seed is None else seed)
        if name != "RandomState" and callable(getattr(streams.numpy, name, None)):
            return getattr(streams.numpy, name)
        return getattr(np.random, name)


class _NumpyStandIn(types.ModuleType):
    """Looks like ``numpy`` with ``random`` replaced."""

    random = _NumpyRandomStandIn("numpy.random")

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)


_random_stand_in = _RandomStandIn("random")
_numpy_stand_in = _NumpyStandIn("numpy")


def isolate(*packages: str) -> None:
    """Bind the stand-ins in every loaded module of ``packages`` (a name covers its submodules). Safe to call again.

    Functions imported by name (``from random import choice``) are bound too; classes are left alone.
    """
    for name, module in list(sys.modules.items()):
        if module is None or not any(name == package or name.startswith(f"{package}.") for package in packages):
            continue
        for attribute, value in list(vars(module).items()):
            stand_in = _stand_in_for(value)
            if stand_in is not None:
                setattr(module, attribute, stand_in)


def _stand_in_for(value: Any) -> Any:
    if value is random:
        return _random_stand_in
    if value is np:
        return _numpy_stand_in
    if value is np.random:
        return _NumpyStandIn.random
    owner = getattr(value, "__self__", None)
    if owner is not None and owner is getattr(random, "_inst", None):
        name = value.__name__
        return lambda *args, **kwargs: getattr(_random_stand_in, name)(*args, **kwargs)
    return None
