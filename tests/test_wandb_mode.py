# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from war_rl.config import ConfigError
from war_rl.wandb_mode import WandbDecision, configure, decide, find_credentials


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "home" / ".config" / "wandb").mkdir(parents=True)
    (tmp_path / "cwd" / "wandb").mkdir(parents=True)
    return tmp_path / "home"


def ask(home: Path, **environ: str) -> WandbDecision:
    return decide(environ, home=home, cwd=home.parent / "cwd", folder="runs/a")


def test_without_credentials_it_is_offline_and_says_how_to_sync(home: Path) -> None:
    decision = ask(home)
    assert decision.mode == "offline"
    assert "no credentials" in decision.message and "wandb sync runs/a/wandb/offline-run-*" in decision.message


def write_netrc(home: Path, host: str = "api.wandb.ai") -> Path:
    (home / ".netrc").write_text(f"machine {host}\n  login user\n  password {'k' * 40}\n")
    return home / ".netrc"


def test_each_place_for_credentials_puts_it_online(home: Path, tmp_path: Path) -> None:
    assert ask(home, WANDB_API_KEY="k").mode == "online"
    (tmp_path / "token").write_text("t")
    assert ask(home, WANDB_IDENTITY_TOKEN_FILE=str(tmp_path / "token")).mode == "online"
    assert ask(home, WANDB_IDENTITY_TOKEN_FILE=str(tmp_path / "absent")).mode == "offline"
    netrc = write_netrc(home)
    assert ask(home) == WandbDecision("online", str(netrc))
    moved = netrc.rename(tmp_path / "elsewhere")
    assert ask(home).mode == "offline" and ask(home, NETRC=str(moved)).mode == "online"
    (home / ".config" / "wandb" / "settings").write_text("[default]\napi_key = k\n")
    assert ask(home).source == "wandb's settings file"


def test_credentials_of_another_server_do_not_count(home: Path) -> None:
    write_netrc(home, "wandb.example.org")
    assert ask(home).mode == "offline"
    assert ask(home, WANDB_BASE_URL="https://wandb.example.org").mode == "online"
    (home / ".config" / "wandb" / "settings").write_text("[default]\nbase_url = https://wandb.example.org\n")
    assert ask(home).mode == "online"


@pytest.mark.parametrize("broken", ["machine", "machine api.wandb.ai\n login a\n password\n", "\x00\xff"])
def test_a_broken_netrc_is_none(home: Path, broken: str) -> None:
    (home / ".netrc").write_text(broken)
    assert find_credentials({}, home=home, cwd=home) == ""


def test_the_users_mode_is_respected(home: Path) -> None:
    write_netrc(home)
    assert ask(home, WANDB_MODE="offline").mode == "offline"
    assert ask(home, WANDB_MODE="disabled") == WandbDecision("disabled", "WANDB_MODE")
    (home.parent / "cwd" / "wandb" / "settings").write_text("[default]\nmode = offline\n")
    assert ask(home).mode == "offline" and ask(home, WANDB_MODE="online").mode == "online"


def test_what_would_ask_or_fail_later_is_refused_now(home: Path) -> None:
    with pytest.raises(ConfigError, match=r"WANDB_MODE='online'.*wandb login"):
        ask(home, WANDB_MODE="online")
    with pytest.raises(ConfigError, match=r"'ofline'.*not one of online, offline"):
        ask(home, WANDB_MODE="ofline")


def test_configure_sets_the_environment_and_speaks_once(home: Path, tmp_path: Path) -> None:
    said: list[str] = []
    environ: dict[str, str] = {}
    cwd = tmp_path / "cwd"
    (cwd / "wandb" / "settings").write_text("[default]\nentity = team\n")
    for _ in range(2):
        configure(environ, tmp_path / "run", home=home, cwd=cwd, say=said.append)
    assert len(said) == 1 and (tmp_path / "run").is_dir()
    assert environ["WANDB_MODE"] == "offline" and environ["WANDB_DIR"] == str(tmp_path / "run")
    assert environ["WANDB_ENTITY"] == "team"


def test_a_users_wandb_dir_is_kept(home: Path, tmp_path: Path) -> None:
    said: list[str] = []
    environ = {"WANDB_DIR": str(tmp_path / "mine")}
    configure(environ, tmp_path / "run", home=home, cwd=tmp_path, say=said.append)
    assert environ["WANDB_DIR"] == str(tmp_path / "mine") and "mine/wandb/offline-run-" in said[0]


@pytest.mark.slow
def test_wandb_itself_logs_offline_where_we_said(home: Path, tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    code = (
        "import os; from war_rl.wandb_mode import from_process; from_process(os.environ['RUN']); import wandb;"
        "r = wandb.init(project='p'); r.log({'war/rollout/turns': 3}, step=1); r.finish()"
    )
    env = {"HOME": str(home), "RUN": str(tmp_path / "run"), "PATH": "/usr/bin:/bin"}
    done = subprocess.run([sys.executable, "-c", code], env=env, cwd=tmp_path, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr.decode()
    assert b"wandb sync" in done.stdout
    assert list((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb"))
