"""``python -m tools.dashboards`` writes the Grafana dashboards of ``deploy/grafana`` from the tables of this file.

Their source of data is a variable, so that they go into any Grafana (11 or later) as they are. Fleet figures come from every
gateway alike, so panels take their maximum; requests are counted by each gateway for itself, so panels add them up.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[1] / "deploy" / "grafana"
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
Json = dict[str, Any]  # as json writes it


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel. ``series``: expressions with their legends. ``unit``: as Grafana names it. ``width``: of 24 columns."""

    title: str
    series: Sequence[tuple[str, str]]
    unit: str = "short"
    kind: str = "timeseries"
    width: int = 8
    text: str = ""
    warns_at: float | None = None
    stacks: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """Panels below one heading."""

    title: str
    panels: Sequence[Panel]


@dataclass(frozen=True, slots=True)
class Dashboard:
    """One file. ``variables``: name and the query that lists its values."""

    uid: str
    title: str
    text: str
    rows: Sequence[Row]
    variables: Sequence[tuple[str, str]] = field(default=())


def _stat(title: str, expr: str, unit: str = "short", *, warns_at: float | None = None, text: str = "") -> Panel:
    return Panel(title, [(expr, "")], unit, "stat", 4, text, warns_at)


def _rate(metric: str, by: str = "", where: str = "") -> str:
    """Return an expression for how often something is counted a second, added up."""
    total = f"sum by ({by})" if by else "sum"
    return f"{total} (rate({metric}{{{where}}}[$__rate_interval]))" if where else f"{total} (rate({metric}[$__rate_interval]))"


def _of_gateways(expr: str) -> str:
    """Return an expression of every process without those that are no gateways."""
    return f'{expr} * on (instance) group_left max by (instance) (muster_build_info{{part="gateway", {_GATEWAY}}})'


def _quantiles(metric: str, by: str, where: str, quantiles: Sequence[float] = (0.5, 0.95, 0.99)) -> list[tuple[str, str]]:
    legend = "" if by == "le" else f"{{{{{by.split(',', maxsplit=1)[0].strip()}}}}} "
    return [
        (
            f"histogram_quantile({share}, sum by ({by}) (rate({metric}_bucket{{{where}}}[$__rate_interval])))",
            f"{legend}p{share * 100:.0f}",
        )
        for share in quantiles
    ]


