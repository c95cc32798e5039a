"""Up to when each person has seen what was decided without them."""

from __future__ import annotations

import django.db.models.deletion
from django.conf import settings
from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        migrations.swappable_dependency(settings.AUTH_USER_MODEL),
        ("governance", "0014_alerts"),
    ]

    operations = [
        migrations.CreateModel(
            name="SeenMark",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("seen_at", models.DateTimeField()),
                (
                    "user",
                    models.OneToOneField(
                        on_delete=django.db.models.deletion.CASCADE, related_name="seen_mark", to=settings.AUTH_USER_MODEL
                    ),
                ),
            ],
        ),
    ]
