# SPDX-License-Identifier: Apache-2.0
"""The dashboard asks only for what somebody exposes."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest

from war_rl.trainers.prometheus import COUNTERS, PLACEMENTS, PREFIX, QUEUE, names

DASHBOARD = Path(__file__).parents[1] / "recipes" / "grafana" / "war-rl.json"
WORDS = {"rate", "sum", "by", "le", "reason", "histogram_quantile"}
"""Functions, keywords and labels that expressions use."""


def dashboard() -> dict[str, Any]:
    return dict(json.loads(DASHBOARD.read_text()))


def expressions() -> list[tuple[str, str]]:
    return [(panel["title"], t["expr"]) for panel in dashboard()["panels"] for t in panel.get("targets", ())]


def metrics(expression: str) -> set[str]:
    """Names of series in an expression; what else there is must be known."""
    plain = re.sub(r"\[\$__rate_interval\]|\b[0-9.]+\b", " ", expression)
    found = set(re.findall(r"[A-Za-z_:][A-Za-z0-9_:]*", plain))
    return found - WORDS


def vllm_names() -> dict[str, str]:
    """Every series name that the installed vLLM's source defines -> counter, gauge or histogram."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("vLLM is not installed")
    root = Path(next(iter(spec.submodule_search_locations))) / "v1"
    kinds: dict[str, str] = {}
    for file in (root / "metrics" / "loggers.py", root / "spec_decode" / "metrics.py"):
        text = file.read_text()
        for kind, name in re.findall(r'_(counter|gauge|histogram)_cls\(\s*name="(vllm:\w+)"', text):
            kinds[name] = kind
        # The counters of drafting are made from a list of (name, documentation).
        kinds |= dict.fromkeys(re.findall(r'\(\s*"(vllm:spec_decode_\w+)",', text), "counter")
    assert len(kinds) > 20, "vLLM's source looks otherwise than expected"
    out: dict[str, str] = {}
    for name, kind in kinds.items():
        ends = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}[kind]
        out |= dict.fromkeys((name + end for end in ends), kind)
    return out


def test_the_dashboard_can_be_imported() -> None:
    made = dashboard()
    assert made["title"] and made["uid"] and made["schemaVersion"] >= 36 and "id" not in made
    panels = made["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels if panel["type"] != "row"]
    assert len(set(places)) == len(places) and all(x + 8 <= 24 for x, _ in places)
    assert [variable["name"] for variable in made["templating"]["list"]] == ["datasource"]
    for panel in panels:
        if panel["type"] != "row":
            assert panel["title"] and panel["description"] and panel["targets"]
            assert {t["datasource"]["uid"] for t in panel["targets"]} == {"${datasource}"}


@pytest.mark.parametrize(("title", "expression"), expressions())
def test_an_expression_names_only_what_is_exposed(title: str, expression: str) -> None:
    used = metrics(expression)
    assert used and expression.count("(") == expression.count(")")
    unknown = used - names() - set(vllm_names())
    assert not unknown, f"{title}: {unknown}"


def test_counts_are_shown_as_rates_and_states_as_they_are() -> None:
    ours = {f"{PREFIX}{name}_total" for name in (*(name for name, _ in COUNTERS.values()), PLACEMENTS)}
    growing = {name for name, kind in vllm_names().items() if kind != "gauge"} | ours
    growing |= {f"{PREFIX}{QUEUE}_{end}" for end in ("bucket", "sum", "count")}
    for title, expression in expressions():
        rated = set(re.findall(r"rate\(([A-Za-z0-9_:]+)\[", expression))
        if title in ("Lost", "Not as announced"):
            continue  # totals: one lost replica must stay visible
        assert metrics(expression) & growing == rated, f"{title}: {expression}"
