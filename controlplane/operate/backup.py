"""``muster backup`` and ``muster restore``: the whole of an installation into one file, and back into an empty database."""

from __future__ import annotations

import getpass
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, LiteralString

import psycopg
from psycopg import sql

from controlplane.launcher.console import LauncherError, say
from controlplane.launcher.files import replace_file
from controlplane.launcher.postgres import explain_old_server
from controlplane.operate.archive import Archive, Kept, Manifest, open_dump_writer, write_archive, write_rest
from controlplane.operate.installation import SECRETS, Installation, Kind, enter, hold_database, read_secrets
from controlplane.operate.postgres_tools import dump, find_tools, restore
from core.limits import limits
from wire import COMMAND, RELEASE, clock
from wire.limits import MIB

Database = psycopg.Connection[tuple[Any, ...]]  # Any: columns of each query
RESTORED = "backup.restore"
_FILES = ("credentials.json", "node/identity.key")
"""Of a folder of ``up``, beside the secrets: what the first start made, and by what nodes know the local one."""
_NOT_KEPT = {"MUSTER_ADMIN_PAGES", "MUSTER_RUN_ID", "MUSTER_LAUNCHER_BEGAN_AT"}
_TABLES = """
SELECT relname, pg_table_size(oid) FROM pg_class WHERE relkind = 'r' AND relnamespace = 'public'::regnamespace ORDER BY relname
"""
_DROP = """
DO $$ DECLARE what text; BEGIN FOREACH what IN ARRAY ARRAY(
  (SELECT format('DROP %s IF EXISTS %s CASCADE', kinds.word, oid::regclass)
  FROM pg_class JOIN (VALUES (1, 'p', 'TABLE'), (2, 'r', 'TABLE'), (3, 'v', 'VIEW'), (4, 'S', 'SEQUENCE'))
  AS kinds (place, kind, word) ON relkind = kind::"char" WHERE relnamespace = 'public'::regnamespace ORDER BY place)
  UNION ALL SELECT format('DROP ROUTINE IF EXISTS %s CASCADE', oid::regprocedure) FROM pg_proc
  WHERE pronamespace = 'public'::regnamespace
    AND NOT EXISTS (SELECT FROM pg_depend WHERE classid = 'pg_proc'::regclass AND objid = pg_proc.oid AND deptype = 'e')
) LOOP EXECUTE what; END LOOP; END $$;
"""
"""All names are collected first: what a table takes with it, such as its sequence, has none any more."""
_SESSIONS = """
SELECT coalesce(nullif(application_name, ''), 'a program') || coalesce(' at ' || host(client_addr), '') FROM pg_stat_activity
WHERE datname = current_database() AND pid <> pg_backend_pid() AND backend_type = 'client backend'
"""


@dataclass(slots=True)
class Progress:
    """Percent and time left on standard error, if that is a terminal; otherwise a line for each quarter."""

    what: str
    total: int
    done: int = 0
    began_s: float = field(default_factory=clock.monotonic)
    _said_s: float = 0.0
    _quarter: int = 0

    def add(self, count: int) -> None:
        self.done += count
        now, share = clock.monotonic(), min(1.0, self.done / max(1, self.total))
        if sys.stderr.isatty():
            if now - self._said_s >= limits().console.progress_s or share == 1.0:
                self._said_s = now
                left = f"{(now - self.began_s) * (1 - share) / share:.0f} s left" if share else "…"
                sys.stderr.write(f"\r\033[K{self.what} {share:4.0%}, {left}")
                sys.stderr.flush()
        elif int(share * 4) > self._quarter:
            self._quarter = int(share * 4)
            say(f"{self.what} {share:.0%} after {now - self.began_s:.1f} s")

    def end(self) -> None:
        if sys.stderr.isatty():
            sys.stderr.write("\r\033[K")


# Back up


def run_backup(installation: Installation, path: Path, passphrase: str) -> int:
    """Write the backup. Raises LauncherError, SettingError; there is no file then."""
    if installation.kind is Kind.NONE:
        raise LauncherError(f"there is no installation in {installation.data}: name its directory with --data DIR")
    if path.exists():
        raise LauncherError(f"{path} exists: choose another file, a backup replaces none")
    if not path.parent.is_dir():
        raise LauncherError(f"the directory {path.parent} does not exist")
    began_s = clock.monotonic()
    with hold_database(installation) as url:
        manifest = _write(path, url, read_kept(installation), passphrase)
        size = path.stat().st_size
        enter(installation, database_url=url)
        _note_backup(path, manifest)
    rows, seconds = sum(manifest.tables.values()), clock.monotonic() - began_s
    say(f"Wrote {path}: {rows:,} rows of {len(manifest.tables)} tables, {_print_size(size)}, in {seconds:.1f} s")
    say("Keep the passphrase elsewhere: nobody can open the keys in this file without it.")
    return 0


