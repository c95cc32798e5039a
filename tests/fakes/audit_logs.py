"""A log made in memory, for the tests of its verifier."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

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


def witness(entries: Iterable[Entry], *, signer: Ed25519PrivateKey = BOX, name: str = "box-1") -> Witness:
    """Return what a box says that saw the checkpoint over these entries, with the note that it was shown.

    ``name`` "": in the form of earlier releases, which signs none.
    """
    seen = checkpoint_of(entries)
    signature, note = signer.sign(seen.witness_message(name)), seen.note(KEY, SIGNER.sign(seen.text().encode()))
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


def make_proof(op_id: str = "op-3") -> dict[str, object]:
    leaves = [leaf_hash(entry.hash) for entry in LOG]
    events = [
        {
            "seq": entry.seq,
            "prev": to_text(entry.prev_hash),
            "hash": to_text(entry.hash),
            "body": to_text(entry.body or b""),
            "path": [to_text(node) for node in inclusion_proof(entry.seq - 1, len(LOG), lambda lo, hi: root(leaves[lo:hi]))],
        }
        for entry in LOG
        if json.loads(entry.body or b"")["op_id"] == op_id
    ]
    return {"format": PROOF_FORMAT, "opId": op_id, "keys": [str(KEY)], "checkpoint": seal(LOG).note, "events": events}


def sealed(log: list[Entry], *sizes: int) -> list[Record]:
    """Return a log with checkpoints of ``sizes`` where they belong."""
    records: list[Record] = []
    for entry in log:
        records += [entry, *([seal(log[: entry.seq])] if entry.seq in sizes else [])]
    return records
