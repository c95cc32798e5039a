from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("governance", "0006_longer_public_keys")]

    operations = [
        migrations.AddField(
            model_name="decision",
            name="brought_by",
            field=models.CharField(
                blank=True,
                db_default="",
                help_text="Who handed the proof in: session:<person> or token:<name>#<key id>",
                max_length=200,
            ),
        ),
    ]
