"""``./muster demo governance``: a second model for the local node, then the people (``manage.py demo_governance``)."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from controlplane.launcher.attach import read_variables, run_manage
from controlplane.launcher.errors import LauncherError
from controlplane.launcher.files import read_json
from controlplane.launcher.parts import TINY_MODEL
from controlplane.launcher.places import installation_path
from controlplane.launcher.processes import send
from controlplane.launcher.tiny_model import write_f16_model

MODEL = "muster-tiny-f16"


def run_demo(data: Path, *, as_json: bool) -> int:
    """Set the demo up on the installation that runs on ``data``; safe to do again. Raises LauncherError."""
    data = data.resolve()
    read_variables(data)  # says what to do when nothing runs there
    make_second_model(data / "models")
    wake_node(data)
    return run_manage(data, ["demo_governance", "--model", MODEL, "--data", str(data), *(["--json"] if as_json else [])])


def make_second_model(folder: Path) -> Path:
    """Return the second model in the folder of the local node, written unless it is there. Raises LauncherError."""
    target = folder / f"{MODEL}.gguf"
    try:
        if not target.exists():
            write_f16_model(TINY_MODEL, target)
    except (OSError, ValueError) as error:
        raise LauncherError(f"cannot make {target}: {error}. Is an installation there? Name it with --data DIR") from None
    return target


def wake_node(data: Path) -> None:
    """Have the local node, if one runs, look through its models again: then it can be seen that it has another one."""
    pids = read_json(installation_path(data)).get("pids")
    pid = pids.get("node") if isinstance(pids, dict) else None
    if isinstance(pid, int) and pid != os.getpid():
        send(pid, signal.SIGHUP)
