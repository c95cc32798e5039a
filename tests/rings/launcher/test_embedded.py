"""The embedded servers: durable, recoverable after ``kill -9``, gone without a trace."""

from __future__ import annotations

import os
import pwd
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import psycopg
import pytest
import redis

from controlplane.launcher.embedded import EmbeddedServers, Postgres
from controlplane.launcher.embedded.postgres import find_tree
from controlplane.launcher.embedded.servers import RunningServer
from controlplane.launcher.embedded.unprivileged import place_binaries
from controlplane.launcher.processes import UserIdentity, find_by_directory, identify, wait_gone
from tests.fakes.waiting import wait_until

pytestmark = pytest.mark.timeout(180)
RECOVERY_S = 30.0
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can try it as somebody else")
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
    assert found == ("on", "UTF8", "muster_app")


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
def test_postgres_runs_as_a_user_that_no_other_process_has(servers: EmbeddedServers) -> None:
    owner = Path(f"/proc/{servers.postgres.pid}").stat().st_uid
    assert _data(servers).stat().st_mode & 0o777 == 0o700
    if os.geteuid() != 0:
        assert owner == os.geteuid()
        return
    with pytest.raises(KeyError):
        pwd.getpwuid(owner)
    assert {path.lstat().st_uid for path in (_data(servers), *_data(servers).rglob("*"))} == {owner}
    others = {pid for pid in psutil.pids() if Path(f"/proc/{pid}").exists() and Path(f"/proc/{pid}").stat().st_uid == owner}
    assert others == set(find_by_directory(_data(servers)))


@as_root
@pytest.mark.parametrize("what", ["postgres", "postgres/data", "postgres/data/pg_hba.conf", "pg"])
def test_other_processes_of_nobody_reach_no_file_of_the_database(servers: EmbeddedServers, what: str) -> None:
    path, nobody = _data(servers).parent.parent / what, pwd.getpwnam("nobody")
    assert path.exists()
    program = (
        "import os, sys\n"
        f"os.setgroups([]), os.setgid({nobody.pw_gid}), os.setuid({nobody.pw_uid})\n"
        "assert not any(os.access(sys.argv[1], mode) for mode in (os.R_OK, os.W_OK, os.X_OK))\n"
    )
    subprocess.run([sys.executable, "-c", program, str(path)], timeout=30, check=True)


@contextmanager
def _running(home: Path) -> Iterator[str]:
    """Run the server of an installation in a folder; yield its URL."""
    server = Postgres(home=home / "postgres", sockets=home / "pg")
    server.prepare()
    running = RunningServer("PostgreSQL", server, home / "postgres.log")
    running.start()
    try:
        yield server.url
    finally:
        running.stop()


@pytest.fixture
def home() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="muster-pg-", dir="/tmp") as name:
        Path(name).chmod(0o711 if os.geteuid() == 0 else 0o700)
        yield Path(name)


def test_our_role_owns_its_database_and_is_no_superuser(home: Path) -> None:
    with _running(home) as url, psycopg.connect(url, autocommit=True) as connection:
        rights = "rolsuper, rolcreaterole, rolcreatedb, rolbypassrls, rolreplication"
        asked = f"SELECT {rights} FROM pg_roles WHERE rolname = current_user"
        assert connection.execute(asked.encode()).fetchone() == (False,) * 5
        connection.execute("CREATE TABLE ours (n int)")
        for statement in ("COPY ours FROM PROGRAM 'echo 1'", "ALTER ROLE muster_app SUPERUSER", "SET ROLE muster"):
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                connection.execute(statement)
        with pytest.raises(psycopg.OperationalError, match=r"no pg_hba\.conf entry"):
            psycopg.connect(url.replace("muster_app@", "muster@"))


OBJECTS = """
CREATE TABLE kept (id bigint GENERATED BY DEFAULT AS IDENTITY, old serial, n int);
INSERT INTO kept (n) VALUES (42);
CREATE TABLE parts (at int) PARTITION BY RANGE (at);
CREATE TABLE parts_1 PARTITION OF parts FOR VALUES FROM (0) TO (9);
CREATE SEQUENCE alone;
CREATE VIEW seen AS SELECT n FROM kept;
CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NEW; END $$;
CREATE FUNCTION twice(n int) RETURNS int LANGUAGE sql AS 'SELECT 2 * n';
CREATE TRIGGER noted BEFORE INSERT ON kept FOR EACH ROW EXECUTE FUNCTION note();
"""


