"""The control plane's real server process, on the database of the tests."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, urlencode

import psutil
import psycopg
from django.core.management import call_command
from django.db import connection, connections
from pytest_django import DjangoDbBlocker

from controlplane.env import read_database
from core.db import threads
from core.limits import limits
from tests.fakes.servers import EmbeddedServers
from tests.fakes.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
READY_WITHIN_S = 90.0
STOPPED_WITHIN_S = 60.0
PORTS = range(10_081, 16_000)
"""Below what systems hand out by themselves: no connection, and nobody who binds port 0, gets one of these by chance.

Browsers open no page at port 10080.
"""


@dataclass(frozen=True)
class ServerProcess:
    """A process that listens on loopback, and the file its output goes to."""

    process: subprocess.Popen[bytes]
    port: int
    log: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def public_url(self) -> str:
        """The address that passkeys belong to; no browser makes one for an IP address."""
        return f"http://localhost:{self.port}"

    def rss_mb(self) -> float:
        return float(psutil.Process(self.process.pid).memory_info().rss) / 2**20

    def has_ended(self, *, within_s: float) -> bool:
        try:
            self.process.wait(within_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def terminate(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(STOPPED_WITHIN_S)


def free_port() -> int:
    """Return a loopback port that nothing listens on, and that no other process of tests is given while this one lives.

    Whoever is to listen on it does so seconds later. The UDP port of that number, which nobody wants, tells that it is taken.
    """
    for port in random.SystemRandom().sample(PORTS, len(PORTS)):
        mark = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        try:
            mark.bind(("127.0.0.1", port))
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", port))
        except OSError:
            mark.close()
        else:
            mark.detach()  # stays open to the end of the process
            return port
    raise AssertionError(f"no port of {PORTS} is free")


def database_url_of_tests() -> str:
    values = connection.settings_dict
    query = {"host": values["HOST"], "connect_timeout": values["OPTIONS"]["connect_timeout"]}
    query |= {"port": values["PORT"]} if values["PORT"] else {}
    return f"postgresql://{quote(values['USER'])}:{quote(values['PASSWORD'])}@/{values['NAME']}?{urlencode(query)}"


@contextmanager
def serve(argv: list[str], *, port: int, log: Path, env: Mapping[str, str] | None = None) -> Iterator[ServerProcess]:
    """Run ``python *argv`` until the block ends; enters when ``port`` accepts connections."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, *argv], cwd=ROOT, env={**os.environ, **(env or {})}, stdout=output, stderr=output
        )
    server = ServerProcess(process, port, log)
    try:
        wait_for_port(server)
        yield server
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


@contextmanager
def serve_control(log: Path, *options: str, env: Mapping[str, str] | None = None) -> Iterator[ServerProcess]:
    port = free_port()
    argv = ["-m", "controlplane.serve_control", "--port", str(port), *options]
    settings = {"DATABASE_URL": database_url_of_tests(), "MUSTER_PUBLIC_URL": f"http://localhost:{port}", **(env or {})}
    with serve(argv, port=port, log=log, env=settings) as server:
        yield server


@contextmanager
def serve_gateway(log: Path, *, port: int = 0, env: Mapping[str, str] | None = None) -> Iterator[ServerProcess]:
    """Run a gateway on the database of the tests, on a port that is free unless one is given."""
    port = port or free_port()
    argv = ["-m", "controlplane.serve_gateway", "--port", str(port)]
    with serve(argv, port=port, log=log, env={"DATABASE_URL": database_url_of_tests(), **(env or {})}) as server:
        yield server


