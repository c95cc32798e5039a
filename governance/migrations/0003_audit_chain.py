"""The hash chain over the audit trail, appended by the database when a transaction commits.

Three steps. On INSERT the database writes ``body``, the canonical JSON of the row: one implementation, which no caller can
contradict, and which also serves the rows of before and those of a release that still runs. At COMMIT a deferred trigger
notes the event in ``governance_auditpending``. What that table's own deferred trigger does, comes behind every other deferred
check of the transaction (PostgreSQL fires triggers in rounds): only there is the one lock of the chain taken, so whoever
waits for it holds up nobody, and whoever holds it waits for no row.

The head is read by a statement of its own behind the lock, so under READ COMMITTED with a snapshot that has the last
holder's entry. A stricter isolation level may see an older head; then the primary key refuses and the transaction fails.
"""

from __future__ import annotations

import django.db.models.deletion
import django.utils.timezone
from django.db import migrations, models

BODIES = """
CREATE FUNCTION governance_canonical_json(value jsonb) RETURNS text LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
    CASE jsonb_typeof(value)
        WHEN 'object' THEN
            RETURN '{' || coalesce((
                SELECT string_agg(to_json(member.key)::text || ':' || governance_canonical_json(member.value), ','
                                  ORDER BY member.key COLLATE "C")
                FROM jsonb_each(value) AS member), '') || '}';
        WHEN 'array' THEN
            RETURN '[' || coalesce((
                SELECT string_agg(governance_canonical_json(item.value), ',' ORDER BY item.place)
                FROM jsonb_array_elements(value) WITH ORDINALITY AS item(value, place)), '') || ']';
        ELSE
            RETURN value::text;
    END CASE;
END
$$;
CREATE FUNCTION governance_audit_body(event governance_auditevent) RETURNS bytea LANGUAGE sql STABLE AS $$
    SELECT convert_to(
        '{"action":' || to_json(event.action::text)::text
        || ',"actor":' || to_json(event.actor::text)::text
        || ',"at_us":' || (extract(epoch FROM event.at) * 1000000)::bigint::text
        || ',"detail":' || governance_canonical_json(event.detail)
        || ',"op_id":' || to_json(event.op_id::text)::text
        || ',"target":' || to_json(event.target::text)::text || '}', 'UTF8')
$$;
CREATE FUNCTION governance_write_audit_body() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    NEW.body := governance_audit_body(NEW);
    RETURN NEW;
END
$$;
ALTER TABLE governance_auditevent DISABLE TRIGGER governance_auditevent_no_change;
UPDATE governance_auditevent AS event SET body = governance_audit_body(event);
ALTER TABLE governance_auditevent ENABLE TRIGGER governance_auditevent_no_change;
ALTER TABLE governance_auditevent ALTER COLUMN body SET NOT NULL;
CREATE TRIGGER governance_auditevent_body BEFORE INSERT ON governance_auditevent
    FOR EACH ROW EXECUTE FUNCTION governance_write_audit_body();
"""
DROP_BODIES = """
DROP TRIGGER governance_auditevent_body ON governance_auditevent;
DROP FUNCTION governance_write_audit_body();
DROP FUNCTION governance_audit_body(governance_auditevent);
DROP FUNCTION governance_canonical_json(jsonb);
"""

CHAIN = """
CREATE TABLE governance_auditpending (event_id bigint PRIMARY KEY);
CREATE FUNCTION governance_chain_event(event bigint) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    head record;
    content bytea;
    place bigint;
    previous bytea;
BEGIN
    PERFORM pg_advisory_xact_lock(7886473060318967809);
    SELECT body INTO STRICT content FROM governance_auditevent WHERE id = event;
    SELECT seq, hash INTO head FROM governance_auditentry ORDER BY seq DESC LIMIT 1;
    place := coalesce(head.seq, 0) + 1;
    previous := coalesce(head.hash, decode(repeat('00', 32), 'hex'));
    INSERT INTO governance_auditentry (seq, event_id, prev_hash, hash)
    VALUES (place, event, previous, sha256(
        convert_to('muster-audit/v1', 'UTF8') || decode('00', 'hex') || int8send(place) || previous
        || int8send(length(content)) || content));
END
$$;
CREATE FUNCTION governance_note_audit_event() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER AS $$
BEGIN
    INSERT INTO governance_auditpending (event_id) VALUES (NEW.id);
    RETURN NULL;
END
$$;
CREATE FUNCTION governance_append_audit_entry() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER AS $$
BEGIN
    PERFORM governance_chain_event(NEW.event_id);
    DELETE FROM governance_auditpending WHERE event_id = NEW.event_id;
    RETURN NULL;
END
$$;
DO $$
DECLARE
    event bigint;
BEGIN
    -- With pg_temp last, a caller's temporary table cannot stand in for one of the log's.
    EXECUTE format('ALTER FUNCTION governance_note_audit_event() SET search_path = %I, pg_temp', current_schema());
    EXECUTE format('ALTER FUNCTION governance_append_audit_entry() SET search_path = %I, pg_temp', current_schema());
    FOR event IN SELECT id FROM governance_auditevent ORDER BY id LOOP
        PERFORM governance_chain_event(event);
    END LOOP;
END
$$;
CREATE CONSTRAINT TRIGGER governance_auditevent_note AFTER INSERT ON governance_auditevent
    DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION governance_note_audit_event();
CREATE CONSTRAINT TRIGGER governance_auditpending_append AFTER INSERT ON governance_auditpending
    DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION governance_append_audit_entry();
"""
DROP_CHAIN = """
DROP TRIGGER governance_auditevent_note ON governance_auditevent;
DROP TABLE governance_auditpending;
DROP FUNCTION governance_append_audit_entry();
DROP FUNCTION governance_note_audit_event();
DROP FUNCTION governance_chain_event(bigint);
"""

