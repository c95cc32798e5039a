"""One installation: where it keeps its things, its generated credentials, and the commands for one that runs already.

Everything lies in one directory, but under root PostgreSQL has a place that its own user can reach.
"""

from __future__ import annotations

import importlib
import os
import shlex
import shutil
import signal
import stat
import sys
import tempfile
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NoReturn

from controlplane.env import SettingError, list_alias_notes, list_problems, list_variables
from controlplane.launcher.console import LauncherError, say
from controlplane.launcher.environment import ROOT
from controlplane.launcher.files import read_holder, read_json, write_json
from core.limits import limits
from wire import COMMAND, IS_CHECKOUT, clock
from wire.variables import report_variables

_SYSTEM_HOME = Path("/var/lib/muster")
_TEMPORARY = Path("/tmp")
_TEMPORARY_PREFIX = "muster-home-"
_FOLDERS = ("logs", "run", "node", "models")
# A folder with one of these has been an installation's.
_MARKS = {"credentials.json", "secret_key"}
# What a folder may hold before: after a start that was cut short, on a disk of its own, or with models put there.
_BEFORE_MARKS = {
    *_FOLDERS,
    *_MARKS,
    "up.lock",
    "cluster_secret",
    "log_key",
    "postgres",
    "postgres-home.json",
    "sockets",
    "lost+found",
}


@dataclass(frozen=True, slots=True)
class Place:
    """The paths of one installation. Everything lies under ``data`` but what PostgreSQL's user could not reach there."""

    data: Path
    postgres: Path
    sockets: Path

    @property
    def logs(self) -> Path:
        return self.data / "logs"

    @property
    def run(self) -> Path:
        """Files that matter only while the installation runs."""
        return self.data / "run"

    @property
    def node(self) -> Path:
        """What the local node keeps: its key, the policy it trusts, used tokens."""
        return self.data / "node"

    @property
    def models(self) -> Path:
        return self.data / "models"

    def make_socket_directory(self) -> None:
        """Make ``sockets``; refuse one that somebody else made for us under /tmp. Raises LauncherError."""
        try:
            self.sockets.mkdir(exist_ok=True)
            found = self.sockets.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
                raise LauncherError(f"{self.sockets} belongs to somebody else: remove it or choose a shorter --data DIR")
            self.sockets.chmod(0o711 if os.geteuid() == 0 else 0o700)
        except OSError as error:
            raise LauncherError(f"cannot make {self.sockets}: {error.strerror}. Choose another --data DIR") from None

    def remove_socket_directory(self) -> None:
        """Delete a ``sockets`` that lies under /tmp, when nothing runs any more."""
        if self.sockets.parent == _TEMPORARY:
            shutil.rmtree(self.sockets, ignore_errors=True)


def default_data() -> Path:
    """Return the folder beside the script, and for an installed package the one that this system has for a person's data."""
    if IS_CHECKOUT:
        return ROOT / ".muster"
    if sys.platform == "darwin":
        return Path("~/Library/Application Support/muster").expanduser()
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path("~/AppData/Local").expanduser()) / "muster"
    given = os.environ.get("XDG_DATA_HOME", "")
    # The specification has everybody ignore one that is relative.
    return (Path(given) if given.startswith("/") else Path("~/.local/share").expanduser()) / "muster"


def node_data(data: Path) -> Path:
    """Return the folder of the local node when ``data`` is that of an installation, else ``data``: some node's own folder."""
    own = data / "node"
    return own if own.is_dir() and (lock_path(data).exists() or data == default_data()) else data


def lock_path(data: Path) -> Path:
    return data / "up.lock"


def credentials_path(data: Path) -> Path:
    return data / "credentials.json"


def installation_path(data: Path) -> Path:
    return data / "run" / "installation.json"


def children_path(data: Path) -> Path:
    return data / "run" / "children.json"


def check_data(data: Path) -> bool:
    """Return whether nothing is in ``data`` yet. Raises LauncherError when it holds what is not an installation's."""
    try:
        names = {entry.name for entry in data.iterdir()}
    except FileNotFoundError:
        return True
    except OSError as error:
        raise LauncherError(f"cannot read {data}: {error.strerror}. Choose another directory with --data DIR") from None
    foreign = sorted(names - _BEFORE_MARKS)
    if foreign and not names & _MARKS:
        shown = ", ".join(foreign[:3]) + (" and more" if len(foreign) > 3 else "")
        raise LauncherError(
            f"{data} is not empty and holds no installation of Muster ({shown}). Choose another with --data DIR"
        )
    return not names


