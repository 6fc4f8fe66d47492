# SPDX-License-Identifier: Apache-2.0
"""Two trainings on one machine must not send their weights to each other's engines.

verl 0.9.1 names the socket between a trainer's rank and its engine after the Ray job id, so that jobs of one machine do
not meet. But a job id is unique within one Ray cluster only: every training that starts Ray itself is job 01000000. Two
of them on a machine take the socket from each other, and both wait for ever in a weight update (or an engine gets the
other's weights). Here the cluster's address is added to the id, on both ends. Where verl names the socket otherwise,
nothing is changed.
"""

from __future__ import annotations

import functools
import os
import re
from types import ModuleType
from typing import Any

JOB_ID = "VERL_RAY_JOB_ID"
"""Environment variable by which verl's server tells its engine the job id."""


def unique(job_id: str, cluster: str) -> str:
    """A job id that no other cluster on this machine has. ``cluster``: its address, host:port."""
    return f"{job_id}-{re.sub('[^0-9A-Za-z.]', '-', cluster)}"


def _ids() -> tuple[str, str]:
    import ray

    context = ray.get_runtime_context()
    return context.get_job_id(), unique(context.get_job_id(), context.gcs_address)


def mend_sender(module: ModuleType) -> None:
    """``module``: verl.workers.rollout.vllm_rollout.vllm_rollout."""
    _after_init(module.ServerAdapter, _rename_handle)


def mend_receiver(module: ModuleType) -> None:
    """``module``: verl.workers.rollout.vllm_rollout.vllm_async_server. The engine inherits the variable."""
    _after_init(module.vLLMHttpServer, _rename_variable)


def _rename_handle(adapter: Any) -> None:
    job, better = _ids()
    adapter.zmq_handle = adapter.zmq_handle.replace(f"-{job}-replica-", f"-{better}-replica-")


def _rename_variable(server: Any) -> None:
    job, better = _ids()
    if os.environ.get(JOB_ID) == job:
        os.environ[JOB_ID] = better


def _after_init(cls: Any, action: Any) -> None:
    original = cls.__init__

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        action(self)

    cls.__init__ = init
