# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from war_rl.alarms import Alarm
from war_rl.analysis import SLOWEST_COLUMNS, slowest
from war_rl.metrics_registry import METRICS, STEP_METRIC, undocumented
from war_rl.types import TrajectoryId, TrajectoryRecord, TurnRecord
from war_rl.wandb_layout import layout, main
from war_rl.wandb_run import SLOWEST_KEY, active_run, define_metrics, log_slowest, send_alert

ROOT = Path(__file__).parent.parent


def test_without_a_run_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    assert active_run() is None and "wandb" not in sys.modules
    define_metrics(None)
    log_slowest(None, [["x"]], 1)
    send_alert(None, Alarm("a", "b"), 1)


def test_an_alert_that_the_server_refuses_does_not_end_the_run(caplog: pytest.LogCaptureFixture) -> None:
    class Run:
        def alert(self, **_: Any) -> None:
            raise RuntimeError("rate limited")

    send_alert(Run(), Alarm("feed_late", "b"), 1)
    assert "feed_late: rate limited" in caplog.text


def test_the_slowest_trajectories_come_first_with_their_seconds_by_cause() -> None:
    def record(session: int, life: float, *turns: TurnRecord) -> TrajectoryRecord:
        return TrajectoryRecord(TrajectoryId("g", session, 3, "7"), 0.0, life, list(turns), env_seconds=1.0)

    first = TurnRecord(0, "a", 100, 0, 10, 0.0, 2.0, 3.0)
    second = TurnRecord(1, "b", 150, 100, 20, 6.0, 0.5, 4.0)
    records = [record(0, 5.0), record(1, 12.0, first, second), record(2, 8.0)]
    rows = slowest(records, ["b", "a"], 0.01, 2)
    assert [row[1] for row in rows] == ["7/1", "7/2"]
    seen = dict(zip(SLOWEST_COLUMNS, rows[0], strict=True))
    expected = {"replicas": "1>0", "turns": 2, "prompt tokens": 250, "computed tokens": 150, "generated tokens": 30}
    expected |= {"seconds": 12.0, "admission s": 2.0, "queue s": 0.5, "prefill s": 1.5, "decode s": 5.5}
    expected |= {"environment s": 1.0, "other s": 1.5, "status": "finished"}
    assert {k: seen[k] for k in expected} == expected


def test_the_layout_shows_only_keys_that_are_documented() -> None:
    keys = [key for section in layout()["sections"] for panel in section["panels"] for key in panel["y"]]
    ours = [key for key in keys if key.startswith("war/")]
    assert not undocumented(ours) and len(ours) == len(set(ours)) > 30
    known = {f"war/{m.name}" for m in METRICS}
    families = ("war/spec/acceptance_rate_", "war/sched/")
    assert [key for key in ours if key not in known and not key.startswith(families)] == []


def test_the_command_writes_the_layout_where_there_are_no_credentials(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("WANDB_API_KEY", "NETRC", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_CONFIG_DIR"):
        monkeypatch.delenv(name, raising=False)
    out = tmp_path / "x.json"
    assert main(["team/project", "--out", str(out)]) == 0
    assert json.loads(out.read_text()) == layout() and "no W&B credentials used" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["project"])


@pytest.mark.slow
def test_the_library_takes_the_layout() -> None:
    pytest.importorskip("wandb_workspaces")
    from war_rl.wandb_layout import workspace

    made = workspace("team", "project")
    assert [s.name for s in made.sections] == [s["name"] for s in layout()["sections"]]


RUN = f"""
import os, sys
sys.path.insert(0, {str(ROOT)!r})
from war_rl.wandb_mode import from_process
from_process(os.environ["RUN"])
from verl.utils.tracking import Tracking
from war_rl import wandb_run
from war_rl.alarms import Alarm
logger = Tracking("p", "e", ["wandb"], config={{"trainer": {{}}, "war": {{"spec": {{"policy": "war"}}}}}})
run = wandb_run.active_run()
wandb_run.define_metrics(run)
for step in (1, 2):
    wandb_run.send_alert(run, Alarm("feed_late", "text arrives late"), step)
    wandb_run.log_slowest(run, [[step] + ["x"] * {len(SLOWEST_COLUMNS) - 1}], step)
    logger.log({{"training/global_step": step, "war/rollout/turns": 10.0 * step}}, step=step)
run.finish()
"""


def read_offline(file: Path) -> list[Any]:
    """The records of an offline run: LevelDB's log format behind a header of seven bytes.

    wandb's own reader is compiled into its binary since 0.31; the record type is still its public protocol buffer.
    """
    from wandb.proto import wandb_internal_pb2

    data, position, parts, records = file.read_bytes(), 7, b"", []
    assert data[:4] == b":W&B"
    while position + 7 <= len(data):
        left = 32_768 - position % 32_768
        if left < 7:
            # A block's last bytes, too few for another piece's checksum, length and kind.
            position += left
            continue
        length, kind = int.from_bytes(data[position + 4 : position + 6], "little"), data[position + 6]
        piece = data[position + 7 : position + 7 + length]
        position += 7 + length
        whole, first, last = kind == 1, kind == 2, kind == 4
        parts = piece if whole or first else parts + piece
        if whole or last:
            records.append(wandb_internal_pb2.Record())
            records[-1].ParseFromString(parts)
    return records


@pytest.mark.slow
def test_an_offline_run_holds_the_keys_axes_table_alert_and_configuration(tmp_path: Path) -> None:
    """What `wandb sync` would upload."""
    pytest.importorskip("wandb")
    pytest.importorskip("verl")
    keep = {k: v for k, v in os.environ.items() if k in ("PYTHONDONTWRITEBYTECODE", "VIRTUAL_ENV")}
    env = {**keep, "HOME": str(tmp_path), "RUN": str(tmp_path / "run"), "PATH": "/usr/bin:/bin"}
    done = subprocess.run([sys.executable, "-c", RUN], env=env, cwd=tmp_path, capture_output=True, timeout=300)
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    (file,) = (tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb")
    records = read_offline(file)
    history: dict[int, dict[str, Any]] = {}
    for record in records:
        if record.HasField("history"):
            items = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            history.setdefault(items["_step"], {}).update(items)
    assert [history[s]["war/rollout/turns"] for s in (1, 2)] == [10.0, 20.0]
    assert history[2][STEP_METRIC] == 2
    assert history[2][f"{SLOWEST_KEY}/_type"] == "table-file" and history[2][f"{SLOWEST_KEY}/nrows"] == 1
    assert history[2][f"{SLOWEST_KEY}/ncols"] == len(SLOWEST_COLUMNS)
    defined = {m.name or m.glob_name: m for r in records if r.HasField("metric") for m in [r.metric]}
    turns = defined["war/rollout/turns_max"]
    assert turns.step_metric == STEP_METRIC or turns.step_metric_index > 0
    assert turns.summary.max and defined["war/rollout/turns"].summary.mean
    assert any("war/spec/*" in name for name in defined)
    alerts = [r.alert for r in records if r.HasField("alert")]
    assert [a.text for a in alerts] == [f"step {s}: text arrives late" for s in (1, 2)]
    config = {u.key: json.loads(u.value_json) for r in records if r.HasField("run") for u in r.run.config.update}
    assert config["war"] == {"spec": {"policy": "war"}}
