# SPDX-License-Identifier: Apache-2.0
"""Keep verl from asking torch for two backends of the same device.

The bug (verl 0.9.1, utils/distributed.py): the backend string is always ``cpu:gloo,<device>:<backend>``. On the CPU
platform that reads ``cpu:gloo,cpu:gloo``, and torch raises "Duplicate device type cpu". verl's function takes a
``backend`` argument for callers who know better; here its default becomes ``cpu:gloo`` on the CPU platform.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any


def mend(module: ModuleType) -> None:
    """Give ``verl.utils.distributed.initialize_global_process_group_ray`` the right default on the CPU platform.

    Called right after that module was executed, before anybody can have taken the function from it.
    """
    original = module.initialize_global_process_group_ray

    @functools.wraps(original)
    def initialize_global_process_group_ray(timeout_second: float | None = None, backend: str | None = None) -> Any:
        if backend is None and module.get_device_name() == "cpu":
            backend = "cpu:gloo"
        return original(timeout_second=timeout_second, backend=backend)

    module.initialize_global_process_group_ray = initialize_global_process_group_ray  # type: ignore[attr-defined]