def find_missing(data: Path) -> list[Path]:
    """Return ``data`` and the directories above it as far as they do not exist, the innermost first."""
    return [path for path in (data, *data.parents) if not path.exists()]


def remove_unused(data: Path, made: list[Path]) -> None:
    """Delete what ``prepare_data`` and the lock left in an empty ``data``, and the directories ``made`` for it, while empty."""
    try:
        for name in _FOLDERS:
            (data / name).rmdir()
        lock_path(data).unlink(missing_ok=True)
        for path in made:
            path.rmdir()
    except OSError:
        return  # a log or a database: it is there to be looked at, and the next start goes on with it


def prepare_data(data: Path) -> Path:
    """Make the directory of an installation with its folders and return its real path. Raises LauncherError in one line."""
    # A directory that we make as root lets others pass, not look: PostgreSQL is another user beneath it. Its files are 0600.
    mode = 0o711 if os.geteuid() == 0 else 0o700
    try:
        made = not data.exists()
        data.mkdir(parents=True, exist_ok=True)
        data = data.resolve()
        if made:
            data.chmod(mode)
        for name in _FOLDERS:
            (data / name).mkdir(exist_ok=True)
            (data / name).chmod(0o700)
        # The mode of a directory says nothing of a disk that is read-only or full: only a write does.
        with tempfile.TemporaryFile(dir=data):
            pass
    except OSError as error:
        raise LauncherError(f"cannot write to {data}: {error.strerror}. Choose another directory with --data DIR") from None
    return data


def choose_place(data: Path) -> tuple[Place, str]:
    """Return the paths for the installation in ``data`` (as ``prepare_data`` returned it) and a line to show, mostly empty.

    The line explains where PostgreSQL's files are when ``data`` is closed to others. Raises LauncherError.
    """
    note = ""
    home = data
    if os.geteuid() == 0 and not is_open_to_others(data):
        home = _system_home(data)
        note = f"PostgreSQL runs as a user of its own, who may not enter {data}: its files are in {home}"
    return Place(data=data, postgres=home / "postgres", sockets=_socket_directory(home)), note


def is_open_to_others(directory: Path) -> bool:
    """Return whether an unprivileged user may pass through ``directory`` and everything above it."""
    return all(path.stat().st_mode & stat.S_IXOTH for path in (directory, *directory.parents))


def _system_home(data: Path) -> Path:
    """Return the directory that belongs to ``data`` and lets others pass; a file in ``data`` remembers its random name."""
    pointer = data / "postgres-home.json"
    kept = read_json(pointer).get("home")
    try:
        if isinstance(kept, str):
            home = Path(kept)
            home.mkdir(exist_ok=True)
        # An installation that is itself temporary leaves nothing under /var/lib.
        elif _TEMPORARY in data.parents:
            _remove_abandoned_homes()
            home = Path(tempfile.mkdtemp(prefix=_TEMPORARY_PREFIX, dir=_TEMPORARY))
        else:
            _SYSTEM_HOME.mkdir(mode=0o711, exist_ok=True)
            home = _SYSTEM_HOME / os.urandom(8).hex()
            home.mkdir()
        home.chmod(0o711)
        write_json(pointer, {"home": str(home)})
        write_json(home / "belongs-to.json", {"data": str(data)})
    except OSError as error:
        raise LauncherError(
            f"PostgreSQL's own user may not enter {data} and {error.filename} cannot be made ({error.strerror}): "
            "choose a directory such as /srv/muster with --data DIR, or set DATABASE_URL"
        ) from None
    if not is_open_to_others(home):
        raise LauncherError(
            f"PostgreSQL's own user may enter neither {data} nor {home}: choose another --data DIR or set DATABASE_URL"
        )
    return home


def _remove_abandoned_homes() -> None:
    """Delete what earlier temporary installations left under /tmp: their own directory is gone."""
    from controlplane.launcher.processes import find_by_directory  # needs psutil, which may not be installed yet

    for home in _TEMPORARY.glob(f"{_TEMPORARY_PREFIX}*"):
        owner = read_json(home / "belongs-to.json").get("data")
        if isinstance(owner, str) and not Path(owner).exists() and not find_by_directory(home / "postgres" / "data"):
            shutil.rmtree(home, ignore_errors=True)


