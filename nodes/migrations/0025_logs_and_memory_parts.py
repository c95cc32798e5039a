import django.db.models.deletion
from django.db import migrations, models

_WEIGHTS = "Of the memory in use, what models' weights take; empty = not known"
_KV = "Of the memory in use, what their KV caches take"


class Migration(migrations.Migration):
    dependencies = [("nodes", "0024_gpu_figures")]

    operations = [
        *(
            migrations.AddField(model, name, models.FloatField(help_text=text, null=True))
            for model in ("gpusample", "gpuminute", "gputenminutes")
            for name, text in (("weights_mb", _WEIGHTS), ("kv_mb", _KV))
        ),
        migrations.CreateModel(
            name="NodeLog",
            fields=[
                (
                    "node",
                    models.OneToOneField(
                        on_delete=django.db.models.deletion.CASCADE,
                        primary_key=True,
                        related_name="log",
                        serialize=False,
                        to="nodes.node",
                    ),
                ),
                ("query_id", models.UUIDField(help_text="Names the question; an answer to an older one is dropped")),
                ("asked_at", models.DateTimeField()),
                (
                    "told_at",
                    models.DateTimeField(blank=True, help_text="When the node, or the gateway for it, answered", null=True),
                ),
                (
                    "is_told",
                    models.BooleanField(
                        default=False, help_text="The node tells its log; False = it cannot, or its owner forbids it"
                    ),
                ),
                ("lines", models.JSONField(default=list)),
                ("left_out", models.PositiveIntegerField(default=0)),
            ],
            options={
                "verbose_name": "log of a node",
                "verbose_name_plural": "logs of nodes",
                "default_permissions": ("view",),
            },
        ),
    ]
