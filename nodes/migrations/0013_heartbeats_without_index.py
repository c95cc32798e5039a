"""An index on what changes with every report is written with every report, and no query of a few thousand rows needs it."""

from __future__ import annotations

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("nodes", "0012_commands_are_runs")]

    operations = [
        migrations.AlterField("nodepresence", "last_heartbeat_at", models.DateTimeField(blank=True, null=True)),
    ]
