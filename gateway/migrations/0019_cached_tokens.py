"""How much of a prompt the node had cached, which has a price of its own."""

from __future__ import annotations

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("gateway", "0018_budget_shares"),
    ]

    operations = [
        migrations.AddField(
            model_name="requestrecord",
            name="cached_tokens",
            field=models.PositiveIntegerField(blank=True, help_text="Of the prompt, what the node had cached", null=True),
        ),
        migrations.AddField(
            model_name="usageevent",
            name="cached_tokens",
            field=models.BigIntegerField(db_default=0, default=0, help_text="Of the prompt, what the node had cached"),
        ),
    ]
