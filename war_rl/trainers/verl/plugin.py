# SPDX-License-Identifier: Apache-2.0
"""What verl loads through the entry point group ``verl.plugins``: every registration War-RL needs, in every process.

verl (0.9.1) loads this module near the end of ``import verl``, in each process that imports verl, and only imports it;
so importing registers. What is imported by then is verl's platform package; its engines, rollout and trainer are not,
and are heavy, so those registrations wait for the first import of the module they belong to.

verl logs a failing plugin at DEBUG only and goes on. So failures are kept here, logged as errors, and raised by
:func:`assert_registered`, which the main program calls before anything starts.
"""

from __future__ import annotations

import importlib
import logging
import os
from importlib import metadata
from types import ModuleType
from typing import Any

from war_rl.compat import IncompatibleError, Problem
from war_rl.trainers.verl.import_hooks import after_import

logger = logging.getLogger(__name__)

ENTRY_POINT = "war_rl"
ENTRY_POINT_GROUP = "verl.plugins"
ROLLOUT_NAME = "war"
TRAINER_NAME = "war_sync"

_failures: list[str] = []
_registered = False


def _load_replica() -> Any:
    from war_rl.trainers.verl.replica import WarReplica

    return WarReplica


def _on_replica_registry(module: ModuleType) -> None:
    module.RolloutReplicaRegistry.register(ROLLOUT_NAME, _load_replica)


def _on_rollout_base(module: ModuleType) -> None:
    # The trainer-side adapter that pushes weights to the servers. verl has no public way to add one.
    module._ROLLOUT_REGISTRY[(ROLLOUT_NAME, "async")] = "verl.workers.rollout.vllm_rollout.ServerAdapter"


class _LazyTrainers(dict[str, Any]):
    """verl's trainer registry, which imports ours at the moment somebody asks for it by name.

    A failing import then comes out of ``get_trainer_cls`` with its own traceback, and a stock run never imports it.
    """

    def __missing__(self, name: str) -> Any:
        if name != TRAINER_NAME:
            raise KeyError(name)
        importlib.import_module("war_rl.trainers.verl.trainer")  # registers itself
        return dict.__getitem__(self, name)


def _on_trainer_base(module: ModuleType) -> None:
    module.TRAINER_REGISTRY = _LazyTrainers(module.TRAINER_REGISTRY)  # type: ignore[attr-defined]


def _on_engines(module: ModuleType) -> None:
    from verl.plugin.platform import get_platform

    # The platform is settled here: verl's engine modules read the device name while they are imported.
    if get_platform().device_name == "cpu":
        importlib.import_module("war_rl.trainers.verl.cpu.engines")


def _on_distributed(module: ModuleType) -> None:
    from war_rl.trainers.verl.cpu import process_group

    process_group.mend(module)


def _on_sender(module: ModuleType) -> None:
    from war_rl.trainers.verl import weight_sockets

    weight_sockets.mend_sender(module)


def _on_receiver(module: ModuleType) -> None:
    from war_rl.trainers.verl import weight_sockets

    weight_sockets.mend_receiver(module)


_ON_IMPORT = {
    "verl.workers.rollout.replica": _on_replica_registry,
    "verl.workers.rollout.base": _on_rollout_base,
    "verl.trainer.ppo.v1.trainer_base": _on_trainer_base,
    "verl.workers.engine": _on_engines,
    "verl.utils.distributed": _on_distributed,
    "verl.workers.rollout.vllm_rollout.vllm_rollout": _on_sender,
    "verl.workers.rollout.vllm_rollout.vllm_async_server": _on_receiver,
}


def _guarded(name: str, action: Any, *args: Any) -> None:
    """A failure of ours must not take down a stock verl run that merely has War-RL installed: keep it, say it."""
    try:
        action(*args)
    except Exception as error:
        _failures.append(f"{name}: {type(error).__name__}: {error}")
        logger.exception("War-RL could not register with %s", name)


