"""PostgreSQL and Redis for a run: the embedded ones, or a database of its own on the servers the environment names."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit, urlunsplit

import psutil
import psycopg
from psycopg import sql

from benchmarks.errors import BenchmarkError
from benchmarks.processes import tree_cpu_s, walk_tree
from controlplane.launcher.console import LauncherError
from tests.fakes.servers import EmbeddedServers


@dataclass(frozen=True, slots=True)
class Storage:
    """Where Muster keeps its state. ``postgres_pid`` is None when the server is not ours to look at."""

    database_url: str
    redis_url: str
    postgres_pid: int | None = None

    def database_cpu_s(self) -> float | None:
        """Return the CPU seconds PostgreSQL has used so far; None when it is not ours."""
        # Backends come and go; their parent keeps the time of those that ended.
        return tree_cpu_s(self.postgres_pid) if self.postgres_pid is not None else None


@contextlib.contextmanager
def open_storage(*, cores: Sequence[int] = ()) -> Iterator[Storage]:
    """Provide storage until the block ends; nothing is left behind. Raises BenchmarkError."""
    database_url, redis_url = os.environ.get("DATABASE_URL"), os.environ.get("REDIS_URL")
    if database_url and redis_url:
        with _own_database(database_url) as own_url:
            yield Storage(own_url, redis_url)
        return
    try:
        with EmbeddedServers() as servers:
            for pid in (servers.postgres.pid, servers.valkey.pid):
                _move(pid, cores)
            yield Storage(servers.database_url, servers.redis_url, servers.postgres.pid)
    except (LauncherError, ModuleNotFoundError) as error:
        raise BenchmarkError(
            f"the embedded servers did not start ({error}): run ./muster once, or set DATABASE_URL and REDIS_URL"
        ) from error


@contextlib.contextmanager
def _own_database(server_url: str) -> Iterator[str]:
    name = f"muster_bench_{secrets.token_hex(4)}"
    try:
        with psycopg.connect(server_url, autocommit=True) as connection:
            connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
            try:
                yield urlunsplit(urlsplit(server_url)._replace(path=f"/{name}"))
            finally:
                connection.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))
    except psycopg.Error as error:
        raise BenchmarkError(f"cannot make a database of its own with DATABASE_URL: {error}") from error


def _move(pid: int, cores: Sequence[int]) -> None:
    """Keep a server off the core of the measured system; what it starts later follows."""
    if not cores:
        return
    for process in walk_tree(pid):
        with contextlib.suppress(psutil.NoSuchProcess, PermissionError):
            os.sched_setaffinity(process.pid, cores)
