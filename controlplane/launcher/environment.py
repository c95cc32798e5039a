"""The virtual environment beside the script: made when missing, brought up to a lock file, and re-entered.

A stamp inside it records the checksum of every lock file it satisfies, so an unchanged set costs nothing. An installed package
runs in the environment that it was installed into, and can only say which of its extras are missing there.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import runpy
import select
import subprocess
import sys
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, NoReturn

from controlplane.launcher.console import LauncherError, complain, pass_clock_on, progress, say
from controlplane.launcher.files import FileLock, LockHeld, read_json, write_json
from core.limits import limits
from wire import IS_CHECKOUT, clock

ROOT = Path(__file__).resolve().parent.parent.parent
VENV = ROOT / ".venv"
_IS_UNIX = hasattr(os, "fork")
_STAMP = VENV / ".muster-installed.json"
_LOCK = ROOT / ".venv.lock"
SETS: dict[str, tuple[str, ...]] = {
    "runner": ("runner",),
    "engines": ("runner", "engines"),
    "server": ("runner", "server"),
    "dev": ("runner", "engines", "server", "dev"),
}
"""Each set and those it holds whole: lock.sh compiles the smaller ones with the biggest one as constraint."""
_EXTRAS = {"engines": ("llamacpp,ct2,whisper", "faster_whisper"), "server": ("server", "django")}
"""The extras of the package that are such a set, and a module by which they are known. The base set is always there."""


def lock_file(name: str) -> Path:
    return ROOT / "requirements" / f"{name}.txt"


def venv_python() -> Path:
    return VENV / "bin" / "python"


def enter(name: str, argv: list[str]) -> None:
    """Go on inside the virtual environment with at least the set ``name``: install what lacks, then re-execute ``argv``.

    Returns only when this process already runs inside it. Raises LauncherError.
    """
    if not _IS_UNIX and (IS_CHECKOUT or name != "runner"):
        raise LauncherError(
            f"muster {argv[0]} runs on Linux and macOS. On Windows there is the node in front of a server of yours, from the "
            "package: pipx run muster node --gateway URL --token-file FILE --backend URL"
        )
    if not IS_CHECKOUT:
        _require_extras(name, argv[0])
        # Programs that we start import nothing from the folder a person happens to be in, which may have a ``core`` too.
        os.environ["PYTHONSAFEPATH"] = "1"
        return
    ensure_installed(name)
    if Path(sys.prefix).resolve() != VENV.resolve():
        python = str(venv_python())
        pass_clock_on()
        os.execv(python, [python, str(ROOT / "muster"), *argv])


def run_module(module: str, words: Sequence[str]) -> NoReturn:
    """Go on as a module of ours in this environment, as ``python -m`` would run it."""
    if _IS_UNIX:
        if IS_CHECKOUT:
            os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
        os.execv(sys.executable, [sys.executable, "-m", module, *words])
    # Windows would start the module beside us, and give the terminal back at once.
    sys.argv = [module, *words]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    sys.exit(0)


def _require_extras(name: str, command: str) -> None:
    if is_installed(name):
        return
    wanted = f"'muster[{_EXTRAS[name][0]}]'"
    is_pipx = (Path(sys.prefix) / "pipx_metadata.json").exists()
    installer = "pipx install --force" if is_pipx else f"{sys.executable} -m pip install"
    raise LauncherError(f"muster {command} needs packages that are not installed here: {installer} {wanted}")


def ensure_installed(name: str) -> None:
    """Bring the virtual environment to the set ``name``; safe when several processes do so at once. Raises LauncherError."""
    if is_installed(name):
        return
    lock = FileLock(_LOCK)
    try:
        lock.acquire(
            within_s=limits().launcher.install_lock_s,
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
    with lock:
        # Whoever held the lock may have installed it meanwhile.
        if not is_installed(name):
            _install_set(name)


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
    """Return whether the environment has the set ``name``; that of a checkout as its lock file says. Raises LauncherError."""
    if not IS_CHECKOUT:
        return name == "runner" or (name in _EXTRAS and importlib.util.find_spec(_EXTRAS[name][1]) is not None)
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
    # Another interpreter than the environment was made from, such as an upgraded one, makes it anew.
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
    told = subprocess.run([*pip, "config", "list"], capture_output=True, text=True, check=False, env=environment)
    settings = parse_pip_settings(told.stdout.splitlines())
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
    """Return uv's arguments for what pip is configured to use."""
    # With hashes required, any index may serve any package.
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
                # What is counted was found in an index, which comes before it is downloaded.
                counted = f" (found {min(len(found), total)} of {total})" if total > 1 else ""
                progress(f"  {what}{counted}, {now - began:.0f} s: {tail[-1][:60]}")
    return None if process.returncode == 0 else " / ".join(tail)[-400:]


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
