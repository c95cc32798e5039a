from django.db import migrations, models


class Migration(migrations.Migration):
    """Where other nodes of a replica reach a node; of a node of an older version nothing."""

    dependencies = [("nodes", "0022_node_authorities")]

    operations = [
        migrations.AddField(
            model_name="node",
            name="cluster_address",
            field=models.CharField(
                blank=True, db_default="", default="", help_text="Where other nodes of a replica reach it", max_length=200
            ),
        ),
    ]
