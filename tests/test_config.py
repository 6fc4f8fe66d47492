# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import yaml

from war_rl import config as c
from war_rl.config_docs import default_yaml, fields_of, markdown

ROOT = Path(__file__).parents[1]


def _sections():
    stack = [("", c.WarConfig)]
    while stack:
        prefix, cls = stack.pop()
        yield prefix, cls
        for f in dataclasses.fields(cls):
            default = f.default_factory() if f.default_factory is not dataclasses.MISSING else f.default
            if dataclasses.is_dataclass(default):
                stack.append((f"{prefix}{f.name}.", type(default)))


def test_the_yaml_defaults_are_the_dataclasses():
    assert yaml.safe_load((ROOT / "configs/war/default.yaml").read_text()) == c.to_dict(c.WarConfig())


def test_defaults_load_and_round_trip():
    assert c.load_config(c.to_dict(c.WarConfig())) == c.WarConfig()


def test_every_field_is_documented_with_its_unit():
    for key, default, doc in fields_of(c.WarConfig):
        assert doc, f"{key} has no docstring"
        if isinstance(default, int | float) and not isinstance(default, bool):
            assert "Unit:" in doc, f"{key} has no unit"


def test_the_generated_pages_are_up_to_date():
    assert (ROOT / "docs/configuration.md").read_text() == markdown(), "run `make docs`"
    assert (ROOT / "configs/war/default.yaml").read_text() == default_yaml(), "run `make docs`"


def test_every_number_is_bounded_and_every_default_lies_inside():
    for prefix, cls in _sections():
        for f in dataclasses.fields(cls):
            key = f"{prefix}{f.name}"
            value = None if f.default is dataclasses.MISSING else f.default
            if isinstance(value, int | float) and not isinstance(value, bool):
                low, high = c.BOUNDS[key]
                assert low <= value <= high
            if key in c.CHOICES:
                assert value in c.CHOICES[key]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"spec": {"polcy": "off"}}, ["war.spec.polcy", "did you mean war.spec.policy"]),
        ({"spec": {"policy": "always"}}, ["war.spec.policy", "'always'", "off"]),
        ({"spec": {"max_draft_tokens": 0}}, ["war.spec.max_draft_tokens=0", "[1, 64]"]),
        ({"spec": {"max_draft_tokens": "8"}}, ["war.spec.max_draft_tokens", "whole number"]),
        ({"spec": {"max_draft_tokens": True}}, ["war.spec.max_draft_tokens", "whole number"]),
        ({"spec": {"replicas": -1}}, ["war.spec.replicas=-1", "all, none or a whole number"]),
        ({"spec": {"replicas": "some"}}, ["war.spec.replicas='some'", "all, none"]),
        ({"spec": {"replicas": True}}, ["war.spec.replicas=True", "all, none"]),
        ({"spec": {"replicas": None}}, ["war.spec.replicas=None", "all, none"]),
        ({"spec": {"feed": "yes"}}, ["war.spec.feed", "true or false"]),
        ({"fault": {"trajectory_timeout_s": 5}}, ["trajectory_timeout_s=5", "step_timeout_s=60"]),
        ({"spec": 3}, ["war.spec=3", "section"]),
        ({"env": {"step_timeout_s": float("nan")}}, ["war.env.step_timeout_s"]),
    ],
)
def test_what_cannot_work_is_refused_by_name(values, words):
    with pytest.raises(c.ConfigError) as refused:
        c.load_config(values)
    for word in words:
        assert word in str(refused.value)


@pytest.mark.parametrize(
    ("values", "drafting"),
    [
        ({}, [0, 1, 2]),
        ({"replicas": "none"}, []),
        ({"replicas": 0}, []),
        ({"replicas": 2}, [0, 1]),
        ({"replicas": "2"}, [0, 1]),
        ({"replicas": 9}, [0, 1, 2]),
        ({"replicas": 2, "policy": "off"}, []),
    ],
)
def test_which_replicas_can_draft(values, drafting):
    spec = c.load_config({"spec": values}).spec
    assert [rank for rank in range(3) if spec.drafts_on(rank)] == drafting
    assert c.load_config(c.to_dict(c.load_config({"spec": values}))).spec == spec


def test_an_unquoted_off_in_yaml_means_off():
    assert c.load_config(yaml.safe_load("progress: off")).progress == "off"
    assert c.load_config(yaml.safe_load("spec: {policy: off}")).spec.policy == "off"