TABLES = ("governance_auditentry", "governance_auditcheckpoint", "governance_witnessstatement")
PROTECT = "".join(
    f"""
CREATE TRIGGER {table}_no_change BEFORE UPDATE OR DELETE ON {table}
    FOR EACH ROW EXECUTE FUNCTION governance_refuse_audit_change();
CREATE TRIGGER {table}_no_truncate BEFORE TRUNCATE ON {table}
    FOR EACH STATEMENT EXECUTE FUNCTION governance_refuse_audit_change();
"""
    for table in TABLES
)
UNPROTECT = "".join(
    f"DROP TRIGGER {table}_no_truncate ON {table}; DROP TRIGGER {table}_no_change ON {table};" for table in TABLES
)


class Migration(migrations.Migration):
    dependencies = [("governance", "0002_append_only_audit")]

    operations = [
        migrations.AlterField("auditevent", "at", models.DateTimeField(db_index=True, default=django.utils.timezone.now)),
        migrations.AddField(
            "auditevent",
            "op_id",
            models.CharField(blank=True, db_default="", help_text="The operation it belongs to, if any", max_length=64),
        ),
        migrations.AddIndex(
            "auditevent",
            models.Index(
                condition=models.Q(("op_id", ""), _negated=True), fields=["op_id", "id"], name="auditevent_of_operation"
            ),
        ),
        migrations.CreateModel(
            name="AuditEntry",
            fields=[
                ("seq", models.BigIntegerField(help_text="From 1, without gaps", primary_key=True, serialize=False)),
                ("prev_hash", models.BinaryField(editable=False, max_length=32, unique=True)),
                ("hash", models.BinaryField(editable=False, max_length=32, unique=True)),
                (
                    "event",
                    models.OneToOneField(
                        db_constraint=False,
                        on_delete=django.db.models.deletion.DO_NOTHING,
                        related_name="entry",
                        to="governance.auditevent",
                    ),
                ),
            ],
            options={"verbose_name_plural": "audit entries", "ordering": ["-seq"]},
        ),
        migrations.CreateModel(
            name="AuditCheckpoint",
            fields=[
                ("size", models.BigIntegerField(primary_key=True, serialize=False)),
                ("root", models.BinaryField(editable=False, max_length=32)),
                (
                    "frontier",
                    models.BinaryField(
                        editable=False, help_text="Roots of its complete subtrees, 32 bytes each, largest first"
                    ),
                ),
                ("note", models.TextField(help_text="C2SP signed note")),
                ("made_at", models.DateTimeField()),
            ],
            options={"ordering": ["-size"]},
        ),
        migrations.CreateModel(
            name="WitnessStatement",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("node_name", models.CharField(max_length=200)),
                ("size", models.BigIntegerField()),
                ("root", models.BinaryField(editable=False, max_length=32)),
                ("signature", models.BinaryField(editable=False, max_length=64)),
                (
                    "public_key",
                    models.BinaryField(editable=False, help_text="Ed25519, 32 bytes or SubjectPublicKeyInfo", max_length=44),
                ),
                ("alarm", models.BooleanField(default=False)),
                ("heard_at", models.DateTimeField()),
            ],
            options={
                "ordering": ["-heard_at"],
                "indexes": [models.Index(fields=["size"], name="witness_by_size")],
                "constraints": [
                    models.UniqueConstraint(fields=("node_name", "public_key", "size", "root", "alarm"), name="witness_once")
                ],
            },
        ),
        migrations.SeparateDatabaseAndState(
            database_operations=[
                migrations.RunSQL(
                    "ALTER TABLE governance_auditevent ADD COLUMN body bytea",
                    "ALTER TABLE governance_auditevent DROP COLUMN body",
                )
            ],
            state_operations=[
                migrations.AddField(
                    "auditevent",
                    "body",
                    models.BinaryField(
                        default=b"", editable=False, help_text="The exact bytes that the chain covers; the database writes them"
                    ),
                )
            ],
        ),
        migrations.RunSQL(BODIES, DROP_BODIES),
        migrations.RunSQL(CHAIN, DROP_CHAIN),
        migrations.RunSQL(PROTECT, UNPROTECT),
    ]
