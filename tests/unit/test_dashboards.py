"""Dashboards and rules name series and labels that there are; a ring asks a real Prometheus (``test_prometheus.py``)."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml

from runner.api.metrics import _KEPT_LABELS, _SHOWN
from tools.dashboards import DASHBOARDS, FOLDER, list_expressions, render

ROOT = Path(__file__).resolve().parents[2]
RULES = ROOT / "deploy" / "prometheus"
ENDINGS = re.compile(r"_(bucket|sum|count)\Z")
ANYWHERE = {"instance", "job", "le"}
GROUPS: list[dict[str, Any]] = [
    group for file in sorted(RULES.glob("*.yaml")) for group in yaml.safe_load(file.read_text())["groups"]
]
RECORDED: dict[str, dict[str, Any]] = {rule["record"]: rule for group in GROUPS for rule in group["rules"] if "record" in rule}
ALERTS: list[dict[str, Any]] = [rule for group in GROUPS for rule in group["rules"] if "alert" in rule]


def read_known() -> dict[str, set[str]]:
    """Return every series that the pages list, which other tests compare with the registries, and its labels."""
    known: dict[str, set[str]] = {f"process_{name}": set() for name in ("cpu_seconds_total", "resident_memory_bytes")}
    for page in ("observe.md", "runner-api.md"):
        text = (ROOT / "docs" / page).read_text(encoding="utf-8")
        for name, labels in re.findall(r"`((?:muster|vllm)_[a-z_0-9]+)(?:\{([a-z_,]+)\})?`", text):
            known.setdefault(name, set()).update(labels.split(",") if labels else ())
    for name in _SHOWN:
        known[name] = known[f"{name}_total"] = {"model", "replica", *_KEPT_LABELS}
    for name, rule in RECORDED.items():
        known[name] = {
            label for each in find(promql_parser.parse(rule["expr"]), promql_parser.AggregateExpr) for label in by(each)
        }
    return known


def find(expr: Any, kind: type[Any]) -> list[Any]:  # Any: nodes of the parser's tree have no base in common
    found: list[Any] = []

    def visit(node: Any) -> bool:
        if isinstance(node, kind):
            found.append(node)
        elif kind is promql_parser.VectorSelector and isinstance(node, promql_parser.MatrixSelector):
            found.append(node.vector_selector)
        return True

    promql_parser.walk(expr, visit)
    return found


def by(aggregate: Any) -> list[str]:
    return list(aggregate.modifier.labels) if aggregate.modifier is not None else []


def list_all() -> Iterator[tuple[str, str]]:
    for dashboard in DASHBOARDS:
        for expr in list_expressions(dashboard):
            yield dashboard.uid, re.sub(r"\$[a-z]+", ".*", expr.replace("$__rate_interval", "5m"))
    for rule in (*RECORDED.values(), *ALERTS):
        yield rule.get("alert") or rule["record"], rule["expr"]


def test_every_expression_can_be_read_and_names_series_and_labels_that_there_are() -> None:
    known, wrong = read_known(), []
    for place, text in list_all():
        expr = promql_parser.parse(text)
        selectors = find(expr, promql_parser.VectorSelector)
        assert selectors, (place, text)
        labels: set[str] = set()
        for selector in selectors:
            name = selector.name if selector.name in known else ENDINGS.sub("", selector.name)
            if name not in known:
                wrong.append(f"{place}: no series {selector.name}")
                continue
            labels |= known[name]
            used = {matcher.name for matcher in selector.matchers.matchers}
            wrong += [f"{place}: {name} has no label {label}" for label in used - known[name] - ANYWHERE]
        grouped = {label for aggregate in find(expr, promql_parser.AggregateExpr) for label in by(aggregate)}
        wrong += [f"{place}: no label {label} in {text}" for label in grouped - labels - ANYWHERE]
    assert not wrong


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda dashboard: dashboard.uid)
def test_the_files_are_those_of_the_tables_and_fit_any_grafana(dashboard: Any) -> None:
    text = (FOLDER / f"{dashboard.uid.removeprefix('muster-')}.json").read_text(encoding="utf-8")
    assert text == render(dashboard), "python -m tools.dashboards writes it anew"
    made = json.loads(text)
    sources = re.findall(r'"uid": "([^"]*)"', text)
    assert set(sources) == {"${datasource}", dashboard.uid}
    assert len({panel["id"] for panel in made["panels"]}) == len(made["panels"])
    places = [panel["gridPos"] for panel in made["panels"]]
    taken = [(x, y) for at in places for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])]
    assert len(taken) == len(set(taken)), "two panels lie upon each other"
    assert max(x for x, _ in taken) < 24
    legends = re.findall(r"\{\{(\w+)\}\}", text)
    assert set(legends) <= {label for labels in read_known().values() for label in labels} | ANYWHERE


def test_every_alert_says_what_it_means_and_the_page_what_to_do() -> None:
    page = (ROOT / "docs" / "troubleshoot.md").read_text(encoding="utf-8")
    section = page.partition("\n## An alert of Prometheus\n")[2].partition("\n## ")[0]
    assert sorted(re.findall(r"`(Muster\w+)`", section)) == sorted(rule["alert"] for rule in ALERTS)
    for rule in ALERTS:
        assert set(rule["annotations"]) == {"summary", "description", "runbook"}, rule["alert"]
        assert rule["annotations"]["runbook"] == "docs/troubleshoot.md#an-alert-of-prometheus"
        assert rule["labels"]["severity"] in {"critical", "warning", "info"}
