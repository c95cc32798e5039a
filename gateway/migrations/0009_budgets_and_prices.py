"""What keys and tenants may use over all gateways, and what the tokens of models cost."""

from __future__ import annotations

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("gateway", "0008_help_texts"),
    ]

    operations = [
        migrations.AddField(
            model_name="apikey",
            name="budgets",
            field=models.JSONField(
                blank=True, db_default=[], default=list, help_text="What it may use: [{kind, amount, is_hard}]"
            ),
        ),
        migrations.AddField(
            model_name="model",
            name="cached_price",
            field=models.DecimalField(
                db_default=0,
                decimal_places=6,
                default=0,
                help_text="Of a million prompt tokens that the node had cached",
                max_digits=14,
            ),
        ),
        migrations.AddField(
            model_name="model",
            name="input_price",
            field=models.DecimalField(
                db_default=0,
                decimal_places=6,
                default=0,
                help_text="Of a million prompt tokens, in MUSTER_CURRENCY",
                max_digits=14,
            ),
        ),
        migrations.AddField(
            model_name="model",
            name="output_price",
            field=models.DecimalField(
                db_default=0, decimal_places=6, default=0, help_text="Of a million generated tokens", max_digits=14
            ),
        ),
        migrations.AddField(
            model_name="tenant",
            name="budgets",
            field=models.JSONField(
                blank=True,
                db_default=[],
                default=list,
                help_text="What all its keys may use together: [{kind, amount, is_hard}]",
            ),
        ),
    ]