_GATEWAY = 'instance=~"$instance"'
_FAILING = (
    'sum(rate(muster_request_outcomes_total{outcome="failed", WHERE}[$__rate_interval])) / '
    'clamp_min(sum(rate(muster_request_outcomes_total{outcome=~"served|failed", WHERE}[$__rate_interval])), 1e-9)'
)
GATEWAY = Dashboard(
    "muster-gateway",
    "Muster gateway",
    "Requests at the gateways: how many, how they ended, how long they took and waited.",
    (
        Row(
            "Now",
            (
                _stat("Requests", _rate("muster_request_outcomes_total", "", _GATEWAY), "reqps"),
                _stat("Failing", _FAILING.replace("WHERE", _GATEWAY), "percentunit", warns_at=0.05),
                _stat("Running", f"sum(muster_requests_in_flight{{{_GATEWAY}}})"),
                _stat("Waiting", f"sum(muster_queue_depth{{{_GATEWAY}}})", warns_at=10),
                _stat("Nodes linked", f"sum(muster_workers_connected{{{_GATEWAY}}})"),
                _stat("Records not written", f"sum(muster_records_pending{{{_GATEWAY}}})", warns_at=1000),
            ),
        ),
        Row(
            "Requests",
            (
                Panel(
                    "By what became of them",
                    [
                        (
                            _rate("muster_request_outcomes_total", "outcome", _GATEWAY),
                            "{{outcome}}",
                        )
                    ],
                    "reqps",
                    stacks=True,
                    text="Refused is the caller's mistake, failed is what an operator can do something about.",
                ),
                Panel(
                    "Refused, by code",
                    [(_rate("muster_refusals_total", "code", _GATEWAY), "{{code}}")],
                    "reqps",
                ),
                Panel(
                    "Failed or left, by code",
                    [(_rate("muster_request_errors_total", "code", _GATEWAY), "{{code}}")],
                    "reqps",
                ),
                Panel("Time to the last byte", _quantiles("muster_request_seconds", "le", _GATEWAY), "s"),
                Panel("Time to the first byte", _quantiles("muster_request_ttfb_seconds", "le", _GATEWAY), "s"),
                Panel("Wait for a node", _quantiles("muster_queue_wait_seconds", "le", _GATEWAY), "s"),
                Panel(
                    "Waiting, by tier",
                    [(f"sum by (tier) (muster_queue_waiting{{{_GATEWAY}}})", "{{tier}}")],
                    stacks=True,
                ),
                Panel(
                    "Given to another node",
                    [
                        (_rate("muster_redispatches_total", "reason", _GATEWAY), "{{reason}}"),
                        (
                            _rate("muster_continued_streams_total", "result", _GATEWAY),
                            "stream {{result}}",
                        ),
                    ],
                    "reqps",
                ),
                Panel(
                    "Refused for a budget",
                    [
                        (
                            _rate("muster_budget_refusals_total", "kind, reason", _GATEWAY),
                            "{{kind}} {{reason}}",
                        )
                    ],
                    "reqps",
                ),
            ),
        ),
        Row(
            "Process",
            (
                Panel(
                    "Processor",
                    [
                        (
                            _of_gateways(f"rate(process_cpu_seconds_total{{{_GATEWAY}}}[$__rate_interval])"),
                            "{{instance}}",
                        )
                    ],
                    "percentunit",
                    width=6,
                ),
                Panel(
                    "Memory",
                    [
                        (
                            _of_gateways(f"process_resident_memory_bytes{{{_GATEWAY}}}"),
                            "{{instance}}",
                        )
                    ],
                    "bytes",
                    width=6,
                ),
                Panel(
                    "Commits of records, calls that wait",
                    [
                        (f"sum(muster_database_calls{{{_GATEWAY}}})", "calls"),
                        (_rate("muster_record_flushes_total", "result", _GATEWAY), "{{result}}"),
                    ],
                    "ops",
                    width=6,
                ),
                Panel(
                    "Dropped",
                    [
                        (_rate("muster_records_dropped_total", "", _GATEWAY), "records of refusals"),
                        (_rate("muster_access_lines_dropped_total", "", _GATEWAY), "access lines"),
                        (_rate("muster_worker_frames_dropped_total", "", _GATEWAY), "frames"),
                        (_rate("muster_hints_dropped_total", "", _GATEWAY), "hints"),
                    ],
                    "ops",
                    width=6,
                ),
            ),
        ),
    ),
    (("instance", 'label_values(muster_build_info{part="gateway"}, instance)'),),
)

