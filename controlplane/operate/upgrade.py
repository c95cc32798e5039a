"""``muster upgrade --check`` and ``muster version``: what an upgrade would do to the database, and which releases run."""

from __future__ import annotations

import importlib.util
import platform
from dataclasses import dataclass
from datetime import timedelta

from controlplane.launcher.console import LauncherError, say
from controlplane.operate.backup import connect, find_unknown_migrations, read_migrations
from controlplane.operate.installation import Installation, Kind, enter
from wire import COMMAND, RELEASE, clock

_ROWS_PER_S = 200_000
"""What PostgreSQL rewrites or checks on a small machine."""
_FROM_ROWS = ("AddIndex", "AddConstraint", "AlterField", "RunPython", "RunSQL")
"""Operations whose duration grows with the rows of their table; the others change the catalogue alone."""
_TAKES_AWAY = ("DeleteModel", "RemoveField", "RenameField", "RenameModel")


@dataclass(frozen=True, slots=True)
class Pending:
    """A migration that was not applied yet. ``takes_away``: what the release before could miss."""

    name: str
    rows: int
    takes_away: tuple[str, ...]

    @property
    def seconds(self) -> float:
        return self.rows / _ROWS_PER_S


def list_pending() -> list[Pending]:
    """Return the migrations of this release that the database lacks, in their order. Django must be set up."""
    from django.db import connection
    from django.db.migrations.executor import MigrationExecutor

    executor = MigrationExecutor(connection)
    found = []
    for migration, _backwards in executor.migration_plan(executor.loader.graph.leaf_nodes()):
        rows, gone = 0, []
        for operation in migration.operations:
            kind = type(operation).__name__
            if kind in _FROM_ROWS:
                # As Django names them unless a model says otherwise, which none of ours does.
                rows += _estimate_rows(f"{migration.app_label}_{getattr(operation, 'model_name', '').lower()}")
            if kind in _TAKES_AWAY:
                gone.append(operation.describe())
        found.append(Pending(f"{migration.app_label}.{migration.name}", rows, tuple(gone)))
    return found


def _estimate_rows(table: str) -> int:
    from django.db import connection

    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT coalesce(sum(greatest(reltuples, 0)), 0)::bigint FROM pg_class WHERE oid IN "
            "(SELECT relid FROM pg_partition_tree(to_regclass(%s)) UNION SELECT to_regclass(%s))",
            [table, table],
        )
        return int(cursor.fetchone()[0])


def run_check(installation: Installation) -> int:
    """Say what an upgrade of the database to this release would do. Returns 1 when it cannot be done as things stand."""
    url = installation.variables.get("DATABASE_URL")
    if not url:
        raise LauncherError(f"nothing runs on {installation.data}: `{COMMAND} up` migrates at its start, back up first")
    enter(installation)
    with connect(url) as database:
        applied = read_migrations(database)
    unknown = find_unknown_migrations(applied)
    if unknown:
        say(f"The database is of a newer release: {unknown[0]} is unknown to {RELEASE}. Run that release, or restore a backup")
        return 1
    pending = list_pending()
    if not pending:
        say(f"The schema is that of {RELEASE}: nothing to migrate")
    for one in pending:
        say(f"{one.name:<50}{one.rows:>12,} rows, about {max(one.seconds, 0.1):.1f} s")
        for text in one.takes_away:
            say(f"  {text}")
    is_alike = not any(one.takes_away for one in pending)
    if pending:
        say(f"{len(pending)} migrations, about {max(sum(one.seconds for one in pending), 0.1):.0f} s in all")
        said = "can go on meanwhile and after it" if is_alike else "has to stop first: it misses what stands above"
        say(f"The release that runs now {said}")
    for text, advice in judge_versions():
        say(f"{text}. {advice}")
    say(describe_last_backup())
    return 0


def describe_last_backup() -> str:
    from governance.audit import BACKUP_CREATED, find_last_action_at

    made_at = find_last_action_at(BACKUP_CREATED)
    if made_at is None:
        return f"There is no backup yet: {COMMAND} backup FILE"
    is_old = clock.now() - made_at > timedelta(days=1)
    return f"The last backup is of {made_at:%Y-%m-%d %H:%M} UTC" + (f". Make one now: {COMMAND} backup FILE" if is_old else "")


def judge_versions() -> list[tuple[str, str]]:
    """Return what is to be said of nodes and gateways of other releases, and what to do."""
    from gateway.services.requests import read_gateways
    from nodes.pages import count_runner_versions

    said = [
        (f"The gateway {one.name} runs {one.release or 'a release before 0.2'}", f"Restart it with {RELEASE}")
        for one in read_gateways()
        if one.release != RELEASE
    ]
    for version, count, order in count_runner_versions():
        nodes = f"{count} nodes run" if count > 1 else "1 node runs"
        if order > 0:
            said.append((f"{nodes} {version}, which is newer than this server", "Upgrade the server, or use its release there"))
        elif order < 0:
            said.append((f"{nodes} {version}, which is older", "They work, and lack what is new: update them at leisure"))
    return said


def run_version(installation: Installation) -> int:
    """Print the releases of this program and of what can be seen of an installation."""
    say(f"muster {RELEASE}")
    say(f"python {platform.python_version()} on {platform.system()} {platform.machine()}")
    if installation.kind not in {Kind.UP, Kind.SERVICES} or importlib.util.find_spec("django") is None:
        return 0
    from django.db import DatabaseError

    enter(installation)
    try:
        with connect(str(installation.variables["DATABASE_URL"])) as database:
            say(f"postgresql {database.info.server_version // 10_000}")
        from nodes.pages import count_runner_versions

        for version, count, _order in count_runner_versions():
            say(f"node {version or 'not told'} ({count})")
    except (LauncherError, DatabaseError) as error:
        say(f"not seen: {' '.join(str(error).split())}")
    return 0
