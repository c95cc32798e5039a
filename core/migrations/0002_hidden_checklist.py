"""When a person put away the first steps on Overview."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("controlplane", "0001_initial"),
    ]

    operations = [
        migrations.AddField(
            model_name="user",
            name="checklist_hidden_at",
            field=models.DateTimeField(
                blank=True, editable=False, help_text="When the person put away the first steps on Overview", null=True
            ),
        ),
    ]
