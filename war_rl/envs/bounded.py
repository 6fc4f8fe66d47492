# SPDX-License-Identifier: Apache-2.0
"""Blocking calls of foreign code from asyncio, bounded in time, that hold up neither others nor the process's end."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


class _Abandoned(BaseException):
    """Raised inside the thread of a call nobody waits for any more."""


async def run_bounded(call: Callable[[], T], timeout_s: float, name: str) -> T:
    """Result of ``call()``, run in a daemon thread of its own named ``name``.

    Not in an executor: its threads are joined when the interpreter exits, so one hung call would keep the process
    alive, and would hold a slot of the pool for ever.

    Args:
        timeout_s: longest wait. Unit: seconds.

    Raises:
        asyncio.TimeoutError: the call did not return in time. Its thread is asked to stop, which works while it runs
            Python code; one that is stuck in C ends with the process.
    """
    future, thread = _start(call, name)
    try:
        return await asyncio.wait_for(future, timeout_s)
    except (asyncio.TimeoutError, asyncio.CancelledError):
        _stop(thread)
        raise


def _start(call: Callable[[], T], name: str) -> tuple[asyncio.Future[T], threading.Thread]:
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: Any, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)

    def work() -> None:
        result: Any = None
        failure: BaseException | None = None
        try:
            result = call()
        except _Abandoned:
            return
        except StopIteration as error:  # asyncio refuses this one as a future's exception
            failure = RuntimeError(f"call raised StopIteration: {error}")
        except BaseException as error:
            failure = error
        # The loop may be gone by the time a late call returns; then nobody waits for the result either.
        with contextlib.suppress(RuntimeError, _Abandoned):
            loop.call_soon_threadsafe(settle, result, failure)

    thread = threading.Thread(target=work, name=name, daemon=True)
    thread.start()
    return future, thread


def _stop(thread: threading.Thread) -> None:
    if thread.ident is not None and thread.is_alive():
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(_Abandoned))
