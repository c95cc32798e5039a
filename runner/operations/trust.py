"""Trust of a runner: whose policy it follows, what it has witnessed, how it stands, and what its owner confirms on the node.

``./muster trust`` (``python -m runner.operations.trust``) confirms, renews and forgets. It does not talk to the runner, which
finds what was changed in its data folder at its next heartbeat, or when it starts. The gate decides about one token.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import json
import logging
import os
import re
import sqlite3
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from runner.config import OperationsConfig
from runner.ledger.database import FILE_NAME, LedgerError
from runner.ledger.ledger import Ledger, PolicyRow
from runner.limits import limits
from runner.operations.keys import (
    OP_KEYS_NAME,
    Identity,
    OpKeys,
    TooManyKeys,
    UnusableKey,
    load_identity,
    read_private,
    remove_private,
    write_private,
)
from wire import COMMAND, clock
from wire.auditlog import AuditLogError, Checkpoint, LogKey, open_note, to_bytes, to_text, verify_consistency
from wire.bridge import CheckpointOffer, GovernanceReport, NodeGovernance, PolicyOffer
from wire.optoken.approval import (
    CLOCK_SKEW_S,
    ApprovalError,
    Policy,
    PolicyRef,
    decode_bytes,
    encode_bytes,
    policy_words,
    read_policy,
    read_statement,
    verify_successor,
)
from wire.optoken.verifier import Level

log = logging.getLogger(__name__)

TRUSTED_NAME = "trusted-policy"
FORGET_NAME = "forget-policy"
"""Its presence asks the node to forget what it pinned and witnessed."""
_CONSONANTS, _VOWELS = "bdfghjklmnprstvz", "aiou"
_LETTERS = (_CONSONANTS, _VOWELS, _CONSONANTS, _VOWELS, _CONSONANTS)
_WORD = re.compile("".join(f"[{letters}]" for letters in _LETTERS))
_HEX = re.compile(r"[0-9a-f]{64}")
WAITING = f"waiting for {COMMAND} trust on the node: a person must confirm the fingerprint of the first policy there"
ANOTHER = "the first policy offered is not the one whose fingerprint was confirmed on the node"
FORGOTTEN = f"forgotten on the node by its owner; waiting for {COMMAND} trust there"
WITNESS_FACT = "witness"
RUNNER_FACT = "box"
"""What ``./muster trust --show`` tells of a node: its id and level as of its last start."""
_FIRST_KEY_FACT = "first_key"
"""The runner id of the key that was made when this ledger was there already."""
NEEDS_DATA = "at level L2 a node keeps what it did in a folder; start it with --data DIR"
SOON = "A running node takes it over within 5 seconds."

EPILOG = """\
The fingerprint is that of the first policy. Get it from an approver, not from the control plane that it protects you from: that
is what makes this step worth anything. Type all twelve words, or the 64 digits.
"""


def parse_fingerprint(parts: Sequence[str]) -> str:
    """Return a fingerprint as it is written down, from words or digits as a person types them.

    Raises ValueError that names the first word that cannot be one. It proposes no other: a guess is not what was confirmed.
    """
    words = [word for part in parts for word in re.split(r"[\s-]+", part.strip().lower()) if word]
    if len(words) == 1 and _HEX.fullmatch(words[0]):
        return words[0]
    for number, word in enumerate(words, start=1):
        if not _WORD.fullmatch(word) and len(words) > 1:
            shown = word[: limits().operations.word_chars]
            raise ValueError(f"word {number}, {shown!r}, cannot be one of a fingerprint: {_find_fault(word)}")
    if len(words) != 12 or not all(map(_WORD.fullmatch, words)):
        given = f"{len(words)} words were given" if len(words) != 1 else f"{len(words[0])} characters were given"
        raise ValueError(f"a fingerprint is twelve words of five letters, or 64 hexadecimal digits; {given}. Type all of it")
    return "-".join(words)


def _find_fault(word: str) -> str:
    """Return what is wrong with a word, such as ``its letter 3 is 'x'``."""
    if len(word) != len(_LETTERS):
        return f"it has {len(word)} letters, not {len(_LETTERS)}"
    number, letter = next((n, each) for n, each in enumerate(word) if each not in _LETTERS[n])
    return f"its letter {number + 1} is {letter!r}, which can be only one of {' '.join(_LETTERS[number])}"


def fingerprint_matches(fingerprint: str, document: bytes) -> bool:
    """Return whether a fingerprint is that of a policy document."""
    digest = hashlib.sha256(document).digest()
    return fingerprint in {digest.hex(), policy_words(digest.hex())}


def read_trusted(data: Path) -> str | None:
    """Return the fingerprint that was confirmed, None when none was or the file cannot be read as one."""
    try:
        content = read_private(data / TRUSTED_NAME)
        return None if content is None else parse_fingerprint([content.decode("ascii")])
    except (OSError, ValueError):
        return None


def write_trusted(data: Path, fingerprint: str) -> None:
    """Write down what was confirmed. Raises OSError."""
    write_private(data / TRUSTED_NAME, f"{fingerprint}\n".encode())


def is_asked_to_forget(data: Path) -> bool:
    """Return whether the node has been asked and has not done it yet."""
    return (data / FORGET_NAME).exists()


class PolicyStore:
    """``trusted`` returns the fingerprint that was confirmed on this node, None before."""

    def __init__(self, ledger: Ledger, trusted: Callable[[], str | None]) -> None:
        self._ledger = ledger
        self._trusted = trusted
        self._lock = asyncio.Lock()
        self._chain: list[Policy] = []
        self._offered: list[Mapping[str, object]] = []
        self._judged_by: str | None = None
        self.error = ""
        """Why the last policies offered were not taken over, "" = they were, or none were offered."""
        self.offered_fingerprint = ""
        """The fingerprint of a first policy that waits to be confirmed."""

    @property
    def policy(self) -> Policy | None:
        """The pinned policy, None while there is none."""
        return self._chain[-1] if self._chain else None

    def find(self, ref: PolicyRef) -> Policy | None:
        """Return a policy that was pinned, be it followed by others; None for one that was not."""
        return next((policy for policy in self._chain if policy.ref == ref), None)

    async def open(self) -> None:
        """Read what was pinned, and check it again: a chain that does not hold is none. Raises LedgerError."""
        rows = await self._ledger.read_policies()
        try:
            self._chain = await asyncio.to_thread(_walk, rows)
        except (ApprovalError, ValueError) as error:
            self._chain, self.error = (
                [],
                f"the pinned policy on the node does not hold ({error}); {COMMAND} trust --forget there",
            )
            log.error("pinned policy does not hold, no operation is carried out: %s", error)  # noqa: TRY400 - text says it

    async def offer(self, offered: Sequence[Mapping[str, object]]) -> bool:
        """Take over what follows the pinned policy; return whether anything changed. Raises LedgerError."""
        async with self._lock:
            self._offered = list(offered[: limits().operations.policies])
            return await self._judge()

    async def reconsider(self) -> bool:
        """Judge the last offer again where a person has confirmed another fingerprint since. Raises LedgerError."""
        async with self._lock:
            if self.policy is not None or not self._offered:
                return False
            if await asyncio.to_thread(self._trusted) == self._judged_by:
                return False
            return await self._judge()

    async def forget(self) -> None:
        """Follow no policy any more; what is offered next has to be confirmed again."""
        async with self._lock:
            self._chain, self._offered, self.offered_fingerprint, self.error = [], [], "", FORGOTTEN

    async def _judge(self) -> bool:
        before = (self.policy, self.error)
        self.error = self.offered_fingerprint = ""
        self._judged_by = await asyncio.to_thread(self._trusted)
        for each in self._offered:
            try:
                found = await asyncio.to_thread(_read_link, each, self._chain)
            except (ApprovalError, KeyError, TypeError, ValueError) as error:
                self.error = _explain(error)
                break
            if found is None:
                continue  # it is held already
            row, policy = found
            if self.policy is None and not self._is_confirmed(row, policy):
                break
            await self._ledger.add_policy(row)
            self._chain.append(policy)
            log.warning("policy pinned id=%s version=%d words=%s", policy.ref.id, policy.ref.version, spell_fingerprint(policy))
        if self.error:
            log.warning("policy was not taken over: %s", self.error)
        return (self.policy, self.error) != before

    def _is_confirmed(self, row: PolicyRow, policy: Policy) -> bool:
        if self._judged_by is not None and fingerprint_matches(self._judged_by, row.document):
            return True
        self.error = WAITING if self._judged_by is None else ANOTHER
        self.offered_fingerprint = spell_fingerprint(policy)
        return False


def spell_fingerprint(policy: Policy) -> str:
    """Return the fingerprint of a policy as twelve words."""
    return policy_words(policy.ref.sha256)


def _walk(rows: Sequence[PolicyRow]) -> list[Policy]:
    chain: list[Policy] = []
    for row in rows:
        current = chain[-1] if chain else None
        chain.append(verify_successor(row.document, read_statement(row.statement), row.proofs, current=current))
    return chain


def _read_link(offered: Mapping[str, object], chain: Sequence[Policy]) -> tuple[PolicyRow, Policy] | None:
    """Return the next policy of the chain; None for one that is held already. Raises ApprovalError, KeyError, TypeError."""
    document = decode_bytes(offered["document"])
    ref = read_policy(document).ref
    if any(policy.ref == ref for policy in chain):
        return None
    statement, proofs = decode_bytes(offered["statement"]), offered["proofs"]
    if not isinstance(proofs, list):
        raise TypeError("proofs")
    current = chain[-1] if chain else None
    policy = verify_successor(document, read_statement(statement), proofs, current=current)
    return PolicyRow(policy.ref.version, document, statement, proofs), policy


def _explain(error: Exception) -> str:
    """Return why a policy was refused, in words that name the rule; a malformed offer has none."""
    if isinstance(error, ApprovalError):
        return f"{error.rule.value}: {error}"
    return "an offered policy has no document, statement and list of proofs"


@dataclass(frozen=True, slots=True)
class Sighting:
    """What this node has to say after a checkpoint was offered.

    ``signature``: of this node over the last checkpoint that it accepted, base64, "" = there is none. ``note``: that one as the
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
        self.identity = identity
        self.seen: Checkpoint | None = None
        self.note = ""

    async def open(self) -> None:
        """Read what was seen last. Raises LedgerError."""
        text = await self._ledger.read_fact(WITNESS_FACT)
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
        """
        name = runner_id if offer.wants_name else ""
        try:
            checkpoint = _read_note(offer.note, log_keys)
            alarm = self._compare(checkpoint, offer)
        except AuditLogError as error:
            return self._refuse(name, str(error))
        if alarm:
            return self._refuse(name, alarm)
        # An older checkpoint, or a proof that begins elsewhere than where this node stands, contradicts nothing: the answer
        # shows where that is, and who has the log judges it.
        if self._follows(checkpoint, offer) and (checkpoint != self.seen or not self.note):
            seen = {"origin": checkpoint.origin, "size": checkpoint.size, "root": to_text(checkpoint.root), "note": offer.note}
            await self._ledger.write_fact(WITNESS_FACT, json.dumps(seen))
            self.seen, self.note = checkpoint, offer.note
        return self._sight(name)

    def _refuse(self, name: str, alarm: str) -> Sighting:
        log.error("audit checkpoint refused: %s", alarm)
        return self._sight(name, alarm=alarm)

    def _sight(self, name: str, *, alarm: str = "") -> Sighting:
        if self.seen is None:
            return Sighting(alarm=alarm)
        signature = self.identity.private_key.sign(self.seen.witness_message(name))
        return Sighting(signature=to_text(signature), note=self.note, alarm=alarm)

    def _compare(self, checkpoint: Checkpoint, offer: CheckpointOffer) -> str:
        """Return in what a checkpoint contradicts the one seen. Raises AuditLogError for a proof that cannot be read."""
        seen = self.seen
        if seen is None:
            return ""
        if checkpoint.origin != seen.origin:
            return f"a checkpoint of another log, {checkpoint.origin}; this node has seen {seen.origin}"
        if checkpoint.size < seen.size:
            log.warning("an audit checkpoint of %d entries was offered; this node has seen %d", checkpoint.size, seen.size)
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


@dataclass(frozen=True, slots=True)
class Standing:
    """How a node stands, for its page and for ``GET /v1/capabilities``. ``advice``: what its owner should do, "" = nothing."""

    level: str
    runner_id: str
    policy_version: int
    policy_words: str
    witness_size: int
    advice: str


class Governance:
    """``disabled``: why no operation is carried out whatever its token, "" = they are. Times are Unix seconds."""

    def __init__(
        self,
        wanted: OperationsConfig,
        *,
        data: Path | None,
        name: str,
        ledger: Ledger,
        clock: Callable[[], float] = clock.unix_s,
    ) -> None:
        self._wanted = wanted
        self._data = data
        self._name = name
        self._ledger = ledger
        self._clock = clock
        self._lock = asyncio.Lock()
        self._held_keys: dict[str, bytes] = {}
        self.level = Level(f"L{wanted.level}")
        self.disabled = NEEDS_DATA if self.level is Level.L2 and data is None else ""
        self.identity: Identity | None = None
        self.policies: PolicyStore | None = None
        self.witness: Witness | None = None
        self._own_keys: OpKeys | None = None
        self._seen: tuple[int, ...] | None = None

    async def open(self) -> None:
        """Read or make what lies in the data folder. Raises ConfigError and LedgerError."""
        data = self._data
        if data is None:
            return
        self.identity = await asyncio.to_thread(load_identity, data, self._name)
        await self._allow_for_a_clock_ahead(self.identity)
        if self.level is not Level.L0 and self._wanted.key_path is None:
            self._own_keys = OpKeys(data / OP_KEYS_NAME)
            await asyncio.to_thread(self._make_first_key)
        self.policies = PolicyStore(self._ledger, lambda: read_trusted(data))
        self.witness = Witness(self._ledger, self.identity)
        await self.policies.open()
        await self.witness.open()
        await self._ledger.write_fact(RUNNER_FACT, json.dumps({"runnerId": self.runner_id, "level": self.level.value}))
        await self.look()

    async def _allow_for_a_clock_ahead(self, identity: Identity) -> None:
        # A new node whose clock is ahead takes what was approved in its first minute.
        # Nothing can come back by it: at L2 an approval names the key of the node, and of a key that was made when this ledger
        # was there already no other ledger has carried anything out. A ledger that follows a lost one allows nothing.
        if identity.is_new:
            await self._ledger.write_fact(_FIRST_KEY_FACT, identity.certified_id)
        if self.level is Level.L2 and await self._ledger.read_fact(_FIRST_KEY_FACT) == identity.certified_id:
            self._ledger.born_at -= CLOCK_SKEW_S

    @property
    def runner_id(self) -> str:
        """The audience of tokens for this node. At L2 it names the node's key, below that it is what its owner chose."""
        if self.level is Level.L2 and self.identity is not None:
            return self.identity.certified_id
        return self._wanted.runner_id or self._name

    @property
    def key_path(self) -> Path | None:
        """Where the HMAC keys of tokens lie, None = there are none."""
        return self._wanted.key_path if self._own_keys is None else self._own_keys.folder

    @property
    def policy(self) -> Policy | None:
        """The pinned policy."""
        return None if self.policies is None else self.policies.policy

    @property
    def standing(self) -> Standing:
        """How things stand now."""
        seen = None if self.witness is None else self.witness.seen
        policy = self.policy
        return Standing(
            level=self.level.value,
            runner_id=self.runner_id,
            policy_version=0 if policy is None else policy.ref.version,
            policy_words="" if policy is None else spell_fingerprint(policy),
            witness_size=0 if seen is None else seen.size,
            advice=self._advise(),
        )

    def describe(self) -> NodeGovernance | None:
        """Return what the control plane is told; None for a node without a data folder, which has no identity."""
        if self.identity is None or self.policies is None or self.witness is None:
            return None
        seen, policy = self.witness.seen, self.policy
        return NodeGovernance(
            level=self.level.value,
            runner_id=self.runner_id,
            public_key=encode_bytes(self.identity.public_key),
            op_keys={kid: encode_bytes(key) for kid, key in self._held_keys.items()},
            policy_version=0 if policy is None else policy.ref.version,
            policy_sha256="" if policy is None else policy.ref.sha256,
            policy_error=self.policies.error,
            witness_size=0 if seen is None else seen.size,
            witness_root="" if seen is None else to_text(seen.root),
            clock_ms=int(self._clock() * 1000),
            keeps_models=self.level is not Level.L0 and not self.disabled,
            reloads_settings=not self.disabled,
            cluster_address=self._wanted.cluster_address if self.level is Level.L2 and not self.disabled else "",
        )

    async def look(self) -> GovernanceReport | None:
        """See what changed in the data folder; return what the control plane should hear of it, None = nothing."""
        data = self._data
        if data is None or self.policies is None:
            return None
        async with self._lock:
            try:
                stamp = await asyncio.to_thread(self._stamp_folders, data)
                if stamp == self._seen:
                    return None
                has_forgotten = await asyncio.to_thread(is_asked_to_forget, data) and await self._forget(data)
                has_pinned = await self.policies.reconsider()
                has_keys = await asyncio.to_thread(self._read_keys)
                if self.policy is not None:
                    # It has served: a runner that loses its ledger must not pin an old policy by it again.
                    await asyncio.to_thread(remove_private, data / TRUSTED_NAME)
                self._seen = stamp
            except (OSError, UnusableKey, LedgerError) as error:
                log.error("data folder cannot be looked through: %s", error)  # noqa: TRY400 - text for the owner
                return None
        return self._report() if has_forgotten or has_pinned or has_keys else None

    async def take_policies(self, offer: PolicyOffer) -> GovernanceReport | None:
        """Judge offered policies and say what came of it; None from a node that cannot keep any. Raises LedgerError."""
        if self.policies is None:
            return None
        async with self._lock:
            await self.policies.offer(offer.policies)
        return self._report()

    async def take_checkpoint(self, offer: CheckpointOffer) -> GovernanceReport | None:
        """Judge a checkpoint and say what came of it; None from a node that cannot keep any. Raises LedgerError."""
        if self.witness is None:
            return None
        async with self._lock:
            policy = self.policy
            if policy is None:  # nobody here knows yet whose signature counts
                return self._report()
            sighting = await self.witness.judge(offer, log_keys=policy.log_keys, runner_id=self.runner_id)
        return self._report(sighting)

    def _report(self, said: Sighting | None = None) -> GovernanceReport | None:
        told, word = self.describe(), said or Sighting()
        if told is None:
            return None
        return GovernanceReport(
            governance=told, witness_signature=word.signature, witness_note=word.note, witness_alarm=word.alarm
        )

    async def _forget(self, data: Path) -> bool:
        assert self.policies is not None
        assert self.witness is not None
        log.warning(
            "THE OWNER HAS THIS BOX FORGET ITS POLICY AND ITS WITNESSED CHECKPOINT; no operation until %s trust", COMMAND
        )
        await self._ledger.forget_trust(WITNESS_FACT)
        await self.policies.forget()
        self.witness.forget()
        await asyncio.to_thread(remove_private, data / FORGET_NAME)
        return True

    def _stamp_folders(self, data: Path) -> tuple[int, ...]:
        """Return what changes when a file comes to the data folder or to that of the keys, or leaves it. Raises OSError."""
        # And each minute: a key is dropped when its successor is old enough, and a file system may count changes in steps.
        folders = [data] if self._own_keys is None else [data, self._own_keys.folder]
        return int(self._clock() // 60), *(folder.stat().st_mtime_ns for folder in folders)

    def _make_first_key(self) -> None:
        assert self._own_keys is not None
        self._own_keys.ensure(self._clock())

    def _read_keys(self) -> bool:
        if self._own_keys is None:
            return False
        if dropped := self._own_keys.drop_retired(self._clock()):
            log.info("operation keys dropped, their successor is a day old kids=%s", ",".join(dropped))
        before, self._held_keys = self._held_keys, self._own_keys.read()
        return before != self._held_keys

    def _advise(self) -> str:
        if self.disabled:
            return f"Remote load/unload is off: {self.disabled}."
        if self.level is not Level.L2 or self.policy is not None or self.policies is None:
            return ""
        if self.policies.offered_fingerprint:
            return (
                f"The control plane offers a policy with the fingerprint {self.policies.offered_fingerprint}. Compare it with "
                f"what the approvers see, then run {COMMAND} trust with it on this node. Until then no operation is carried "
                "out."
            )
        return (
            "No policy is pinned, so no operation is carried out. Connect the node, get the fingerprint of the policy from the "
            f"approvers, then run {COMMAND} trust WORDS on this node."
        )


class Refusal(Exception):
    """What was asked for cannot be done; the text says why and what would help."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what is asked; return the exit status: 0, or 2 when it was refused."""
    parser = _make_parser()
    options = parser.parse_args(arguments)
    given = options.data or os.environ.get("MUSTER_DATA", "")
    try:
        if not given:
            raise Refusal("where does the node keep its data? Give --data DIR or set MUSTER_DATA")
        data = Path(given).expanduser().resolve()
        if not data.is_dir():
            raise Refusal(f"there is no folder {data}; start the node with --data {data} first")
        text = _act(options, data)
    except (Refusal, ValueError, TooManyKeys, ApprovalError) as error:
        sys.stderr.write(f"trust: {error}\n")
        return 2
    except (OSError, sqlite3.Error) as error:
        sys.stderr.write(f"trust: the data folder cannot be used: {error}; run this as the user that the node runs as\n")
        return 2
    sys.stdout.write(text + "\n")
    return 0


def _act(options: argparse.Namespace, data: Path) -> str:
    asked = [name for name in ("show", "renew_key", "forget") if getattr(options, name)]
    if len(asked) + bool(options.fingerprint) != 1:
        raise Refusal("give a fingerprint, or one of --show, --renew-key and --forget")
    if options.show:
        return show(data)
    if options.renew_key:
        return renew_key(data)
    if options.forget:
        return forget(data)
    return confirm(data, options.fingerprint)


def confirm(data: Path, parts: Sequence[str]) -> str:
    """Write down the fingerprint of the first policy. Raises Refusal, ValueError and OSError."""
    wanted = parse_fingerprint(parts)
    policies = [] if is_asked_to_forget(data) else read_ledger(data)[1]
    first = policies[0] if policies else None
    if first is not None and fingerprint_matches(wanted, first.raw):
        return "This node follows that policy already; nothing was changed."
    if first is not None:
        raise Refusal(
            f"this node follows another policy, whose first version is {spell_fingerprint(first)}. To enrol it anew, run "
            "--forget first; a new version of the same policy is taken over by itself"
        )
    write_trusted(data, wanted)
    return f"Confirmed: the first policy of this node is {wanted}. {SOON}"


def renew_key(data: Path) -> str:
    """Make another key for operation tokens. Raises Refusal, TooManyKeys and OSError."""
    keys = OpKeys(data / OP_KEYS_NAME)
    if not keys.list_kids():
        raise Refusal("the node has made no key of its own yet; it does so when it starts at level 1 or 2")
    kid = keys.renew(clock.unix_s())
    return f"Made the key {kid}; those before it are good for 24 h more. {SOON}"


def forget(data: Path) -> str:
    """Have the node forget its policy and what it witnessed. Raises OSError."""
    remove_private(data / TRUSTED_NAME)  # first, so that a node that has forgotten finds nothing to trust again
    write_private(data / FORGET_NAME, b"")
    return (
        "The node forgets its policy and the audit checkpoint it saw, and tells the control plane so. It carries out nothing "
        f"until a fingerprint is confirmed again. {SOON}"
    )


def show(data: Path) -> str:
    """Return what the runner is and believes. Raises OSError and sqlite3.Error."""
    facts, policies = read_ledger(data)
    identity, seen = json.loads(facts.get(RUNNER_FACT, "{}")), json.loads(facts.get(WITNESS_FACT, "{}"))
    confirmed = read_trusted(data)
    if policies:
        first, newest = policies[0], policies[-1]
        policy = f"{newest.ref.id} version {newest.ref.version}, {spell_fingerprint(newest)}"
        policy += f"\nconfirmed   version 1, {spell_fingerprint(first)}, sha256 {first.ref.sha256}"
    elif confirmed:
        policy = f"none pinned; confirmed and waiting to be offered: {confirmed}"
    else:
        policy = f"none pinned; run {COMMAND} trust"
    witnessed = f"{seen['origin']}, {seen['size']} entries, root {seen['root']}" if seen else "no audit checkpoint yet"
    lines = [
        f"runner id   {identity.get('runnerId') or 'not known; the box has not been started with this folder'}",
        f"level       {identity.get('level') or 'not known'}",
        f"policy      {policy}",
        f"op keys     {', '.join(OpKeys(data / OP_KEYS_NAME).list_kids()) or 'none of its own'}",
        f"witnessed   {witnessed}",
    ]
    if is_asked_to_forget(data):
        lines.append("about to forget policy and checkpoint, when the node runs")
    return "\n".join(lines)


def read_ledger(data: Path) -> tuple[dict[str, str], list[Policy]]:
    """Return the facts and the pinned policies in the ledger, while a runner may be using it. Raises sqlite3.Error."""
    path = data / FILE_NAME
    if not path.is_file():
        return {}, []
    with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=limits().ledger.busy_s)) as connection:
        if connection.execute("PRAGMA user_version").fetchone()[0] < 2:
            return {}, []  # of an earlier version of this program, which pinned nothing
        facts = dict(connection.execute("SELECT name, value FROM facts"))
        documents = connection.execute("SELECT document FROM policies ORDER BY version").fetchall()
    return facts, [read_policy(document) for (document,) in documents]


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="muster trust",
        description="Confirm on a node whose approvals it follows, and look after its keys.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("fingerprint", nargs="*", metavar="WORDS|HEX", help="the fingerprint of the first policy")
    parser.add_argument("--data", default="", metavar="DIR", help="the data folder of the node (default: MUSTER_DATA)")
    parser.add_argument("--show", action="store_true", help="print runner id, level, policy, keys and witnessed checkpoint")
    parser.add_argument("--renew-key", action="store_true", help="make another key for tokens; the old ones stay good for 24 h")
    parser.add_argument("--forget", action="store_true", help="forget policy and checkpoint, to enrol the node anew")
    return parser


if __name__ == "__main__":
    sys.exit(main())