def read_kept(installation: Installation) -> Kept:
    """Return the keys and settings of an installation. Raises LauncherError."""
    given = {name: text for name, text in os.environ.items() if name.startswith("MUSTER_") and name not in _NOT_KEPT}
    variables = given | read_secrets(installation.variables)
    if not variables.get("MUSTER_SECRET_KEY"):
        raise LauncherError("there is no MUSTER_SECRET_KEY here, without which no other installation can use the database")
    files = {}
    for name in _FILES if installation.is_in_folder else ():
        path = installation.data / name
        try:
            if path.exists():
                files[name] = path.read_text(encoding="latin-1")
        except OSError as error:
            raise LauncherError(f"cannot read {path}: {error.strerror}. Do this as the user who runs it") from None
    return Kept(variables=variables, files=files)


def _write(path: Path, url: str, kept: Kept, passphrase: str) -> Manifest:
    with connect(url) as database:
        # The dump sees this very transaction: rows that are counted here are the rows in the file.
        database.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        server = check_server(database)
        sizes = dict(database.execute(_TABLES).fetchall())
        migrations = read_migrations(database)
        if not migrations:
            raise LauncherError("the database holds no installation of Muster")
        _require_space(path.parent, sum(sizes.values()))
        tools = find_tools(server)
        (snapshot,) = _one(database, "SELECT pg_export_snapshot()")
        audit = database.execute(
            "SELECT seq, encode(hash, 'hex') FROM governance_auditentry ORDER BY seq DESC LIMIT 1"
        ).fetchone()
        tables = {name: _count(database, name) for name in sizes}
        progress, before = Progress("Backing up", sum(sizes.values())), [0]

        def on_table(name: str) -> None:
            # A table that begins is behind the one before it.
            progress.add(before[0])
            before[0] = sizes.get(name, 0)

        with write_archive(path) as archive:
            with open_dump_writer(archive) as writer:
                dump(tools, url, snapshot=snapshot, write=writer.write, on_table=on_table)
            progress.end()
            manifest = Manifest(
                made_at=clock.now().isoformat(timespec="seconds"), release=RELEASE, server=server, tool=tools.major,
                migrations=migrations, tables=tables, table_bytes=sum(sizes.values()), dump_bytes=writer.count,
                dump_sha256=writer.sha256, audit_entries=audit[0] if audit else 0, audit_hash=audit[1] if audit else "",
            )  # fmt: skip
            write_rest(archive, manifest, kept, passphrase)
    return manifest


def _require_space(folder: Path, table_bytes: int) -> None:
    free, wanted = shutil.disk_usage(folder).free, table_bytes // 2 + limits().console.backup_spare_bytes
    if free < wanted:
        raise LauncherError(
            f"{folder} has {_print_size(free)} free, and a backup of {_print_size(table_bytes)} of rows may need "
            f"{_print_size(wanted)}: free some space or choose another disk"
        )


def _note_backup(path: Path, manifest: Manifest) -> None:
    from django.db import DatabaseError

    from governance.audit import BACKUP_CREATED

    try:
        _note(BACKUP_CREATED, path, manifest)
    except DatabaseError as error:
        say(
            f"The database takes no note of this backup, so the page System does not know of it: {' '.join(str(error).split())}"
        )


def _note(action: str, path: Path, manifest: Manifest) -> None:
    from django.db import transaction

    from controlplane.commands import ACTOR
    from governance.audit import record_event

    detail = {"made_at": manifest.made_at, "release": manifest.release, "entries": manifest.audit_entries}
    with transaction.atomic():
        record_event(actor=ACTOR, action=action, target=path.name, detail={**detail, "sha256": manifest.dump_sha256})


# Restore


@dataclass(frozen=True, slots=True)
class RestoreOptions:
    """``replace``: the name of a database whose rows may go; ``settings``: only write the settings of the backup there."""

    path: Path
    replace: bool = False
    confirm: str = ""
    settings: Path | None = None