def _socket_directory(home: Path) -> Path:
    """Return where the sockets go: beside the data, or a short directory of the same owner when that path is too long."""
    beside = home / "sockets"
    # sockaddr_un holds 108 bytes on Linux and 104 on macOS; PostgreSQL adds "/.s.PGSQL.5432" to the directory.
    if len(os.fsencode(beside)) <= limits().launcher.socket_directory_bytes:
        return beside
    name = f"{zlib.crc32(os.fsencode(home)):08x}{zlib.adler32(os.fsencode(home)):08x}"
    return _TEMPORARY / f"muster-{os.geteuid()}-{name}"


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
        raise LauncherError(f"{path} is missing, incomplete or not yours to read: has {COMMAND} up run with this --data DIR?")
    values = asdict(credentials)
    for line in [values[name]] if name else [f"{each:<18}{value}" for each, value in values.items()]:
        say(line)
    return 0


def describe_command(data: Path) -> str:
    """Return the command line that shows the credentials in ``data``, to be pasted anywhere."""
    where = [] if data == default_data() else ["--data", str(data)]
    script = ROOT / "muster" if IS_CHECKOUT else Path(sys.executable).with_name("muster")
    # By its name alone where that finds the same one.
    is_on_path = not IS_CHECKOUT and (found := shutil.which("muster")) is not None and script.samefile(found)
    return shlex.join(["muster" if is_on_path else str(script), "credentials", *where])


def run_down(data: Path) -> int:
    """Stop the ``up`` that runs on ``data`` and wait until it has. Returns 0 also when none ran. Raises LauncherError."""
    holder = read_holder(lock_path(data))
    if holder is None:
        say(f"Not running: {data}")
        return 0
    say(f"Stopping muster (process {holder})")
    try:
        os.kill(holder, signal.SIGTERM)
    except ProcessLookupError:
        pass  # it stopped by itself meanwhile
    except PermissionError:
        raise LauncherError(f"process {holder} belongs to another user: stop it as that user") from None
    until = clock.monotonic() + limits().launcher.attach_stop_s
    while read_holder(lock_path(data)) == holder:
        if clock.monotonic() > until:
            raise LauncherError(f"process {holder} still runs after {limits().launcher.attach_stop_s:.0f} s; see {data}/logs")
        clock.sleep(0.05)
    say("Stopped")
    return 0


def run_config(data: Path, *, as_json: bool, is_check: bool) -> int:
    """Print every setting of the servers: of the installation that runs on ``data``, over those of this shell.

    Returns 1 for a wrong one when ``is_check``.
    """
    own = read_variables(data) if read_holder(lock_path(data)) is not None else {}
    os.environ.update(own)
    # What is wrong is part of what is shown.
    with suppress(SettingError):
        importlib.import_module("controlplane.settings")
    problems = list_problems()
    read = [
        replace(one, origin="installation", source="muster up") if one.name in own and one.origin == "variable" else one
        for one in list_variables()
    ]
    say(report_variables(read, problems, list_alias_notes(), as_json=as_json, is_check=is_check))
    return int(is_check and bool(problems))


def has_own_variables(environment: Mapping[str, str]) -> bool:
    """Return whether these variables name an installation by themselves, as those of a service do."""
    names = set(environment)
    return bool({"DATABASE_URL", "DATABASE_URL_FILE"} & names and {"MUSTER_SECRET_KEY", "MUSTER_SECRET_KEY_FILE"} & names)


def run_manage(data: Path, arguments: Sequence[str]) -> NoReturn:
    """Replace this process by ``controlplane.manage`` with the environment of the installation on ``data``.

    With DATABASE_URL and MUSTER_SECRET_KEY set, these are used and nothing has to run; nor has it for a help.
    Raises LauncherError.
    """
    environment = dict(os.environ)
    if not has_own_variables(environment) and not {"-h", "--help"} & set(arguments):
        environment |= read_variables(data)
    # What waits in the buffer is lost when the process is replaced.
    sys.stdout.flush()
    if IS_CHECKOUT:
        os.chdir(ROOT)
    os.execve(sys.executable, [sys.executable, "-m", "controlplane.manage", *arguments], environment)


def read_variables(data: Path) -> dict[str, str]:
    """Return the environment of the installation that runs on ``data``. Raises LauncherError when none does."""
    if read_holder(lock_path(data)) is None:
        raise LauncherError(f"no Muster runs on {data}: start it with {COMMAND} up, or name its directory with --data DIR")
    variables = read_json(installation_path(data)).get("environment")
    if not isinstance(variables, dict):
        raise LauncherError(
            f"the Muster on {data} is still starting, or belongs to another user: try again when it says it is ready"
        )
    return {str(name): str(value) for name, value in variables.items()}
