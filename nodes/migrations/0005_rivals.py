from django.contrib.postgres.fields import ArrayField
from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("nodes", "0004_governance"),
    ]

    operations = [
        migrations.AddField(
            model_name="node",
            name="former_instances",
            field=ArrayField(base_field=models.CharField(max_length=64), blank=True, db_default=[], default=list, size=None),
        ),
        migrations.AddField(
            model_name="node",
            name="installation",
            field=models.CharField(blank=True, db_default="", default="", max_length=64),
        ),
        migrations.AddField(
            model_name="node",
            name="rival_address",
            field=models.CharField(blank=True, db_default="", default="", max_length=64),
        ),
        migrations.AddField(
            model_name="node",
            name="rival_seen_at",
            field=models.DateTimeField(blank=True, null=True),
        ),
    ]