def run_restore(installation: Installation, options: RestoreOptions, passphrase: Callable[[], str]) -> int:
    """Restore a backup; the database stays as it was until all of the file has been checked. Raises LauncherError."""
    archive = Archive(options.path)
    manifest = archive.manifest
    _require_known(manifest)
    kept = archive.open_settings(passphrase())
    if options.settings is not None:
        return _write_settings(options.settings, kept)
    if installation.kind is Kind.UP:
        raise LauncherError(f"Muster runs on {installation.data}: stop it first with {COMMAND} down")
    if installation.kind is Kind.SERVICES:
        _require_same_keys(kept, installation)
    progress = Progress("Checking", manifest.dump_bytes)
    archive.check_dump(progress.add)
    progress.end()
    with hold_database(installation) as url:
        with connect(url) as database:
            server = check_server(database)
            first = _require_room(database, options)
        progress = Progress("Restoring", manifest.dump_bytes)
        tools = find_tools(max(manifest.tool, server))
        restore(tools, url, server=server, pieces=archive.read_dump(progress.add), first=first)
        progress.end()
        with connect(url, autocommit=True) as database:
            _compare_rows(database, manifest)
            database.execute("ANALYZE")
        if installation.is_in_folder:
            _write_files(installation.data, kept)
        return _bring_up_to_date(installation, url, kept, archive)


def _require_known(manifest: Manifest) -> None:
    unknown = find_unknown_migrations(manifest.migrations)
    if unknown:
        raise LauncherError(
            f"the backup is of Muster {manifest.release} and its database is newer than this program, which is {RELEASE} "
            f"({unknown[0]} is unknown here): restore it with {manifest.release} or newer"
        )


def _require_same_keys(kept: Kept, installation: Installation) -> None:
    for name in ("MUSTER_SECRET_KEY", "MUSTER_LOG_KEY"):
        if kept.variables.get(name, "") != installation.variables.get(name, ""):
            raise LauncherError(
                f"{name} is not the one of the backup, and what it protects in the database could not be used: write the "
                f"settings of the backup with {COMMAND} restore FILE --settings OUT, and give the services that one"
            )


def _require_room(database: Database, options: RestoreOptions) -> str:
    """Return the statements that make room. Raises LauncherError when something is there that nobody gave up."""
    others = [str(row[0]) for row in database.execute(_SESSIONS).fetchall()]
    if others:
        raise LauncherError(
            f"{len(others)} connections to this database are open ({others[0]}): stop every process of Muster first"
        )
    (name,) = _one(database, "SELECT current_database()")
    if not database.execute(_TABLES).fetchall():
        return ""
    if not options.replace:
        raise LauncherError(f"the database {name} is not empty: give an empty one, or --replace to delete what is in it")
    given = options.confirm or (input(f"Everything in the database {name} is deleted. Type its name: ") if _is_asked() else "")
    if given.strip() != name:
        raise LauncherError(f"nothing was changed: --replace wants the name of the database, --confirm {name}")
    return _DROP


def _compare_rows(database: Database, manifest: Manifest) -> None:
    audit = database.execute(
        "SELECT encode(hash, 'hex') FROM governance_auditentry WHERE seq = %s", [manifest.audit_entries]
    ).fetchone()
    if manifest.audit_entries and (audit is None or audit[0] != manifest.audit_hash):
        raise LauncherError("the audit log does not end with the entry that the backup names")
    wrong = {name: count for name in manifest.tables if (count := _count(database, name)) != manifest.tables[name]}
    if wrong:
        name, count = next(iter(wrong.items()))
        raise LauncherError(
            f"{len(wrong)} tables do not hold what the backup says ({name}: {count} rows instead of {manifest.tables[name]})"
        )


def _write_files(data: Path, kept: Kept) -> None:
    texts = {SECRETS[name]: f"{text}\n" for name, text in kept.variables.items() if name in SECRETS}
    try:
        for name, text in {**texts, **{name: text for name, text in kept.files.items() if name in _FILES}}.items():
            (data / name).parent.mkdir(mode=0o700, exist_ok=True)
            replace_file(data / name, text.encode("latin-1"))
    except OSError as error:
        raise LauncherError(
            f"cannot write {data}: {error.strerror}. The database is restored; do it again with --replace"
        ) from None


def _write_settings(path: Path, kept: Kept) -> int:
    text = "".join(f"{name}={shlex.quote(text)}\n" for name, text in sorted(kept.variables.items()))
    try:
        replace_file(path, text.encode())
    except OSError as error:
        raise LauncherError(f"cannot write {path}: {error.strerror}") from None
    say(f"Wrote {len(kept.variables)} variables to {path}; they are secrets")
    return 0


