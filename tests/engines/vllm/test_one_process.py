# SPDX-License-Identifier: Apache-2.0
"""The executor of engines on CPUs: any number may start at once, and it holds one worker only."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytestmark = pytest.mark.vllm


def executor(world_size: int):
    from war_rl.engines.vllm.one_process import OneProcessExecutor

    made = OneProcessExecutor.__new__(OneProcessExecutor)
    made.vllm_config = SimpleNamespace(device_config=SimpleNamespace(device="cpu"))
    made.parallel_config = SimpleNamespace(world_size=world_size)
    return made


def test_two_engines_that_start_at_once_meet_on_ports_of_their_own():
    from torch.distributed import rendezvous

    stores = []
    for _ in range(2):
        method, rank, _ = executor(1)._distributed_args()
        # As torch.distributed.init_process_group does it.
        store, _, _ = next(rendezvous(method, rank, 1))
        stores.append(store)
    assert stores[0].port != stores[1].port


def test_more_workers_than_one_are_refused():
    with pytest.raises(ValueError, match="use distributed_executor_backend=mp"):
        executor(2)._distributed_args()
