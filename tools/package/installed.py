"""The wheel in an empty environment outside the checkout, used as a person does: ``up``, the printed lines, a second node."""

from __future__ import annotations

import hashlib
import json
import os
import pwd
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.request import Request, urlopen

import psutil

from controlplane.launcher.installation import is_open_to_others
from tools.package.checks import Check, CheckFailed, NotHere, Outcome, Passed, Workplace, find_program, format_bytes
from tools.package.wheel import find_wheel
from wire import clock

_PYTHONS = ("python3.14", "python3.13", "python3.12", "python3.11")
_READY_S = 120.0
_NODE_S = 60.0
_COMMANDS = (
    ("status",), ("version",), ("logs", "-n", "3"), ("upgrade", "--check"), ("doctor",), ("config", "--check"),
    ("audit", "verify"), ("manage", "allow_model", "some-model"),
    ("conformance", "--list"), ("demo", "governance"),
)  # fmt: skip
"""What has to work outside a checkout on an installation that runs, and that the rest of a check does not use."""


@dataclass(frozen=True, slots=True)
class Person:
    """Who installs and types: a user of this machine, and a home of theirs that is empty before."""

    name: str
    uid: int
    home: Path

    def environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if name in {"LANG", "LC_ALL", "TZ"}}
        return {**kept, "HOME": str(self.home), "USER": self.name, "PATH": os.defpath, "PYTHONDONTWRITEBYTECODE": "1"}

    def start(self, *words: str | Path, log: Path) -> subprocess.Popen[bytes]:
        """Start a program of theirs in their home, in a session of its own."""
        uid, groups = (None, None) if self.uid == os.geteuid() else (self.uid, ())
        with log.open("wb") as output:
            return subprocess.Popen(
                [str(word) for word in words], cwd=self.home, env=self.environment(), stdin=subprocess.DEVNULL,
                stdout=output, stderr=subprocess.STDOUT, start_new_session=True, user=uid, group=uid, extra_groups=groups,
            )  # fmt: skip


def find_python() -> Path:
    """Return a Python that every user of this machine may run: ours, or the system's. Raises CheckFailed."""
    own = Path(sys.executable).resolve()
    for python in (own, *(Path(found) for name in _PYTHONS if (found := shutil.which(name, path=os.defpath)))):
        if is_open_to_others(python.resolve().parent):
            return python
    raise CheckFailed(f"no other user may run {own}, and the system has no Python of 3.11 or newer")


def make_environment(place: Workplace, lock: str) -> Path:
    """Make an empty virtual environment, install a locked set by its hashes and the wheel by its own. Returns its folder."""
    folder = place.make_folder(f"venv-{lock}")
    place.call(find_python(), "-m", "venv", "--without-pip", folder)
    wheel = find_wheel(place)
    own = folder / "muster.txt"
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    own.write_text(f"muster @ {wheel.as_uri()} --hash=sha256:{digest}\n", encoding="utf-8")
    install: list[str | Path] = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--python", folder / "bin" / "python"]
    install += ["--no-deps", "--require-hashes", "--no-build", "-r"]
    place.call(*install, place.root / "requirements" / f"{lock}.txt")
    place.call(*install, own)
    place.call(sys.executable, "-m", "uv", "pip", "check", "--quiet", "--python", folder / "bin" / "python")
    return folder


def make_server(place: Workplace) -> Path:
    return make_environment(place, "server")


def make_node(place: Workplace) -> Path:
    return make_environment(place, "runner")


