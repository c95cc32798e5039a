from django.contrib.postgres.operations import AddIndexConcurrently
from django.db import migrations, models


class Migration(migrations.Migration):
    atomic = False
    """The audit log may be long, and whoever serves meanwhile writes to it."""

    dependencies = [("governance", "0012_webhooks_of_usage")]

    operations = [
        AddIndexConcurrently("auditevent", models.Index(fields=["target", "id"], name="auditevent_of_target")),
        AddIndexConcurrently(
            "operationrun",
            models.Index(
                condition=models.Q(("node_id__isnull", False)), fields=["node_id", "queued_at"], name="operationrun_of_node"
            ),
        ),
    ]
