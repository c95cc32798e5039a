from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("governance", "0012_webhooks_of_usage")]

    # A million events take a second; whoever writes one meanwhile waits for that.
    operations = [
        migrations.AddIndex("auditevent", models.Index(fields=["target", "id"], name="auditevent_of_target")),
        migrations.AddIndex(
            "operationrun",
            models.Index(
                condition=models.Q(("node_id__isnull", False)), fields=["node_id", "queued_at"], name="operationrun_of_node"
            ),
        ),
    ]
