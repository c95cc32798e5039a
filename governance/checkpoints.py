"""Signed checkpoints of the audit log, proofs over them, and what the nodes say that they saw of it."""

from __future__ import annotations

import base64
import binascii
import hashlib
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from functools import lru_cache
from http import HTTPStatus

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.db import transaction
from django.db.models import Count, Max, Q
from django.utils.translation import gettext as _

from core.limits import limits
from governance.audit import Tail, check_tail, log_size, read_entries_of, read_hashes, record_event
from governance.errors import GovernanceError
from governance.models import AuditCheckpoint, AuditEvent, WitnessStatement
from wire import COMMAND, auditlog, clock
from wire.auditlog import PROOF_FORMAT, AuditLogError, Checkpoint, Frontier, LogKey, leaf_hash
from wire.contract import ErrorCode

_HASH_BYTES = hashlib.sha256().digest_size
_ACTOR = "system:audit"


class WitnessStatus(StrEnum):
    """How the log of now compares with what a node saw of it."""

    OK = "ok"
    BEHIND = "behind"
    INCONSISTENT = "inconsistent"


@dataclass(frozen=True, slots=True)
class LogStatus:
    """What a page says of the log without reading all of it. ``nodes`` is how many have ever told what they saw."""

    tail: Tail
    checkpoint: AuditCheckpoint | None
    nodes: int
    alarms: int
    heard_at: datetime | None
    has_key: bool


class InvalidWitness(GovernanceError):
    """A statement about the log that its node did not sign."""


class UnknownSize(GovernanceError):
    """The log never had, or no longer has, so many entries."""


class AuditLogBroken(GovernanceError, code=ErrorCode.INTERNAL_ERROR, status=HTTPStatus.INTERNAL_SERVER_ERROR):
    """The chain has a gap: no checkpoint is signed over it."""


def log_key() -> LogKey | None:
    """Return name and public key of the log, None without GOVERNANCE_LOG_KEY. Raises ImproperlyConfigured."""
    if not settings.GOVERNANCE_LOG_KEY:
        return None
    public = _signing_key(settings.GOVERNANCE_LOG_KEY).public_key().public_bytes_raw()
    return LogKey(settings.GOVERNANCE_LOG_ORIGIN, public)


def log_keys() -> list[LogKey]:
    """Return the keys whose checkpoints are accepted: the log's own, if it has one."""
    key = log_key()
    return [key] if key else []


def latest_checkpoint() -> AuditCheckpoint | None:
    return AuditCheckpoint.objects.order_by("-size").first()


def has_checkpoint(size: int) -> bool:
    # A node can have seen no size but one that was signed.
    return AuditCheckpoint.objects.filter(size=size).exists()


def checkpoint_if_due(*, now: datetime | None = None) -> AuditCheckpoint | None:
    """Make a checkpoint if enough is new since the last one. Cheap when not: two index look-ups. Raises AuditLogBroken."""
    at = now or clock.now()
    last, size = latest_checkpoint(), log_size()
    fresh = size - (last.size if last else 0)
    is_due = fresh >= limits().governance.checkpoint_entries or (
        fresh > 0 and (last is None or at - last.made_at >= timedelta(seconds=limits().governance.checkpoint_age_s))
    )
    return make_checkpoint(now=at) if is_due else None


def is_first_due(*, now: datetime) -> bool:
    """Return whether a log must have its first checkpoint by now, at most ``checkpoint_age_s`` after its first event."""
    first = AuditEvent.objects.order_by("pk").values_list("at", flat=True).first()
    is_young = first is not None and timedelta() <= now - first < 2 * timedelta(seconds=limits().governance.checkpoint_age_s)
    return not is_young or log_size() >= limits().governance.checkpoint_entries


def make_checkpoint(*, now: datetime) -> AuditCheckpoint | None:
    """Sign the log as it is. Costs as much as there are entries since the last checkpoint.

    Returns None when nothing is new or there is no GOVERNANCE_LOG_KEY. Raises AuditLogBroken.
    """
    key = log_key()
    last, size = latest_checkpoint(), log_size()
    if key is None or size <= (last.size if last else 0):
        return None
    frontier = _frontier_at(size)
    checkpoint = Checkpoint(key.name, size, frontier.root())
    signature = _signing_key(settings.GOVERNANCE_LOG_KEY).sign(checkpoint.text().encode())
    row = AuditCheckpoint(
        size=size, root=checkpoint.root, frontier=b"".join(frontier.nodes), note=checkpoint.note(key, signature), made_at=now
    )
    # Two workers at once make the same bytes: Ed25519 is deterministic.
    AuditCheckpoint.objects.bulk_create([row], ignore_conflicts=True)
    return row


