# SPDX-License-Identifier: Apache-2.0
"""The recipe's script with a training command that only records its arguments; the router is the real one."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "recipes" / "slime_war" / "run.sh"
PYTHON = """#!{python}
import json, os, subprocess, sys, urllib.request
if sys.argv[1] != "train.py":
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
alive = urllib.request.urlopen({health!r}, timeout=5).status if {war} else 0
json.dump({{"arguments": sys.argv[2:], "router": alive, "folder": os.getcwd()}}, open({out!r}, "w"))
"""


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def run(folder: Path, **settings: str) -> tuple[dict, str]:
    """What the training command saw, and the address of the router's health."""
    port = free_port()
    health = f"http://127.0.0.1:{port}/health"
    (folder / "slime" / "scripts" / "models").mkdir(parents=True)
    (folder / "slime" / "scripts" / "models" / "qwen3-4B.sh").write_text("MODEL_ARGS=(--num-layers 36)\n")
    (folder / "bin").mkdir()
    fake, out = folder / "bin" / "python", folder / "seen.json"
    war = settings.get("ROLLOUT") != "stock"
    fake.write_text(PYTHON.format(python=sys.executable, health=health, out=str(out), war=war))
    fake.chmod(0o755)
    env = os.environ | {"PATH": f"{fake.parent}:{os.environ['PATH']}", "ROUTER_PORT": str(port)}
    env |= {"MODEL": "/m", "DATA": "/d", "SLIME": str(folder / "slime"), "PYTHONPATH": str(SCRIPT.parents[2])}
    subprocess.run([str(SCRIPT), "--num-rollout", "2"], env=env | settings, cwd=folder, check=True, timeout=120)
    return json.loads(out.read_text()), health


def test_the_router_lives_while_slime_trains_and_no_longer(tmp_path):
    seen, health = run(tmp_path)
    assert seen["router"] == 200 and Path(seen["folder"]) == tmp_path / "slime"
    text = " ".join(seen["arguments"])
    assert "--rollout-function-path war_rl.trainers.slime.rollout.generate_rollout" in text
    assert "--sglang-router-ip 127.0.0.1 --sglang-router-port" in text and "--num-layers 36" in text
    assert "--sglang-speculative-algorithm NGRAM" in text and text.endswith("--num-rollout 2")
    save = seen["arguments"][seen["arguments"].index("--save") + 1]
    assert save == str(tmp_path / "runs" / "slime-war" / "checkpoints")
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(health, timeout=5)


def test_the_stock_rollout_is_one_switch_away(tmp_path):
    seen, _ = run(tmp_path, ROLLOUT="stock")
    text = " ".join(seen["arguments"])
    assert "router" not in text and "war_rl" not in text and "speculative" not in text
