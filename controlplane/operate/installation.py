"""The installation that a command is about: what ``up`` runs, a stopped folder of it, or the services of the environment."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from controlplane.env import read_text
from controlplane.launcher.console import LauncherError, progress
from controlplane.launcher.files import FileLock, LockHeld, read_holder
from controlplane.launcher.installation import (
    check_data,
    children_path,
    choose_place,
    credentials_path,
    find_missing,
    has_own_variables,
    lock_path,
    prepare_data,
    read_variables,
    remove_unused,
)
from controlplane.launcher.parts import STOP_ORDER, embedded_spec
from controlplane.launcher.postgres import Postgres
from controlplane.launcher.supervisor import Supervisor
from controlplane.launcher.up import end_leftovers
from wire import COMMAND

SECRETS = {"MUSTER_SECRET_KEY": "secret_key", "MUSTER_CLUSTER_SECRET": "cluster_secret", "MUSTER_LOG_KEY": "log_key"}
"""Variables without which the rows of a database cannot be used, and the file of ``up`` that holds each."""


class Kind(StrEnum):
    SERVICES = "services"
    """The variables of this process name a database: its processes are run by somebody else."""
    UP = "up"
    STOPPED = "stopped"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Installation:
    """``variables``: what makes a process one of it; without a database where none runs."""

    kind: Kind
    data: Path
    variables: Mapping[str, str]

    @property
    def is_in_folder(self) -> bool:
        return self.kind is not Kind.SERVICES


def find_installation(data: Path) -> Installation:
    """Return what is found, with the same precedence as ``muster manage``. Raises LauncherError, SettingError."""
    if has_own_variables(os.environ):
        return Installation(Kind.SERVICES, data, {"DATABASE_URL": read_text("DATABASE_URL"), **read_secrets({})})
    data = data.resolve()
    if read_holder(lock_path(data)) is not None:
        return Installation(Kind.UP, data, read_variables(data))
    kept = {}
    for variable, name in SECRETS.items():
        path = data / name
        try:
            kept[variable] = path.read_text(encoding="ascii").strip() if path.exists() else ""
        except OSError as error:
            raise LauncherError(f"cannot read {path}: {error.strerror}. Do this as the user who runs it") from None
    is_there = credentials_path(data).exists() or bool(kept["MUSTER_SECRET_KEY"])
    return Installation(Kind.STOPPED if is_there else Kind.NONE, data, read_secrets(kept))


def read_secrets(kept: Mapping[str, str]) -> dict[str, str]:
    """Return the secrets of the environment, and of ``kept`` those that are not set there. Raises SettingError."""
    found = {name: read_text(name) or kept.get(name, "") for name in SECRETS}
    return {name: text for name, text in found.items() if text}


def enter(installation: Installation, *, database_url: str = "", with_pages: bool = False) -> None:
    """Make this process one of the installation: its variables, then Django. Raises SettingError."""
    import django

    os.environ.update(installation.variables)
    if database_url:
        os.environ["DATABASE_URL"] = database_url
    os.environ["MUSTER_ADMIN_PAGES"] = "1" if with_pages else "0"
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "controlplane.settings")
    django.setup()


@contextmanager
def hold_database(installation: Installation) -> Iterator[str]:
    """Yield the URL of its database, whose server is started for the block when ``up`` does not run it. Raises LauncherError.

    A folder of ``up`` is locked meanwhile, so that nothing else starts on it.
    """
    given = installation.variables.get("DATABASE_URL")
    if given:
        yield given
        return
    made, is_empty = find_missing(installation.data), check_data(installation.data)
    data = prepare_data(installation.data)
    lock = FileLock(lock_path(data))
    try:
        lock.acquire(within_s=0.3)
    except LockHeld as held:
        raise LauncherError(f"{data} is in use by process {held.holder or '?'}: stop it with {COMMAND} down") from None
    with lock:
        outside = read_text("DATABASE_URL")
        if outside:
            yield outside
            return
        try:
            with _serve(data) as url:
                yield url
        except LauncherError:
            if is_empty:
                remove_unused(data, made)
            raise


@contextmanager
def _serve(data: Path) -> Iterator[str]:
    end_leftovers(children_path(data))
    place, _note = choose_place(data)
    place.make_socket_directory()
    server = Postgres(home=place.postgres, sockets=place.sockets / "postgres")
    supervisor = Supervisor(place.logs, lambda: None)
    try:
        server.prepare()
        progress("Starting postgres for this command alone")
        supervisor.start([embedded_spec("postgres", server)])
        supervisor.wait_ready(["postgres"], lambda _name: None)
        yield server.url
    finally:
        supervisor.stop(STOP_ORDER)
        place.remove_socket_directory()
