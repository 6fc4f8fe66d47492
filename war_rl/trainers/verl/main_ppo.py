# SPDX-License-Identifier: Apache-2.0
"""The main job: ``war-rl train [hydra overrides]`` or ``python -m war_rl.trainers.verl.main_ppo [hydra overrides]``.

Everything that can be refused is refused here, before Ray starts.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from pathlib import Path
from typing import Any

from war_rl.board import TOKEN_VARIABLE
from war_rl.config import ConfigError, load_config

logger = logging.getLogger(__name__)

DEFAULT_CONFIG = "war_ppo_trainer"

PASSED_ON = ("WANDB_MODE", "WANDB_DIR", "VERL_PLATFORM", "WAR_PLATFORM", "VERL_FILE_LOGGER_ROOT")
"""Environment variables that the run's processes get where they are set here."""


def choose_platform() -> str:
    """ "cpu" or "gpu": the configuration group to compose with, also told to verl through VERL_PLATFORM.

    The user's VERL_PLATFORM wins; otherwise "cpu" only where verl finds no accelerator.
    """
    from verl.plugin.platform import get_platform

    name = "cpu" if get_platform().device_name == "cpu" else "gpu"
    if name == "cpu":
        os.environ.setdefault("VERL_PLATFORM", "cpu")
    os.environ.setdefault("WAR_PLATFORM", name)
    return name


def compose(overrides: list[str], config_name: str = DEFAULT_CONFIG) -> Any:
    """The whole trainer configuration.

    Raises:
        ConfigError: Hydra refused an override; the message is Hydra's own first lines.
    """
    from hydra import compose as hydra_compose
    from hydra import initialize_config_module
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    from war_rl.prepare import default_model_dir

    # What `war-rl prepare` makes; the demonstration's configuration reads it from here.
    os.environ.setdefault("WAR_MODEL", str(default_model_dir()))
    try:
        with initialize_config_module("war_rl.configs", version_base=None):
            return hydra_compose(config_name, overrides=overrides)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(_explain(error, overrides)) from error


def _explain(error: Exception, overrides: list[str]) -> str:
    """Hydra names only the last part of an unknown key; ours are named whole, with the closest known one."""
    for override in overrides:
        key, _, value = override.lstrip("+~").partition("=")
        section, _, rest = key.partition(".")
        if section == "war" and rest:
            nested: Any = value
            for part in reversed(rest.split(".")):
                nested = {part: nested}
            try:
                load_config(nested)
            except ConfigError as known:
                if "unknown key" in str(known):
                    return str(known)
    return str(error)


def run(overrides: list[str], config_name: str = DEFAULT_CONFIG) -> int:
    """Train. Returns the process's exit code: 0 done, 2 refused before start.

    Exceptions of a started run pass through.
    """
    from war_rl.compat import check_versions
    from war_rl.display import announce, shown
    from war_rl.supervise import interrupted

    problems = check_versions()
    if problems:
        for problem in problems:
            print(f"war-rl: {problem}", file=sys.stderr)
        return 2
    show_config = "--cfg" in overrides
    overrides = [o for o in overrides if o not in ("--cfg", "job")] if show_config else overrides
    try:
        platform = choose_platform()
        config = compose(overrides, config_name)
        _check_all(config)
    except ConfigError as error:
        print(f"war-rl: configuration refused: {error}", file=sys.stderr)
        return 2
    if show_config:
        from omegaconf import OmegaConf

        print(OmegaConf.to_yaml(config, resolve=True))
        return 0
    from war_rl.trainers.verl.settings import war_config

    announce(war_config(config).progress)
    folder = _prepare_run_folder(config)
    address = join_cluster(config)
    if address:
        print(f"war-rl: joining the Ray cluster at {address}", flush=True)
    print(f"war-rl: rollout={config.trainer.rollout} platform={platform} run folder {folder}", flush=True)
    began = time.time()
    try:
        with shown(folder):
            _train(config)
    except Exception as error:
        if interrupted():
            raise KeyboardInterrupt from error
        _close_summary(folder, error, began)
        raise
    if not os.environ.get("WAR_RL_SUMMARY_NOTE"):
        # The command line prints it itself, also for runs that were interrupted.
        _print_summary(folder)
    return 0


def _check_all(config: Any) -> None:
    from hydra.errors import HydraException
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config

    from war_rl.trainers.verl.plugin import assert_registered
    from war_rl.trainers.verl.settings import check, check_model

    assert_registered()
    check(config)
    check_model(config)
    try:
        validate_config(
            config=config, use_reference_policy=need_reference_policy(config), use_critic=need_critic(config)
        )
    except (AssertionError, ValueError, HydraException) as error:
        raise ConfigError(f"verl refuses this configuration: {error}") from error


