"""The last audit checkpoint that this box saw. It accepts a larger one only with the proof that nothing before was changed."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from runner.ledger import Ledger
from runner.limits import limits
from runner.operations.identity import Identity
from wire.auditlog import AuditLogError, Checkpoint, LogKey, open_note, to_bytes, to_text, verify_consistency
from wire.bridge import CheckpointOffer

log = logging.getLogger(__name__)

FACT = "witness"


@dataclass(frozen=True, slots=True)
class Sighting:
    """What this box has to say after a checkpoint was offered.

    ``signature``: of this box over the last checkpoint that it accepted, base64, "" = there is none. ``note``: that one as the
    log signed it, "" when it was accepted before notes were kept. ``alarm``: in what the offer contradicts it, or that nobody
    known signed the offer; "" = it does not.
    """

    signature: str = ""
    note: str = ""
    alarm: str = ""


class Witness:
    """``seen`` is on disk before anything is signed, and so is ``note``, in which the log signed it."""

    def __init__(self, ledger: Ledger, identity: Identity) -> None:
        self._ledger = ledger
        self._identity = identity
        self.seen: Checkpoint | None = None
        self.note = ""

    @property
    def public_key(self) -> bytes:
        """The key with which this box signs what it saw: SPKI DER."""
        return self._identity.public_key

    async def open(self) -> None:
        """Read what was seen last. Raises LedgerError."""
        text = await self._ledger.read_fact(FACT)
        if text is not None:
            kept = json.loads(text)
            self.seen = Checkpoint(kept["origin"], kept["size"], to_bytes(kept["root"]))
            self.note = kept.get("note", "")

    def forget(self) -> None:
        """Have seen nothing; the caller removes it from the disk."""
        self.seen, self.note = None, ""

    async def judge(self, offer: CheckpointOffer, *, log_keys: Sequence[str], runner_id: str) -> Sighting:
        """Say what becomes of a checkpoint, and keep it when it extends the last one. Raises LedgerError.

        ``log_keys``: C2SP verifier keys of the pinned policy. ``runner_id``: signed with what was seen, if the offer asks.
        Neither a checkpoint from before nor a proof that begins elsewhere than where this box stands contradicts anything: the
        answer shows where that is, for who has the log to judge.
        """
        name = runner_id if offer.wants_name else ""
        try:
            checkpoint = _read_note(offer.note, log_keys)
            alarm = self._compare(checkpoint, offer)
        except AuditLogError as error:
            return self._refuse(name, str(error))
        if alarm:
            return self._refuse(name, alarm)
        if self._follows(checkpoint, offer) and (checkpoint != self.seen or not self.note):
            await self._ledger.write_fact(FACT, _describe(checkpoint, offer.note))
            self.seen, self.note = checkpoint, offer.note
        return self._sight(name)

    def _refuse(self, name: str, alarm: str) -> Sighting:
        log.error("audit checkpoint refused: %s", alarm)
        return self._sight(name, alarm=alarm)

    def _sight(self, name: str, *, alarm: str = "") -> Sighting:
        """Return the signed word of this box on what it has seen."""
        if self.seen is None:
            return Sighting(alarm=alarm)
        signature = self._identity.private_key.sign(self.seen.witness_message(name))
        return Sighting(signature=to_text(signature), note=self.note, alarm=alarm)

    def _compare(self, checkpoint: Checkpoint, offer: CheckpointOffer) -> str:
        """Return in what a checkpoint contradicts the one seen. Raises AuditLogError for a proof that cannot be read."""
        seen = self.seen
        if seen is None:
            return ""
        if checkpoint.origin != seen.origin:
            return f"a checkpoint of another log, {checkpoint.origin}; this box has seen {seen.origin}"
        if checkpoint.size < seen.size:
            log.warning("an audit checkpoint of %d entries was offered; this box has seen %d", checkpoint.size, seen.size)
            return ""
        if checkpoint.size == seen.size:
            return "" if checkpoint.root == seen.root else f"another root over the same {seen.size} entries"
        if offer.old_size != seen.size:
            return ""
        if len(offer.proof) > limits().operations.proof_hashes:
            raise AuditLogError(f"a proof of more than {limits().operations.proof_hashes} hashes")
        proof = [to_bytes(each) for each in offer.proof]
        holds = verify_consistency(
            old=seen.size, size=checkpoint.size, old_root=seen.root, new_root=checkpoint.root, proof=proof
        )
        return "" if holds else f"the log of {checkpoint.size} entries does not extend the one of {seen.size} that was seen"

    def _follows(self, checkpoint: Checkpoint, offer: CheckpointOffer) -> bool:
        """Return whether a checkpoint without contradiction is the one seen, or proven to follow it."""
        seen = self.seen
        return seen is None or checkpoint == seen or (checkpoint.size > seen.size and offer.old_size == seen.size)


def _read_note(note: str, log_keys: Sequence[str]) -> Checkpoint:
    if len(note) > limits().operations.note_chars:
        raise AuditLogError(f"a note of more than {limits().operations.note_chars} characters")
    return open_note(note, [LogKey.parse(text) for text in log_keys], _holds)


def _holds(public_key: bytes, message: bytes, signature: bytes) -> bool:
    try:
        Ed25519PublicKey.from_public_bytes(public_key).verify(signature, message)
    except (InvalidSignature, ValueError):
        return False
    return True


def _describe(checkpoint: Checkpoint, note: str) -> str:
    return json.dumps({"origin": checkpoint.origin, "size": checkpoint.size, "root": to_text(checkpoint.root), "note": note})
