"""Weights: of tenants in the queue, and of what a model's nodes are scored by."""

from __future__ import annotations

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("gateway", "0015_resumed_streams")]

    operations = [
        migrations.AddField(
            model_name="tenant",
            name="weight",
            field=models.PositiveIntegerField(
                db_default=100,
                default=100,
                help_text="Its part of the slots while requests wait; 100 = as much as other tenants",
            ),
        ),
        migrations.AddField(
            model_name="model",
            name="score_weights",
            field=models.JSONField(
                blank=True, db_default={}, default=dict, help_text="Weights of its nodes' scores that differ from the settings"
            ),
        ),
    ]
