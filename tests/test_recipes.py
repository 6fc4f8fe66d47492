# SPDX-License-Identifier: Apache-2.0
"""Each recipe's script, run with a command that only records its arguments: they must compose and pass our checks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPTS = sorted(
    p for p in (ROOT / "recipes").glob("*/run*.sh") if "war-rl train" in p.read_text() or '" train' in p.read_text()
)


def recorded(script: Path, folder: Path) -> list[str]:
    """The arguments of the script's last call of War-RL's command line."""
    fake = folder / "war-rl"
    out = folder / "arguments.json"
    fake.write_text(f"#!{sys.executable}\nimport json, sys\njson.dump(sys.argv[1:], open({str(out)!r}, 'w'))\n")
    fake.chmod(0o755)
    subprocess.run([str(script)], env={**os.environ, "WAR_RL": str(fake)}, check=True)
    return list(json.loads(out.read_text()))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda p: f"{p.parent.name}/{p.name}")
def test_a_recipe_composes_and_is_accepted(script, tmp_path, monkeypatch):
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config

    from war_rl.trainers.verl import settings
    from war_rl.trainers.verl.main_ppo import DEFAULT_CONFIG, compose

    command, *arguments = recorded(script, tmp_path)
    assert command == "train"
    monkeypatch.setenv("WAR_PLATFORM", "cpu" if "cpu" in script.parent.name else "gpu")
    name = DEFAULT_CONFIG
    if arguments[:1] == ["--config-name"]:
        name, arguments = arguments[1], arguments[2:]
    config = compose(arguments, name)
    settings.check(config)
    assert config.actor_rollout_ref.rollout.name == "war"
    # verl's own checks, as its main program makes them.
    critic, reference = need_critic(config), need_reference_policy(config)
    validate_config(config=config, use_reference_policy=reference, use_critic=critic)


@pytest.mark.parametrize("script", sorted(ROOT.glob("recipes/*/*.sh")), ids=lambda p: f"{p.parent.name}/{p.name}")
def test_a_script_parses_and_may_be_run(script):
    subprocess.run(["bash", "-n", str(script)], check=True)
    assert os.access(script, os.X_OK)


def test_there_are_recipes():
    assert len(SCRIPTS) >= 3