def _prepare_run_folder(config: Any) -> Path:
    """Make the run folder absolute (Ray's processes may run elsewhere) and send W&B's files there."""
    from omegaconf import open_dict

    from war_rl import wandb_mode

    folder = Path(config.trainer.default_local_dir).expanduser().resolve()
    folder.mkdir(parents=True, exist_ok=True)
    with open_dict(config):
        config.trainer.default_local_dir = str(folder)
        runtime_env = config.ray_kwargs.ray_init.setdefault("runtime_env", {})
        env_vars = runtime_env.setdefault("env_vars", {})
        if "wandb" in config.trainer.logger:
            wandb_mode.from_process(folder)
        # verl's file logger writes into the working folder otherwise.
        os.environ.setdefault("VERL_FILE_LOGGER_ROOT", str(folder))
        # A cluster that runs already does not inherit this process's environment.
        given = variables_of_job()
        for name in (*PASSED_ON, TOKEN_VARIABLE):
            if name in os.environ and name not in given:
                env_vars[name] = os.environ[name]
    return folder


def variables_of_job() -> set[str]:
    """Environment variables that ``ray job submit`` has set already; Ray refuses to be told any of them again."""
    from ray._private.runtime_env.constants import RAY_JOB_CONFIG_JSON_ENV_VAR

    job = json.loads(os.environ.get(RAY_JOB_CONFIG_JSON_ENV_VAR) or "{}")
    return set((job.get("runtime_env") or {}).get("env_vars") or {})


def join_cluster(config: Any) -> str:
    """The address of the Ray cluster that verl will join, "" if it will start one of its own.

    A cluster that runs has its sizes and refuses to be told any, so those of the configuration are taken out.
    """
    from omegaconf import open_dict
    from ray._private.services import canonicalize_bootstrap_address

    init = config.ray_kwargs.ray_init
    given = init.get("address") or os.environ.get("RAY_ADDRESS") or None
    # A Ray client's address ("ray://...") is not a cluster's own.
    address = given if given and "://" in given else canonicalize_bootstrap_address(given)
    if address:
        with open_dict(config):
            for name in ("num_cpus", "num_gpus", "resources", "labels", "object_store_memory"):
                if init.get(name) is not None:
                    init[name] = None
    return address or ""


def why_not_joined(error: ConnectionError) -> str:
    """What to do about a Ray cluster that cannot be joined.

    Ray 2.60 starts a cluster with authentication where the user has a token, and sends none to an address it is given.
    """
    if "InvalidAuthToken" not in f"{error} {error.__cause__}":
        return str(error)
    return (
        f"{error}: it asks for a token. Set RAY_AUTH_MODE=token for this command, with the cluster's token in "
        "~/.ray/auth_token, RAY_AUTH_TOKEN_PATH or RAY_AUTH_TOKEN (docs/launching.md)"
    )


def _train(config: Any) -> None:
    import ray
    from verl.trainer.main_ppo import TaskRunnerV1, run_ppo
    from verl.utils.device import auto_set_device

    auto_set_device(config)
    try:
        run_ppo(config, task_runner_class=TaskRunnerV1)
    except ConnectionError as error:
        text = why_not_joined(error)
        if text == str(error):
            raise
        raise ConnectionError(text) from error
    finally:
        ray.shutdown()


def _close_summary(folder: Path, error: Exception, began: float) -> None:
    """A run that died before its first step has nobody else to say why. The innermost cause says most.

    ``began``, unix seconds, tells its summary from what an earlier run left in the folder.
    """
    from war_rl.summary import mark_ended

    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    try:
        # The trainer may live on another machine, whose clock may be a little behind.
        mark_ended(folder, "failed", lines[-1] if lines else type(error).__name__, since=began - 60.0)
    except (OSError, ValueError):
        logger.debug("no summary to close in %s", folder)


def _print_summary(folder: Path) -> None:
    from war_rl.summary import format_table, load_summary

    path = folder / "summary.json"
    print(format_table(load_summary(path)))
    print(f"war-rl: summary in {path}")


def main(argv: list[str] | None = None) -> int:
    """The same as ``war-rl train``: supervised, so that Ctrl-C leaves nothing behind."""
    from war_rl.cli import main as cli

    return cli(["train", *(sys.argv[1:] if argv is None else argv)])


if __name__ == "__main__":
    raise SystemExit(main())
