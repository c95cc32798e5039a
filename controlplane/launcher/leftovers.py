"""Which children belong to which run, written down so that the next ``up`` can end what a killed one left behind."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from pathlib import Path

from controlplane.launcher.console import say
from controlplane.launcher.errors import LauncherError
from controlplane.launcher.files import read_json, write_json
from controlplane.launcher.part import Part
from controlplane.launcher.parts import RUN_ID_VARIABLE
from controlplane.launcher.processes import find_by_variable, is_alive, send, send_group, wait_gone
from core.limits import limits


def record_children(path: Path, run_id: str, parts: Mapping[str, Part]) -> None:
    """Write down the children that run now, each with what tells it from a later process of the same id."""
    children = {
        name: {"pid": part.process.pid, "identity": part.identity} for name, part in parts.items() if part.process is not None
    }
    write_json(path, {"run_id": run_id, "children": children})


def end_leftovers(path: Path) -> None:
    """End the children of an earlier run that are still alive; a process that only shares an id with one is left alone.

    PostgreSQL is left to ``Postgres.clear_leftovers``, which knows all of its processes. Raises LauncherError.
    """
    kept = read_json(path)
    children = kept.get("children")
    run_id = kept.get("run_id")
    if not isinstance(children, dict) or not isinstance(run_id, str):
        return
    recorded = [
        (int(child["pid"]), str(child["identity"]))
        for name, child in children.items()
        if name != "postgres" and isinstance(child, dict) and is_alive(int(child["pid"]), str(child["identity"]))
    ]

    def survivors() -> set[int]:
        return {pid for pid, identity in recorded if is_alive(pid, identity)} | set(find_by_variable(RUN_ID_VARIABLE, run_id))

    if not survivors():
        return
    say(f"Ending {len(survivors())} processes that an earlier run left behind")
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid, identity in recorded:
            if is_alive(pid, identity):
                send_group(pid, number)
        for pid in find_by_variable(RUN_ID_VARIABLE, run_id):
            send(pid, number)
        if wait_gone(lambda: not survivors(), limits().launcher.leftover_s):
            return
    raise LauncherError(f"processes of an earlier run cannot be ended: {sorted(survivors())}. Stop them and try again")
