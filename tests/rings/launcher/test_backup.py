"""``muster backup`` and ``muster restore``: everything comes back, and nothing is touched that must not be."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType

import psycopg
import pytest

from controlplane.launcher.environment import ROOT
from controlplane.operate.archive import Archive
from controlplane.operate.installation import find_installation, hold_database

pytestmark = pytest.mark.timeout(180)
PASSPHRASE = "a passphrase of the tests"


@dataclass(frozen=True)
class Home:
    """A temporary place with a passphrase and an installation that has been restored from nothing but a first backup."""

    root: Path

    def run(
        self, *words: str, largest: int = 0, variables: Mapping[str, str] = MappingProxyType({})
    ) -> subprocess.CompletedProcess[str]:
        foreign = ("DATABASE_URL", "REDIS_URL", "MUSTER_", "DJANGO_")
        environment = {name: value for name, value in os.environ.items() if not name.startswith(foreign)} | {**variables}
        command = [sys.executable, "-m", "controlplane.operate", *words, "--passphrase-file", str(self.root / "passphrase")]

        def limit() -> None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (largest, largest))

        return subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False,
            stdin=subprocess.DEVNULL, preexec_fn=limit if largest else None,  # one thread
        )  # fmt: skip

    @property
    def data(self) -> Path:
        return self.root / "data"


@pytest.fixture(scope="module")
def home() -> Iterator[Home]:
    # /tmp by name: PostgreSQL's own user cannot enter pytest's folder.
    with TemporaryDirectory(prefix="muster-backup-", dir="/tmp") as folder:
        made = Home(Path(folder))
        made.root.chmod(0o755)
        (made.root / "passphrase").write_text(PASSPHRASE)
        fill(made.data)
        yield made


def fill(data: Path) -> None:
    """Make an installation as the first start does, without starting its parts."""
    program = (
        "import sys; from pathlib import Path; from controlplane.operate.installation import *; data = Path(sys.argv[1])\n"
        "from controlplane.launcher.files import read_or_create_secret\n"
        "data.mkdir(mode=0o711)\n"
        "for name in SECRETS.values(): read_or_create_secret(data / name)\n"
        "(data / 'node').mkdir(); (data / 'node/identity.key').write_text('the key of a node')\n"
        "here = find_installation(data)\n"
        "with hold_database(here) as url:\n"
        "    enter(here, database_url=url)\n"
        "    from django.core.management import call_command\n"
        "    from controlplane.commands import run_command\n"
        "    call_command('migrate', verbosity=0)\n"
        "    run_command(['bootstrap', '--credentials', str(data / 'credentials.json')])\n"
    )
    environment = {name: value for name, value in os.environ.items() if name not in {"DATABASE_URL", "MUSTER_SECRET_KEY"}}
    subprocess.run([sys.executable, "-c", program, str(data)], cwd=ROOT, env=environment, timeout=120, check=True)


@contextmanager
def serve(data: Path) -> Iterator[str]:
    """Run the database of a folder, whatever servers the tests have."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("DATABASE_URL", "MUSTER_SECRET_KEY"):
            patch.delenv(name, raising=False)
        with hold_database(find_installation(data)) as url:
            yield url


def test_a_backup_brings_an_installation_back_elsewhere(home: Home) -> None:
    file, other = home.root / "b.zip", home.root / "other"
    assert (told := home.run("backup", str(file), "--data", str(home.data))).returncode == 0, told.stderr
    told = home.run("restore", str(file), "--data", str(other))
    assert (told.returncode, "Audit log: good" in told.stdout) == (0, True), told.stderr + told.stdout
    for name in ("secret_key", "cluster_secret", "log_key", "credentials.json", "node/identity.key"):
        assert (other / name).read_bytes() == (home.data / name).read_bytes(), name
        assert (other / name).stat().st_mode & 0o777 == 0o600, name
    assert Archive(file).manifest.tables["gateway_apikey"] == 1
    again = home.run("restore", str(file), "--data", str(other))
    assert (again.returncode, "is not empty" in again.stderr) == (1, True)
    named = home.run("restore", str(file), "--data", str(other), "--replace", "--confirm", "another")
    assert (named.returncode, "--confirm muster" in named.stderr) == (1, True)
    replaced = home.run("restore", str(file), "--data", str(other), "--replace", "--confirm", "muster")
    assert (replaced.returncode, "Audit log: good" in replaced.stdout) == (0, True), replaced.stderr


def test_a_disk_that_gets_full_is_said_in_a_line_and_keeps_nothing(home: Home) -> None:
    file, secret = home.root / "full.zip", (home.data / "secret_key").read_text().strip()
    with serve(home.data) as url:
        told = home.run("backup", str(file), largest=64 * 1024, variables={"DATABASE_URL": url, "MUSTER_SECRET_KEY": secret})
    assert (told.returncode, file.exists()) == (1, False)
    assert told.stderr.strip() == f"muster: cannot write {file}: File too large. Nothing was kept of it"
    assert not list(home.root.glob(".full*"))


def test_a_restore_of_a_broken_or_newer_backup_touches_no_database(home: Home) -> None:
    file = home.root / "c.zip"
    assert home.run("backup", str(file), "--data", str(home.data)).returncode == 0
    content = bytearray(file.read_bytes())
    content[len(content) // 3] ^= 1
    (home.root / "broken.zip").write_bytes(content)
    told = home.run("restore", str(home.root / "broken.zip"), "--data", str(home.root / "nowhere"))
    assert (told.returncode, "no whole backup" in told.stderr) == (1, True), told.stderr
    assert not (home.root / "nowhere").exists()


def test_a_restore_refuses_while_somebody_is_connected(home: Home) -> None:
    file = home.root / "d.zip"
    assert home.run("backup", str(file), "--data", str(home.data)).returncode == 0
    target = home.root / "services"
    kept = Archive(file).open_settings(PASSPHRASE).variables
    with serve(target) as url, psycopg.connect(url, application_name="a gateway"):
        variables = {name: kept[name] for name in ("MUSTER_SECRET_KEY", "MUSTER_LOG_KEY")} | {"DATABASE_URL": url}
        told = home.run("restore", str(file), variables=variables)
        assert "1 connections to this database are open (a gateway)" in told.stderr
        told = home.run("restore", str(file), variables={**variables, "MUSTER_SECRET_KEY": "another"})
        assert "MUSTER_SECRET_KEY is not the one of the backup" in told.stderr


def test_settings_alone_are_written_for_services(home: Home) -> None:
    file, out = home.root / "e.zip", home.root / "settings.env"
    assert home.run("backup", str(file), "--data", str(home.data)).returncode == 0
    assert home.run("restore", str(file), "--settings", str(out)).returncode == 0
    written = dict(line.split("=", 1) for line in out.read_text().splitlines())
    assert written["MUSTER_SECRET_KEY"] == (home.data / "secret_key").read_text().strip()
    assert out.stat().st_mode & 0o777 == 0o600
    assert json.loads((home.data / "credentials.json").read_text())["api_key"] not in out.read_text()
