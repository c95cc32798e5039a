"""``muster status``: what runs, where and since when, how parts and nodes stand, open operations, what needs attention."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any

import httpx
import psutil

from controlplane.launcher.console import say
from controlplane.launcher.files import read_holder, read_json
from controlplane.launcher.installation import installation_path, lock_path
from controlplane.operate.installation import Installation, Kind, enter
from core.limits import limits
from wire import COMMAND, RELEASE

WELL, ATTENTION, NOT_RUNNING = 0, 1, 3
"""Exit statuses. 3 is what service scripts answer for a program that does not run (LSB)."""


@dataclass(frozen=True, slots=True)
class RunningPart:
    """A process that ``up`` runs. ``since`` is empty and the rest 0 for one that is away."""

    name: str
    pid: int = 0
    since: str = ""
    memory_mib: int = 0


@dataclass(slots=True)
class Status:
    """Everything that was seen. ``unseen``: what was not, and why."""

    release: str = RELEASE
    kind: str = ""
    data: str = ""
    exit: int = WELL
    since: str = ""
    addresses: dict[str, str] = field(default_factory=dict)
    processes: list[RunningPart] = field(default_factory=list)
    parts: list[dict[str, Any]] = field(default_factory=list)
    nodes: list[dict[str, Any]] = field(default_factory=list)
    operations: dict[str, int] = field(default_factory=dict)
    alerts: list[dict[str, str]] = field(default_factory=list)
    unseen: list[str] = field(default_factory=list)

    def note(self, why: str) -> None:
        self.unseen.append(why)
        self.exit = max(self.exit, ATTENTION)


def run_status(installation: Installation, *, as_json: bool) -> int:
    """Print the status and return what a script goes by: 0 well, 1 somebody should look, 3 it does not run."""
    status = read_status(installation)
    if as_json:
        say(json.dumps(asdict(status), indent=1, default=str))
    else:
        for line in describe(status):
            say(line)
    return status.exit


def read_status(installation: Installation) -> Status:
    status = Status(kind=installation.kind.value, data=str(installation.data) if installation.is_in_folder else "")
    match installation.kind:
        case Kind.NONE | Kind.STOPPED:
            status.exit = NOT_RUNNING
            return status
        case Kind.UP:
            _read_processes(status, installation)
        case Kind.SERVICES:
            status.unseen.append("processes: the services manager that runs them knows (systemctl, docker compose, kubectl)")
    try:
        enter(installation, with_pages=True)
        _read_database(status)
    except _database_errors() as error:
        status.note(f"parts, nodes, operations and alerts: the database does not answer ({' '.join(str(error).split())})")
    _ask_servers(status, installation)
    return status


def _database_errors() -> tuple[type[Exception], ...]:
    from django.db import DatabaseError

    return (DatabaseError,)


def _read_processes(status: Status, installation: Installation) -> None:
    holder = read_holder(lock_path(installation.data))
    status.since = _since(holder) if holder else ""
    told = read_json(installation_path(installation.data))
    status.addresses = {name: str(told[name]) for name in ("public_url", "control_url", "gateway_url") if name in told}
    pids = told.get("pids")
    for name, pid in pids.items() if isinstance(pids, dict) else ():
        status.processes.append(_look_at(name, int(pid)))
    if any(not part.pid for part in status.processes):
        status.exit = ATTENTION


def _look_at(name: str, pid: int) -> RunningPart:
    try:
        process = psutil.Process(pid)
        return RunningPart(name, pid, _since(pid), round(process.memory_info().rss / 1024 / 1024))
    except psutil.Error:
        return RunningPart(name)


def _since(pid: int) -> str:
    try:
        return datetime.fromtimestamp(psutil.Process(pid).create_time(), UTC).isoformat(timespec="seconds")
    except psutil.Error:
        return ""


def _read_database(status: Status) -> None:
    from controlplane.system import Sign, read_parts
    from governance.alerts import list_open_problems
    from governance.operations.queries import count_open
    from governance.states import Severity
    from nodes.services.availability import read_fleet

    for part in read_parts():
        facts = dict(part.facts)
        status.parts.append(
            {"name": part.name, "state": part.sign.value, "what": part.what, "advice": part.advice, "facts": facts}
        )
        if part.sign is Sign.ATTENTION:
            status.exit = max(status.exit, ATTENTION)
    for node in read_fleet().nodes:
        models, busy = list(node.model_names), f"{node.active_requests}/{node.max_concurrent}"
        status.nodes.append({"name": node.name, "status": node.status.value, "requests": busy, "models": models})
    status.operations = {name: count for name, count in count_open().items() if count}
    for alert in list_open_problems():
        status.alerts.append(
            {"severity": alert.severity.name.lower(), "what": alert.what, "advice": alert.advice, "since": str(alert.since)}
        )
        if alert.severity is not Severity.NOTICE:
            status.exit = max(status.exit, ATTENTION)


def _ask_servers(status: Status, installation: Installation) -> None:
    from django.conf import settings

    if installation.kind is Kind.SERVICES:
        status.addresses = {"control_url": settings.PUBLIC_URL, "gateway_url": settings.GATEWAY_PUBLIC_URL}
    for name, path in (("control_url", "/healthz"), ("gateway_url", "/health")):
        url = status.addresses.get(name, "").rstrip("/")
        answer = ask(f"{url}{path}")
        if isinstance(answer, str):
            status.note(f"{url}: {answer}")
        elif answer.status_code != httpx.codes.OK:
            status.note(f"{url}{path} answers {answer.status_code}: {answer.text[:200]}")


def ask(url: str) -> httpx.Response | str:
    """Return the answer of a GET, or why there is none."""
    try:
        return httpx.get(url, timeout=limits().console.operate_answer_s, trust_env=False)
    except httpx.HTTPError as error:
        return str(error) or type(error).__name__
    except httpx.InvalidURL as error:
        return f"it is no address ({error})"


def describe(status: Status) -> list[str]:
    """Return the lines for a person."""
    if status.exit == NOT_RUNNING:
        there = f"There is an installation in {status.data}, and it does not run. Start it with {COMMAND} up"
        nothing = (
            f"There is no installation in {status.data}. Start one with {COMMAND} up, or name its directory with --data DIR"
        )
        return [there if status.kind == Kind.STOPPED else nothing]
    runs = f"up since {_print_time(status.since)}, data in {status.data}" if status.data else "services of this environment"
    lines = [f"Muster {status.release}, {runs}"]
    lines += [f"  {name:<14}{url}" for name, url in status.addresses.items()]
    lines += _list("Processes", map(_describe_process, status.processes))
    signs = {"ok": "ok", "attention": "LOOK", "unknown": "?"}
    lines += _list("Parts", (f"{signs[one['state']]:<5}{one['name']:<20}{one['what']} {one['advice']}" for one in status.parts))
    nodes = (f"{one['name']:<20}{one['status']:<12}{one['requests']:<8}{', '.join(one['models'])}" for one in status.nodes)
    lines += _list("Nodes", nodes)
    lines += _list("Open operations", (f"{name}: {count}" for name, count in status.operations.items()))
    lines += _list("Needs attention", (f"{one['severity']:<10}{one['what']} {one['advice']}" for one in status.alerts))
    lines += _list("Not seen", status.unseen)
    return lines


def _describe_process(part: RunningPart) -> str:
    return f"{part.name:<12}" + (
        f"process {part.pid}, since {_print_time(part.since)}, {part.memory_mib} MiB" if part.pid else "is away"
    )


def _list(title: str, lines: Iterable[str]) -> list[str]:
    found = [f"  {line}".rstrip() for line in lines]
    return ["", title, *found] if found else []


def _print_time(text: str) -> str:
    return f"{datetime.fromisoformat(text):%Y-%m-%d %H:%M} UTC" if text else "?"
