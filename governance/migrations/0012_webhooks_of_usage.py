"""Webhooks that get the usage of finished requests instead of notices."""

from __future__ import annotations

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("governance", "0011_help_texts"),
    ]

    operations = [
        migrations.AddField(
            model_name="webhookendpoint",
            name="takes_usage",
            field=models.BooleanField(
                db_default=False, default=False, help_text="Whether it gets the usage of finished requests instead of notices"
            ),
        ),
    ]
