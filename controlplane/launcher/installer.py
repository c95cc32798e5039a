"""Installs a hash-locked set of packages: with uv where that works, with pip otherwise.

uv does not read pip's configuration, so the indexes that pip would use are handed to it. Both check every hash.
"""

from __future__ import annotations

import ast
import os
import re
import select
import subprocess
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

from controlplane.launcher.console import complain, progress
from controlplane.launcher.errors import LauncherError
from core.limits import limits
from wire import clock

_PIN = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]*==")
# What uv -v and pip say about each package on the way; a wheel from a local directory shows by its file name only.
_FOUND = re.compile(
    r"(?:Selecting:|^Collecting|^Requirement already satisfied:) ([A-Za-z0-9][A-Za-z0-9._-]*)|^Processing \S*/([\w.]+)-\d"
)
_RESOLVED = re.compile(r"^Resolved (\d+) packages? in")
# Pins that CPython 3.11 or newer on Linux and macOS never takes. Only the count shown to the person depends on it.
_FOREIGN_MARKERS = ("== 'win32'", "== 'PyPy'", "== 'emscripten'", "!= 'CPython'")


def install(python: Path, requirements: Path, installer_requirements: Path) -> None:
    """Install ``requirements`` into the environment of ``python``. Raises LauncherError with the installer's last words."""
    pip = [str(python), "-m", "pip"]
    environment = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1"}
    settings = read_pip_settings(pip, environment)
    total = count_pins(requirements.read_text(encoding="utf-8"))
    progress(f"Installing {total} packages from {requirements.name}")
    if _install_uv(pip, python, installer_requirements, environment):
        command = [str(python), "-m", "uv", "pip", "install", "-v", "--color", "never", "--python", str(python)]
        command += ["--require-hashes", "-r", str(requirements), *uv_options(settings)]
        failure = run_installer(command, environment | uv_environment(settings), total)
        if failure is None:
            return
        complain(f"uv could not install ({failure}); trying pip")
    failure = run_installer(
        [*pip, "install", "--progress-bar", "off", "--require-hashes", "-r", str(requirements)], environment, total
    )
    if failure is not None:
        raise LauncherError(
            f"cannot install {requirements.name}: {failure}. Check the network and pip's index settings, then try again"
        )


def count_pins(text: str) -> int:
    """Return how many packages a lock file pins for this system, as far as a platform marker tells."""
    pins = [line for line in text.splitlines() if _PIN.match(line)]
    return sum(1 for line in pins if not any(marker in line for marker in _FOREIGN_MARKERS))


def read_pip_settings(pip: Sequence[str], environment: Mapping[str, str]) -> dict[str, str]:
    """Return what pip is configured to use, by option name (``extra-index-url``…); variables win over files."""
    answer = subprocess.run([*pip, "config", "list"], capture_output=True, text=True, check=False, env=dict(environment))
    return parse_pip_settings(answer.stdout.splitlines())


def parse_pip_settings(lines: Iterable[str]) -> dict[str, str]:
    """Return the options in the output of ``pip config list`` that hold for ``pip install``, the strongest value of each.

    pip's order: ``global`` in files, then ``install`` in files, then ``PIP_…`` variables (shown as ``:env:``).
    """
    strength = {"global": 0, "install": 1, ":env:": 2}
    chosen: dict[str, tuple[int, str]] = {}
    for line in lines:
        key, separator, raw = line.partition("=")
        section, _, option = key.strip().rpartition(".")
        if not separator or section not in strength:
            continue
        try:
            value = str(ast.literal_eval(raw.strip()))
        except (ValueError, SyntaxError):
            continue
        if option not in chosen or strength[section] >= chosen[option][0]:
            chosen[option] = (strength[section], value)
    return {option: value for option, (_, value) in chosen.items()}


def uv_options(settings: Mapping[str, str]) -> list[str]:
    """Return uv's arguments for what pip is configured to use. With hashes required, any index may serve any package."""
    options = ["--index-strategy", "unsafe-best-match"]
    if settings.get("index-url"):
        options += ["--default-index", settings["index-url"]]
    for option, flag in (
        ("extra-index-url", "--extra-index-url"),
        ("find-links", "--find-links"),
        ("trusted-host", "--allow-insecure-host"),
    ):
        for value in settings.get(option, "").split():
            options += [flag, value]
    if settings.get("no-index", "").lower() in {"1", "true", "yes", "on"}:
        options.append("--no-index")
    return options


def uv_environment(settings: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that give uv pip's certificate store and time-out."""
    variables = {}
    if settings.get("cert"):
        variables["SSL_CERT_FILE"] = settings["cert"]
    if settings.get("default-timeout") or settings.get("timeout"):
        variables["UV_HTTP_TIMEOUT"] = settings.get("timeout") or settings["default-timeout"]
    return variables


def _install_uv(pip: Sequence[str], python: Path, requirements: Path, environment: Mapping[str, str]) -> bool:
    if subprocess.run([str(python), "-m", "uv", "--version"], capture_output=True, check=False).returncode == 0:
        return True
    command = [*pip, "install", "--quiet", "--require-hashes", "-r", str(requirements)]
    return run_installer(command, environment, 1, what="the installer uv") is None


def run_installer(command: Sequence[str], environment: Mapping[str, str], total: int, *, what: str = "packages") -> str | None:
    """Run an installer, say how far it is every two seconds. Returns None when it succeeded, else its last words."""
    began = shown_at = clock.monotonic()
    tail: deque[str] = deque(["downloading…"], maxlen=5)
    found: set[str] = set()
    process = subprocess.Popen(
        list(command), env=dict(environment), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert process.stdout is not None
    with process, process.stdout as output:
        for text in _read_lines(output):
            if match := _FOUND.search(text):
                found.add(re.sub(r"[-_.]+", "-", match.group(1) or match.group(2)).lower())
            if match := _RESOLVED.match(text):
                total = int(match.group(1))
            if text and not text.startswith(("DEBUG", "TRACE")):
                tail.append(text)
            now = clock.monotonic()
            if now - shown_at >= limits().launcher.install_said_s:
                shown_at = now
                progress(describe_step(what, found=len(found), total=total, seconds=now - began, last=tail[-1]))
    return None if process.returncode == 0 else " / ".join(tail)[-400:]


def describe_step(what: str, *, found: int, total: int, seconds: float, last: str) -> str:
    """Return how far an installer is. What is counted was found in an index, which comes before it is downloaded."""
    counted = f" (found {min(found, total)} of {total})" if total > 1 else ""
    return f"  {what}{counted}, {seconds:.0f} s: {last[:60]}"


def _read_lines(output: IO[bytes]) -> Iterator[str]:
    """Yield the lines of a pipe as they come, and an empty text whenever a second passes without one."""
    rest = b""
    while True:
        if not select.select([output], [], [], 1.0)[0]:
            yield ""
            continue
        piece = os.read(output.fileno(), 65536)
        if not piece:
            break
        *lines, rest = (rest + piece).split(b"\n")
        yield from (line.decode(errors="replace").strip() for line in lines)
    yield rest.decode(errors="replace").strip()
