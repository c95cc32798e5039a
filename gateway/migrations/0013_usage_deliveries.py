"""How far each webhook that takes usage got its events."""

from __future__ import annotations

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("gateway", "0012_lost_attempts"),
    ]

    operations = [
        migrations.CreateModel(
            name="UsageDelivery",
            fields=[
                ("webhook_id", models.BigIntegerField(primary_key=True, serialize=False)),
                (
                    "written_in",
                    models.DecimalField(decimal_places=0, default=0, help_text="Transaction of the last event", max_digits=20),
                ),
                ("seq", models.BigIntegerField(default=0, help_text="Number of the last event")),
                ("attempt", models.PositiveIntegerField(default=0, help_text="Tries since the last batch that got through")),
                ("due_at", models.DateTimeField()),
                ("last_error", models.CharField(blank=True, default="", max_length=200)),
            ],
            options={
                "verbose_name_plural": "usage deliveries",
            },
        ),
    ]
