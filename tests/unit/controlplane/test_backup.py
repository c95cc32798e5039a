"""The file of a backup: what it holds, who can open it, and that no change of it goes unnoticed."""

from __future__ import annotations

import json
import stat
import zipfile
from collections.abc import Callable
from dataclasses import replace
from io import BytesIO
from pathlib import Path

import pytest

from controlplane.launcher.console import LauncherError
from controlplane.operate.archive import Archive, Kept, Manifest, open_dump_writer, write_archive, write_rest
from controlplane.operate.backup import ask_passphrase, find_unknown_migrations
from controlplane.operate.postgres_tools import find_tools, pump, split_password

PASSPHRASE = "correct horse battery staple"
KEPT = Kept(variables={"MUSTER_SECRET_KEY": "s3cret"}, files={"node/identity.key": "key"})
MANIFEST = Manifest(
    made_at="2026-11-28T12:00:00+00:00", release="0.1.0", server=18, tool=18, migrations=["nodes.0001_initial"],
    tables={"nodes_node": 3}, table_bytes=8192, dump_bytes=0, dump_sha256="", audit_entries=7, audit_hash="00",
)  # fmt: skip
DUMP = b"PGDMP" + bytes(range(256)) * 40


def write(path: Path, dump: bytes = DUMP) -> Path:
    with write_archive(path) as archive:
        with open_dump_writer(archive) as writer:
            writer.write(dump[:100])
            writer.write(dump[100:])
        write_rest(archive, replace(MANIFEST, dump_bytes=writer.count, dump_sha256=writer.sha256), KEPT, PASSPHRASE)
    return path


def rewrite(path: Path, name: str, change: Callable[[bytes], bytes]) -> None:
    with zipfile.ZipFile(path) as archive:
        parts = {each: archive.read(each) for each in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for each, content in parts.items():
            archive.writestr(each, change(content) if each == name else content)


def test_a_backup_gives_back_what_was_put_in_and_is_for_its_owner_alone(tmp_path: Path) -> None:
    archive = Archive(write(tmp_path / "b.zip"))
    archive.check_dump(lambda _count: None)
    assert b"".join(archive.read_dump(lambda _count: None)) == DUMP
    assert archive.open_settings(PASSPHRASE) == KEPT
    assert archive.manifest.tables == {"nodes_node": 3}
    assert stat.S_IMODE(archive.path.stat().st_mode) == 0o600
    assert b"s3cret" not in archive.path.read_bytes()
    assert [path.name for path in tmp_path.iterdir()] == ["b.zip"]


def test_another_passphrase_opens_nothing(tmp_path: Path) -> None:
    with pytest.raises(LauncherError, match="the passphrase is wrong"):
        Archive(write(tmp_path / "b.zip")).open_settings(PASSPHRASE + "!")


def test_a_changed_dump_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "b.zip")
    rewrite(path, "database.dump", lambda content: content[:-1] + b"!")
    with pytest.raises(LauncherError, match="the dump is not the one that was written"):
        Archive(path).check_dump(lambda _count: None)


def test_a_manifest_that_names_another_dump_opens_no_settings(tmp_path: Path) -> None:
    path = write(tmp_path / "b.zip")
    rewrite(path, "manifest.json", lambda content: json.dumps(json.loads(content) | {"dump_sha256": "0" * 64}).encode())
    with pytest.raises(LauncherError, match="somebody changed the file"):
        Archive(path).open_settings(PASSPHRASE)


@pytest.mark.parametrize("length", [0, 100, -30])
def test_a_file_that_is_cut_or_something_else_is_refused_in_one_line(tmp_path: Path, length: int) -> None:
    path = write(tmp_path / "b.zip")
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(LauncherError, match=r"no whole backup of Muster \(.*\)\. Take another copy"):
        Archive(path)


def test_a_backup_that_fails_leaves_nothing_and_replaces_nothing(tmp_path: Path) -> None:
    path = tmp_path / "b.zip"
    with pytest.raises(LauncherError, match="No space left on device"), write_archive(path):
        raise OSError(28, "No space left on device")
    assert not list(tmp_path.iterdir())
    path.write_text("kept")
    with pytest.raises(LauncherError, match="File exists"):
        write(path)
    assert path.read_text() == "kept"


def test_a_newer_format_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "b.zip")
    rewrite(path, "manifest.json", lambda content: content.replace(b"muster-backup/1", b"muster-backup/9"))
    with pytest.raises(LauncherError, match="'muster-backup/9'; this release reads muster-backup/1"):
        Archive(path)


def test_the_migrations_of_a_newer_release_are_unknown_and_those_of_libraries_are_not_ours() -> None:
    known = ["auth.9999_later", "controlplane.0001_initial", "governance.0003_audit_chain"]
    assert find_unknown_migrations([*known, "nodes.9999_later"]) == ["nodes.9999_later"]


def test_a_password_is_not_on_the_command_line_of_pg_dump() -> None:
    address, environment = split_password("postgresql://ada:p%40ss@db:5433/muster?sslmode=require")
    assert (address, environment["PGPASSWORD"]) == ("postgresql://ada@db:5433/muster?sslmode=require", "p@ss")
    address, environment = split_password("postgresql://ada@/muster?host=/run/pg&password=p")
    assert ("password" in address, environment["PGPASSWORD"]) == (False, "p")


@pytest.mark.parametrize(("server", "is_kept"), [(16, False), (17, True)])
def test_a_setting_that_an_older_server_does_not_know_is_left_out_of_the_script(server: int, *, is_kept: bool) -> None:
    script = (
        b"SET lock_timeout = 0;\nSET transaction_timeout = 0;\n"
        + b"COPY t FROM stdin;\n1\tSET transaction_timeout = 0;\n" * 400
    )
    target = BytesIO()
    pump(BytesIO(script), target, b"first;\n", server)
    wanted = script if is_kept else script.replace(b"SET transaction_timeout = 0;\nCOPY", b"COPY", 1)
    assert target.getvalue() == b"first;\n" + wanted


def test_programs_of_postgresql_that_are_too_old_are_asked_for() -> None:
    with pytest.raises(LauncherError, match="postgresql-client-99"):
        find_tools(99)


def test_a_new_passphrase_is_long(tmp_path: Path) -> None:
    file = tmp_path / "passphrase"
    file.write_text("short\n")
    assert ask_passphrase(file, is_new=False) == "short"
    with pytest.raises(LauncherError, match="at least 12 characters"):
        ask_passphrase(file, is_new=True)
