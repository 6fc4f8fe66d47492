# SPDX-License-Identifier: Apache-2.0
"""Run something right after a module was first imported, without importing it now.

verl loads its plugins while ``import verl`` is half done and in every process that imports it, so a plugin must not
import verl's heavy rooms (the engines, the trainer). It leaves a note here instead.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

Action = Callable[[ModuleType], None]


class _PostImportFinder(MetaPathFinder):
    """Finds a watched module with the other finders, then makes its loader call the actions after execution."""

    def __init__(self) -> None:
        self.pending: dict[str, list[Action]] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self.pending:
            return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                self._wrap(spec)
                return spec
        return None

    def _wrap(self, spec: ModuleSpec) -> None:
        loader = spec.loader
        if loader is None:  # a namespace package executes nothing
            return
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            for action in self.pending.pop(spec.name, []):
                action(module)

        # On the instance, not a wrapper object: the loader keeps its type, so get_source and friends still work.
        loader.exec_module = exec_module  # type: ignore[method-assign]


_finder = _PostImportFinder()


def after_import(name: str, action: Action) -> None:
    """Call ``action(module)`` once, right after module ``name`` has been executed; now, if it already has.

    The action runs inside the import statement: what it raises comes out of that import.
    """
    module = sys.modules.get(name)
    if module is not None and not getattr(getattr(module, "__spec__", None), "_initializing", False):
        action(module)
        return
    if module is not None:
        raise RuntimeError(f"{name} is being imported at this moment; its post-import action would never run")
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    _finder.pending.setdefault(name, []).append(action)


def pending() -> tuple[str, ...]:
    """Modules whose actions have not run yet."""
    return tuple(_finder.pending)
