# SPDX-License-Identifier: Apache-2.0
"""Everything else is in pyproject.toml; the package list needs code because configs/ is installed as war_rl.configs."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["war_rl", "war_rl.*"]), "war_rl.configs"],
    package_dir={"war_rl.configs": "configs"},
)
