"""What engines said, and the index of ids by their ends.

The table may hold millions of rows and requests are written while this runs, so the index is built partition by partition
without locking any of them. That cannot be one transaction: every step may be taken again after an interruption.
"""

import django.db.models.functions.comparison
import django.db.models.functions.text
from django.db import migrations, models

TABLE = "gateway_requestrecord"
INDEX = f"{TABLE}_tail"
WHAT = "(right(id::text, 12)) WHERE finished_at IS NOT NULL"


def build_index(apps, schema_editor):
    """Build the index on each partition, then name it a part of the whole; a partition made meanwhile gets it by itself."""
    with schema_editor.connection.cursor() as cursor:
        cursor.execute(f"CREATE INDEX IF NOT EXISTS {INDEX} ON ONLY {TABLE} {WHAT}")
        cursor.execute("SELECT relid::regclass::text FROM pg_partition_tree(%s::regclass) WHERE isleaf", [TABLE])
        for (partition,) in cursor.fetchall():
            part = f"{partition}_tail"
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
        ("gateway", "0004_change_marks"),
    ]

    operations = [
        migrations.SeparateDatabaseAndState(
            state_operations=[
                migrations.AddField(
                    model_name="requestrecord",
                    name="engine_error",
                    field=models.CharField(
                        blank=True,
                        db_default="",
                        default="",
                        help_text="What the engine said when it failed or refused, without what it repeated of the request",
                        max_length=300,
                    ),
                ),
                migrations.AddIndex(
                    model_name="requestrecord",
                    index=models.Index(
                        django.db.models.functions.text.Right(
                            django.db.models.functions.comparison.Cast("id", models.TextField()), 12
                        ),
                        condition=models.Q(("finished_at__isnull", False)),
                        name="gateway_requestrecord_tail",
                    ),
                ),
            ],
            database_operations=[
                migrations.RunSQL(
                    sql=f"ALTER TABLE {TABLE} ADD COLUMN IF NOT EXISTS engine_error varchar(300) NOT NULL DEFAULT ''",
                    reverse_sql=f"ALTER TABLE {TABLE} DROP COLUMN engine_error",
                ),
                migrations.RunPython(build_index, migrations.RunPython.noop),
                migrations.RunSQL(sql=migrations.RunSQL.noop, reverse_sql=f"DROP INDEX {INDEX}"),
            ],
        ),
    ]
