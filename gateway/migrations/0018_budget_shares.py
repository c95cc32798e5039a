"""What gateways hold of budgets while PostgreSQL deals them out."""

from __future__ import annotations

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("gateway", "0017_usage_indexes"),
    ]

    operations = [
        migrations.CreateModel(
            name="BudgetShares",
            fields=[
                ("name", models.CharField(max_length=400, primary_key=True, serialize=False)),
                ("state", models.JSONField()),
            ],
            options={
                "verbose_name_plural": "budget shares",
            },
        ),
    ]
