"""Approvals whose key was revoked or whose person was switched off since are marked by the database, whoever changes the row.

A decision that stood already when the mark came in is marked as well. A previous release that serves on reads no mark; it
drops such approvals while the person is off.
"""

from __future__ import annotations

from django.conf import settings
from django.db import migrations, models

CREATE = """
CREATE FUNCTION governance_void_approvals() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF TG_TABLE_NAME = 'governance_approverkey' THEN
        UPDATE governance_decision SET void_at = now()
        WHERE key_id = NEW.id AND is_approval AND withdrawn_at IS NULL AND void_at IS NULL;
    ELSE
        UPDATE governance_decision SET void_at = now()
        WHERE person_id = NEW.id AND is_approval AND withdrawn_at IS NULL AND void_at IS NULL;
    END IF;
    RETURN NULL;
END
$$;
CREATE TRIGGER governance_user_off AFTER UPDATE OF is_active ON controlplane_user
    FOR EACH ROW WHEN (OLD.is_active AND NOT NEW.is_active) EXECUTE FUNCTION governance_void_approvals();
CREATE TRIGGER governance_approverkey_revoked AFTER UPDATE OF revoked_at ON governance_approverkey
    FOR EACH ROW WHEN (OLD.revoked_at IS NULL AND NEW.revoked_at IS NOT NULL) EXECUTE FUNCTION governance_void_approvals();
UPDATE governance_decision SET void_at = now()
WHERE is_approval AND withdrawn_at IS NULL AND (
    person_id IN (SELECT id FROM controlplane_user WHERE NOT is_active)
    OR key_id IN (SELECT id FROM governance_approverkey WHERE revoked_at IS NOT NULL)
);
"""

DROP = """
DROP TRIGGER governance_approverkey_revoked ON governance_approverkey;
DROP TRIGGER governance_user_off ON controlplane_user;
DROP FUNCTION governance_void_approvals();
"""


class Migration(migrations.Migration):
    dependencies = [("governance", "0008_hidden_sign_in_names"), migrations.swappable_dependency(settings.AUTH_USER_MODEL)]

    operations = [
        migrations.AddField(
            model_name="decision",
            name="void_at",
            field=models.DateTimeField(
                blank=True, help_text="When its key was revoked or its person switched off; the database writes it", null=True
            ),
        ),
        migrations.RunSQL(sql=CREATE, reverse_sql=DROP),
    ]