@contextmanager
def serve_worker(log: Path, *, env: Mapping[str, str] | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """Run the worker on the database of the tests until the block ends. It may not be ready yet when the block begins."""
    settings = {"DATABASE_URL": database_url_of_tests(), **(env or {})}
    with log.open("wb") as output:
        argv = [sys.executable, "-m", "controlplane.serve_worker"]
        process = subprocess.Popen(argv, cwd=ROOT, env={**os.environ, **settings}, stdout=output, stderr=output)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


def wait_for_port(server: ServerProcess) -> None:
    """Return when the port accepts connections. Raises AssertionError with the log when the process ends before."""
    deadline = time.monotonic() + READY_WITHIN_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", server.port), timeout=1).close()
        except OSError:
            assert not server.has_ended(within_s=0.02), server.log.read_text()
            assert time.monotonic() < deadline, server.log.read_text()
        else:
            return


_STANDING = {psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP, psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD}


@contextmanager
def standing_still(parent: psutil.Process) -> Iterator[None]:
    """Stop a process and everything below it without ending it, and let it all go on after the block."""
    stopped = stop_tree(parent)
    try:
        yield
    finally:
        go_on(stopped)


def stop_tree(parent: psutil.Process) -> list[psutil.Process]:
    stopped = [parent]
    try:
        _stop(parent)  # first: it starts no others then
        stopped += parent.children(recursive=True)
        for process in stopped[1:]:
            _stop(process)
    except BaseException:
        go_on(stopped)  # nobody else would
        raise
    return stopped


def go_on(stopped: list[psutil.Process]) -> None:
    """Let the processes go on. One that had ended before is gone as soon as its parent, which goes on last, looks after it."""
    for process in reversed(stopped):
        with suppress(psutil.NoSuchProcess):
            process.resume()


def _stop(process: psutil.Process) -> None:
    """Stop a process and return once it stands, or has ended: until it comes to see the signal it may still answer."""

    def stands() -> bool:
        process.suspend()
        return process.status() in _STANDING

    with suppress(psutil.NoSuchProcess):
        wait_until(stands, f"{process} stands still")


WITHIN_S = 30.0


def close_thread_connections() -> None:
    """Close what the threads of the ORM have kept: each of them, since a connection is closed where it was opened."""
    bounds = limits().core
    for name, number in (("orm", bounds.database_threads), ("upkeep", bounds.database_upkeep_threads), ("pulse", 1)):
        pool, together = threads._pool(name, number), threading.Barrier(number)
        for job in [pool.submit(_close_connections, together) for _ in range(number)]:
            job.result()


def _close_connections(together: threading.Barrier) -> None:
    together.wait()  # so that each thread of the pool gets one of these jobs
    connections.close_all()


@contextmanager
def use_database(url: str) -> Iterator[None]:
    """Point Django's default connection of this process at ``url``, in every thread that connects from now on."""
    connections.close_all()
    close_thread_connections()
    saved = connections.settings["default"].copy()
    wanted = read_database(url)
    connections.settings["default"].update(wanted)
    connection.settings_dict.update(wanted)
    try:
        yield
    finally:
        connections.close_all()
        close_thread_connections()
        connections.settings["default"].update(saved)
        connection.settings_dict.update(saved)


@contextmanager
def private_database(blocker: DjangoDbBlocker) -> Iterator[EmbeddedServers]:
    """Run a PostgreSQL and a Valkey, migrated, that are Django's until the block ends. Not durable: it may freeze, not die."""
    with EmbeddedServers(durable=False) as private, blocker.unblock(), use_database(private.database_url):
        call_command("migrate", verbosity=0)
        yield private


@contextmanager
def frozen(servers: EmbeddedServers) -> Iterator[None]:
    """Stop the server with all its processes, as a hypervisor does, and let them go on after the block."""
    with standing_still(psutil.Process(servers.postgres.pid)):
        yield


@contextmanager
def held(servers: EmbeddedServers, statement: str) -> Iterator[None]:
    with psycopg.connect(servers.database_url) as holder:
        holder.execute(statement)
        yield


def count_blocked(servers: EmbeddedServers) -> int:
    with psycopg.connect(servers.database_url, autocommit=True) as looker:
        row = looker.execute("SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'").fetchone()
        assert row is not None
        return int(row[0])


def wait_for_the_abandoned(servers: EmbeddedServers) -> None:
    """Return once only this thread's own connection is left: what a frozen server was sent, it does when thawed all the same.

    For tests whose other clients have all gone: it cannot tell an abandoned connection from one in use. One over which nothing
    was ever asked does not count: an exception that somebody keeps may keep it open.
    """
    own = connection.connection.info.backend_pid if connection.connection is not None else 0
    others = (
        "SELECT pid, state, query FROM pg_stat_activity WHERE datname = current_database()"
        " AND backend_type = 'client backend' AND query <> '' AND pid NOT IN (pg_backend_pid(), %s)"
    )
    with psycopg.connect(servers.database_url, autocommit=True) as looker:
        wait_until(lambda: not looker.execute(others, [own]).fetchall(), "nobody else is left", within_s=WITHIN_S)


def in_thread(work: Callable[[], object]) -> Future[object]:
    def run() -> object:
        try:
            return work()
        finally:
            connections.close_all()

    pool = ThreadPoolExecutor(1)
    future = pool.submit(run)
    pool.shutdown(wait=False)
    return future
