"""A run carries its way to its node: what was a row of its own in ``nodes_nodecommand``.

That table stays, for a previous release that serves on: it sends what it has put there and ends the runs. What it leaves
behind has no token here, and is sent anew by the first worker of this release that looks at it.
"""

from __future__ import annotations

from django.db import migrations, models

COPY = """
UPDATE governance_operationrun r
SET node_id = c.node_id, token = c.token, token_expires_at = c.token_expires_at, sent_at = c.sent_at,
    contact_at = c.updated_at, gateway_id = c.gateway_id, task_id = c.task_id
FROM nodes_nodecommand c WHERE c.run_id = r.id;
"""


class Migration(migrations.Migration):
    dependencies = [("governance", "0009_void_approvals"), ("nodes", "0011_ejections")]

    operations = [
        migrations.AddField(
            "operationrun",
            "node_id",
            models.UUIDField(blank=True, editable=False, help_text="The node that carries it out, if one does", null=True),
        ),
        migrations.AddField(
            "operationrun",
            "token",
            models.TextField(blank=True, db_default="", editable=False, help_text="What the node verifies; until it has ended"),
        ),
        migrations.AddField("operationrun", "token_expires_at", models.DateTimeField(blank=True, editable=False, null=True)),
        migrations.AddField(
            "operationrun",
            "sent_at",
            models.DateTimeField(blank=True, editable=False, help_text="When the node was given this token", null=True),
        ),
        migrations.AddField(
            "operationrun",
            "contact_at",
            models.DateTimeField(
                blank=True,
                editable=False,
                help_text="When the node was last sent something about it, or said something",
                null=True,
            ),
        ),
        migrations.AddField(
            "operationrun",
            "gateway_id",
            models.UUIDField(blank=True, editable=False, help_text="The gateway that sent it last", null=True),
        ),
        migrations.AddField(
            "operationrun",
            "task_id",
            models.CharField(
                blank=True, db_default="", editable=False, help_text="Of a node that is called over HTTP", max_length=80
            ),
        ),
        migrations.AddIndex(
            "operationrun",
            models.Index(condition=models.Q(("ended_at", None)), fields=["node_id"], name="operationrun_node"),
        ),
        migrations.RunSQL(sql=COPY, reverse_sql=migrations.RunSQL.noop),
    ]