def _bring_up_to_date(installation: Installation, url: str, kept: Kept, archive: Archive) -> int:
    secrets = {name: kept.variables[name] for name in SECRETS if name in kept.variables}
    own = {**secrets, "DATABASE_URL": url}
    enter(Installation(installation.kind, installation.data, {**installation.variables, **own}))
    from django.core.management import call_command

    from controlplane.commands.audit import verify_database
    from governance import checkpoints

    call_command("migrate", interactive=False, verbosity=0)
    verdict = verify_database(checkpoints.log_keys())
    _note(RESTORED, archive.path, archive.manifest)
    made = datetime.fromisoformat(archive.manifest.made_at)
    say(f"Restored {sum(archive.manifest.tables.values()):,} rows of {made.astimezone(UTC):%Y-%m-%d %H:%M} UTC "
        f"(Muster {archive.manifest.release}) and brought them to {RELEASE}")  # fmt: skip
    for line in verdict.lines():
        say(f"Audit log: {line}")
    entries = archive.manifest.audit_entries
    say(f"Nodes that saw more of the audit log than its {entries:,} entries raise an alarm, and keep a newer policy.")
    say("Keys that were revoked since are valid again: revoke them. docs/upgrade.md says what nodes answer and what to do.")
    say(f"Start it: {COMMAND} up" if installation.is_in_folder else "Start the services, the control plane first.")
    return int(verdict.status)


# The database


@contextmanager
def connect(url: str, *, autocommit: bool = False) -> Iterator[Database]:
    """Yield a connection. Raises LauncherError when there is none."""
    longest_s = int(limits().console.operate_answer_s)
    try:
        database = psycopg.connect(url, connect_timeout=longest_s, autocommit=autocommit, application_name="muster")
    except psycopg.Error as error:
        raise LauncherError(f"the database does not answer: {' '.join(str(error).split())}") from None
    with database:
        yield database


def check_server(database: Database) -> int:
    """Return the major version of the server. Raises LauncherError when it is too old."""
    major = database.info.server_version // 10_000
    if why := explain_old_server(major):
        raise LauncherError(why)
    return major


def read_migrations(database: Database) -> list[str]:
    """Return the migrations that were applied, as ``app.name``; none where there is no installation."""
    if not database.execute("SELECT to_regclass('public.django_migrations') IS NOT NULL").fetchall()[0][0]:
        return []
    return [str(row[0]) for row in database.execute("SELECT app || '.' || name FROM django_migrations ORDER BY id").fetchall()]


def find_unknown_migrations(applied: list[str]) -> list[str]:
    """Return those of our own apps that this release does not have: a newer one made them."""
    root = Path(__file__).resolve().parents[2]
    # The people of core have the label of what they once belonged to.
    apps = {"controlplane": "core", "core": "core", "gateway": "gateway", "governance": "governance", "nodes": "nodes"}
    known = {app: {path.stem for path in (root / folder / "migrations").glob("0*.py*")} for app, folder in apps.items()}
    split = [(name, *name.split(".", 1)) for name in applied]
    return [name for name, app, migration in split if app in known and migration not in known[app]]


def _count(database: Database, table: str) -> int:
    (count,) = _one(database, sql.SQL("SELECT count(*) FROM {}").format(sql.Identifier("public", table)))
    assert isinstance(count, int)
    return count


def _one(database: Database, query: LiteralString | sql.Composed) -> tuple[Any, ...]:  # Any: columns of the query
    row = database.execute(query).fetchone()
    assert row is not None
    return row


# The passphrase


def ask_passphrase(file: Path | None, *, is_new: bool) -> str:
    """Return the passphrase of a file, or ask for it: twice for a new one. Raises LauncherError."""
    if file is not None:
        try:
            text = file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise LauncherError(f"cannot read {file}: {error}") from None
    elif not _is_asked():
        raise LauncherError("there is no terminal to ask for the passphrase: name a file that holds it with --passphrase-file")
    else:
        text = getpass.getpass("Passphrase: ")
        if is_new and getpass.getpass("The same again: ") != text:
            raise LauncherError("these were two different passphrases; nothing was written")
    least = limits().console.backup_passphrase_chars
    if is_new and len(text) < least:
        raise LauncherError(f"a passphrase has at least {least} characters")
    return text


def _is_asked() -> bool:
    return sys.stdin.isatty()


def _print_size(count: int) -> str:
    return f"{count / MIB:,.1f} MiB" if count < 1024 * MIB else f"{count / MIB / 1024:,.1f} GiB"
