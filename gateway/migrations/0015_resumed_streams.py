"""Models whose streams go on at another node when theirs dies."""

from __future__ import annotations

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("gateway", "0014_decisions")]

    operations = [
        migrations.AddField(
            model_name="model",
            name="resumes",
            field=models.BooleanField(
                db_default=False, default=False, help_text="Have another node go on with a stream whose node dies"
            ),
        ),
    ]
