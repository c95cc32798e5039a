"""Sums of requests for charts, and what they are made from beside the usage: who answered, how, and how soon."""

from __future__ import annotations

from django.contrib.postgres.fields import ArrayField
from django.db import migrations, models

_DIMENSIONS = [(0, "all"), (1, "model"), (2, "node"), (3, "tenant"), (4, "key"), (5, "tenant_model")]
_COUNTS = ("served", "refused", "failed", "cancelled", "prompt_tokens", "completion_tokens", "cost_micros")
_SKETCHES = ("latency", "ttft", "token_time", "queue_time")


def _create_sums(name: str) -> migrations.CreateModel:
    return migrations.CreateModel(
        name=name,
        fields=[
            (
                "pk",
                models.CompositePrimaryKey(
                    "dimension", "at", "name", blank=True, editable=False, primary_key=True, serialize=False
                ),
            ),
            ("dimension", models.PositiveSmallIntegerField(choices=_DIMENSIONS)),
            ("at", models.DateTimeField()),
            ("name", models.CharField(blank=True, db_collation="C", max_length=300)),
            *((count, models.BigIntegerField(default=0)) for count in _COUNTS),
            *((sketch, ArrayField(base_field=models.BigIntegerField(), default=list, size=None)) for sketch in _SKETCHES),
            ("queued_most", models.PositiveIntegerField(default=0)),
            ("running_most", models.PositiveIntegerField(default=0)),
        ],
        options={"abstract": False},
    )


class Migration(migrations.Migration):
    dependencies = [
        ("gateway", "0019_cached_tokens"),
    ]

    operations = [
        *(_create_sums(name) for name in ("RequestDay", "RequestMinute", "RequestTenMinutes", "RequestHour")),
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
            ALTER TABLE gateway_requesthour SET (fillfactor = 60);
            ALTER TABLE gateway_requestday SET (fillfactor = 60);
            """,
            reverse_sql=migrations.RunSQL.noop,
        ),
    ]
