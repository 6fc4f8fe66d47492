# SPDX-License-Identifier: Apache-2.0
"""The ``cpu`` platform for verl, and the question whether this machine has an accelerator."""

from __future__ import annotations

import glob
import os
import resource
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from verl.plugin.platform.platform_base import PlatformBase

from war_rl.compat import installed_vllm

# Device nodes of NVIDIA, WSL, AMD and Ascend. They stay visible in a Ray actor that was given no GPU, where
# torch.cuda.is_available() is False.
_ACCELERATOR_NODES = ("/dev/nvidiactl", "/dev/nvidia[0-9]*", "/dev/dxg", "/dev/kfd", "/dev/davinci[0-9]*")


def accelerator_traces() -> list[str]:
    """What on this machine says that an accelerator is there: device nodes, or torch seeing one."""
    found = [node for pattern in _ACCELERATOR_NODES for node in sorted(glob.glob(pattern))]
    if torch.cuda.is_available():
        found.append("torch.cuda")
    npu = getattr(torch, "npu", None)
    if npu is not None and npu.is_available():
        found.append("torch.npu")
    return found


class _CpuDevice(types.ModuleType):
    """``torch.cpu`` plus the functions verl calls on ``torch.<device>`` without asking whether they exist.

    Memory figures are those of the process (resident set); its peak cannot be reset.
    """

    def __init__(self) -> None:
        super().__init__("torch.cpu")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(torch.cpu, name)

    @staticmethod
    def _nothing(*args: Any, **kwargs: Any) -> None:
        return None

    empty_cache = ipc_collect = reset_peak_memory_stats = reset_accumulated_memory_stats = _nothing
    set_per_process_memory_fraction = set_device = manual_seed_all = _nothing

    @staticmethod
    def memory_allocated(*args: Any) -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize()

    memory_reserved = memory_allocated

    @staticmethod
    def max_memory_allocated(*args: Any) -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB

    max_memory_reserved = max_memory_allocated

    @staticmethod
    def mem_get_info(*args: Any) -> tuple[int, int]:
        page = os.sysconf("SC_PAGE_SIZE")
        return os.sysconf("SC_AVPHYS_PAGES") * page, os.sysconf("SC_PHYS_PAGES") * page

    @staticmethod
    def get_device_name(*args: Any) -> str:
        return "CPU"

    get_rng_state = staticmethod(torch.get_rng_state)
    set_rng_state = staticmethod(torch.set_rng_state)
    manual_seed = staticmethod(torch.manual_seed)


class PlatformCPU(PlatformBase):
    """verl without an accelerator: gloo, no streams, no sleep mode, devices that Ray counts as ``GPU``.

    The resource is called ``GPU`` because verl's own check of the cluster (``_check_resource_available``) counts only
    ``GPU`` and ``NPU``. One such device stands for one rank; ``ray.init(num_gpus=N)`` says how many a node has.
    """

    _device_module = _CpuDevice()

    @property
    def device_name(self) -> str:
        return "cpu"

    @property
    def vendor_name(self) -> str:
        return "cpu"

    @property
    def device_module(self) -> types.ModuleType:
        return self._device_module

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        """Whether verl may choose this platform on its own (VERL_PLATFORM=cpu chooses it regardless).

        No trace of an accelerator is not enough: the head node of a GPU cluster has none either. The installed vLLM
        has to be a CPU build as well.
        """
        vllm = installed_vllm()
        return vllm is not None and vllm.is_cpu_build and not accelerator_traces()

    def current_device(self) -> Any:
        return "cpu"  # verl passes it to Tensor.to(), where the index 0 would mean cuda:0

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None:
        return None

    def synchronize(self, device_index: int | None = None) -> None:
        return None

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        return None

    def empty_cache(self) -> None:
        return None

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"  # what Ray sets for its resource GPU

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None:
        return None

    def profiler_stop(self) -> None:
        return None

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

    def is_ipc_supported(self) -> bool:
        return False

    def rollout_env_vars(self) -> dict[str, str]:
        """Environment of a vLLM replica. The user's own ``VLLM_CPU_*`` and ``KMP_BLOCKTIME`` win."""
        defaults = {
            "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
            # vLLM binds each engine to its own idea of the cores; two engines on one small machine then collide.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            # A thread that spins while it waits for work takes the core of the other replica: ten times slower.
            "KMP_BLOCKTIME": "0",
            "OMP_WAIT_POLICY": "PASSIVE",
        }
        return {**{k: os.environ.get(k, v) for k, v in defaults.items()}, "OMP_NUM_THREADS": str(replica_threads())}

    def cudart(self) -> Any:
        return None


def replica_threads() -> int:
    """OpenMP threads of one replica: ``WAR_CPU_THREADS`` if set, else this machine's cores shared out over the devices
    Ray counts on one node. Ray sets OMP_NUM_THREADS in its actors, so that variable does not tell a user's wish."""
    chosen = os.environ.get("WAR_CPU_THREADS")
    if chosen:
        return max(1, int(chosen))
    cores = len(os.sched_getaffinity(0))
    return max(1, cores // max(1, _devices_per_node()))


def _devices_per_node() -> int:
    import ray

    if not ray.is_initialized():
        return 1
    return max((int(node["Resources"].get("GPU", 0)) for node in ray.nodes() if node.get("Alive")), default=1)
