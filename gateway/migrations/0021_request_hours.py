"""Sums of hours: a week in ten minutes, or the first of a thousand nodes of a day, are too many rows for a chart."""

from __future__ import annotations

import django.contrib.postgres.fields
from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("gateway", "0020_rollups"),
    ]

    operations = [
        migrations.CreateModel(
            name="RequestHour",
            fields=[
                (
                    "pk",
                    models.CompositePrimaryKey(
                        "dimension", "at", "name", blank=True, editable=False, primary_key=True, serialize=False
                    ),
                ),
                (
                    "dimension",
                    models.PositiveSmallIntegerField(
                        choices=[(0, "all"), (1, "model"), (2, "node"), (3, "tenant"), (4, "key"), (5, "tenant_model")]
                    ),
                ),
                ("at", models.DateTimeField()),
                ("name", models.CharField(blank=True, db_collation="C", max_length=300)),
                ("served", models.BigIntegerField(default=0)),
                ("refused", models.BigIntegerField(default=0)),
                ("failed", models.BigIntegerField(default=0)),
                ("cancelled", models.BigIntegerField(default=0)),
                ("prompt_tokens", models.BigIntegerField(default=0)),
                ("completion_tokens", models.BigIntegerField(default=0)),
                ("cost_micros", models.BigIntegerField(default=0)),
                (
                    "latency",
                    django.contrib.postgres.fields.ArrayField(base_field=models.BigIntegerField(), default=list, size=None),
                ),
                (
                    "ttft",
                    django.contrib.postgres.fields.ArrayField(base_field=models.BigIntegerField(), default=list, size=None),
                ),
                (
                    "token_time",
                    django.contrib.postgres.fields.ArrayField(base_field=models.BigIntegerField(), default=list, size=None),
                ),
                (
                    "queue_time",
                    django.contrib.postgres.fields.ArrayField(base_field=models.BigIntegerField(), default=list, size=None),
                ),
                ("queued_most", models.PositiveIntegerField(default=0)),
                ("running_most", models.PositiveIntegerField(default=0)),
            ],
            options={
                "abstract": False,
            },
        ),
        migrations.RunSQL(
            sql="""
            ALTER TABLE gateway_requesthour SET (fillfactor = 60);
            """,
            reverse_sql=migrations.RunSQL.noop,
        ),
    ]
