from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("governance", "0005_witness_note"),
    ]

    operations = [
        migrations.AlterField(
            model_name="approverkey",
            name="public_key",
            field=models.CharField(help_text="SPKI DER in base64url", max_length=800),
        ),
    ]