def inclusion(seq: int, size: int) -> list[bytes]:
    """Return the RFC 9162 path of entry ``seq`` (from 1) to the root over the first ``size``. Raises UnknownSize."""
    _require(1 <= seq <= size <= log_size(), f"entry {seq} of {size}")
    return auditlog.inclusion_proof(seq - 1, size, _subtrees(_frontier_at(seq - 1)))


def consistency(old_size: int, new_size: int) -> list[bytes]:
    """Return the RFC 9162 proof that the log of ``old_size`` is the head of that of ``new_size``. Raises UnknownSize.

    Costs as much as there are entries between the two and since the last checkpoint before ``old_size``.
    """
    _require(0 <= old_size <= new_size <= log_size(), f"{old_size} to {new_size} entries")
    return auditlog.consistency_proof(old_size, new_size, _subtrees(_frontier_at(old_size)))


def count_alarms() -> int:
    """Return how many words of nodes disagree with the log."""
    return WitnessStatement.objects.filter(alarm=True).count()


def read_status() -> LogStatus:
    """Check the end of the log (``TAIL_ENTRIES``) and count its witnesses. Three queries, however long the log is."""
    told = WitnessStatement.objects.aggregate(
        nodes=Count("public_key", distinct=True), alarms=Count("pk", filter=Q(alarm=True)), heard_at=Max("heard_at")
    )
    return LogStatus(tail=check_tail(), checkpoint=latest_checkpoint(), has_key=log_key() is not None, **told)


def root_at(size: int) -> bytes:
    """Return the root over the first ``size`` entries. Raises UnknownSize."""
    _require(0 <= size <= log_size(), f"{size} entries")
    return _frontier_at(size).root()


def record_witness(
    *, node_name: str, runner_id: str, size: int, root: bytes, signature: bytes, public_key: bytes, note: str = ""
) -> WitnessStatus:
    """Compare the log with the last checkpoint that a node saw, and keep the node's signed word for it.

    ``signature`` is the node's, over ``Checkpoint(GOVERNANCE_LOG_ORIGIN, size, root).witness_message(runner_id)``, which it is
    kept under, or in the form of earlier releases that names nobody, kept under ``node_name``; ``public_key``: its Ed25519 key,
    32 raw bytes or SubjectPublicKeyInfo. ``note``: the checkpoint as the log signed it; a node that can show none
    proves nothing, unless the log has one of that size and root. A log that is shorter or another is an event
    ``audit.witness_alarm``, once for each statement and at most ``audit_alarms_per_hour`` times for a node.
    Raises InvalidWitness.
    """
    seen = Checkpoint(settings.GOVERNANCE_LOG_ORIGIN, size, root)
    is_possible = 0 <= size < 1 << 63 and len(root) == _HASH_BYTES
    # Runners of earlier releases sign a form that names nobody.
    signed_as = (name for name in (runner_id, "") if check_signature(public_key, seen.witness_message(name), signature))
    signed_name = next(signed_as, None) if is_possible else None
    if signed_name is None:
        raise InvalidWitness(
            _("The statement about the audit log is not signed by %(node_name)s.") % {"node_name": node_name}, param="signature"
        )
    proof = _prove_sighting(seen, note, node_name=node_name)
    entries = log_size()
    status = WitnessStatus.BEHIND
    if size <= entries:
        status = WitnessStatus.OK if root_at(size) == root else WitnessStatus.INCONSISTENT
    is_alarm = status is not WitnessStatus.OK
    if is_alarm and _has_told_enough(node_name, public_key):
        return status
    with transaction.atomic():
        _row, is_new = WitnessStatement.objects.get_or_create(
            node_name=signed_name or node_name,
            size=size,
            root=root,
            public_key=public_key,
            alarm=is_alarm,
            defaults={"signature": signature, "note": proof, "heard_at": clock.now()},
        )
        if is_new and is_alarm:
            detail = {"status": status.value, "seen_size": size, "seen_root": root.hex(), "log_size": entries}
            record_event(actor=_ACTOR, action="audit.witness_alarm", target=node_name, detail=detail)
    return status


