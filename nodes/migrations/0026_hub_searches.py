import django.db.models.deletion
from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("nodes", "0025_logs_and_memory_parts")]

    operations = [
        migrations.CreateModel(
            name="HubSearch",
            fields=[
                (
                    "node",
                    models.OneToOneField(
                        on_delete=django.db.models.deletion.CASCADE,
                        primary_key=True,
                        related_name="hub_search",
                        serialize=False,
                        to="nodes.node",
                    ),
                ),
                ("query_id", models.UUIDField(help_text="Names the question; an answer to an older one is dropped")),
                ("text", models.CharField(max_length=200)),
                ("asked_at", models.DateTimeField()),
                (
                    "told_at",
                    models.DateTimeField(blank=True, help_text="When the node, or the gateway for it, answered", null=True),
                ),
                (
                    "error",
                    models.CharField(
                        blank=True, db_default="", default="", help_text="Why it found nothing out", max_length=500
                    ),
                ),
                ("found", models.JSONField(db_default=[], default=list, help_text="Repositories, as the node names them")),
            ],
            options={
                "verbose_name": "search of a hub",
                "verbose_name_plural": "searches of hubs",
                "default_permissions": ("view",),
            },
        ),
    ]
