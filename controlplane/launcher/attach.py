"""Commands for an installation that runs already: ``down`` and ``manage``."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from controlplane.launcher.console import say
from controlplane.launcher.environment import ROOT
from controlplane.launcher.errors import LauncherError
from controlplane.launcher.files import read_json
from controlplane.launcher.locks import read_holder
from controlplane.launcher.places import installation_path, lock_path
from controlplane.launcher.processes import send
from core.limits import limits
from wire import clock


def run_down(data: Path) -> int:
    """Stop the ``up`` that runs on ``data`` and wait until it has. Returns 0 also when none ran. Raises LauncherError."""
    holder = read_holder(lock_path(data))
    if holder is None:
        say(f"Not running: {data}")
        return 0
    say(f"Stopping muster (process {holder})")
    try:
        send(holder, signal.SIGTERM)
    except PermissionError:
        raise LauncherError(f"process {holder} belongs to another user: stop it as that user") from None
    until = clock.monotonic() + limits().launcher.attach_stop_s
    while read_holder(lock_path(data)) == holder:
        if clock.monotonic() > until:
            raise LauncherError(f"process {holder} still runs after {limits().launcher.attach_stop_s:.0f} s; see {data}/logs")
        clock.sleep(0.05)
    say("Stopped")
    return 0


def run_manage(data: Path, arguments: Sequence[str]) -> int:
    """Replace this process by ``manage.py`` with the environment of the installation on ``data``.

    With DATABASE_URL and MUSTER_SECRET_KEY set, these are used and nothing has to run. Raises LauncherError.
    """
    environment = dict(os.environ)
    if not ("DATABASE_URL" in environment and {"MUSTER_SECRET_KEY", "MUSTER_SECRET_KEY_FILE"} & set(environment)):
        environment |= read_variables(data)
    sys.stdout.flush()
    os.chdir(ROOT)
    os.execve(sys.executable, [sys.executable, str(ROOT / "manage.py"), *arguments], environment)


def read_variables(data: Path) -> dict[str, str]:
    """Return the environment of the installation that runs on ``data``. Raises LauncherError when none does."""
    if read_holder(lock_path(data)) is None:
        raise LauncherError(f"no Muster runs on {data}: start it with ./muster up, or name its directory with --data DIR")
    variables = read_json(installation_path(data)).get("environment")
    if not isinstance(variables, dict):
        raise LauncherError(
            f"the Muster on {data} is still starting, or belongs to another user: try again when it says it is ready"
        )
    return {str(name): str(value) for name, value in variables.items()}
