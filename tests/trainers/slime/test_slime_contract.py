# SPDX-License-Identifier: Apache-2.0
"""The record of slime's seams: true of the installed slime, of the stand-in, and enough for what War-RL calls."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from pathlib import Path

import pytest

from tests.trainers.slime import contract, fake_slime
from war_rl.trainers.slime import rollout
from war_rl.trainers.slime.sessions import ROUTING_HEADER

HAS_SLIME = importlib.util.find_spec("slime") is not None


@pytest.mark.skipif(not HAS_SLIME, reason="slime is not installed (docs/slime.md says how); the record stands for it")
def test_the_installed_slime_is_as_recorded():
    record = contract.recorded()
    record.pop("slime")
    assert contract.describe() == record


@pytest.mark.skipif(not HAS_SLIME, reason="slime is not installed (docs/slime.md says how)")
def test_the_installed_slime_speaks_to_the_router_as_it_listens():
    """What no signature shows: paths, payload names and the routing key's header, in slime's source."""
    root = Path(next(iter(importlib.import_module("slime").__path__)))
    wanted = {
        "rollout/sglang_rollout.py": (ROUTING_HEADER, "/generate", "/workers", 'worker["url"]', "session_id"),
        "backends/sglang_utils/sglang_engine.py": ("/workers", '"worker_type"', 'worker["id"]', "requests.delete"),
        "backends/sglang_utils/server_control.py": ("/abort_request", '"abort_all"', "/v1/loads"),
        "agent/adapters/common.py": (ROUTING_HEADER, "/abort_request", '"rid"'),
        "ray/rollout.py": ("args.sglang_router_ip is not None",),
    }
    missing = {(f, text) for f, texts in wanted.items() for text in texts if text not in (root / f).read_text("utf-8")}
    assert not missing


def test_the_stand_in_is_as_recorded():
    if HAS_SLIME:
        pytest.skip("the real package is tested")
    record = contract.recorded()
    record.pop("slime")
    fake_slime.install()
    try:
        assert contract.describe() == record
    finally:
        fake_slime.uninstall()


def test_the_rollout_functions_take_what_slime_passes():
    for ours, theirs in (
        (rollout.generate_rollout, "slime.rollout.sglang_rollout.generate_rollout"),
        (rollout.generate, "slime.rollout.sglang_rollout.generate"),
    ):
        wanted = contract.recorded()["functions"][theirs]
        mine = [[p.name, None if p.default is p.empty else repr(p.default)] for p in _parameters(ours)]
        assert mine[: len(wanted)] == wanted
        assert all(default is not None for _, default in mine[len(wanted) :])


def test_the_samples_hold_what_is_read_of_them():
    fields = contract.recorded()["dataclasses"]["slime.utils.types.Sample"]
    read = {"group_index", "index", "prompt", "response", "response_length", "status", "session_id", "spec_info"}
    assert (read | {"non_generation_time"}) <= set(fields)
    assert set(rollout._SPEC_FIELDS) <= set(contract.recorded()["dataclasses"]["slime.utils.types.Sample.SpecInfo"])
    assert set(contract.recorded()["status"].values()) >= {"pending", "completed", "truncated", "aborted", "failed"}


def _parameters(function):
    return inspect.signature(function).parameters.values()