_MODEL = 'model=~"$model"'
_CACHED, _PROMPT = f'kind="cached", {_MODEL}', f'kind="prompt", {_MODEL}'
_SHARE_CACHED = (
    f"{_rate('muster_tokens_total', 'model', _CACHED)} / clamp_min({_rate('muster_tokens_total', 'model', _PROMPT)}, 1e-9)"
)
MODEL = Dashboard(
    "muster-model",
    "Muster model",
    "One model or several: requests, speed, tokens, what waits, and what engines say themselves.",
    (
        Row(
            "Requests",
            (
                Panel(
                    "By state",
                    [
                        (
                            _rate("muster_requests_total", "model, state", _MODEL),
                            "{{model}} {{state}}",
                        )
                    ],
                    "reqps",
                    stacks=True,
                ),
                Panel(
                    "Time to the first byte", _quantiles("muster_request_ttfb_seconds", "model, le", _MODEL, (0.5, 0.95)), "s"
                ),
                Panel(
                    "Time per output token",
                    _quantiles("muster_time_per_output_token_seconds", "model, le", _MODEL, (0.5, 0.95)),
                    "s",
                    text="Of streams, behind their first byte.",
                ),
                Panel("Time to the last byte", _quantiles("muster_request_seconds", "model, le", _MODEL, (0.5, 0.95)), "s"),
                Panel("Wait for a node", _quantiles("muster_queue_wait_seconds", "model, le", _MODEL, (0.5, 0.95)), "s"),
                Panel("Waiting", [(f"sum by (model) (muster_model_queue_depth{{{_MODEL}}})", "{{model}}")]),
            ),
        ),
        Row(
            "Tokens",
            (
                Panel(
                    "Tokens a second",
                    [(_rate("muster_tokens_total", "model, kind", _MODEL), "{{model}} {{kind}}")],
                    width=12,
                ),
                Panel(
                    "Share of prompts that was cached",
                    [
                        (
                            _SHARE_CACHED,
                            "{{model}}",
                        )
                    ],
                    "percentunit",
                    width=12,
                ),
            ),
        ),
        Row(
            "On nodes",
            (
                Panel(
                    "Running and waiting there",
                    [
                        (f"sum by (model) (muster_runner_running{{{_MODEL}}})", "{{model}} running"),
                        (f"sum by (model) (muster_runner_waiting{{{_MODEL}}})", "{{model}} waiting"),
                        (f"sum by (model) (muster_runner_slots{{{_MODEL}}})", "{{model}} slots"),
                    ],
                ),
                Panel(
                    "Memory",
                    [(f"sum by (model, kind) (muster_runner_model_memory_bytes{{{_MODEL}}})", "{{model}} {{kind}}")],
                    "bytes",
                ),
                Panel(
                    "Time in the engine",
                    _quantiles("vllm_inference_duration_seconds", "model, le", _MODEL, (0.5, 0.95)),
                    "s",
                ),
                Panel(
                    "Starts of engines",
                    [(f"sum by (model) (increase(muster_runner_engine_restarts_total{{{_MODEL}}}[1h]))", "{{model}}")],
                    text="Within an hour.",
                ),
                Panel(
                    "vLLM: cache in use",
                    [(f"max by (instance, model) (vllm:kv_cache_usage_perc{{{_MODEL}}})", "{{instance}} {{model}}")],
                    "percentunit",
                    text="Empty without vLLM.",
                ),
                Panel(
                    "Engines: requests",
                    [
                        (f"sum by (model) (vllm:num_requests_running{{{_MODEL}}})", "{{model}} vLLM running"),
                        (f"sum by (model) (vllm:num_requests_waiting{{{_MODEL}}})", "{{model}} vLLM waiting"),
                        (f"sum by (model) (llamacpp:requests_processing{{{_MODEL}}})", "{{model}} llama.cpp running"),
                        (f"sum by (model) (llamacpp:requests_deferred{{{_MODEL}}})", "{{model}} llama.cpp waiting"),
                        (f"sum by (model) (tgi_batch_current_size{{{_MODEL}}})", "{{model}} TGI running"),
                        (f"sum by (model) (tgi_queue_size{{{_MODEL}}})", "{{model}} TGI waiting"),
                    ],
                    text="As far as the engine tells it.",
                ),
            ),
        ),
    ),
    (("model", "label_values(muster_requests_total, model)"),),
)

