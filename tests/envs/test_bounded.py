# SPDX-License-Identifier: Apache-2.0
"""Bounded calls: results, errors, a named thread that is told to stop, and a process that ends all the same."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
import threading

import pytest

from war_rl.envs.bounded import run_bounded


def test_result_and_error_come_back():
    assert asyncio.run(run_bounded(lambda: 7, 60, "t")) == 7
    with pytest.raises(ZeroDivisionError):
        asyncio.run(run_bounded(lambda: 1 / 0, 60, "t"))
    with pytest.raises(RuntimeError, match="StopIteration"):
        asyncio.run(run_bounded(lambda: next(iter(())), 60, "t"))


@pytest.mark.parametrize("how", ["timeout", "cancel"])
def test_nobody_waiting_stops_the_thread(how):
    started, stopped = threading.Event(), threading.Event()

    def spin():
        started.set()
        try:
            while True:
                pass
        finally:
            stopped.set()

    async def main():
        task = asyncio.create_task(run_bounded(spin, 0.2 if how == "timeout" else 60, "spin"))
        if how == "cancel":
            while not started.is_set():
                await asyncio.sleep(0.01)
            task.cancel()
        await task

    with pytest.raises(asyncio.TimeoutError if how == "timeout" else asyncio.CancelledError):
        asyncio.run(main())
    assert stopped.wait(timeout=60)


def test_a_hung_call_does_not_keep_the_process_alive():
    code = """
        import asyncio, time
        from war_rl.envs.bounded import run_bounded
        try:
            asyncio.run(run_bounded(lambda: time.sleep(3600), 0.2, "hung"))
        except asyncio.TimeoutError:
            print("gave up")
    """
    run = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=120)
    assert (run.returncode, run.stdout.strip()) == (0, "gave up"), run.stderr
