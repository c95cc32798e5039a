"""Sums of cached tokens and of nodes' time, and the index of requests that were not served.

The table of requests may hold millions of rows and is written while this runs, so the index is built partition by partition
without locking any of them. That cannot be one transaction: every step may be taken again after an interruption.
"""

from __future__ import annotations

from django.db import migrations, models

TABLE = "gateway_requestrecord"
INDEX = f"{TABLE}_unserved"
STATES = ("cancelled", "failed", "interrupted", "rejected")
WHAT = f"(created_at) WHERE state IN ({', '.join(repr(state) for state in STATES)})"
SUMS = ("gateway_requestminute", "gateway_requesttenminutes", "gateway_requesthour", "gateway_requestday")
COLUMNS = ("cached_tokens", "node_ms")


def build_index(apps, schema_editor):
    """Build the index on each partition, then name it a part of the whole; a partition made meanwhile gets it by itself."""
    with schema_editor.connection.cursor() as cursor:
        cursor.execute(f"CREATE INDEX IF NOT EXISTS {INDEX} ON ONLY {TABLE} {WHAT}")
        cursor.execute("SELECT relid::regclass::text FROM pg_partition_tree(%s::regclass) WHERE isleaf", [TABLE])
        for (partition,) in cursor.fetchall():
            part = f"{partition}_unserved"
            cursor.execute(
                "SELECT FROM pg_inherits JOIN pg_index ON indexrelid = inhrelid "
                "WHERE inhparent = %s::regclass AND indrelid = %s::regclass",
                [INDEX, partition],
            )
            if cursor.fetchone() is not None:
                continue
            cursor.execute("SELECT indisvalid FROM pg_index WHERE indexrelid = to_regclass(%s)", [part])
            if cursor.fetchone() == (False,):  # it was cut off half-way
                cursor.execute(f"DROP INDEX {part}")
            cursor.execute(f"CREATE INDEX CONCURRENTLY IF NOT EXISTS {part} ON {partition} {WHAT}")
            cursor.execute(f"ALTER INDEX {INDEX} ATTACH PARTITION {part}")


class Migration(migrations.Migration):
    atomic = False

    dependencies = [
        ("gateway", "0020_rollups"),
    ]

    operations = [
        migrations.SeparateDatabaseAndState(
            state_operations=[
                *(
                    migrations.AddField(
                        model_name=table.removeprefix("gateway_"),
                        name=column,
                        field=models.BigIntegerField(db_default=0, default=0),
                    )
                    for table in SUMS
                    for column in COLUMNS
                ),
                migrations.AddIndex(
                    model_name="requestrecord",
                    index=models.Index(
                        fields=["created_at"],
                        condition=models.Q(("state__in", list(STATES))),
                        name="gateway_requestrecord_unserved",
                    ),
                ),
            ],
            database_operations=[
                migrations.RunSQL(
                    sql=[
                        f"ALTER TABLE {table} ADD COLUMN IF NOT EXISTS {column} bigint NOT NULL DEFAULT 0"
                        for table in SUMS
                        for column in COLUMNS
                    ],
                    reverse_sql=[f"ALTER TABLE {table} DROP COLUMN {column}" for table in SUMS for column in COLUMNS],
                ),
                migrations.RunPython(build_index, migrations.RunPython.noop),
                migrations.RunSQL(sql=migrations.RunSQL.noop, reverse_sql=f"DROP INDEX {INDEX}"),
            ],
        ),
    ]
