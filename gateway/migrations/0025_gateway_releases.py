from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("gateway", "0024_refused_before"),
    ]

    operations = [
        migrations.AddField(
            model_name="gatewayprocess",
            name="release",
            field=models.CharField(
                blank=True, db_default="", default="", help_text="Version of Muster that it runs", max_length=40
            ),
        ),
    ]
