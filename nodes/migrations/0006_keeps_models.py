from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("nodes", "0005_rivals"),
    ]

    operations = [
        migrations.AddField(
            model_name="node",
            name="keeps_models",
            field=models.BooleanField(db_default=False, default=False, help_text="Its loads take keepLoaded"),
        ),
    ]
