# SPDX-License-Identifier: Apache-2.0
"""Mend vLLM's CPU engine inside a worker, each bug only where it is.

Called once per worker process, after the worker class is chosen and before the model is loaded.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from war_rl.engines.vllm.fixes import expand_kernel, packed_weights, recovered_tokens
from war_rl.engines.vllm.fixes.seed import refuse_seed

__all__ = ["FIXES", "Fix", "FixFailedError", "apply", "refuse_seed"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Fix:
    """One bug, how to see it and how to mend it."""

    name: str
    bug: str
    is_present: Callable[[], bool]
    mend: Callable[[], None]


FIXES: tuple[Fix, ...] = tuple(
    Fix(module.__name__.rpartition(".")[2], module.BUG, module.is_present, module.mend)
    for module in (expand_kernel, recovered_tokens, packed_weights)  # the silent one first
)


class FixFailedError(RuntimeError):
    """A bug of vLLM's CPU engine could not be looked for or is still there: results cannot be trusted."""


def apply(fixes: tuple[Fix, ...] = FIXES) -> list[str]:
    """Look for each bug, mend those found, look again. Returns the names of those mended; empty off the CPU engine.

    Raises :class:`FixFailedError` when a probe fails or a mended bug still shows: samples could be wrong.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return []
    return _apply(fixes)


def _apply(fixes: tuple[Fix, ...]) -> list[str]:
    mended = []
    for fix in fixes:
        try:
            if not fix.is_present():
                continue
            fix.mend()
            still_there = fix.is_present()
        except Exception as error:
            raise FixFailedError(
                f"cannot look for or mend {fix.name} ({fix.bug}) in this vLLM: {error}. Install a version from "
                "docs/compatibility.md"
            ) from error
        if still_there:
            raise FixFailedError(f"{fix.name} is still there after mending: {fix.bug}")
        logger.info("mended in vLLM: %s", fix.bug)
        mended.append(fix.name)
    return mended