FLEET = Dashboard(
    "muster-fleet",
    "Muster fleet",
    "Nodes, GPUs, operations and the parts of the installation.",
    (
        Row(
            "Now",
            (
                _stat("Nodes available", 'max(muster_nodes{status="available"})'),
                _stat("Nodes offline", 'max(muster_nodes{status="offline"})', warns_at=1),
                _stat(
                    "Slots in use",
                    "sum(max by (node_id) (muster_node_slots_used)) / sum(max by (node_id) (muster_node_slots))",
                    "percentunit",
                    warns_at=0.9,
                ),
                _stat(
                    "Problems",
                    'sum(max by (kind, severity) (muster_alerts{severity=~"down|impaired"})) or vector(0)',
                    warns_at=1,
                ),
                _stat("Waiting for approval", 'sum(muster_operations_open{state="pending"})'),
                _stat("Gateways", 'max(muster_gateways{state="alive"})'),
            ),
        ),
        Row(
            "Nodes",
            (
                Panel("By status", [("max by (status) (muster_nodes)", "{{status}}")], stacks=True),
                Panel("Sessions by health", [("sum by (health) (muster_sessions)", "{{health}}")], stacks=True),
                Panel(
                    "Slots in use, by node",
                    [("max by (node) (muster_node_slots_used) / max by (node) (muster_node_slots)", "{{node}}")],
                    "percentunit",
                ),
                Panel(
                    "Requests, by node",
                    [(_rate("muster_node_requests_total", "node"), "{{node}}")],
                    "reqps",
                ),
                Panel(
                    "Failed, by node",
                    [(_rate("muster_node_requests_total", "node", 'outcome="failed"'), "{{node}}")],
                    "reqps",
                ),
                Panel(
                    "Ejected, wrong credentials",
                    [
                        ("sum by (reason) (increase(muster_node_ejections_total[1h]))", "ejected: {{reason}}"),
                        ("sum by (reason) (increase(muster_worker_auth_failures_total[1h]))", "turned away: {{reason}}"),
                    ],
                    text="Within an hour.",
                ),
            ),
        ),
        Row(
            "GPUs",
            (
                Panel(
                    "Memory in use",
                    [
                        (
                            "max by (node, gpu) (muster_gpu_memory_used_bytes) / max by (node, gpu) (muster_gpu_memory_bytes)",
                            "{{node}} {{gpu}}",
                        )
                    ],
                    "percentunit",
                    width=6,
                ),
                Panel(
                    "Use", [("max by (node, gpu) (muster_gpu_utilization_ratio)", "{{node}} {{gpu}}")], "percentunit", width=6
                ),
                Panel(
                    "Temperature",
                    [("max by (node, gpu) (muster_gpu_temperature_celsius)", "{{node}} {{gpu}}")],
                    "celsius",
                    width=6,
                ),
                Panel("Power", [("max by (node, gpu) (muster_gpu_power_watts)", "{{node}} {{gpu}}")], "watt", width=6),
            ),
        ),
        Row(
            "Operations and audit log",
            (
                Panel("Open", [("sum by (state) (muster_operations_open)", "{{state}}")], width=6, stacks=True),
                Panel(
                    "The oldest",
                    [
                        ("max(muster_approval_oldest_seconds)", "waits for approvals"),
                        ("max(muster_operation_run_oldest_seconds)", "run"),
                    ],
                    "s",
                    width=6,
                ),
                Panel(
                    "Runs that ended",
                    [
                        (
                            'sum by (state) (delta(muster_operation_runs{state=~"succeeded|failed|unknown|resolved"}[1h]))',
                            "{{state}}",
                        )
                    ],
                    width=6,
                    text="Within an hour.",
                ),
                Panel(
                    "Since the last checkpoint",
                    [
                        ("max(muster_audit_checkpoint_age_seconds)", "age"),
                        ("max(muster_audit_unsigned_entries)", "entries it does not cover"),
                    ],
                    width=6,
                ),
            ),
        ),
        Row(
            "Parts",
            (
                Panel(
                    "PostgreSQL: connections",
                    [
                        ("sum by (state) (muster_database_connections)", "{{state}}"),
                        ("max(muster_database_connections_max)", "most"),
                    ],
                ),
                Panel("PostgreSQL: size", [("max(muster_database_bytes)", "")], "bytes"),
                Panel(
                    "Worker",
                    [
                        ("max(muster_tasks_queued)", "tasks that wait"),
                        ("max(muster_worker_look_age_seconds)", "seconds since it looked for problems"),
                        ("max(muster_sums_behind_seconds)", "seconds that charts are behind"),
                    ],
                ),
                Panel(
                    "Pages and REST API",
                    [
                        (
                            f"histogram_quantile(0.95, {_rate('muster_control_request_seconds_bucket', 'part, le')})",
                            "{{part}} p95",
                        )
                    ],
                    "s",
                ),
                Panel(
                    "Their errors",
                    [(_rate("muster_control_requests_total", "part, status", 'status=~"5.."'), "{{part}} {{status}}")],
                    "reqps",
                ),
                Panel(
                    "Valkey",
                    [("max(muster_valkey_memory_bytes)", "memory")],
                    "bytes",
                ),
            ),
        ),
    ),
)
DASHBOARDS = (FLEET, MODEL, GATEWAY)


