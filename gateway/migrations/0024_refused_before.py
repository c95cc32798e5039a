"""What operators took back before the column was there: no credential shall allow it by itself."""

from django.db import migrations

FIND = """
UPDATE gateway_model AS m SET refused = true
 WHERE NOT m.allowed AND NOT m.refused AND 'model.disallow' = (
       SELECT e.action FROM governance_auditevent AS e
        WHERE e.target = m.name AND e.action IN ('model.allow', 'model.disallow') ORDER BY e.id DESC LIMIT 1)
"""


class Migration(migrations.Migration):
    dependencies = [
        ("gateway", "0023_own_secrets"),
        ("governance", "0001_initial"),
    ]

    operations = [migrations.RunSQL(sql=FIND, reverse_sql=migrations.RunSQL.noop)]