def _make_as_the_last_release_did(home: Path) -> None:
    """Leave the database folder of 0.1.0: of ``nobody`` under root, with one role, a superuser, that owns everything."""
    data, sockets, is_root = home / "postgres" / "data", home / "pg", os.geteuid() == 0
    home.joinpath("postgres").mkdir(mode=0o711)
    nobody = pwd.getpwnam("nobody")
    user = UserIdentity(nobody.pw_uid, nobody.pw_gid) if is_root else None
    for path in (data, sockets):
        path.mkdir(mode=0o700)
        if user:
            os.chown(path, user.uid, user.gid)
    tree = place_binaries(find_tree(), user, home / "postgres") / "bin"
    identity = {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []} if is_root else {}
    make = [str(tree / "initdb"), "-D", str(data), "--encoding=UTF8", "--locale=C", "--username=muster", "--auth=trust"]
    subprocess.run(make, cwd=data.parent, capture_output=True, check=True, **identity)  # type: ignore[call-overload]
    if is_root:
        (data / "pg_hba.conf").write_text("local all all peer map=muster\n")
        (data / "pg_ident.conf").write_text("muster root muster\n")
    log = (home / "old.log").open("wb")
    serve = [str(tree / "postgres"), "-D", str(data), "-k", str(sockets), "-c", "listen_addresses=", "-c", "port=5432"]
    with log, subprocess.Popen(serve, cwd=data.parent, stdout=log, stderr=log, **identity) as process:  # type: ignore[call-overload]
        url = f"postgresql://muster@/postgres?host={sockets}"
        wait_until(lambda: _connects(url), what="the old server answers")
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute("CREATE DATABASE muster")
        with psycopg.connect(url.replace("/postgres?", "/muster?"), autocommit=True) as connection:
            connection.execute(OBJECTS.encode())
        process.send_signal(signal.SIGINT)


def _connects(url: str) -> bool:
    try:
        psycopg.connect(url).close()
    except psycopg.OperationalError:
        return False
    return True


def _check_upgraded(url: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        assert connection.execute("SELECT n FROM seen").fetchone() == (42,)
        connection.execute("INSERT INTO kept (n) VALUES (7)")
        for statement in (
            "ALTER TABLE kept ADD later int",
            "CREATE TABLE parts_2 PARTITION OF parts FOR VALUES FROM (9) TO (19)",
            "DROP TABLE parts_1",
            "ALTER SEQUENCE alone RESTART",
            "CREATE OR REPLACE FUNCTION twice(n int) RETURNS int LANGUAGE sql AS 'SELECT n + n'",
            "ALTER TABLE kept DISABLE TRIGGER noted",
            "CREATE OR REPLACE VIEW seen AS SELECT n FROM kept WHERE n > 0",
        ):
            connection.execute(statement)
        owners = "SELECT DISTINCT relowner::regrole::text FROM pg_class WHERE relnamespace = 'public'::regnamespace"
        assert connection.execute(owners).fetchall() == [("muster_app",)]


def test_a_folder_of_the_last_release_is_taken_over_with_everything_in_it(home: Path) -> None:
    _make_as_the_last_release_did(home)
    with _running(home) as url:
        _check_upgraded(url)
    owners = {path.lstat().st_uid for path in (home / "postgres" / "data").rglob("*")}
    assert owners.isdisjoint({pwd.getpwnam("nobody").pw_uid, 0} if os.geteuid() == 0 else set())


@pytest.mark.parametrize("at", ["before the role was let in", "while files changed their owner"])
def test_a_take_over_that_was_cut_short_is_done_again(home: Path, at: str) -> None:
    _make_as_the_last_release_did(home)
    Postgres(home=home / "postgres", sockets=home / "pg").prepare()
    data = home / "postgres" / "data"
    if at == "before the role was let in":
        (data / "pg_hba.conf").unlink()
    elif os.geteuid() == 0:
        for path in (data, data / "global", *(data / "base").rglob("*")):  # the folder itself is the last to change
            os.chown(path, pwd.getpwnam("nobody").pw_uid, data.stat().st_gid)
    with _running(home) as url:
        _check_upgraded(url)


def test_a_folder_that_moved_goes_on_elsewhere(home: Path) -> None:
    with _running(home) as url, psycopg.connect(url, autocommit=True) as connection:
        connection.execute("CREATE TABLE kept AS SELECT 42 AS n")
    (home / "postgres").rename(home / "elsewhere")
    (home / "other").mkdir(mode=0o711)
    (home / "elsewhere").rename(home / "other" / "postgres")
    with _running(home / "other") as url, psycopg.connect(url) as connection:
        assert connection.execute("SELECT n FROM kept").fetchone() == (42,)


@as_root
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


@linux_only
@as_root
@pytest.mark.parametrize("count", [65_536, 1_000], ids=["a container with 16 bits of users", "one with too few"])
def test_in_a_container_postgres_gets_a_user_that_the_container_has(count: int) -> None:
    asked = "from pathlib import Path; from controlplane.launcher.embedded.unprivileged import choose_user as ask; "
    command = f"read go; exec {sys.executable} -c '{asked}print(ask(Path(\"/data\")).uid)'"
    contained = subprocess.Popen(
        ["unshare", "--user", "sh", "-c", command],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        ours = Path("/proc/self/ns/user").readlink()
        wait_until(
            lambda: contained.poll() is not None or Path(f"/proc/{contained.pid}/ns/user").readlink() != ours,
            what="the namespace of users is there",
        )
        if contained.poll() is not None:
            pytest.skip("this system lets root make no namespace of users")
        for name in ("uid_map", "gid_map"):
            Path(f"/proc/{contained.pid}/{name}").write_text(f"0 0 {count}\n")
        said, trouble = contained.communicate("\n", timeout=60)
    finally:
        contained.kill()
        contained.communicate()
    if count == 65_536:
        assert 60_578 <= int(said) <= 61_183, trouble
    else:
        assert "set DATABASE_URL" in trouble
