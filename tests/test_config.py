# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import ast
import dataclasses
import inspect
from pathlib import Path

import pytest
import yaml

from war_rl import config as c

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


def test_every_field_is_documented():
    for _, cls in _sections():
        body = ast.parse(inspect.getsource(cls)).body[0].body
        names = [n.target.id for n in body if isinstance(n, ast.AnnAssign)]
        for i, node in enumerate(body):
            if isinstance(node, ast.AnnAssign) and not dataclasses.is_dataclass(cls.__dataclass_fields__[names[0]]):
                default = getattr(c, node.annotation.id, None) if isinstance(node.annotation, ast.Name) else None
                if dataclasses.is_dataclass(default):
                    continue
                follows = body[i + 1] if i + 1 < len(body) else None
                assert isinstance(follows, ast.Expr), f"{cls.__name__}.{node.target.id} has no docstring"


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
        ({"spec": {"feed": "yes"}}, ["war.spec.feed", "true or false"]),
        ({"spec": {"max_draft_tokens": 24, "tree_depth": 24}}, ["max_draft_tokens=24", "tree_depth=24"]),
        ({"spec": 3}, ["war.spec=3", "section"]),
        ({"env": {"step_timeout_s": float("nan")}}, ["war.env.step_timeout_s"]),
    ],
)
def test_what_cannot_work_is_refused_by_name(values, words):
    with pytest.raises(c.ConfigError) as refused:
        c.load_config(values)
    for word in words:
        assert word in str(refused.value)


def test_an_unquoted_off_in_yaml_means_off():
    assert c.load_config(yaml.safe_load("progress: off")).progress == "off"
    assert c.load_config(yaml.safe_load("spec: {policy: off}")).spec.policy == "off"
