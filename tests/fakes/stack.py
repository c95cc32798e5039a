"""The system under test as processes: one ``./muster up``, more gateways beside it, and the operator's hands."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any  # rows that come back from services are JSON

import psutil

from controlplane.launcher.installation import read_variables
from tests.fakes.control_process import ROOT, free_port
from tests.fakes.waiting import wait_until

READY_WITHIN_S = 120.0
STOPPED_WITHIN_S = 60.0


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as reply:
            return bool(reply.status == 200)
    except (OSError, urllib.error.URLError):
        return False


@dataclass(frozen=True)
class Ready:
    """What ``--ready-file`` holds."""

    control_url: str
    gateway_url: str
    admin: Mapping[str, str]
    admin_token: str
    api_key: str
    model: str
    worker_secret: str
    node_token: str
    database_url: str
    redis_url: str
    pids: Mapping[str, int]


def read_ready(path: Path) -> Ready:
    """Return the content of a ready file; extra members are ignored."""
    content = json.loads(path.read_text())
    return Ready(**{name: content[name] for name in Ready.__dataclass_fields__})


@dataclass
class Gateway:
    """A gateway process: where it listens and, when the tests started it themselves, its process and log."""

    url: str
    name: str
    process: subprocess.Popen[bytes] | None = None
    log: Path | None = None

    @property
    def worker_url(self) -> str:
        """Where workers dial in, without the query."""
        return self.url.replace("http://", "ws://", 1) + "/v1/worker/connect"

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])

    def stop(self) -> None:
        if self.process is None or self.process.poll() is not None:
            return
        self.process.terminate()
        try:
            self.process.wait(STOPPED_WITHIN_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Backstage:
    """Calls of service functions in a control plane process (``tests.fakes.backstage``)."""

    def __init__(self, env: Mapping[str, str], log: Path) -> None:
        self._log = log.open("ab")
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.fakes.backstage"], cwd=ROOT, env=dict(env), stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=self._log, text=True,
        )  # fmt: skip

    def call(self, function: str, **arguments: Any) -> Any:
        """Return what ``function`` (dotted path) returned. Raises AssertionError with its error text."""
        stdin, stdout = self._pipes()
        with self._lock:
            stdin.write(json.dumps({"function": function, "arguments": arguments}) + "\n")
            stdin.flush()
            line = stdout.readline()
        if not line:
            raise AssertionError(f"backstage ended during {function}; see {self._log.name}")
        reply = json.loads(line)
        if "error" in reply:
            raise AssertionError(f"{function}: {reply['error']}")
        return reply["result"]

    def _pipes(self) -> tuple[IO[str], IO[str]]:
        stdin, stdout = self._process.stdin, self._process.stdout
        if stdin is None or stdout is None:
            raise AssertionError("backstage has no pipes")
        return stdin, stdout

    def stop(self) -> None:
        stdin, stdout = self._pipes()
        stdin.close()
        self._process.wait(STOPPED_WITHIN_S)
        stdout.close()
        self._log.close()


@dataclass
class Stack:
    """One running ``./muster up`` and what the tests started beside it."""

    directory: Path
    ready: Ready
    process: subprocess.Popen[bytes]
    env: Mapping[str, str]
    backstage: Backstage
    gateways: dict[str, Gateway] = field(default_factory=dict)

    @classmethod
    def start(cls, directory: Path, *, settings: Mapping[str, str], node: bool = False) -> Stack:
        """Run ``./muster up`` in ``directory`` and wait until it says that it is ready."""
        directory.mkdir(parents=True, exist_ok=True)
        ready_file = directory / "ready.json"
        command = [sys.executable, str(ROOT / "muster"), "up", "--data", str(directory / "data")]
        command += ["--port", str(free_port()), "--gateway-port", str(free_port()), "--ready-file", str(ready_file)]
        if not node:
            command.append("--no-node")
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("MUSTER_", "DJANGO_"))}
        inherited.pop("DATABASE_URL", None)
        inherited.pop("REDIS_URL", None)
        log = directory / "up.log"
        with log.open("ab") as sink:
            process = subprocess.Popen(
                command, cwd=ROOT, env={**inherited, **settings}, stdin=subprocess.DEVNULL, stdout=sink,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        try:
            wait_until(
                lambda: ready_file.exists() or process.poll() is not None,
                within_s=READY_WITHIN_S,
                what="./muster up wrote its ready file",
            )
            if process.poll() is not None:
                raise AssertionError(f"./muster up ended with {process.returncode}:\n{log.read_text()[-4000:]}")
            ready = read_ready(ready_file)
            env = {**inherited, **settings, **read_variables(directory / "data"), "MUSTER_ADMIN_PAGES": "0"}
            backstage = Backstage(env, directory / "backstage.log")
        except BaseException:
            process.send_signal(signal.SIGTERM)
            process.wait(STOPPED_WITHIN_S)
            raise
        stack = cls(directory, ready, process, env, backstage)
        stack.gateways["main"] = Gateway(url=ready.gateway_url, name="main")
        return stack

    @property
    def main(self) -> Gateway:
        return self.gateways["main"]

    def gateway(self, name: str, settings: Mapping[str, str], *, port: int | None = None) -> Gateway:
        """Return the extra gateway ``name``, started with ``settings`` on first use, on the same database."""
        known = self.gateways.get(name)
        if known is not None and known.process is not None and known.process.poll() is None:
            return known
        port = port or free_port()
        log = self.directory / f"gateway-{name}.log"
        with log.open("ab") as sink:
            process = subprocess.Popen(
                [sys.executable, "-m", "controlplane.serve_gateway", "--host", "127.0.0.1", "--port", str(port)], cwd=ROOT,
                env={**self.env, **settings}, stdin=subprocess.DEVNULL, stdout=sink, stderr=subprocess.STDOUT,
            )  # fmt: skip
        gateway = Gateway(url=f"http://127.0.0.1:{port}", name=name, process=process, log=log)
        self.gateways[name] = gateway
        wait_until(
            lambda: answers(gateway.url + "/health") or process.poll() is not None,
            within_s=READY_WITHIN_S,
            what=f"gateway {name} answers /health",
        )
        if process.poll() is not None:
            raise AssertionError(f"gateway {name} ended with {process.returncode}:\n{log.read_text()[-4000:]}")
        return gateway

    @contextlib.contextmanager
    def lend_gateway(self, name: str, settings: Mapping[str, str], *, port: int | None = None) -> Iterator[Gateway]:
        """Do as ``gateway`` does, and stop it afterwards: a gateway has work with every node and model, whoever uses them."""
        gateway = self.gateway(name, settings, port=port)
        try:
            yield gateway
        finally:
            gateway.stop()

    def part(self, *words: str) -> psutil.Process:
        """Return the child of ``up`` whose command line has one of ``words``, the one running now."""
        found = self.find_part(*words)
        if found is None:
            raise AssertionError(f"no child of ./muster up runs {words}")
        return found

    def find_part(self, *words: str) -> psutil.Process | None:
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self.process.pid).children():
                with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                    line = " ".join(child.cmdline())
                    if child.status() != psutil.STATUS_ZOMBIE and any(word in line for word in words):
                        return child
        return None

    def stop(self) -> None:
        """Stop everything in order; nothing may be left behind."""
        for gateway in self.gateways.values():
            gateway.stop()
        self.backstage.stop()
        family = [*psutil.Process(self.process.pid).children(recursive=True)]
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(STOPPED_WITHIN_S)
        finally:
            _, left = psutil.wait_procs(family, timeout=30)
            for process in left:
                process.kill()
        if left:
            raise AssertionError(f"./muster up left processes behind: {[p.pid for p in left]}")


@contextlib.contextmanager
def run_stack(name: str, settings: Mapping[str, str], *, node: bool = False) -> Iterator[Stack]:
    """Run a stack in a directory of its own and remove that afterwards; the logs stay in ``test-results/contract/``.

    The directory may be entered by everyone, because as root PostgreSQL runs as another user and pytest's own
    temporary directories are closed to it.
    """
    directory = Path(tempfile.mkdtemp(prefix=f"muster-{name}-"))
    directory.chmod(0o755)
    try:
        stack = Stack.start(directory, settings=settings, node=node)
        try:
            yield stack
        finally:
            stack.stop()
    finally:
        kept = ROOT / "test-results" / "contract" / name
        shutil.rmtree(kept, ignore_errors=True)
        kept.mkdir(parents=True)
        for log in directory.rglob("*.log"):
            shutil.copy(log, kept)
        shutil.rmtree(directory)
