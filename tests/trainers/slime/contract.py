# SPDX-License-Identifier: Apache-2.0
"""slime's seams as data: what War-RL calls, passes and reads. ``python -m tests.trainers.slime.contract`` records it.

Recorded from slime's source; contract.json names version and commit.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import sys
from pathlib import Path
from typing import Any

PATH = Path(__file__).with_name("contract.json")

FUNCTIONS = (
    "slime.rollout.sglang_rollout.generate_rollout",
    "slime.rollout.sglang_rollout.generate",
    "slime.rollout.sglang_rollout.generate_and_rm",
    "slime.rollout.sglang_rollout.generate_and_rm_group",
    "slime.rollout.base_types.call_rollout_fn",
    "slime.utils.async_utils.run",
    "slime.utils.misc.load_function",
    "slime.utils.http_utils.post",
    "slime.utils.http_utils.init_http_client",
)
DATACLASSES = (
    "slime.utils.types.Sample",
    "slime.utils.types.Sample.SpecInfo",
    "slime.rollout.base_types.RolloutFnTrainOutput",
    "slime.rollout.base_types.RolloutFnEvalOutput",
)


def find(path: str) -> Any:
    """The object at a dotted path that may lead into a class."""
    parts = path.split(".")
    for size in range(len(parts) - 1, 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:size]))
        except ModuleNotFoundError:
            continue
        for name in parts[size:]:
            found = getattr(found, name)
        return found
    raise ModuleNotFoundError(path)


def describe() -> dict[str, Any]:
    """What the importable ``slime`` looks like."""
    status = find("slime.utils.types.Sample.Status")
    return {
        "functions": {path: _signature(find(path)) for path in FUNCTIONS},
        "dataclasses": {path: _fields(find(path)) for path in DATACLASSES},
        "status": {s.name: s.value for s in status},
    }


def _signature(function: Any) -> list[list[Any]]:
    parameters = inspect.signature(function).parameters.values()
    return [[p.name, None if p.default is p.empty else repr(p.default)] for p in parameters]


def _fields(cls: Any) -> dict[str, str]:
    out = {}
    for field in dataclasses.fields(cls):
        if field.default_factory is not dataclasses.MISSING:
            out[field.name] = f"{field.default_factory.__name__}()"
        else:
            out[field.name] = "" if field.default is dataclasses.MISSING else repr(field.default)
    return out


def recorded() -> dict[str, Any]:
    return dict(json.loads(PATH.read_text("utf-8")))


if __name__ == "__main__":
    source = dict(zip(("version", "commit"), sys.argv[1:3], strict=True))
    PATH.write_text(json.dumps({"slime": source, **describe()}, indent=1) + "\n", "utf-8")
