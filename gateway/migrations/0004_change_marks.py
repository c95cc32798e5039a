"""Tenants and keys carry the transaction that changed them last, so that no clock decides what a gateway reads again.

``updated_at`` is the clock of whoever wrote. A transaction id is the database's own, and a snapshot says which of them it did
not see yet: also those that began long before they were committed. The column is the database's alone; no model has it.
"""

from __future__ import annotations

from django.db import migrations

CREATE = """
CREATE FUNCTION gateway_mark_change() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    NEW.changed_in := pg_current_xact_id();
    RETURN NEW;
END
$$;

ALTER TABLE gateway_tenant ADD COLUMN changed_in xid8 NOT NULL DEFAULT '0';
CREATE INDEX gateway_tenant_changed_in ON gateway_tenant (changed_in);
CREATE TRIGGER gateway_tenant_mark_new BEFORE INSERT ON gateway_tenant
    FOR EACH ROW EXECUTE FUNCTION gateway_mark_change();
CREATE TRIGGER gateway_tenant_mark_change BEFORE UPDATE ON gateway_tenant
    FOR EACH ROW WHEN (OLD.* IS DISTINCT FROM NEW.*) EXECUTE FUNCTION gateway_mark_change();

ALTER TABLE gateway_apikey ADD COLUMN changed_in xid8 NOT NULL DEFAULT '0';
CREATE INDEX gateway_apikey_changed_in ON gateway_apikey (changed_in);
CREATE TRIGGER gateway_apikey_mark_new BEFORE INSERT ON gateway_apikey
    FOR EACH ROW EXECUTE FUNCTION gateway_mark_change();
-- That a key was used is written every second and is nothing that anybody must read again.
CREATE TRIGGER gateway_apikey_mark_change BEFORE UPDATE ON gateway_apikey
    FOR EACH ROW WHEN (to_jsonb(OLD) - 'last_used_at' IS DISTINCT FROM to_jsonb(NEW) - 'last_used_at')
    EXECUTE FUNCTION gateway_mark_change();
"""

DROP = """
DROP TRIGGER gateway_apikey_mark_change ON gateway_apikey;
DROP TRIGGER gateway_apikey_mark_new ON gateway_apikey;
ALTER TABLE gateway_apikey DROP COLUMN changed_in;
DROP TRIGGER gateway_tenant_mark_change ON gateway_tenant;
DROP TRIGGER gateway_tenant_mark_new ON gateway_tenant;
ALTER TABLE gateway_tenant DROP COLUMN changed_in;
DROP FUNCTION gateway_mark_change();
"""


class Migration(migrations.Migration):
    dependencies = [("gateway", "0003_client_surfaces")]

    operations = [migrations.RunSQL(sql=CREATE, reverse_sql=DROP)]
