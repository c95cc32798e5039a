"""Questions that nodes of a model are asked now and then, to find those that make their answers up."""

from __future__ import annotations

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("gateway", "0006_tidy_streams")]

    operations = [
        migrations.AddField(
            model_name="model",
            name="canary_question",
            field=models.CharField(
                blank=True,
                db_default="",
                default="",
                help_text="What its nodes are asked now and then; empty = nothing",
                max_length=500,
            ),
        ),
        migrations.AddField(
            model_name="model",
            name="canary_answer",
            field=models.CharField(
                blank=True,
                db_default="",
                default="",
                help_text="What the answer to the canary question contains",
                max_length=200,
            ),
        ),
    ]
