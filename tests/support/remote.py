# SPDX-License-Identifier: Apache-2.0
"""Hand-made Ray handles: what ``handle.method`` looks like to a caller on the same event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any


class Remote:
    """``method.remote(...)`` as a future of an asynchronous function."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def remote(self, *args: Any) -> Any:
        return asyncio.ensure_future(self._call(*args))
