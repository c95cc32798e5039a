"""The audit trail can only grow: the database refuses UPDATE, DELETE and TRUNCATE on it, whoever asks."""

from __future__ import annotations

from django.db import migrations

CREATE = """
CREATE FUNCTION governance_refuse_audit_change() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'the audit trail is append-only: % on % is refused', TG_OP, TG_TABLE_NAME
        USING ERRCODE = 'insufficient_privilege';
END
$$;
CREATE TRIGGER governance_auditevent_no_change BEFORE UPDATE OR DELETE ON governance_auditevent
    FOR EACH ROW EXECUTE FUNCTION governance_refuse_audit_change();
CREATE TRIGGER governance_auditevent_no_truncate BEFORE TRUNCATE ON governance_auditevent
    FOR EACH STATEMENT EXECUTE FUNCTION governance_refuse_audit_change();
"""

DROP = """
DROP TRIGGER governance_auditevent_no_truncate ON governance_auditevent;
DROP TRIGGER governance_auditevent_no_change ON governance_auditevent;
DROP FUNCTION governance_refuse_audit_change();
"""


class Migration(migrations.Migration):
    dependencies = [("governance", "0001_initial")]

    operations = [migrations.RunSQL(sql=CREATE, reverse_sql=DROP)]
