# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from war_rl import cli
from war_rl.summary import load_summary

ROOT = Path(__file__).parent.parent


def war_rl(*args: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run the command; ``path`` goes before the package, to put stand-ins into it."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, filter(None, (path, ROOT))))}
    argv = [sys.executable, "-m", "war_rl", *args]
    return subprocess.run(argv, env=env, capture_output=True, text=True, timeout=120)


def test_help_names_every_command() -> None:
    done = war_rl("--help")
    assert done.returncode == 0
    assert all(c.name in done.stdout and c.help in done.stdout for c in cli.COMMANDS.values())


def test_no_command_shows_help_and_fails() -> None:
    done = war_rl()
    assert done.returncode == 2 and "commands:" in done.stdout


def test_unknown_command_gives_the_choices() -> None:
    done = war_rl("trian")
    assert done.returncode == 2 and "'trian'" in done.stderr and "train" in done.stderr and "doctor" in done.stderr


def test_version(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "_version", lambda: "9.9")
    with pytest.raises(SystemExit) as end:
        cli.main(["--version"])
    assert end.value.code == 0 and capsys.readouterr().out == "war-rl 9.9\n"


NAMES = ["train", "prepare", "doctor", "replay", "report", "trace", "wandb-workspace", "bench", "bench drafter"]


@pytest.mark.parametrize("command", NAMES)
def test_help_of_a_command_is_its_own(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main([*command.split(), "--help"])
    assert end.value.code == 0 and f"usage: war-rl {command} " in capsys.readouterr().out


def test_bench_names_its_kinds_and_refuses_others(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["bench", "drafters"])
    error = capsys.readouterr().err
    assert end.value.code == 2 and all(kind in error for kind in cli.BENCHES)


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from war_rl import cli\n"
        "try: cli.main(['train', '--help'])\n"
        "except SystemExit: pass\n"
        "sys.exit(','.join(m for m in ('torch', 'ray', 'verl', 'hydra', 'numpy', 'wandb')"
        " if m in sys.modules) or 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("argv", "message"),
    [(["nonsense"], "'nonsense' is no override"), (["--nope", "a=b"], "unrecognized arguments: --nope")],
)
def test_train_refuses_what_is_no_override(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["train", *argv])
    assert end.value.code == 2 and message in capsys.readouterr().err


@pytest.fixture
def stand_in(tmp_path: Path) -> Path:
    """A copy of the package whose trainer is what a test writes into ``trainer.py``; nothing of verl is needed."""
    package = tmp_path / "war_rl"
    (package / "trainers" / "verl").mkdir(parents=True)
    for file in (ROOT / "war_rl").glob("*.py"):
        (package / file.name).write_text(file.read_text())
    for folder in (package / "trainers", package / "trainers" / "verl"):
        (folder / "__init__.py").write_text("")
    return tmp_path


TRAINER = """
import json, sys, time
from pathlib import Path
from war_rl.config import ConfigError
from war_rl.summary import RunSummary
FOLDER = Path({folder!r})
def run(overrides, config_name):
    (FOLDER / "args.json").write_text(json.dumps([overrides, config_name]))
    summary = RunSummary(FOLDER / "run", rollout="war", config={{}}, clock=time.monotonic, versions={{}})
    summary.add_step(1, {{"war/rollout/turns": 12.0}}, 0.5)
    (FOLDER / "ready").write_text("")
    {body}
"""


def install(stand_in: Path, body: str) -> None:
    target = stand_in / "war_rl" / "trainers" / "verl" / "main_ppo.py"
    target.write_text(TRAINER.format(folder=str(stand_in), body=body))


def train(stand_in: Path, *args: str) -> subprocess.Popen[str]:
    env = {**os.environ, "PYTHONPATH": str(stand_in)}
    argv = [sys.executable, "-m", "war_rl", "train", *args]
    return subprocess.Popen(argv, env=env, cwd=stand_in, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for(file: Path, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 60
    while not file.exists():
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.02)


def test_overrides_pass_through_and_the_table_ends_the_run(stand_in: Path) -> None:
    install(stand_in, "summary.finish()\n    return 0")
    overrides = ["a.b=1", "+c=[1,2]", "~d"]
    process = train(stand_in, overrides[0], "--config-name", "mine", *overrides[1:])
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert json.loads((stand_in / "args.json").read_text()) == [overrides, "mine"]
    assert "finished after" in out and str(stand_in / "run" / "summary.json") in out


def test_cfg_job_shows_the_configuration_through_the_trainer(stand_in: Path) -> None:
    install(stand_in, "return 0")
    train(stand_in, "--cfg", "job", "a=1").communicate(timeout=60)
    assert json.loads((stand_in / "args.json").read_text())[0] == ["a=1", "--cfg", "job"]


def test_the_default_configuration_is_ours(stand_in: Path) -> None:
    install(stand_in, "return 0")
    train(stand_in).communicate(timeout=60)
    assert json.loads((stand_in / "args.json").read_text()) == [[], "war_ppo_trainer"]


@pytest.mark.parametrize(
    ("body", "code", "message"),
    [
        ("return 3", 3, "exit code 3"),
        ("raise ConfigError('war.spec.policy=1: no')", 2, "war-rl train: war.spec.policy=1: no"),
        ("raise RuntimeError('boom')", 1, "boom"),
        ("import os; os.kill(os.getpid(), 9)", 137, "exit code 137"),
    ],
)
def test_a_run_that_fails_without_a_word_is_marked_failed(stand_in: Path, body: str, code: int, message: str) -> None:
    install(stand_in, body)
    process = train(stand_in)
    out, err = process.communicate(timeout=60)
    assert process.returncode == code and message in out + err
    assert ("Traceback" in err) is ("boom" in body)
    data = load_summary(stand_in / "run")
    assert data["status"] == "failed" and len(data["steps"]) == 1


ECHO = """try:
        time.sleep(1000)
    finally:
        summary.finish("failed", "an actor died")
"""


@pytest.mark.parametrize("body", ["time.sleep(1000)", ECHO], ids=["silent", "calls its own end a failure"])
def test_an_interrupted_run_is_marked_interrupted_and_still_shows_its_steps(stand_in: Path, body: str) -> None:
    install(stand_in, body)
    process = train(stand_in)
    wait_for(stand_in / "ready", process)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "Ctrl-C: stopping" in err and "Traceback" not in err
    assert load_summary(stand_in / "run")["status"] == "interrupted" and "interrupted after" in out


def test_a_run_that_had_failed_before_the_signal_stays_failed(stand_in: Path) -> None:
    install(stand_in, 'summary.finish("failed", "engine died")\n    (FOLDER / "failed").touch()\n    time.sleep(1000)')
    process = train(stand_in)
    wait_for(stand_in / "failed", process)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    data = load_summary(stand_in / "run")
    assert process.returncode == 130 and (data["status"], data["error"]) == ("failed", "engine died")


def test_a_run_that_is_killed_with_its_watcher_is_marked_by_the_next_start(
    stand_in: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(stand_in))
    install(stand_in, "time.sleep(1000)")
    process = train(stand_in)
    wait_for(stand_in / "ready", process)
    (child,) = psutil.Process(process.pid).children()
    process.kill()
    child.kill()
    process.communicate(timeout=60)
    assert load_summary(stand_in / "run")["status"] == "running"
    # Another run, of which only the start matters.
    (stand_in / "war_rl" / "trainers" / "verl" / "main_ppo.py").write_text("def run(*args):\n    return 0\n")
    train(stand_in).communicate(timeout=60)
    data = load_summary(stand_in / "run")
    assert data["status"] == "failed" and data["error"].startswith("killed") and len(data["steps"]) == 1


def test_a_missing_trainer_points_to_the_doctor(stand_in: Path) -> None:
    process = train(stand_in)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1 and "war-rl doctor" in err and "Traceback" not in err
