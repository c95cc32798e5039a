from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("nodes", "0021_exclusions"),
    ]

    operations = [
        migrations.CreateModel(
            name="NodeAuthority",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("certificate", models.TextField(help_text="PEM")),
                (
                    "sealed_private",
                    models.TextField(blank=True, editable=False, help_text="Encrypted; empty = it gives no more certificates"),
                ),
                ("created_at", models.DateTimeField()),
                ("issues_at", models.DateTimeField()),
                (
                    "dropped_at",
                    models.DateTimeField(blank=True, help_text="When nobody is to trust it any more", null=True),
                ),
            ],
            options={
                "ordering": ["-pk"],
            },
        ),
    ]
