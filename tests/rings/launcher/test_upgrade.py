"""An installation of an older release, restored from its backup: everything of it is there and goes on under this one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psycopg
import pytest
from psycopg import sql

from controlplane.launcher.environment import ROOT
from controlplane.operate.archive import Archive
from controlplane.operate.installation import find_installation, hold_database
from tests.fakes.waiting import wait_until
from tools.release_fixture import PASSPHRASE

pytestmark = pytest.mark.timeout(240)
RELEASES = sorted((ROOT / "tests" / "fixtures" / "releases").iterdir())


@dataclass(frozen=True)
class Restored:
    """A folder of ``up`` made from a release's backup, with which nothing has run yet. ``folder``: what is kept of it."""

    folder: Path
    data: Path
    told: str

    @contextmanager
    def open(self) -> Iterator[psycopg.Connection[tuple[Any, ...]]]:
        with pytest.MonkeyPatch.context() as patch:
            for name in ("DATABASE_URL", "MUSTER_SECRET_KEY"):
                patch.delenv(name, raising=False)
            with hold_database(find_installation(self.data)) as url, psycopg.connect(url) as database:
                yield database


def clean_environment() -> dict[str, str]:
    foreign = ("DATABASE_URL", "REDIS_URL", "MUSTER_", "DJANGO_")
    return {name: value for name, value in os.environ.items() if not name.startswith(foreign)}


@pytest.fixture(scope="module", params=RELEASES, ids=lambda folder: str(folder.name))
def restored(request: pytest.FixtureRequest) -> Iterator[Restored]:
    folder: Path = request.param
    # /tmp by name: PostgreSQL's own user cannot enter pytest's folder.
    with TemporaryDirectory(prefix="muster-upgrade-", dir="/tmp") as home:
        Path(home).chmod(0o755)
        (Path(home) / "passphrase").write_text(PASSPHRASE)
        words = ["restore", str(folder / "database.zip"), "--data", f"{home}/data", "--passphrase-file", f"{home}/passphrase"]
        command = [sys.executable, "-m", "controlplane.operate", *words]
        told = subprocess.run(
            command, cwd=ROOT, env=clean_environment(), capture_output=True, text=True, timeout=120, check=False
        )
        assert told.returncode == 0, told.stderr + told.stdout
        yield Restored(folder, Path(home) / "data", told.stdout)


def test_every_row_is_there_after_the_migrations_and_the_audit_log_holds(restored: Restored) -> None:
    assert "Audit log: good" in restored.told
    # A table that this release has no more is named here when it goes.
    gone: set[str] = set()
    with restored.open() as database:
        for table, rows in Archive(restored.folder / "database.zip").manifest.tables.items():
            if table not in gone:
                query = sql.SQL("SELECT count(*) FROM {}").format(sql.Identifier(table))
                found = database.execute(query).fetchone()
                assert found is not None
                assert found[0] >= rows, table


def test_operations_that_were_open_are_open(restored: Restored) -> None:
    with restored.open() as database:
        states = dict(database.execute("SELECT state, count(*) FROM governance_operation GROUP BY 1").fetchall())
        runs = dict(database.execute("SELECT state, count(*) FROM governance_operationrun GROUP BY 1").fetchall())
    assert states.get("pending", 0) > 0
    assert sum(runs.get(state, 0) for state in ("queued", "dispatched", "executing")) > 0


def test_the_release_before_can_write_to_the_schema_of_now(restored: Restored) -> None:
    columns: dict[str, list[str]] = json.loads((restored.folder / "columns.json").read_text())
    wrong = []
    with restored.open() as database:
        for table, names in columns.items():
            listed = sql.SQL(", ").join(map(sql.Identifier, names))
            copy = sql.SQL("INSERT INTO {0} ({1}) SELECT {1} FROM {0} LIMIT 1").format(sql.Identifier(table), listed)
            try:
                with database.transaction(force_rollback=True):
                    database.execute(copy)
            # The row is there already, and the log refuses another end of itself: columns and their defaults are meant.
            except (psycopg.errors.UniqueViolation, psycopg.errors.RaiseException):
                continue
            except psycopg.Error as error:
                wrong.append(f"{table}: {error}")
    assert not wrong


@contextmanager
def serve(data: Path) -> Iterator[dict[str, Any]]:
    ready = data.parent / "ready.json"
    ports = ["--port", "0", "--gateway-port", "0"]
    command = [sys.executable, str(ROOT / "muster"), "up", "--data", str(data), *ports, "--ready-file", str(ready)]
    with (data.parent / "up.log").open("wb") as log:
        process = subprocess.Popen(command, env=clean_environment(), stdout=log, stderr=log)
    try:
        wait_until(lambda: ready.exists() or process.poll() is not None, within_s=90)
        assert ready.exists(), (data.parent / "up.log").read_text()
        yield json.loads(ready.read_text())
    finally:
        process.terminate()
        process.wait(90)


def test_it_starts_and_keys_of_then_are_served(restored: Restored) -> None:
    key = json.loads((restored.data / "credentials.json").read_text())["api_key"]
    with serve(restored.data) as told:
        assert told["api_key"] == key
        body = {"model": "muster-tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        request = urllib.request.Request(f"{told['gateway_url']}/v1/chat/completions", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert json.load(answer)["choices"]
        command = [sys.executable, "-m", "controlplane.operate", "status", "--json", "--data", str(restored.data)]
        said = subprocess.run(
            command, cwd=ROOT, env=clean_environment(), capture_output=True, text=True, timeout=60, check=False
        )
        status = json.loads(said.stdout)
        assert "local" in {node["name"] for node in status["nodes"]}, said.stderr
        assert not [part for part in status["parts"] if part["name"] in ("Audit log", "Database") and part["state"] != "ok"]
