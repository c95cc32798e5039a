"""What ``bootstrap`` generated: who may sign in, and the bearer credentials of the quick start."""

from __future__ import annotations

import shlex
from dataclasses import asdict, dataclass
from pathlib import Path

from controlplane.launcher.console import say
from controlplane.launcher.environment import ROOT
from controlplane.launcher.errors import LauncherError
from controlplane.launcher.files import read_json
from controlplane.launcher.places import credentials_path, default_data

_MAY_BE_EMPTY = {"password", "admin_token"}


@dataclass(frozen=True, slots=True)
class Credentials:
    """The generated credentials of an installation, in clear text.

    ``password`` is empty once the operator has changed it, ``admin_token`` once it was revoked and a policy forbids another.
    """

    username: str
    password: str
    admin_token: str
    api_key: str
    model: str
    worker_secret: str
    node_token: str
    local_node_token: str


def read_credentials(path: Path) -> Credentials | None:
    """Return what ``path`` holds, or None when it is missing or incomplete."""
    values = read_json(path)
    admin = values.get("admin")
    if not isinstance(admin, dict):
        return None
    flat = {**values, **admin}
    names = Credentials.__slots__
    if not all(isinstance(flat.get(name), str) and (flat[name] or name in _MAY_BE_EMPTY) for name in names):
        return None
    return Credentials(**{name: str(flat[name]) for name in names})


def require_credentials(path: Path) -> Credentials:
    """Return what ``path`` holds. Raises LauncherError when bootstrap left it incomplete."""
    credentials = read_credentials(path)
    if credentials is None:
        raise LauncherError(f"{path} is incomplete: delete it and start again, new credentials are made then")
    return credentials


def run_credentials(data: Path, name: str | None) -> int:
    """Print the credentials of the installation in ``data``, or the one called ``name`` alone. Raises LauncherError."""
    path = credentials_path(data)
    credentials = read_credentials(path)
    if credentials is None:
        raise LauncherError(f"{path} is missing, incomplete or not yours to read: has ./muster up run with this --data DIR?")
    values = asdict(credentials)
    for line in [values[name]] if name else [f"{each:<18}{value}" for each, value in values.items()]:
        say(line)
    return 0


def describe_command(data: Path) -> str:
    """Return the command line that shows the credentials in ``data``, to be pasted anywhere."""
    where = [] if data == default_data() else ["--data", str(data)]
    return shlex.join([str(ROOT / "muster"), "credentials", *where])
