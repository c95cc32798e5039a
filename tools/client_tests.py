"""The packages for the tests with the official Node SDKs, in ``tests/rings/clients/node``: installed when missing or old."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import zlib
from pathlib import Path

from controlplane.launcher.console import LauncherError, progress
from controlplane.launcher.environment import ROOT
from controlplane.launcher.files import FileLock, LockHeld, read_json, write_json
from wire import clock

TESTS = "tests/rings/clients"
SWITCH_VARIABLE = "MUSTER_TEST_CLIENTS"
OLDEST_NODE = 20
_LOCK_S = 600.0
_ASKING_S = 20.0
_INSTALLING_S = 600.0


def client_environment(root: Path = ROOT) -> dict[str, str]:
    """Return the variables under which pytest runs the tests in ``TESTS``; installs first what lacks. Raises LauncherError."""
    version, folder = find_node(), root / TESTS / "node"
    if not _is_satisfied(folder):
        lock = FileLock(root / ".venv.lock")
        try:
            lock.acquire(within_s=_LOCK_S, on_wait=lambda holder: progress(f"Waiting for process {holder}"))
        except LockHeld as held:
            raise LauncherError(f"process {held.holder} has been installing for too long; stop it and try again") from None
        with lock:
            if not _is_satisfied(folder):
                _install(folder, version)
    return {SWITCH_VARIABLE: "1"}


def find_node() -> str:
    """Return the version of the Node.js on the path, such as ``v20.20.2``. Raises LauncherError when there is none to use."""
    wanted = f"the tests with Node SDKs need Node.js {OLDEST_NODE} or newer and npm on the path"
    node = shutil.which("node")
    if node is None or shutil.which("npm") is None:
        raise LauncherError(wanted)
    try:
        said = subprocess.run([node, "--version"], capture_output=True, text=True, check=True, timeout=_ASKING_S).stdout.strip()
    except (OSError, subprocess.SubprocessError) as error:
        raise LauncherError(f"{node} --version fails: {error}") from None
    major = re.match(r"v(\d+)\.", said)
    if major is None or int(major[1]) < OLDEST_NODE:
        raise LauncherError(f"{wanted}; {node} is {said or 'of no known version'}")
    return said


def _install(folder: Path, version: str) -> None:
    began = clock.monotonic()
    lock = folder / "package-lock.json"
    total = len(json.loads(lock.read_text(encoding="utf-8"))["packages"]) - 1
    progress(f"Installing {total} packages from {lock.name} for Node.js {version}")
    # No package here needs its install script to run, so none may.
    options = ["--ignore-scripts", "--no-audit", "--no-fund", "--loglevel", "error"]
    try:
        subprocess.run(
            ["npm", "ci", "--prefix", str(folder), *options], capture_output=True, text=True, check=True, timeout=_INSTALLING_S
        )
    except subprocess.CalledProcessError as error:
        raise LauncherError(_describe(lock.name, str(error.stderr).strip()[-400:] or f"status {error.returncode}")) from None
    except subprocess.TimeoutExpired:
        raise LauncherError(_describe(lock.name, f"no end after {_INSTALLING_S:.0f} s")) from None
    write_json(_stamp(folder), {"checksum": _checksum(folder)})
    progress(f"Installed the Node SDKs in {clock.monotonic() - began:.1f} s")


def _describe(what: str, failure: str) -> str:
    return f"npm cannot install {what}: {failure}. Check the network and npm's registry, then try again"


def _is_satisfied(folder: Path) -> bool:
    return read_json(_stamp(folder)).get("checksum") == _checksum(folder)


def _stamp(folder: Path) -> Path:
    return folder / "node_modules" / ".muster-installed.json"


def _checksum(folder: Path) -> int:
    return zlib.crc32((folder / "package-lock.json").read_bytes())
