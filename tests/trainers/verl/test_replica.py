# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from war_rl.config import SchedulerConfig, WarConfig
from war_rl.types import TrajectoryId, encode_request_id

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize("wanted, expected", [(True, {"priority": -3}), (False, {})])
def test_a_request_gets_its_priority_from_the_turns_behind_it(monkeypatch, wanted, expected):
    pytest.importorskip("vllm")
    from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer

    from war_rl.trainers.verl.replica import WarHttpServer

    seen = {}

    async def generate(self, **kwargs):
        seen.update(kwargs)
        return SimpleNamespace(extra_fields={})

    monkeypatch.setattr(vLLMHttpServer, "generate", generate)
    server = object.__new__(WarHttpServer)
    server._war = WarConfig(scheduler=SchedulerConfig(engine_priority=wanted))
    server.replica_rank = 1
    request_id = encode_request_id(TrajectoryId("g", 0, 1), 3)
    output = asyncio.run(server.generate(request_id=request_id, prompt_ids=[1]))
    assert output.extra_fields == {"war_replica": 1}
    assert seen == {"request_id": request_id, "prompt_ids": [1], **expected}
