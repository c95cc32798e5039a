"""Fewer indexes of usage events: each request writes one, and a record becomes final, and so an event, once.

Sums are of days, in which a block range index finds the events of all tenants. The order of webhooks keeps its own index.
"""

from __future__ import annotations

import django.contrib.postgres.indexes
from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("gateway", "0016_weights"),
    ]

    operations = [
        migrations.SeparateDatabaseAndState(
            state_operations=[
                migrations.AddField(
                    model_name="usageevent",
                    name="seq",
                    field=models.BigAutoField(default=0, primary_key=True, serialize=False),
                    preserve_default=False,
                ),
                migrations.AlterField(model_name="usageevent", name="event_id", field=models.UUIDField(editable=False)),
            ],
            database_operations=[
                migrations.RunSQL(
                    sql="ALTER TABLE gateway_usageevent DROP CONSTRAINT gateway_usageevent_pkey",
                    reverse_sql="ALTER TABLE gateway_usageevent ADD PRIMARY KEY (event_id)",
                ),
            ],
        ),
        migrations.RemoveIndex(model_name="usageevent", name="gateway_usageevent_of_tenant"),
        migrations.AddIndex(
            model_name="usageevent",
            index=django.contrib.postgres.indexes.BrinIndex(
                autosummarize=True, fields=["created_at"], name="gateway_usageevent_created"
            ),
        ),
    ]
