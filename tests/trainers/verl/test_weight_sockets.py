# SPDX-License-Identifier: Apache-2.0
"""Both ends of a weight update find each other, and nobody else's."""

from __future__ import annotations

import inspect
import os
from types import SimpleNamespace

import pytest
import ray

from war_rl.trainers.verl import weight_sockets


def cluster(monkeypatch, address):
    """As a process of the first job of the Ray cluster at ``address``."""
    context = SimpleNamespace(get_job_id=lambda: "01000000", gcs_address=address)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)


def module():
    """The two classes of verl as far as they matter here."""

    class ServerAdapter:
        def __init__(self, replica):
            job_id = ray.get_runtime_context().get_job_id()
            self.zmq_handle = f"ipc:///tmp/rl-colocate-zmq-{job_id}-replica-{replica}-rank-0.sock"

    class Server:
        def __init__(self, replica):
            os.environ["VERL_REPLICA_RANK"] = str(replica)
            os.environ["VERL_RAY_JOB_ID"] = ray.get_runtime_context().get_job_id()

    made = SimpleNamespace(ServerAdapter=ServerAdapter, vLLMHttpServer=Server)
    weight_sockets.mend_sender(made)
    weight_sockets.mend_receiver(made)
    return made


def received(monkeypatch):
    """Where verl's own engine-side code expects the weights, with the environment that the server left it."""
    from verl.workers.rollout.vllm_rollout import utils

    monkeypatch.setattr(utils, "_resolve_vllm_weight_sync_local_rank", lambda rank, config: rank)
    worker = SimpleNamespace(model_runner=SimpleNamespace(vllm_config=None), local_rank=0)
    return utils.vLLMColocateWorkerExtension._get_zmq_handle(worker)


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    for name in ("VERL_REPLICA_RANK", "VERL_RAY_JOB_ID", "VERL_ZMQ_BASE_TRAINER_RANK"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def test_both_ends_meet_and_two_clusters_do_not(monkeypatch):
    handles = []
    for address in ("127.0.0.1:6379", "127.0.0.1:50021"):
        cluster(monkeypatch, address)
        verl = module()
        sent = verl.ServerAdapter(1).zmq_handle
        verl.vLLMHttpServer(1)
        assert received(monkeypatch) == sent
        handles.append(sent)
    assert handles[0] != handles[1]
    assert all(len(handle) < 100 for handle in handles), "a Unix socket's path has 107 characters"


def test_a_verl_that_names_its_sockets_otherwise_is_left_alone(monkeypatch):
    cluster(monkeypatch, "127.0.0.1:6379")

    class ServerAdapter:
        def __init__(self):
            self.zmq_handle = "ipc:///tmp/weights-4711.sock"

    class Server:
        def __init__(self):
            os.environ["VERL_RAY_JOB_ID"] = "4711"

    made = SimpleNamespace(ServerAdapter=ServerAdapter, vLLMHttpServer=Server)
    weight_sockets.mend_sender(made)
    weight_sockets.mend_receiver(made)
    assert made.ServerAdapter().zmq_handle == "ipc:///tmp/weights-4711.sock"
    made.vLLMHttpServer()
    assert os.environ["VERL_RAY_JOB_ID"] == "4711"


def test_the_installed_verl_still_needs_it_and_has_it():
    from verl.workers.rollout.vllm_rollout import vllm_async_server, vllm_rollout

    for cls in (vllm_rollout.ServerAdapter, vllm_async_server.vLLMHttpServer):
        assert cls.__init__.__wrapped__, "mended when it was imported"
    assert "rl-colocate-zmq-{job_id}-replica-" in inspect.getsource(vllm_rollout.ServerAdapter.__init__.__wrapped__)
    wanted = f'os.environ["{weight_sockets.JOB_ID}"] = ray.get_runtime_context().get_job_id()'
    assert wanted in inspect.getsource(vllm_async_server.vLLMHttpServer.__init__.__wrapped__)
