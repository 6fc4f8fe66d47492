# SPDX-License-Identifier: Apache-2.0
"""Weights & Biases without questions: on by default, offline where no credentials are found, never a prompt.

Looks where wandb itself looks (environment, netrc, wandb's settings files) but imports nothing of it, so that the
decision falls before anything heavy starts.
"""

from __future__ import annotations

import configparser
import netrc
import os
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from war_rl.config import ConfigError

DEFAULT_HOST = "https://api.wandb.ai"
KNOWN_MODES = ("online", "offline", "disabled", "shared", "dryrun", "run")
"""Values wandb takes for WANDB_MODE; the last two are its old names of offline and online."""
NEEDS_CREDENTIALS = ("online", "shared", "run")


@dataclass(frozen=True, slots=True)
class WandbDecision:
    """``mode`` for WANDB_MODE, where it comes from, and what to tell the user ("" for nothing)."""

    mode: str
    source: str
    message: str = ""


def decide(environ: Mapping[str, str], *, home: Path, cwd: Path, folder: str | Path) -> WandbDecision:
    """Which mode W&B runs in. ``folder`` is the run's folder (WANDB_DIR), named in the hint about syncing.

    Raises:
        ConfigError: WANDB_MODE is unknown, or asks for a connection for which there are no credentials.
    """
    settings = {**_user_settings(environ, home), **_folder_settings(cwd)}
    credentials = find_credentials(environ, home=home, cwd=cwd)
    asked, source = environ.get("WANDB_MODE", ""), "WANDB_MODE"
    if not asked and settings.get("mode"):
        asked, source = settings["mode"], "wandb's settings file"
    if asked and asked not in KNOWN_MODES:
        raise ConfigError(f"WANDB_MODE={asked!r} ({source}): not one of {', '.join(KNOWN_MODES)}")
    if asked in NEEDS_CREDENTIALS and not credentials:
        raise ConfigError(
            f"WANDB_MODE={asked!r} ({source}) needs credentials and none were found: run `wandb login`, set "
            "WANDB_API_KEY, or set WANDB_MODE=offline"
        )
    if asked:
        return WandbDecision(asked, source, sync_hint(folder) if asked in ("offline", "dryrun") else "")
    if credentials:
        return WandbDecision("online", credentials)
    message = f"W&B: no credentials found, so this run is logged offline (nothing is lost). {sync_hint(folder)}"
    return WandbDecision("offline", "no credentials", message)


def sync_hint(folder: str | Path) -> str:
    """How offline runs get to the server later."""
    return f"To upload it later: `wandb login`, then `wandb sync {Path(folder) / 'wandb' / 'offline-run-*'}`"


def configure(
    environ: MutableMapping[str, str],
    folder: str | Path,
    *,
    home: Path | None = None,
    cwd: Path | None = None,
    say: Callable[[str], None] = print,
) -> WandbDecision:
    """Decide and set WANDB_MODE and WANDB_DIR in ``environ``, before Ray starts and its workers inherit it.

    What needs saying is said once per process tree: a child that calls this again finds the decision made.

    Raises:
        ConfigError: as :func:`decide`.
    """
    if environ.get("WAR_RL_WANDB_DECIDED") == environ.get("WANDB_MODE", "-"):
        return WandbDecision(environ["WANDB_MODE"], "decided before")
    folder = environ.get("WANDB_DIR") or folder
    cwd = cwd or Path.cwd()
    decision = decide(environ, home=home or Path.home(), cwd=cwd, folder=folder)
    environ["WANDB_DIR"] = str(folder)
    # wandb reads the settings of WANDB_DIR; what `wandb init` wrote into the working folder must still hold.
    for name in ("base_url", "entity", "project"):
        if name in _folder_settings(cwd):
            environ.setdefault(f"WANDB_{name.upper()}", _folder_settings(cwd)[name])
    # wandb falls back to a temporary folder when WANDB_DIR does not exist.
    Path(folder).mkdir(parents=True, exist_ok=True)
    environ["WANDB_MODE"] = environ["WAR_RL_WANDB_DECIDED"] = decision.mode
    if decision.message:
        say(decision.message)
    return decision


def find_credentials(environ: Mapping[str, str], *, home: Path, cwd: Path) -> str:
    """Where credentials for the W&B server were found; "" if nowhere. Reads them, never returns them."""
    if environ.get("WANDB_API_KEY", "").strip():
        return "WANDB_API_KEY"
    user = _user_settings(environ, home)
    token_file = environ.get("WANDB_IDENTITY_TOKEN_FILE", "")
    if token_file and Path(token_file).expanduser().is_file():
        return "identity token file"
    if user.get("api_key", "").strip():
        return "wandb's settings file"
    folder = _folder_settings(cwd)
    host = environ.get("WANDB_BASE_URL") or folder.get("base_url") or user.get("base_url") or DEFAULT_HOST
    path = _netrc_path(environ, home)
    return str(path) if path and _netrc_has(path, host) else ""


def _netrc_path(environ: Mapping[str, str], home: Path) -> Path | None:
    if environ.get("NETRC"):
        return Path(environ["NETRC"]).expanduser()
    return next((p for p in (home / ".netrc", home / "_netrc") if p.is_file()), None)


def _netrc_has(path: Path, host: str) -> bool:
    try:
        entry = netrc.netrc(str(path)).authenticators(urlsplit(host).netloc)
    except (OSError, netrc.NetrcParseError):
        # wandb cannot read it either, and would ask.
        return False
    return bool(entry and entry[2])


def _user_settings(environ: Mapping[str, str], home: Path) -> dict[str, str]:
    config_home = environ.get("WANDB_CONFIG_DIR")
    return _read_settings((Path(config_home) if config_home else home / ".config" / "wandb") / "settings")


def _folder_settings(cwd: Path) -> dict[str, str]:
    return _read_settings(cwd / "wandb" / "settings")


def _read_settings(file: Path) -> dict[str, str]:
    parser = configparser.ConfigParser(interpolation=None)
    try:
        parser.read_string(file.read_text())
    except (OSError, UnicodeDecodeError, configparser.Error):
        return {}
    return dict(parser["default"]) if parser.has_section("default") else {}


def from_process(folder: str | Path, say: Callable[[str], None] = print) -> WandbDecision:
    """:func:`configure` for this very process."""
    return configure(os.environ, folder, say=say)
