"""A log made in memory, for the tests of its verifier."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import psycopg
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from django.conf import settings
from django.db import connection, transaction

from controlplane.commands.audit import verify_database
from governance import checkpoints
from governance.audit import record_event
from governance.models import AuditEntry
from wire.auditlog import (
    GENESIS,
    PROOF_FORMAT,
    Checkpoint,
    Entry,
    Frontier,
    LogKey,
    Record,
    Seal,
    Verdict,
    Verifier,
    Witness,
    consistency_proof,
    entry_hash,
    inclusion_proof,
    leaf_hash,
    render,
    render_header,
    root,
    to_text,
)
from wire.bridge import CheckpointOffer

ORIGIN = "example.org/audit"
SIGNER = Ed25519PrivateKey.from_private_bytes(b"\x05" * 32)
KEY = LogKey(ORIGIN, SIGNER.public_key().public_bytes_raw())
BOX = Ed25519PrivateKey.from_private_bytes(b"\x06" * 32)


def make_body(number: int, **changes: object) -> bytes:
    return json.dumps({"action": "a.b", "n": number, "op_id": f"op-{number % 5}"} | changes, sort_keys=True).encode()


def make_chain(bodies: Iterable[bytes]) -> list[Entry]:
    entries: list[Entry] = []
    for seq, body in enumerate(bodies, 1):
        previous = entries[-1].hash if entries else GENESIS
        entries.append(Entry(seq, previous, entry_hash(seq, previous, body), body, json.loads(body)))
    return entries


def checkpoint_of(entries: Iterable[Entry]) -> Checkpoint:
    frontier = Frontier()
    for entry in entries:
        frontier.append(leaf_hash(entry.hash))
    return Checkpoint(ORIGIN, frontier.size, frontier.root())


def seal(entries: Iterable[Entry]) -> Seal:
    checkpoint = checkpoint_of(entries)
    return Seal(checkpoint.note(KEY, SIGNER.sign(checkpoint.text().encode())))


def witness(entries: Iterable[Entry], *, name: str = "box-1") -> Witness:
    """Return what a node says that saw the checkpoint over these entries, with the note that it was shown.

    ``name`` "": in the form of earlier releases, which signs none.
    """
    seen = checkpoint_of(entries)
    signature, note = BOX.sign(seen.witness_message(name)), seen.note(KEY, SIGNER.sign(seen.text().encode()))
    return Witness("box-1", seen.size, seen.root, signature, BOX.public_key().public_bytes_raw(), note)


def judge(records: Iterable[Record], *, pinned: Iterable[Checkpoint] = ()) -> Verdict:
    verifier = Verifier(keys=[KEY], origin=ORIGIN, pinned=pinned)
    for record in records:
        verifier.feed(record)
    return verifier.finish()


def export(records: Iterable[Record], *, size: int = 0) -> str:
    return "\n".join([render_header(origin=ORIGIN, keys=[KEY], size=size), *map(render, records)]) + "\n"


LOG = make_chain(make_body(number) for number in range(40))
FORK = make_chain(make_body(number, n=number + (number > 3)) for number in range(40))


def offer_of(entries: Sequence[Entry], *, old: int = 0, note: str | None = None) -> CheckpointOffer:
    """The checkpoint over ``entries`` with the proof that it extends its first ``old``."""
    leaves = [leaf_hash(entry.hash) for entry in entries]
    proof = consistency_proof(old, len(leaves), lambda lo, hi: root(leaves[lo:hi]))
    return CheckpointOffer(note=note or seal(entries).note, old_size=old, proof=[to_text(each) for each in proof])


def make_proof() -> dict[str, object]:
    leaves = [leaf_hash(entry.hash) for entry in LOG]
    events = [
        {
            "seq": entry.seq, "prev": to_text(entry.prev_hash), "hash": to_text(entry.hash), "body": to_text(entry.body or b""),
            "path": [to_text(node) for node in inclusion_proof(entry.seq - 1, len(LOG), lambda lo, hi: root(leaves[lo:hi]))],
        }
        for entry in LOG
        if json.loads(entry.body or b"")["op_id"] == "op-3"
    ]  # fmt: skip
    return {"format": PROOF_FORMAT, "opId": "op-3", "keys": [str(KEY)], "checkpoint": seal(LOG).note, "events": events}


def sealed(log: list[Entry], *sizes: int) -> list[Record]:
    records: list[Record] = []
    for entry in log:
        records += [entry, *([seal(log[: entry.seq])] if entry.seq in sizes else [])]
    return records


LOG_KEY = "BQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQU"
"""32 bytes 05 as base64url."""
TABLES = ("auditevent", "auditentry", "auditcheckpoint", "witnessstatement")


def append(count: int, *, op_id: str = "") -> None:
    for number in range(count):
        with transaction.atomic():
            record_event(actor="user:ada", action="test.append", target=f"t{number}", detail={"n": number}, op_id=op_id)
    chain_events()


def chain_events() -> None:
    """Have the database chain what it was told, as it does at a commit: a test inside one transaction has none."""
    if connection.in_atomic_block:
        with connection.cursor() as cursor:
            cursor.execute("SET CONSTRAINTS ALL IMMEDIATE; SET CONSTRAINTS ALL DEFERRED")


def append_at_once(count: int) -> None:
    with connection.cursor() as cursor:
        cursor.execute(
            "INSERT INTO governance_auditevent (at, actor, action, target, detail) "
            "SELECT now(), 'user:ada', 'test.append', 't' || n, jsonb_build_object('n', n) FROM generate_series(1, %s) AS n",
            [count],
        )
    chain_events()


def judge_database() -> Verdict:
    chain_events()
    return verify_database(checkpoints.log_keys())


def database_url() -> str:
    """Return a URL of the test database, for connections that are not Django's."""
    from urllib.parse import urlsplit, urlunsplit

    return urlunsplit(urlsplit(settings.DATABASE_URL)._replace(path=f"/{connection.settings_dict['NAME']}"))


@contextmanager
def raw_connection() -> Iterator[psycopg.Connection[tuple[object, ...]]]:
    with psycopg.connect(database_url()) as session:
        yield session


def tamper(*statements: str) -> None:
    """Run statements as somebody who may switch off every trigger and drop every constraint of the log."""
    chain_events()
    with connection.cursor() as cursor:
        for table in TABLES:
            cursor.execute(f"ALTER TABLE governance_{table} DISABLE TRIGGER USER")
        try:
            for statement in statements:
                cursor.execute(statement)
        finally:
            for table in TABLES:
                cursor.execute(f"ALTER TABLE governance_{table} ENABLE TRIGGER USER")
                cursor.execute(f"ALTER TABLE governance_{table} DISABLE TRIGGER governance_{table}_no_truncate")


def sizes() -> list[int]:
    return list(AuditEntry.objects.order_by("seq").values_list("seq", flat=True))