def _prove_sighting(seen: Checkpoint, note: str, *, node_name: str) -> str:
    """Return the note in which the log signed what a node saw: ours, or the one it shows. Raises InvalidWitness."""
    own = AuditCheckpoint.objects.filter(size=seen.size).first()
    # Our own needs no second look at its key, which may have been another one then.
    if own is not None and bytes(own.root) == seen.root:
        return own.note
    try:
        if auditlog.open_note(note, log_keys(), check_signature) == seen:
            return note
    except AuditLogError:
        pass
    raise InvalidWitness(
        _("%(node_name)s shows no checkpoint of %(size)s entries that this log signed.")
        % {"node_name": node_name, "size": seen.size},
        param="note",
    )


def prove_operation(op_id: str, *, now: datetime) -> dict[str, object]:
    """Return the proof of an operation's events as ``auditlog.py prove-check`` reads it, without the operation itself.

    Makes a checkpoint if the newest does not cover them. Raises UnknownSize without such events or without a log key.
    """
    entries = read_entries_of(op_id)
    _require(bool(entries) and log_key() is not None, f"events of operation {op_id}, or no log key")
    last = latest_checkpoint()
    if last is None or last.size < entries[-1].seq:
        last = make_checkpoint(now=now) or latest_checkpoint()
    if last is None:
        raise UnknownSize(_("The audit log has no checkpoint."))
    events = [
        {
            "seq": entry.seq,
            "prev": auditlog.to_text(entry.prev_hash),
            "hash": auditlog.to_text(entry.hash),
            "body": auditlog.to_text(entry.body or b""),
            "path": [auditlog.to_text(step) for step in inclusion(entry.seq, last.size)],
        }
        for entry in entries
    ]
    keys = [str(key) for key in log_keys()]
    return {"format": PROOF_FORMAT, "opId": op_id, "keys": keys, "checkpoint": last.note, "events": events}


def check_signature(public_key: bytes, message: bytes, signature: bytes) -> bool:
    # As ``auditlog.verify_signature`` does, a hundred times faster.
    try:
        Ed25519PublicKey.from_public_bytes(public_key.removeprefix(auditlog.SPKI_HEAD)).verify(signature, message)
    except (InvalidSignature, ValueError):
        return False
    return True


def _has_told_enough(node_name: str, public_key: bytes) -> bool:
    since = clock.now() - timedelta(hours=1)
    told = WitnessStatement.objects.filter(Q(node_name=node_name) | Q(public_key=public_key), alarm=True, heard_at__gt=since)
    return told.count() >= limits().governance.audit_alarms_per_hour


def _require(is_known: bool, what: str) -> None:
    if not is_known:
        raise UnknownSize(_("The audit log has no %(what)s.") % {"what": what})


@lru_cache(maxsize=4)
def _signing_key(text: str) -> Ed25519PrivateKey:
    try:
        return Ed25519PrivateKey.from_private_bytes(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)))
    except (ValueError, binascii.Error):
        raise ImproperlyConfigured("MUSTER_LOG_KEY must be 32 random bytes as base64url") from None


def _frontier_at(size: int) -> Frontier:
    """Return the frontier of the first ``size`` entries, from the last checkpoint before on. Raises AuditLogBroken."""
    base = AuditCheckpoint.objects.filter(size__lte=size).order_by("-size").first()
    frontier = (_open_frontier(base) if base else None) or Frontier()
    for seq, hashed in read_hashes(frontier.size, size):
        if seq != frontier.size + 1:
            break
        frontier.append(leaf_hash(hashed))
    if frontier.size != size:
        raise AuditLogBroken(
            _("Entry %(size)s of the audit log is missing: run %(muster)s audit verify.")
            % {"size": frontier.size + 1, "muster": COMMAND}
        )
    return frontier


def _open_frontier(checkpoint: AuditCheckpoint) -> Frontier | None:
    """Return the frontier kept with a checkpoint; None unless it has the root that the log signed."""
    raw = bytes(checkpoint.frontier)
    frontier = Frontier(checkpoint.size, [raw[at : at + _HASH_BYTES] for at in range(0, len(raw), _HASH_BYTES)])
    try:
        signed = auditlog.open_note(checkpoint.note, log_keys(), check_signature)
    except AuditLogError:
        return None
    # The row is believed as far as the signed note says the same.
    return frontier if (signed.size, signed.root) == (frontier.size, frontier.root()) else None


def _subtrees(frontier: Frontier) -> auditlog.Subtree:
    """Return how proofs get subtrees: those that the frontier holds, the others from the entries."""
    held = dict(zip(frontier.ranges(), frontier.nodes, strict=True))

    def read_subtree(lo: int, hi: int) -> bytes:
        return held.get((lo, hi)) or auditlog.root(leaf_hash(hashed) for _seq, hashed in read_hashes(lo, hi))

    return read_subtree