def _measure(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*") if not path.is_symlink())


def _install(place: Workplace) -> Outcome:
    found = []
    for name, make in (("server", make_server), ("runner", make_node)):
        began = clock.monotonic()
        folder = place.make_once(name, make)
        count = len(list(folder.glob("lib/python*/site-packages/*.dist-info")))
        took = clock.monotonic() - began
        found.append(
            f"{name}: {count} packages, {format_bytes(_measure(folder))}, {took:.1f} s by hashes, from uv's cache if warm"
        )
    return Passed("\n".join(found))


def run_as(place: Workplace, name: str, uid: int, commands: Sequence[tuple[str, ...]] = ()) -> Outcome:
    """Start an installation from the wheel as a user, paste what it prints, serve from a second node, run ``commands``."""
    server, node = place.make_once("server", make_server), place.make_once("runner", make_node)
    home = place.make_folder(f"home-{name}")
    os.chown(home, uid, -1)
    person = Person(name, uid, home)
    logs = place.make_folder(f"logs-{name}")
    muster, ready_file = server / "bin" / "muster", home / "ready.json"
    began = clock.monotonic()
    words: list[str | Path] = [muster, "up", "--port", "0", "--gateway-port", "0", "--ready-file", ready_file]
    with _running(person.start(*words, log=logs / "up.log"), logs / "up.log") as up:
        _await(ready_file.exists, up, logs / "up.log", within_s=_READY_S)
        ready_s = clock.monotonic() - began
        ready = json.loads(ready_file.read_text(encoding="utf-8"))
        pasted = _paste(person, logs)
        worker: list[str | Path] = [
            node / "bin" / "muster",
            "node",
            "--gateway",
            ready["gateway_url"],
            "--token",
            ready["node_token"],
        ]
        began = clock.monotonic()
        tiny = next(node.glob("lib/python*/site-packages/runner/tiny/*.gguf"))
        worker += ["--name", "second", "--model-path", tiny, "--model-name", ready["model"], "--threads", "1"]
        with _running(person.start(*worker, log=logs / "node.log"), logs / "node.log") as second:
            _await(lambda: _count_nodes(ready) == 2, second, logs / "node.log", within_s=_NODE_S)
            joined_s = clock.monotonic() - began
            resident = _measure_memory(psutil.Process(up.pid))
            _run_commands(person, muster, commands, logs / "command.log")
        data = home / ".local" / "share" / "muster"
        if not (data / "credentials.json").exists():
            raise CheckFailed(f"the installation is not in {data}")
        began = clock.monotonic()
        down = person.start(muster, "down", log=logs / "down.log")
        if down.wait(timeout=_READY_S) or up.wait(timeout=_READY_S):
            raise CheckFailed(f"muster down failed: {(logs / 'down.log').read_text()}")
    return Passed(
        f"ready after {ready_s:.1f} s, {pasted}\nsecond node after {joined_s:.1f} s; all of up's processes "
        f"{format_bytes(resident)} (PSS); data {format_bytes(_measure(data))}; stopped in {clock.monotonic() - began:.1f} s"
    )


def _run_commands(person: Person, muster: Path, commands: Sequence[tuple[str, ...]], log: Path) -> None:
    for words in commands:
        status = person.start(muster, *words, log=log).wait(timeout=_NODE_S)
        # Of an installation that is seconds old, ``status`` may well say that something needs attention.
        if status > int(words == ("status",)):
            raise CheckFailed(f"`muster {' '.join(words)}` ended with status {status}:\n{_tail(log)}")
        if "./muster" in log.read_text(encoding="utf-8"):
            raise CheckFailed(f"`muster {' '.join(words)}` speaks of ./muster, which an installed package has not")


def _paste(person: Person, logs: Path) -> str:
    """Run the printed lines in a shell, as they are. Returns what came."""
    said = (logs / "up.log").read_text(encoding="utf-8").splitlines()
    lines = [line for line in said if line.startswith(("  export MUSTER_API_KEY=", "  curl "))]
    if len(lines) != 2:
        raise CheckFailed("`muster up` printed no two lines to paste:\n" + "\n".join(said[-20:]))
    began = clock.monotonic()
    shell = person.start("sh", "-ec", "\n".join(lines), log=logs / "curl.log")
    status, answer = shell.wait(timeout=_NODE_S), (logs / "curl.log").read_text(encoding="utf-8")
    events = [line.removeprefix("data: ") for line in answer.splitlines() if line.startswith("data: ")]
    if status or len(events) < 3 or events[-1] != "[DONE]":
        raise CheckFailed(f"the printed request ended with status {status}:\n{answer[-800:]}")
    texts = [choice["delta"].get("content") or "" for event in events[:-1] for choice in json.loads(event)["choices"]]
    took = clock.monotonic() - began
    return f"the printed request streamed {len(''.join(texts))} characters in {len(events)} events, {took:.1f} s"


def _count_nodes(ready: dict[str, str]) -> int:
    request = Request(f"{ready['gateway_url']}/admin/workers", headers={"Authorization": f"Bearer {ready['admin_token']}"})  # noqa: S310  # of our own gateway
    with urlopen(request, timeout=5) as answer:  # noqa: S310  # as above
        told = json.loads(answer.read())
    return len(told["workers"])


def _measure_memory(process: psutil.Process) -> int:
    """Return the bytes of a process and all below it, each shared page counted once (PSS; where a system has none, RSS)."""
    total = 0
    for each in (process, *process.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):  # it has ended meanwhile
            told = each.memory_full_info()
            total += getattr(told, "pss", told.rss)
    return total


@contextmanager
def _running(process: subprocess.Popen[bytes], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                raise CheckFailed(f"it did not stop within a minute of SIGTERM:\n{_tail(log)}") from None


def _await(condition: Callable[[], bool], process: subprocess.Popen[bytes], log: Path, *, within_s: float) -> None:
    until = clock.monotonic() + within_s
    while not condition():
        if process.poll() is not None:
            raise CheckFailed(f"it ended with status {process.returncode}:\n{_tail(log)}")
        if clock.monotonic() > until:
            raise CheckFailed(f"nothing after {within_s:.0f} s:\n{_tail(log)}")
        clock.sleep(0.1)


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-15:])


def _as_user(place: Workplace) -> Outcome:
    if os.geteuid():
        return run_as(place, pwd.getpwuid(os.geteuid()).pw_name, os.geteuid(), _COMMANDS)
    try:
        return run_as(place, "nobody", pwd.getpwnam("nobody").pw_uid, _COMMANDS)
    except KeyError:
        return NotHere("this system has no user nobody, and we are root")


def _as_root(place: Workplace) -> Outcome:
    return NotHere("needs root") if os.geteuid() else run_as(place, "root", 0)


def _as_pipx(place: Workplace) -> Outcome:
    """Install with pipx, whose environment has no pip of its own, and ask it for what an extra lacks."""
    pipx = find_program("pipx")
    if pipx is None:
        return NotHere("pipx is not installed")
    home = place.make_folder("pipx")
    environment = {**os.environ, "PIPX_HOME": str(home / "home"), "PIPX_BIN_DIR": str(home / "bin")}
    place.call(pipx, "install", f"{find_wheel(place)}[server]", env=environment)
    return Passed(place.call(home / "bin" / "muster", "--help").splitlines()[0])


CHECKS = (
    Check("install", "server and node are installed by hashes into empty environments, and fit together", _install),
    Check("user", "an ordinary user has an answer from the wheel, a second node and every command", _as_user),
    Check("root", "root has the same", _as_root),
    Check("pipx", "pipx installs the server", _as_pipx),
)
