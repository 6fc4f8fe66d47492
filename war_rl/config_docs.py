# SPDX-License-Identifier: Apache-2.0
"""docs/configuration.md and configs/war/default.yaml, made from the dataclasses in :mod:`war_rl.config`."""

from __future__ import annotations

import ast
import dataclasses
import inspect
from collections.abc import Iterator
from typing import Any

from war_rl.config import BOUNDS, CHOICES, COUNTS, WarConfig, to_dict

_HEAD = """# Configuration

`war-rl train` composes `war_ppo_trainer`, which is verl's own `ppo_trainer` plus a `war:` section. Every key of verl
stays as verl documents it. `war-rl train --cfg job [overrides]` prints the whole resolved configuration and starts
nothing.

## The switch

`trainer.rollout=war` (default) does the rollouts with the WAR worker group; `trainer.rollout=vllm` with verl's stock
one. Everything else stays identical, and both are measured by the same code. Any other value is refused.

## The machine

The group `war_platform` is `gpu` (verl's own settings) or `cpu` (`configs/war_platform/cpu.yaml`: a machine without an
accelerator). `war-rl train` chooses `cpu` only where there is no accelerator; `VERL_PLATFORM=cpu` or `war_platform=cpu`
force it. `WAR_CPU_THREADS` sets the threads of each replica there.

## A configuration of your own

```yaml
hydra:
  searchpath: [pkg://verl.trainer.config, pkg://war_rl.configs]
defaults:
  - war_ppo_base
  - _self_
```

## The `war:` section

An unknown key, a value out of range or a contradiction is refused before anything starts.
"""


def fields_of(cls: type[Any], prefix: str = "war.") -> Iterator[tuple[str, Any, str]]:
    """(key, default, docstring) of every plain field, sections flattened, in order of definition."""
    body = ast.parse(inspect.getsource(cls)).body[0]
    assert isinstance(body, ast.ClassDef)
    docs: dict[str, str] = {}
    for node, after in zip(body.body, [*body.body[1:], None], strict=True):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and isinstance(after, ast.Expr):
            docs[node.target.id] = " ".join(str(ast.literal_eval(after.value)).split())
    for field in dataclasses.fields(cls):
        if dataclasses.is_dataclass(default := _default(field)):
            yield from fields_of(type(default), f"{prefix}{field.name}.")  # type: ignore[arg-type]
        else:
            yield f"{prefix}{field.name}", default, docs.get(field.name, "")


def _default(field: dataclasses.Field[Any]) -> Any:
    return field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default


def _allowed(key: str) -> str:
    name = key.removeprefix("war.")
    if name in CHOICES:
        number = ", a number" if name in COUNTS else ""
        return ", ".join(f"`{choice}`" for choice in CHOICES[name]) + number
    if name in BOUNDS:
        low, high = BOUNDS[name]
        return f"{low:g} to {high:g}"
    return ""


def markdown() -> str:
    """The whole page."""
    rows = ["| key | default | allowed | meaning |", "|---|---|---|---|"]
    for key, default, doc in fields_of(WarConfig):
        rows.append(f"| `{key}` | `{default!r}` | {_allowed(key)} | {doc.replace('|', '/')} |")
    return "\n".join([_HEAD, *rows, ""])


def default_yaml() -> str:
    """The defaults as the Hydra group file."""
    import yaml

    head = "# Defaults of the war: section, made by `make docs` from war_rl/config.py; see docs/configuration.md.\n"
    return head + str(yaml.safe_dump(to_dict(WarConfig()), sort_keys=False))
