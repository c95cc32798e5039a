"""Commands are runs now (``governance.0010``). The table stays for a previous release that serves on; a later one drops it.

Its rows hold no node any more: nothing of this release would take them along when it empties the table of nodes.
"""

from __future__ import annotations

from django.db import migrations

LET_GO = """
DO $$
DECLARE held record;
BEGIN
    FOR held IN SELECT conname FROM pg_constraint WHERE conrelid = 'nodes_nodecommand'::regclass AND contype = 'f' LOOP
        EXECUTE format('ALTER TABLE nodes_nodecommand DROP CONSTRAINT %I', held.conname);
    END LOOP;
END
$$;
"""
HOLD = (
    "ALTER TABLE nodes_nodecommand ADD CONSTRAINT nodes_nodecommand_node_id_fk FOREIGN KEY (node_id) "
    "REFERENCES nodes_node (id) DEFERRABLE INITIALLY DEFERRED"
)


class Migration(migrations.Migration):
    dependencies = [("nodes", "0011_ejections"), ("governance", "0010_runs_on_nodes")]

    operations = [
        migrations.SeparateDatabaseAndState(
            database_operations=[migrations.RunSQL(sql=LET_GO, reverse_sql=HOLD)],
            state_operations=[migrations.DeleteModel("NodeCommand")],
        ),
    ]
