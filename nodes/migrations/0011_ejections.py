"""What gateways hold against a node, for pages and the API."""

from __future__ import annotations

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("nodes", "0010_reloads_settings")]

    operations = [
        migrations.AddField(
            model_name="nodepresence",
            name="ejections",
            field=models.JSONField(
                blank=True,
                db_default={},
                default=dict,
                help_text="Models for which a gateway sends it nothing new, by gateway, in hex",
            ),
        ),
    ]
