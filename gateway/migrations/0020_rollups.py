"""Sums of requests for charts, and what they are made from beside the usage: who answered, how, and how soon."""

from __future__ import annotations

import django.contrib.postgres.fields
from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("gateway", "0019_cached_tokens"),
    ]

    operations = [
        migrations.CreateModel(
            name="RequestDay",
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
        migrations.CreateModel(
            name="RequestMinute",
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
        migrations.CreateModel(
            name="RequestTenMinutes",
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
        migrations.AddField(
            model_name="usageevent",
            name="latency_ms",
            field=models.PositiveIntegerField(null=True),
        ),
        migrations.AddField(
            model_name="usageevent",
            name="node_id",
            field=models.UUIDField(null=True),
        ),
        migrations.AddField(
            model_name="usageevent",
            name="queue_ms",
            field=models.PositiveIntegerField(null=True),
        ),
        migrations.AddField(
            model_name="usageevent",
            name="status_code",
            field=models.PositiveSmallIntegerField(null=True),
        ),
        migrations.AddField(
            model_name="usageevent",
            name="ttft_ms",
            field=models.PositiveIntegerField(help_text="Until the first byte of a stream", null=True),
        ),
        # Rows of the time that still runs are written again and again: there is room for the next version beside the last one.
        migrations.RunSQL(
            sql="""
            ALTER TABLE gateway_requestminute SET (fillfactor = 60);
            ALTER TABLE gateway_requesttenminutes SET (fillfactor = 60);
            ALTER TABLE gateway_requestday SET (fillfactor = 60);
            """,
            reverse_sql=migrations.RunSQL.noop,
        ),
    ]
