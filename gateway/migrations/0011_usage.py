"""What requests reserved of budgets, and an event of usage for each that has ended.

Webhooks get events in the order of ``written_in`` and ``seq``: a transaction id is the database's own, and a snapshot says which
transactions are still under way, so that none is passed over. These columns are the database's alone; no model has them.
"""

from __future__ import annotations

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("gateway", "0010_requirements"),
    ]

    operations = [
        migrations.AddField(
            model_name="requestrecord",
            name="reserved_micros",
            field=models.BigIntegerField(blank=True, help_text="The same in millionths of the currency", null=True),
        ),
        migrations.AddField(
            model_name="requestrecord",
            name="reserved_tokens",
            field=models.BigIntegerField(blank=True, help_text="What it might use of the budgets of its caller", null=True),
        ),
        migrations.CreateModel(
            name="UsageEvent",
            fields=[
                ("event_id", models.UUIDField(editable=False, primary_key=True, serialize=False)),
                ("created_at", models.DateTimeField()),
                ("finished_at", models.DateTimeField()),
                ("gateway_id", models.UUIDField()),
                ("tenant", models.CharField(max_length=80)),
                ("key_id", models.UUIDField()),
                ("key_name", models.CharField(max_length=80)),
                ("model", models.CharField(max_length=200)),
                ("state", models.CharField(max_length=12)),
                ("prompt_tokens", models.BigIntegerField(default=0)),
                ("completion_tokens", models.BigIntegerField(default=0)),
                ("tokens", models.BigIntegerField(default=0, help_text="What budgets count: both, or what was reserved")),
                ("cost_micros", models.BigIntegerField(default=0, help_text="Millionths of the currency")),
                ("is_estimated", models.BooleanField(default=False, help_text="Whether the engine did not count")),
            ],
            options={
                "ordering": ["-created_at"],
                "indexes": [models.Index(fields=["tenant", "created_at"], name="gateway_usageevent_of_tenant")],
            },
        ),
        migrations.RunSQL(
            sql="""
            ALTER TABLE gateway_usageevent ADD COLUMN seq bigint GENERATED ALWAYS AS IDENTITY,
                ADD COLUMN written_in xid8 NOT NULL DEFAULT pg_current_xact_id();
            CREATE INDEX gateway_usageevent_written ON gateway_usageevent (written_in, seq);
            """,
            reverse_sql="ALTER TABLE gateway_usageevent DROP COLUMN seq, DROP COLUMN written_in",
        ),
    ]
