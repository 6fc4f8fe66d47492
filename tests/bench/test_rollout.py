# SPDX-License-Identifier: Apache-2.0
"""The command around the measurement: flags, overrides of a side, its configuration, reading the engines."""

from __future__ import annotations

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from war_rl.bench.engines import can_share_engines, side_overrides
from war_rl.bench.options import parse, split_overrides
from war_rl.bench.presets import Settings, make_settings
from war_rl.bench.rollout import engine_counters
from war_rl.engine_page import parse_gauges


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--sides", "war"], "needs two sides"),
        (["--sides", "war,sglang"], "--sides sglang: not one of war, vllm, vllm+suffix, vllm+ngram"),
        (["--trace", "x.json"], "--trace and --format belong together"),
        (["--preset", "no-repeat", "--trace", "x", "--format", "war"], "--trace contradicts --source no-repeat"),
        (["--json", "/nowhere/at/all/out.json"], "its folder does not exist"),
        (["--pairs", "0"], "--pairs 0: must be at least 1"),
        (["stray"], "'stray' is no override"),
        (["war#2:a.b=1"], "there is no side war#2; sides are war, vllm"),
    ],
)
def test_wrong_use_is_refused_before_anything_starts(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with pytest.raises(SystemExit) as end:
        parse(["--model", str(tmp_path), *argv])
    assert end.value.code == 2
    assert message in capsys.readouterr().err


def test_a_missing_model_says_how_to_get_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(SystemExit):
        parse([])
    assert "war-rl prepare" in capsys.readouterr().err


def test_flags_override_the_preset(tmp_path: Path) -> None:
    options = parse(["--model", str(tmp_path), "--preset", "high-load", "--n", "2", "--sides", "war,war"])
    assert options.settings.n == 2
    assert (
        options.settings.groups == make_settings("high-load", packaged=True).groups != make_settings("high-load").groups
    )
    assert options.sides == {"war": "war", "war#2": "war"}


def test_overrides_of_all_sides_and_of_one() -> None:
    got = split_overrides(["a.b=1", "war#2:c.d=x:y", "++e={f:1}", "~g"], ["war", "war#2"])
    assert got == {"war": ["a.b=1", "++e={f:1}", "~g"], "war#2": ["a.b=1", "c.d=x:y", "++e={f:1}", "~g"]}


def overrides(rollout: str, kv_tokens: int | None = None) -> dict[str, str]:
    made = side_overrides(rollout, Settings(draft_tokens=5), model="/m", max_model_len=512, kv_tokens=kv_tokens)
    return dict(text.split("=", 1) for text in made)


def test_sides_differ_only_in_the_rollout() -> None:
    stock, war = overrides("vllm"), overrides("war")
    differing = {key for key in stock if stock[key] != war[key]}
    assert set(stock) == set(war)
    assert differing == {"trainer.rollout", "++actor_rollout_ref.rollout.engine_kwargs.vllm.worker_extension_cls"}
    suffix, ngram = overrides("vllm+suffix"), overrides("vllm+ngram")
    key = "++actor_rollout_ref.rollout.engine_kwargs.vllm.speculative_config"
    assert suffix.pop(key) == "{method:suffix,num_speculative_tokens:5}" and "method:ngram" in ngram.pop(key)
    assert suffix == ngram == stock


def test_kv_tokens_are_what_the_engine_can_use() -> None:
    key = "++actor_rollout_ref.rollout.engine_kwargs.vllm.num_gpu_blocks_override"
    assert key not in overrides("vllm")
    assert overrides("vllm", 1600)[key] == "101"


PAGE = """\
# HELP vllm:num_requests_running x
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_waiting{engine="0",model_name="m"} 1.0
vllm:generation_tokens_total{engine="0"} 1.25e+03
vllm:generation_tokens_total{engine="1"} 50
vllm:generation_tokens_created{engine="0"} 1.7e+09
vllm:request_generation_tokens_bucket{le="1.0"} 8.0
vllm:num_preemptions_total 2.0
python_info{version="3"} 1.0
"""


def test_the_page_is_read() -> None:
    assert parse_gauges(PAGE) == {"running": 3.0, "waiting": 1.0, "generated": 1300.0, "preemptions": 2.0}


def test_a_page_as_the_library_writes_it_is_read() -> None:
    prometheus = pytest.importorskip("prometheus_client")
    registry = prometheus.CollectorRegistry()
    tokens = prometheus.Counter("vllm:generation_tokens", "x", ["engine", "model_name"], registry=registry)
    running = prometheus.Gauge("vllm:num_requests_running", "x", ["engine", "model_name"], registry=registry)
    for engine, count in (("0", 1_234_567), ("1", 3)):
        tokens.labels(engine, '/a/{odd} "name"').inc(count)
        running.labels(engine, "m").set(2)
    assert parse_gauges(prometheus.generate_latest(registry).decode()) == {"generated": 1_234_570.0, "running": 4.0}


def test_an_engine_without_drafting_has_drafted_nothing() -> None:
    assert engine_counters({"engine_steps": 4.0, "generated": 9.0}) == {
        "scheduled_tokens": 0.0,
        "drafts": 0.0,
        "draft_tokens": 0.0,
        "accepted_tokens": 0.0,
        "preemptions": 0.0,
        "engine_steps": 4.0,
    }


def test_only_sides_that_differ_in_what_engines_do_not_see_share_engines() -> None:
    def side(
        rollout: str = "war",
        scheduler: str = "cost",
        spec: str = "off",
        length: int = 512,
        trace: str = "off",
        **more: object,
    ) -> object:
        # As composed: replicas read the whole section through the rollout's own configuration.
        rollout_config = {"name": rollout, "max_model_len": length, "custom": {"war": "${war}"}}
        return OmegaConf.create(
            {
                "trainer": {"rollout": rollout},
                "actor_rollout_ref": {"rollout": rollout_config},
                "war": {"scheduler": {"policy": scheduler, **more}, "spec": {"policy": spec}, "trace": trace},
            }
        )

    assert can_share_engines(side(), side(scheduler="war"))
    assert can_share_engines(side(), side(trace="sampled"))
    assert can_share_engines(side(), side(trace="full", scheduler="war"))
    assert not can_share_engines(side(), side(trace="sampled", spec="budget"))
    assert not can_share_engines(side(), side(engine_priority=True))
    assert not can_share_engines(side(), side())
    assert not can_share_engines(side(), side(scheduler="war", spec="budget"))
    assert not can_share_engines(side(), side(scheduler="war", length=1024))
    assert not can_share_engines(side("vllm"), side("vllm", scheduler="war"))