def register() -> None:
    """Register everything, or leave the note that does. Safe to call again."""
    global _registered
    if _registered:
        return
    _registered = True
    _guarded("the vLLM distribution alias", _install_alias)
    _guarded("verl's platforms", _register_platform)
    for name, action in _ON_IMPORT.items():
        _guarded(name, after_import, name, lambda module, n=name, a=action: _guarded(n, a, module))


def _install_alias() -> None:
    from war_rl.trainers.verl.cpu import vllm_alias

    vllm_alias.install()


def _register_platform() -> None:
    from verl.plugin.platform import PlatformRegistry

    from war_rl.trainers.verl.cpu.platform import PlatformCPU

    PlatformRegistry.register(platform="cpu")(PlatformCPU)


def registration_problems(load: bool = False) -> list[Problem]:
    """What is wrong with the registration, in this process and in those verl will start.

    With ``load`` the modules that registrations wait for are imported first (about ten seconds) and each registry is
    looked into; without it only what has happened so far is judged.
    """
    problems = _entry_point_problems()
    if load:
        for name in _ON_IMPORT:
            _guarded(name, importlib.import_module, name)
        problems += _missing_registrations()
    problems += [
        Problem(f"registration failed with {text}", "war-rl doctor  (and see docs/compatibility.md)")
        for text in dict.fromkeys(_failures)
    ]
    return problems


def _entry_point_problems() -> list[Problem]:
    problems = []
    names = {point.name for point in metadata.entry_points(group=ENTRY_POINT_GROUP)}
    if ENTRY_POINT not in names:
        problems.append(
            Problem(
                f"the installed war-rl has no entry point '{ENTRY_POINT}' in the group '{ENTRY_POINT_GROUP}', "
                "so verl's worker processes would not know it",
                "uv pip install -e .  (in the War-RL repository)",
            )
        )
    policy = os.environ.get("VERL_USE_EXTERNAL_PLUGINS", "auto").strip().lower()
    if policy != "auto" and ENTRY_POINT not in {name.strip() for name in policy.split(",")}:
        problems.append(
            Problem(
                f"VERL_USE_EXTERNAL_PLUGINS={policy} keeps verl from loading War-RL",
                "unset VERL_USE_EXTERNAL_PLUGINS, or add war_rl to its list",
            )
        )
    return problems


def _missing_registrations() -> list[Problem]:
    import verl.workers.rollout.base as rollout_base
    from verl.plugin.platform import PlatformRegistry, get_platform
    from verl.trainer.ppo.v1 import trainer_base
    from verl.workers.engine import EngineRegistry
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    engines = EngineRegistry._engines
    found = {
        "platform 'cpu'": PlatformRegistry.get("cpu") is not None,
        f"rollout '{ROLLOUT_NAME}'": ROLLOUT_NAME in RolloutReplicaRegistry._registry,
        f"rollout adapter '{ROLLOUT_NAME}'": (ROLLOUT_NAME, "async") in rollout_base._ROLLOUT_REGISTRY,
        f"trainer '{TRAINER_NAME}'": isinstance(trainer_base.TRAINER_REGISTRY, _LazyTrainers),
    }
    if get_platform().device_name == "cpu":
        for model_type in ("language_model", "value_model"):
            found[f"engine {model_type}/fsdp2 for cpu"] = "cpu" in engines.get(model_type, {}).get("fsdp2", {})
    return [
        Problem(f"verl does not know War-RL's {what}", "war-rl doctor  (and see docs/compatibility.md)")
        for what, is_there in found.items()
        if not is_there
    ]


def assert_registered(load: bool = False) -> None:
    """Raise :class:`~war_rl.compat.IncompatibleError` with every registration problem; see
    :func:`registration_problems` for ``load``."""
    register()
    problems = registration_problems(load)
    if problems:
        raise IncompatibleError(problems)


register()
