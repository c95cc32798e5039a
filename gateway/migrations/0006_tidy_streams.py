"""Models whose chat streams are put right for strict clients."""

from __future__ import annotations

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("gateway", "0005_refused_requests")]

    operations = [
        migrations.AddField(
            model_name="model",
            name="tidy",
            field=models.BooleanField(
                db_default=False, default=False, help_text="Put chunks of its chat streams right for strict clients"
            ),
        ),
    ]
