"""The embedded servers: durable, recoverable after ``kill -9``, gone without a trace."""

from __future__ import annotations

import os
import pwd
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
import redis

from controlplane.launcher.embedded import EmbeddedServers, Postgres
from controlplane.launcher.embedded.servers import RunningServer
from controlplane.launcher.processes import find_by_directory, identify, wait_gone

pytestmark = pytest.mark.timeout(180)
RECOVERY_S = 30.0
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="only Linux shows whose process is whose")


@pytest.fixture(scope="module")
def servers() -> Iterator[EmbeddedServers]:
    with EmbeddedServers() as running:
        yield running


def _data(servers: EmbeddedServers) -> Path:
    assert isinstance(servers.postgres.server, Postgres)
    return servers.postgres.server.data


def test_postgres_is_durable_and_speaks_utf8(servers: EmbeddedServers) -> None:
    with psycopg.connect(servers.database_url) as connection:
        found = connection.execute(
            "SELECT current_setting('fsync'), current_setting('server_encoding'), current_user"
        ).fetchone()
    assert found == ("on", "UTF8", "muster")


def test_nothing_listens_on_tcp(servers: EmbeddedServers) -> None:
    with psycopg.connect(servers.database_url) as connection:
        assert connection.execute("SELECT current_setting('listen_addresses')").fetchone() == ("",)
    with redis.Redis.from_url(servers.redis_url) as client:
        assert client.config_get("port") == {"port": "0"}


def test_valkey_keeps_nothing_and_refuses_rather_than_evicts(servers: EmbeddedServers) -> None:
    with redis.Redis.from_url(servers.redis_url) as client:
        settings = client.config_get("*")
    assert (settings["save"], settings["appendonly"], settings["maxmemory-policy"]) == ("", "no", "noeviction")
    assert int(settings["maxmemory"]) > 0
    with redis.Redis.from_url(servers.redis_url) as client, pytest.raises(redis.RedisError):
        client.publish("muster", b"x" * 2**21)


@linux_only
def test_postgres_runs_as_an_unprivileged_user(servers: EmbeddedServers) -> None:
    owner = Path(f"/proc/{servers.postgres.pid}").stat().st_uid
    assert owner != 0
    assert owner == (pwd.getpwnam("nobody").pw_uid if os.geteuid() == 0 else os.geteuid())
    assert _data(servers).stat().st_mode & 0o777 == 0o700


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can try it as somebody else")
def test_another_user_cannot_connect(servers: EmbeddedServers) -> None:
    program = (
        "import os, sys, psycopg\n"
        "os.setgroups([]), os.setgid(12345), os.setuid(12345)\n"
        "try:\n    psycopg.connect(sys.argv[1])\n"
        "except psycopg.OperationalError:\n    sys.exit(7)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program, servers.database_url], capture_output=True, text=True, timeout=30, check=False
    )
    assert (ended.returncode, ended.stderr) == (7, "")


def test_committed_rows_survive_kill_9_and_the_server_is_back_in_time(servers: EmbeddedServers) -> None:
    with psycopg.connect(servers.database_url, autocommit=True) as connection:
        connection.execute("CREATE TABLE IF NOT EXISTS kept (n int)")
        connection.execute("INSERT INTO kept VALUES (42)")
    servers.postgres.kill()
    began = time.monotonic()
    servers.postgres.start()
    assert time.monotonic() - began < RECOVERY_S
    with psycopg.connect(servers.database_url) as connection:
        assert connection.execute("SELECT n FROM kept").fetchone() == (42,)


@linux_only
def test_backends_that_outlive_a_killed_postmaster_are_ended(servers: EmbeddedServers) -> None:
    with psycopg.connect(servers.database_url, autocommit=True) as connection:
        backend = connection.info.backend_pid
        # A stopped backend cannot notice that its postmaster died, and a new postmaster refuses to start beside it.
        os.kill(backend, signal.SIGSTOP)
        servers.postgres.kill()
        assert backend in find_by_directory(_data(servers))
        began = time.monotonic()
        servers.postgres.start()
        assert time.monotonic() - began < RECOVERY_S
    assert identify(backend) is None
    with psycopg.connect(servers.database_url) as fresh:
        assert fresh.execute("SELECT 1").fetchone() == (1,)


@linux_only
def test_a_postmaster_of_an_earlier_run_is_stopped_before_the_next(servers: EmbeddedServers) -> None:
    earlier = servers.postgres.process
    assert earlier is not None
    later = RunningServer("PostgreSQL", servers.postgres.server, servers.postgres.log_path)
    later.start()
    assert earlier.wait(timeout=30) == 0
    servers.postgres.process = later.process
    with psycopg.connect(servers.database_url) as connection:
        assert connection.execute("SELECT 1").fetchone() == (1,)


def test_a_pid_file_that_names_a_stranger_harms_nobody(servers: EmbeddedServers) -> None:
    servers.postgres.kill()
    stranger = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        pid_file = _data(servers) / "postmaster.pid"
        pid_file.write_text("\n".join([str(stranger.pid), *pid_file.read_text().splitlines()[1:]]) + "\n")
        servers.postgres.start()
        assert stranger.poll() is None
    finally:
        stranger.communicate()


def test_valkey_is_back_after_kill_9(servers: EmbeddedServers) -> None:
    servers.valkey.kill()
    assert not servers.valkey.server.is_ready(0)
    servers.valkey.start()
    with redis.Redis.from_url(servers.redis_url) as client:
        assert client.ping()


def test_stopping_leaves_no_process_and_no_file() -> None:
    with EmbeddedServers(durable=False) as running:
        data = _data(running)
        pids = [running.postgres.pid, running.valkey.pid]
    assert wait_gone(lambda: not any(identify(pid) for pid in pids), 30.0)
    assert find_by_directory(data) == []
    assert not data.exists()
