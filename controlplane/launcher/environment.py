"""The virtual environment beside the script: made when missing, brought up to a lock file, and re-entered.

A stamp inside it records the checksum of every lock file it satisfies, so an unchanged set costs nothing.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import zlib
from pathlib import Path

from controlplane.launcher.console import pass_clock_on, progress, say
from controlplane.launcher.errors import LauncherError
from controlplane.launcher.files import read_json, write_json
from controlplane.launcher.installer import install
from controlplane.launcher.locks import FileLock, LockHeld, acquire_patiently
from core.limits import limits
from wire import clock

ROOT = Path(__file__).resolve().parent.parent.parent
VENV = ROOT / ".venv"
_STAMP = VENV / ".muster-installed.json"
_LOCK = ROOT / ".venv.lock"
SETS: dict[str, tuple[str, ...]] = {
    "runner": ("runner",),
    "engines": ("runner", "engines"),
    "server": ("runner", "server"),
    "dev": ("runner", "engines", "server", "dev"),
}
"""Each set and those it holds whole: lock.sh compiles the smaller ones with the biggest one as constraint."""


def lock_file(name: str) -> Path:
    """Return the hash-locked requirements of the set ``name``."""
    return ROOT / "requirements" / f"{name}.txt"


def venv_python() -> Path:
    """Return the interpreter of the virtual environment."""
    return VENV / "bin" / "python"


def enter(name: str, argv: list[str]) -> None:
    """Go on inside the virtual environment with at least the set ``name``: install what lacks, then re-execute ``argv``.

    Returns only when this process already runs inside it. Raises LauncherError.
    """
    ensure_installed(name)
    if Path(sys.prefix).resolve() != VENV.resolve():
        python = str(venv_python())
        pass_clock_on()
        os.execv(python, [python, str(ROOT / "muster"), *argv])


def ensure_installed(name: str) -> None:
    """Bring the virtual environment to the set ``name``; safe when several processes do so at once. Raises LauncherError."""
    if is_installed(name):
        return
    lock = FileLock(_LOCK)
    try:
        acquire_patiently(
            lock,
            deadline_s=limits().launcher.install_lock_s,
            on_wait=lambda holder: say(f"Another muster (process {holder or '?'}) is installing; waiting for it"),
        )
    except LockHeld as held:
        raise LauncherError(
            f"process {held.holder} has been installing into {VENV} for too long; stop it and try again"
        ) from None
    except OSError as error:
        raise LauncherError(
            f"cannot write to {ROOT}: {error.strerror}. Use a copy of the repository that you may write to"
        ) from None
    try:
        if not is_installed(name):
            _install_set(name)
    finally:
        lock.release()


def _install_set(name: str) -> None:
    began = clock.monotonic()
    if not _has_working_pip():
        _create_venv()
    install(venv_python(), lock_file(name), lock_file("installer"))
    satisfied = {each: _checksum(each) for each in SETS[name]}
    stamp = read_json(_STAMP)
    if stamp.get("python") == _python_tag() and isinstance(older := stamp.get("sets"), dict):
        # A set is added to what is there, never cut back to itself.
        satisfied = {**older, **satisfied}
    write_json(_STAMP, {"python": _python_tag(), "sets": satisfied})
    progress(f"Installed the {name} set in {clock.monotonic() - began:.1f} s")


def is_installed(name: str) -> bool:
    """Return whether the virtual environment has the set ``name`` as its lock file says. Raises LauncherError."""
    stamp = read_json(_STAMP)
    sets = stamp.get("sets")
    if not isinstance(sets, dict) or not venv_python().exists():
        return False
    return stamp.get("python") == _python_tag() and sets.get(name) == _checksum(name)


def _checksum(name: str) -> str:
    try:
        content = lock_file(name).read_bytes()
    except OSError as error:
        raise LauncherError(f"cannot read {lock_file(name)}: {error.strerror}. Is this a complete checkout?") from None
    # Tells a changed file, defends nothing: what may be installed is for the hashes inside the file to say.
    return f"{zlib.crc32(content):08x}-{len(content)}"


def _python_tag() -> str:
    """Name the interpreter that the environment was made from, so that an upgraded one makes it anew."""
    return str(venv_python().resolve())


def _has_working_pip() -> bool:
    if not venv_python().exists():
        return False
    answer = subprocess.run([str(venv_python()), "-m", "pip", "--version"], capture_output=True, check=False)
    return answer.returncode == 0


def _create_venv() -> None:
    if importlib.util.find_spec("ensurepip") is None:
        package = f"python{sys.version_info[0]}.{sys.version_info[1]}-venv"
        raise LauncherError(f"this Python cannot make virtual environments. Install {package}: apt-get install {package}")
    if VENV.exists() and any(VENV.iterdir()) and not (VENV / "pyvenv.cfg").exists():
        raise LauncherError(f"{VENV} exists and is no virtual environment. Move it away and try again")
    progress(f"Making a virtual environment in {VENV}")
    made = subprocess.run(
        [sys.executable, "-m", "venv", "--clear", str(VENV)],
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    if made.returncode:
        reason = (made.stderr or made.stdout).strip().splitlines() or ["no reason given"]
        raise LauncherError(f"cannot make {VENV}: {reason[-1]}")