def list_expressions(dashboard: Dashboard) -> Iterator[str]:
    """Yield every expression of a dashboard."""
    for row in dashboard.rows:
        for panel in row.panels:
            yield from (expr for expr, _ in panel.series)


def render(dashboard: Dashboard) -> str:
    """Return the file of a dashboard."""
    panels: list[Json] = []
    top = 0
    for row in dashboard.rows:
        panels.append({"type": "row", "title": row.title, "collapsed": False, "panels": [], "gridPos": _place(0, top, 24, 1)})
        top, left, height = top + 1, 0, 0
        for panel in row.panels:
            if left + panel.width > 24:
                top, left = top + height, 0
            height = 4 if panel.kind == "stat" else 8
            panels.append(_render_panel(panel, _place(left, top, panel.width, height)))
            left += panel.width
        top += height
    for number, made in enumerate(panels, 1):
        made["id"] = number
    whole = {
        "uid": dashboard.uid,
        "title": dashboard.title,
        "description": dashboard.text,
        "tags": ["muster"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-3h", "to": "now"},
        "templating": {"list": [_SOURCE_VARIABLE, *(_render_variable(name, query) for name, query in dashboard.variables)]},
        "links": [{"title": "Muster", "type": "dashboards", "tags": ["muster"], "asDropdown": True, "includeVars": False}],
        "panels": panels,
    }
    return f"{json.dumps(whole, indent=1, ensure_ascii=False)}\n"


_SOURCE_VARIABLE: Json = {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"}


def _render_variable(name: str, query: str) -> Json:
    return {
        "name": name, "label": name.capitalize(), "type": "query", "datasource": _SOURCE,
        "query": {"query": query, "refId": name}, "definition": query,
        "refresh": 2, "sort": 1, "multi": True, "includeAll": True, "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }  # fmt: skip


def _render_panel(panel: Panel, place: Json) -> Json:
    steps: list[Json] = [{"color": "green", "value": None}]
    if panel.warns_at is not None:
        steps.append({"color": "orange", "value": panel.warns_at})
    custom: Json = {"lineWidth": 1, "fillOpacity": 20 if panel.stacks else 5, "showPoints": "never"}
    if panel.stacks:
        custom["stacking"] = {"mode": "normal"}
    defaults: Json = {"unit": panel.unit, "min": 0, "thresholds": {"mode": "absolute", "steps": steps}}
    if panel.kind == "timeseries":
        defaults["custom"] = custom
    options: Json = {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi", "sort": "desc"}}
    if panel.kind == "stat":
        options = {"reduceOptions": {"calcs": ["lastNotNull"]}, "graphMode": "area", "colorMode": "value"}
    return {
        "type": panel.kind, "title": panel.title, "description": panel.text, "datasource": _SOURCE, "gridPos": place,
        "fieldConfig": {"defaults": defaults, "overrides": []}, "options": options,
        "targets": [
            {"refId": chr(ord("A") + index), "datasource": _SOURCE, "expr": expr, "legendFormat": legend or "__auto",
             "instant": panel.kind == "stat", "range": panel.kind != "stat"}
            for index, (expr, legend) in enumerate(panel.series)
        ],
    }  # fmt: skip


def _place(left: int, top: int, width: int, height: int) -> Json:
    return {"x": left, "y": top, "w": width, "h": height}


def main() -> None:
    """Write the files."""
    for dashboard in DASHBOARDS:
        (FOLDER / f"{dashboard.uid.removeprefix('muster-')}.json").write_text(render(dashboard), encoding="utf-8")


if __name__ == "__main__":
    main()
