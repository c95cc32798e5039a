"""The stand-alone verifier of the audit log: hash chain, Merkle tree, signed checkpoints. No database, no clock.

Standard library only and nothing of ours, so that an auditor can read and run this one file:
``python auditlog.py verify EXPORT`` and ``python auditlog.py prove-check BUNDLE``. The server and the nodes use it too.

Tree: RFC 9162 section 2.1. Notes, keys and checkpoints: C2SP signed-note and tlog-checkpoint. Signatures: RFC 8032.
"""

from __future__ import annotations

import argparse
import base64
import binascii
import hashlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from pathlib import Path
from typing import NoReturn

ENTRY_DOMAIN = b"muster-audit/v1\x00"
WITNESS_DOMAIN, NAMED_WITNESS_DOMAIN = b"muster-witness/v1\x00", b"muster-witness/v2\x00"
EXPORT_FORMAT, PROOF_FORMAT = "muster-audit-export/v2", "muster-audit-proof/v1"
READ_FORMATS = (EXPORT_FORMAT, "muster-audit-export/v1")
"""The first version of an export differs in its witnesses alone, none of which signs its name."""
GENESIS = bytes(32)
"""``prev_hash`` of the first entry."""
USAGE_STATUS = 64
"""Exit status when there was nothing to judge: wrong arguments, no such file."""
SPKI_HEAD = bytes.fromhex("302a300506032b6570032100")
"""What stands before the 32 bytes of an Ed25519 key in a SubjectPublicKeyInfo (RFC 8410)."""
_SEARCHED_SEQS, _MAX_FINDINGS, _ED25519 = 1000, 20, b"\x01"


class AuditLogError(ValueError):
    """A note, key, export or bundle that cannot be read, or a signature that does not hold."""


# Merkle tree (RFC 9162 section 2.1). Leaves are passed around as leaf hashes; leaf i is entry i + 1.

Subtree = Callable[[int, int], bytes]
"""Returns the root over the leaves [lo, hi)."""


def entry_hash(seq: int, prev_hash: bytes, body: bytes) -> bytes:
    """Return the 32-byte hash of entry ``seq`` (from 1), which binds its place, its predecessor and its exact bytes."""
    head = ENTRY_DOMAIN + seq.to_bytes(8, "big") + prev_hash + len(body).to_bytes(8, "big")
    return hashlib.sha256(head + body).digest()


def leaf_hash(data: bytes) -> bytes:
    """Return the hash of a leaf; its data is the hash of an entry."""
    return hashlib.sha256(b"\x00" + data).digest()


def node_hash(left: bytes, right: bytes) -> bytes:
    """Return the hash of an inner node."""
    return hashlib.sha256(b"\x01" + left + right).digest()


@dataclass(slots=True)
class Frontier:
    """The roots of the complete subtrees that a growing tree consists of, largest first: at most one per bit of ``size``."""

    size: int = 0
    nodes: list[bytes] = field(default_factory=list)

    def append(self, leaf: bytes) -> None:
        """Add one leaf hash."""
        node, size = leaf, self.size
        while size & 1:
            node, size = node_hash(self.nodes.pop(), node), size >> 1
        self.nodes.append(node)
        self.size += 1

    def root(self) -> bytes:
        """Return the root of the tree so far."""
        if not self.nodes:
            return hashlib.sha256(b"").digest()
        result = self.nodes[-1]
        for node in reversed(self.nodes[:-1]):
            result = node_hash(node, result)
        return result

    def ranges(self) -> list[tuple[int, int]]:
        """Return which leaves [lo, hi) each of ``nodes`` covers."""
        found, lo = [], 0
        for bit in reversed(range(self.size.bit_length())):
            if self.size >> bit & 1:
                found.append((lo, lo + (1 << bit)))
                lo += 1 << bit
        return found


def root(leaves: Iterable[bytes]) -> bytes:
    """Return the root over leaf hashes."""
    frontier = Frontier()
    for leaf in leaves:
        frontier.append(leaf)
    return frontier.root()


def _split(size: int) -> int:
    """Return the largest power of two below ``size``, which is at least 2."""
    return 1 << (size - 1).bit_length() - 1


def inclusion_proof(index: int, size: int, subtree: Subtree) -> list[bytes]:
    """Return the path of leaf ``index`` (from 0) in the tree of ``size`` leaves (section 2.1.3.1)."""
    lo, hi, path = 0, size, []
    while hi - lo > 1:
        middle = lo + _split(hi - lo)
        if index < middle:
            path.append(subtree(middle, hi))
            hi = middle
        else:
            path.append(subtree(lo, middle))
            lo = middle
    return path[::-1]


def consistency_proof(old: int, size: int, subtree: Subtree) -> list[bytes]:
    """Return the proof that the tree of ``old`` leaves is the head of the one of ``size`` (section 2.1.4.1)."""
    lo, hi, path, has_moved = 0, size, [], False
    while 0 < old < hi:
        middle = lo + _split(hi - lo)
        if old <= middle:
            path.append(subtree(middle, hi))
            hi = middle
        else:
            path.append(subtree(lo, middle))
            lo, has_moved = middle, True
    return [*([subtree(lo, hi)] if has_moved else []), *path[::-1]]


def verify_inclusion(*, leaf: bytes, index: int, size: int, proof: Sequence[bytes], expected: bytes) -> bool:
    """Return whether ``proof`` puts the leaf hash at ``index`` of the tree with that root (section 2.1.3.2)."""
    if not 0 <= index < size:
        return False
    at, last, result = index, size - 1, leaf
    for node in proof:
        if last == 0:
            return False
        if at & 1 or at == last:
            result = node_hash(node, result)
            while not at & 1 and at:
                at, last = at >> 1, last >> 1
        else:
            result = node_hash(result, node)
        at, last = at >> 1, last >> 1
    return last == 0 and result == expected


def verify_consistency(*, old: int, size: int, old_root: bytes, new_root: bytes, proof: Sequence[bytes]) -> bool:
    """Return whether the tree of ``old`` leaves is the head of the one of ``size`` (section 2.1.4.2). All begin with none."""
    if old == size or old == 0:
        return not proof and 0 <= old <= size and (old == 0 or old_root == new_root)
    path = [*([old_root] if old & (old - 1) == 0 else []), *proof]
    if not 0 < old < size or not path:
        return False
    at, last = old - 1, size - 1
    while at & 1:
        at, last = at >> 1, last >> 1
    was = now = path[0]
    for node in path[1:]:
        if last == 0:
            return False
        if at & 1 or at == last:
            was, now = node_hash(node, was), node_hash(node, now)
            while not at & 1 and at:
                at, last = at >> 1, last >> 1
        else:
            now = node_hash(now, node)
        at, last = at >> 1, last >> 1
    return last == 0 and was == old_root and now == new_root


# Ed25519, verifying only (RFC 8032 section 5.1.7, without the cofactor). Nothing here is secret, so nothing is constant time.

_P, _L = 2**255 - 19, 2**252 + 27742317777372353535851937790883648493
_D, _ROOT_OF_MINUS_1 = -121665 * pow(121666, -1, _P) % _P, pow(2, (_P - 1) // 4, _P)
_Point = tuple[int, int, int, int]


def _add(a: _Point, b: _Point) -> _Point:
    low, high = (a[1] - a[0]) * (b[1] - b[0]) % _P, (a[1] + a[0]) * (b[1] + b[0]) % _P
    both, z = 2 * a[3] * b[3] * _D % _P, 2 * a[2] * b[2] % _P
    e, f, g, h = high - low, z - both, z + both, high + low
    return e * f % _P, g * h % _P, f * g % _P, e * h % _P


def _decode_point(raw: bytes) -> _Point | None:
    y, sign = int.from_bytes(raw, "little") & (1 << 255) - 1, raw[31] >> 7
    u, v = (y * y - 1) % _P, (_D * y * y + 1) % _P
    x = u * pow(v, 3, _P) * pow(u * pow(v, 7, _P), (_P - 5) // 8, _P) % _P
    if v * x * x % _P == -u % _P:
        x = x * _ROOT_OF_MINUS_1 % _P
    if y >= _P or v * x * x % _P != u or (x == 0 and sign):
        return None
    x = x if x & 1 == sign else _P - x
    return x, y, 1, x * y % _P


_BASE = _decode_point((4 * pow(5, -1, _P) % _P).to_bytes(32, "little"))


def verify_signature(public_key: bytes, message: bytes, signature: bytes) -> bool:
    """Return whether an Ed25519 signature holds. The key is its 32 bytes, or a SubjectPublicKeyInfo."""
    raw = public_key.removeprefix(SPKI_HEAD)
    key = _decode_point(raw) if len(raw) == 32 and len(signature) == 64 else None
    s = int.from_bytes(signature[32:], "little")
    if key is None or _BASE is None or s >= _L:
        return False
    k = int.from_bytes(hashlib.sha512(signature[:32] + raw + message).digest(), "little") % _L
    minus_key = (_P - key[0], key[1], 1, _P - key[3])
    table = (None, _BASE, minus_key, _add(_BASE, minus_key))
    point: _Point = (0, 1, 1, 0)
    for bit in reversed(range(253)):
        point = _add(point, point)
        term = table[(s >> bit & 1) + 2 * (k >> bit & 1)]
        point = point if term is None else _add(point, term)
    inverse = pow(point[2], -1, _P)
    encoded = point[1] * inverse % _P | (point[0] * inverse % _P & 1) << 255
    return encoded.to_bytes(32, "little") == signature[:32]


Check = Callable[[bytes, bytes, bytes], bool]
"""Verifies (public key, message, signature). A faster one than ours may be passed in."""


# Names and signatures as C2SP writes them: log keys, checkpoints, notes


def to_text(raw: bytes) -> str:
    """Return base64 as C2SP and the export write it."""
    return base64.b64encode(raw).decode()


def to_bytes(text: object) -> bytes:
    """Read base64. Raises AuditLogError."""
    try:
        return base64.b64decode(str(text), validate=True)
    except (binascii.Error, ValueError):
        raise AuditLogError(f"{str(text)[:40]!r} is not base64") from None


@dataclass(frozen=True, slots=True)
class LogKey:
    """Name and 32-byte Ed25519 key of a log; its text is a C2SP verifier key, ``name+hash+base64``."""

    name: str
    public: bytes

    @property
    def keyid(self) -> bytes:
        """The four bytes by which a signature names its key."""
        return hashlib.sha256(self.name.encode() + b"\n" + _ED25519 + self.public).digest()[:4]

    def __str__(self) -> str:
        return f"{self.name}+{self.keyid.hex()}+{to_text(_ED25519 + self.public)}"

    @classmethod
    def parse(cls, text: str) -> LogKey:
        """Read a verifier key. Raises AuditLogError."""
        name, plus, rest = text.strip().partition("+")
        keyid, _, encoded = rest.partition("+")
        raw = to_bytes(encoded)
        key = cls(name, raw[1:])
        if not (name and plus and len(raw) == 33 and raw[:1] == _ED25519 and key.keyid.hex() == keyid):
            raise AuditLogError("not a verifier key of Ed25519: name+8 hex digits+base64")
        return key


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What a log says of itself: the root over its first ``size`` entries."""

    origin: str
    size: int
    root: bytes

    def text(self) -> str:
        """Return the text that is signed, with its last newline."""
        return f"{self.origin}\n{self.size}\n{to_text(self.root)}\n"

    def note(self, key: LogKey, signature: bytes) -> str:
        """Return the signed note: the text, an empty line, the signature."""
        return f"{self.text()}\n\u2014 {key.name} {to_text(key.keyid + signature)}\n"

    def witness_message(self, name: str) -> bytes:
        """Return what the node of that name signs to say that it saw this checkpoint; "" = in the form that names nobody."""
        if not name:
            return WITNESS_DOMAIN + self.text().encode()
        named = name.encode()
        return NAMED_WITNESS_DOMAIN + len(named).to_bytes(8, "big") + named + self.text().encode()


def open_note(note: str, keys: Iterable[LogKey], check: Check = verify_signature) -> Checkpoint:
    """Return the checkpoint in a note that one of ``keys`` signed; signatures of others count for nothing.

    Raises AuditLogError.
    """
    text, separator, signatures = note.rpartition("\n\n")
    text += "\n"
    lines = text.split("\n")
    if not separator or len(lines) < 4 or not lines[0] or not (lines[1].isascii() and lines[1].isdigit()):
        raise AuditLogError("not a checkpoint: origin, size, root, an empty line, signatures")
    checkpoint = Checkpoint(lines[0], int(lines[1]), to_bytes(lines[2]))
    trusted = list(keys)
    for line in signatures.splitlines():
        dash, _, rest = line.partition(" ")
        name, _, encoded = rest.partition(" ")
        raw = to_bytes(encoded)
        for key in trusted:
            if dash == "\u2014" and key.name == name == checkpoint.origin and key.keyid == raw[:4]:
                if len(checkpoint.root) == 32 and check(key.public, text.encode(), raw[4:]):
                    return checkpoint
                raise AuditLogError(f"the signature of checkpoint {checkpoint.size} does not hold")
    raise AuditLogError(f"checkpoint {checkpoint.size} is not signed by a log key that was given")


# What a log consists of, in the order in which it is read


@dataclass(frozen=True, slots=True)
class Entry:
    """One place of the chain. ``body`` is None where the event is gone; ``columns`` is what a table shows in its place."""

    seq: int
    prev_hash: bytes
    hash: bytes
    body: bytes | None
    columns: Mapping[str, object] | None = None


@dataclass(frozen=True, slots=True)
class Seal:
    """A signed checkpoint. It stands right behind the entry that it ends with, or behind the last one."""

    note: str


@dataclass(frozen=True, slots=True)
class Witness:
    """A checkpoint that a node has seen, signed by the node. It stands where a ``Seal`` of its size would, behind that one.

    ``node``: its runner id, which it signs too; of a node of an earlier release a name that nobody signed.
    ``note``: the checkpoint as the log signed it, by which the node proves that it was told so; "" = it has none to show.
    """

    node: str
    size: int
    root: bytes
    signature: bytes
    public_key: bytes
    note: str = ""


@dataclass(frozen=True, slots=True)
class Stray:
    """Something outside the chain: an event without an entry, or (``is_line``) a line of an export that nobody can read."""

    name: str
    is_line: bool = False


Record = Entry | Seal | Witness | Stray


class Kind(StrEnum):
    """What is wrong."""

    EDITED = "edited"
    MISSING = "missing"
    REORDERED = "reordered"
    INSERTED = "inserted"
    TRUNCATED = "truncated"
    SIGNATURE = "signature"
    INCONSISTENT = "inconsistent"


class Status(IntEnum):
    """How a verification ends; the exit status of the commands."""

    GOOD = 0
    BROKEN = 1
    TRUNCATED = 2
    INCONSISTENT = 3
    UNWITNESSED = 4


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing wrong at entry ``seq``."""

    kind: Kind
    seq: int
    text: str

    @property
    def status(self) -> Status:
        """How a log with this finding alone would end."""
        known = {Kind.TRUNCATED: Status.TRUNCATED, Kind.SIGNATURE: Status.INCONSISTENT, Kind.INCONSISTENT: Status.INCONSISTENT}
        return known.get(self.kind, Status.BROKEN)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Outcome. ``size`` and ``root`` are of the entries that verified; ``seals`` and ``witnesses`` are how many were compared.

    ``sealed``: up to which entry a signed checkpoint agrees. ``unproven``: how many witnesses show no checkpoint that the log
    signed; they count for nothing, or a node could make it up. ``unnamed``: how many of the others did not sign their name.
    """

    status: Status
    findings: tuple[Finding, ...]
    size: int
    root: bytes
    seals: int
    witnesses: int
    sealed: int = 0
    unproven: int = 0
    unnamed: int = 0

    def lines(self) -> list[str]:
        """Return the outcome for a person."""
        head = f"{self.status.name.lower()}: {self.size} entries verified, root {to_text(self.root)}"
        found = [f"entry {finding.seq}: {finding.kind.value}: {finding.text}" for finding in self.findings]
        if self.status is Status.UNWITNESSED:
            found.append("no signed checkpoint covers any of it: whoever can write to the database could have made it up whole")
        elif self.sealed < self.size:
            found.append(f"entries {self.sealed + 1} to {self.size} are covered by no signed checkpoint yet")
        if self.unnamed:
            found.append(f"{self.unnamed} witness statements do not sign the name that they stand under")
        if self.unproven:
            found.append(f"{self.unproven} witness statements show no checkpoint that the log signed, and count for nothing")
        return [f"{head}, {self.seals} checkpoints and {self.witnesses} witness statements agree", *found]


class Verifier:
    """Reads a log record by record, in constant memory, and says what is wrong with it.

    The first defect of the chain is named; from there on the rest is read only to tell its kind and to check signatures.
    ``pinned`` are checkpoints known from elsewhere. ``size_claimed`` is how long the log says that it is.
    """

    def __init__(
        self,
        *,
        keys: Iterable[LogKey],
        origin: str,
        pinned: Iterable[Checkpoint] = (),
        size_claimed: int = 0,
        check: Check = verify_signature,
    ) -> None:
        self._keys, self._origin, self._check, self._size_claimed = tuple(keys), origin, check, size_claimed
        self._frontier, self._last, self._before_last = Frontier(), GENESIS, b""
        self._broken: Finding | None = None
        self._suspect: Entry | None = None
        self._findings: list[Finding] = []
        self._awaited: dict[int, list[tuple[str, bytes]]] = {}
        self._seals = self._witnesses = self._sealed = self._unproven = self._unnamed = 0
        self._last_seal: tuple[int, bytes] | None = None
        for checkpoint in pinned:
            self._expect("a checkpoint you gave", checkpoint.size, checkpoint.root)

    def feed(self, record: Record) -> None:
        """Take the next record."""
        match record:
            case Entry() if self._broken is not None:
                self._look_ahead(record)
            case Entry():
                self._take_entry(record)
            case Seal(note):
                self._take_seal(note)
            case Witness():
                self._take_witness(record)
            case Stray(name, is_line):
                kind = Kind.EDITED if is_line else Kind.INSERTED
                text = f"{name} cannot be read" if is_line else f"{name} is not part of the chain"
                self._broken = self._broken or Finding(kind, self._frontier.size + 1, text)

    def finish(self) -> Verdict:
        """Return the outcome."""
        size, broken = self._frontier.size, self._broken
        if broken is None:
            for beyond, claims in sorted(self._awaited.items()):
                self._find(Kind.TRUNCATED, size + 1, f"{claims[0][0]} covers {beyond} entries, the log has {size}")
            if self._size_claimed > size:
                self._find(Kind.TRUNCATED, size + 1, f"the log says that it has {self._size_claimed} entries")
        # What is wrong inside comes first, then what was signed and does not agree, then what is only gone.
        order = (Status.BROKEN, Status.INCONSISTENT, Status.TRUNCATED)
        findings = sorted([*([broken] if broken else []), *self._findings], key=lambda found: order.index(found.status))
        status = Status.GOOD if self._sealed or not size else Status.UNWITNESSED
        status = findings[0].status if findings else status
        counts = (self._seals, self._witnesses, self._sealed, self._unproven, self._unnamed)
        return Verdict(status, tuple(findings[:_MAX_FINDINGS]), size, self._frontier.root(), *counts)

    def _take_entry(self, entry: Entry) -> None:
        place, body = self._frontier.size + 1, entry.body
        follows = (entry.seq, entry.prev_hash) == (place, self._last)
        if not follows or body is None or entry_hash(place, self._last, body) != entry.hash or not _shows(entry.columns, body):
            self._broken, self._suspect = self._judge(entry, place), entry
            return
        self._before_last, self._last = self._last, entry.hash
        self._frontier.append(leaf_hash(entry.hash))
        self._compare(place)

    def _judge(self, entry: Entry, place: int) -> Finding:
        """Name the first defect from the first entry that does not fit."""
        true = self._true_place(entry, place)
        if entry.body is None:
            return Finding(Kind.MISSING, place, "its event is gone")
        if true == place - 1 and entry.prev_hash == self._before_last and entry.hash != self._last:
            return Finding(Kind.INSERTED, place - 1, "two entries follow the same predecessor")
        if true == place == entry.seq:
            if entry.prev_hash == self._last:
                return Finding(Kind.EDITED, place, "the event shows other values than those that were recorded")
            return Finding(Kind.EDITED, max(1, place - 1), "the next entry follows an entry with another hash")
        if true == place:
            return Finding(Kind.EDITED, place, f"its number was changed to {entry.seq}")
        if (true or entry.seq) < place:
            return Finding(Kind.INSERTED, place, "an entry that does not belong here")
        if (true or entry.seq) > place:
            return Finding(Kind.MISSING, place, f"what follows is entry {true or entry.seq}")
        return Finding(Kind.EDITED, place, "its hash is not that of its content")

    def _true_place(self, entry: Entry, place: int) -> int | None:
        """Return the number for which the entry's own hash holds; None = none, so somebody changed it."""
        if entry.body is None:
            return None
        near = range(max(1, place - _SEARCHED_SEQS), place + _SEARCHED_SEQS)
        for seq in (entry.seq, place, place - 1, *sorted(near, key=lambda seq: abs(seq - place))):
            if 0 < seq < 1 << 63 and entry_hash(seq, entry.prev_hash, entry.body) == entry.hash:
                return seq
        return None

    def _look_ahead(self, entry: Entry) -> None:
        """Tell moved entries from lost or changed ones: does what belongs at the broken place come later?"""
        broken, suspect = self._broken, self._suspect
        if broken is None or suspect is None or entry.body is None or broken.seq != self._frontier.size + 1:
            return
        genuine = entry_hash(broken.seq, self._last, entry.body)
        if genuine == entry.hash and broken.kind is Kind.EDITED and suspect.hash != genuine:
            self._broken = Finding(Kind.INSERTED, broken.seq, "an entry that does not belong here")
        elif genuine == entry.hash and broken.kind is Kind.MISSING:
            self._broken = Finding(Kind.REORDERED, broken.seq, "the entry that belongs here comes later")
        elif genuine == suspect.hash and suspect.body is not None and entry.body != suspect.body:
            self._broken = Finding(Kind.REORDERED, broken.seq, "the content that belongs here comes later")
        else:
            return
        self._suspect = None

    def _take_seal(self, note: str) -> None:
        try:
            checkpoint = open_note(note, self._keys, self._check)
        except AuditLogError as error:
            self._find(Kind.SIGNATURE, self._frontier.size, str(error))
            return
        if checkpoint.origin != self._origin:
            self._find(Kind.SIGNATURE, checkpoint.size, f"the checkpoint is of another log, {checkpoint.origin}")
            return
        self._seals += 1
        self._last_seal = (checkpoint.size, checkpoint.root)
        self._expect("a checkpoint", checkpoint.size, checkpoint.root)

    def _take_witness(self, seen: Witness) -> None:
        checkpoint = Checkpoint(self._origin, seen.size, seen.root)
        is_named = self._check(seen.public_key, checkpoint.witness_message(seen.node), seen.signature)
        if not is_named and not self._check(seen.public_key, checkpoint.witness_message(""), seen.signature):
            self._find(Kind.SIGNATURE, seen.size, f"the signature of witness {seen.node} does not hold")
            return
        if not self._is_proven(seen):
            self._unproven += 1
            return
        self._witnesses += 1
        self._unnamed += not is_named
        self._expect(f"witness {seen.node}{'' if is_named else ' (which did not sign its name)'}", seen.size, seen.root)

    def _is_proven(self, seen: Witness) -> bool:
        """Return whether the log signed what a node says that it saw: by the note it shows, or by the seal before it."""
        if (seen.size, seen.root) == self._last_seal:
            return True
        try:
            return open_note(seen.note, self._keys, self._check) == Checkpoint(self._origin, seen.size, seen.root)
        except AuditLogError:
            return False

    def _expect(self, who: str, size: int, claimed: bytes) -> None:
        if self._broken is not None:
            return
        if size < self._frontier.size:
            self._find(Kind.INCONSISTENT, size, f"{who} stands behind entry {self._frontier.size}, where it cannot be compared")
            return
        self._awaited.setdefault(size, []).append((who, claimed))
        self._compare(self._frontier.size)

    def _compare(self, size: int) -> None:
        for who, claimed in self._awaited.pop(size, ()):
            if claimed == self._frontier.root():
                self._sealed = size
            else:
                self._find(Kind.INCONSISTENT, size, f"{who} has another root: the log was rewritten at or before here")

    def _find(self, kind: Kind, seq: int, text: str) -> None:
        if len(self._findings) < _MAX_FINDINGS or kind not in {found.kind for found in self._findings}:
            self._findings.append(Finding(kind, seq, text))


def _shows(columns: Mapping[str, object] | None, body: bytes) -> bool:
    try:
        return columns is None or json.loads(body) == columns
    except ValueError:
        return False


# Files: an export is one JSON object a line, the header first; a proof is one JSON object


def render_header(*, origin: str, keys: Iterable[LogKey], size: int) -> str:
    """Return the first line of an export."""
    return json.dumps({"format": EXPORT_FORMAT, "origin": origin, "keys": [str(key) for key in keys], "size": size})


def render(record: Record) -> str:
    """Return the line of a record. Columns are written only where they differ from the body, which is a defect."""
    line: dict[str, object]
    match record:
        case Entry(seq, prev_hash, hashed, body, columns):
            line = {"seq": seq, "prev": to_text(prev_hash), "hash": to_text(hashed)}
            line["body"] = None if body is None else to_text(body)
            if body is not None and not _shows(columns, body):
                line["columns"] = columns
        case Seal(note):
            line = {"checkpoint": note}
        case Witness(node, size, seen, signature, public_key, note):
            line = {"witness": node, "size": size, "root": to_text(seen)}
            line |= {"signature": to_text(signature), "key": to_text(public_key), "note": note}
        case Stray(name):
            line = {"stray": name}
    return json.dumps(line)


def read_header(line: str) -> tuple[str, list[LogKey], int]:
    """Return origin, keys and size of an export's first line. Raises AuditLogError."""
    try:
        header = json.loads(line)
        if header["format"] in READ_FORMATS:
            return str(header["origin"]), [LogKey.parse(str(key)) for key in header["keys"]], int(header["size"])
    except (LookupError, TypeError, ValueError) as error:
        raise AuditLogError(f"the first line is not the header of an export: {error}") from None
    raise AuditLogError(f"not an export of the format {EXPORT_FORMAT}")


def read_records(lines: Iterable[str]) -> Iterator[Record]:
    """Yield the records of the lines behind the header. A line that cannot be read is a ``Stray``."""
    for number, line in enumerate(lines, 2):
        try:
            yield _read_record(json.loads(line))
        except (LookupError, TypeError, ValueError):
            yield Stray(f"line {number}", is_line=True)


def _read_record(line: Mapping[str, object]) -> Record:
    if "checkpoint" in line:
        return Seal(str(line["checkpoint"]))
    if "witness" in line:
        size, seen = int(str(line["size"])), to_bytes(line["root"])
        signature, public_key, note = to_bytes(line["signature"]), to_bytes(line["key"]), str(line.get("note", ""))
        return Witness(str(line["witness"]), size, seen, signature, public_key, note)
    if "stray" in line:
        return Stray(str(line["stray"]))
    body, columns = line["body"], line.get("columns")
    raw = None if body is None else to_bytes(body)
    shown = columns if isinstance(columns, dict) else None
    return Entry(int(str(line["seq"])), to_bytes(line["prev"]), to_bytes(line["hash"]), raw, shown)


def verify_export(lines: Iterator[str], *, keys: Sequence[LogKey] = (), pinned: Iterable[Checkpoint] = ()) -> Verdict:
    """Judge an export. Without ``keys`` it is judged by the keys that it names itself. Raises AuditLogError on its header."""
    origin, own_keys, size = read_header(next(lines, ""))
    verifier = Verifier(keys=keys or own_keys, origin=origin, pinned=pinned, size_claimed=size)
    for record in read_records(lines):
        verifier.feed(record)
    return verifier.finish()


def check_proof(proof: Mapping[str, object], *, keys: Sequence[LogKey] = (), check: Check = verify_signature) -> int:
    """Return how many events the proof of an operation holds, all of them in the log of its checkpoint.

    Without ``keys`` the keys are used that it names itself. Raises AuditLogError, saying what does not hold.
    """
    try:
        if proof["format"] != PROOF_FORMAT:
            raise AuditLogError(f"not a proof of the format {PROOF_FORMAT}")
        named, events = proof["keys"], proof["events"]
        if not isinstance(named, list) or not isinstance(events, list) or not events:
            raise AuditLogError("a proof without keys or without events")
        checkpoint = open_note(str(proof["checkpoint"]), keys or [LogKey.parse(str(key)) for key in named], check)
        for event in events:
            _check_event(event, str(proof["opId"]), checkpoint)
    except (LookupError, TypeError) as error:
        raise AuditLogError(f"not a proof: {error!r}") from None
    return len(events)


def _check_event(event: Mapping[str, object], op_id: str, checkpoint: Checkpoint) -> None:
    seq, body, hashed, path = int(str(event["seq"])), to_bytes(event["body"]), to_bytes(event["hash"]), event["path"]
    if entry_hash(seq, to_bytes(event["prev"]), body) != hashed:
        raise AuditLogError(f"entry {seq}: its hash is not that of its content")
    if json.loads(body).get("op_id") != op_id:
        raise AuditLogError(f"entry {seq} is not about operation {op_id}")
    steps = [to_bytes(step) for step in path] if isinstance(path, list) else []
    size, expected = checkpoint.size, checkpoint.root
    if not verify_inclusion(leaf=leaf_hash(hashed), index=seq - 1, size=size, proof=steps, expected=expected):
        raise AuditLogError(f"entry {seq} is not in the log of checkpoint {size}")


class _Parser(argparse.ArgumentParser):
    """Ends with a status of its own on wrong arguments: argparse's is 2, which here means a log that was cut off."""

    def error(self, message: str) -> NoReturn:
        self.exit(USAGE_STATUS, f"{self.prog}: {message}\n")


def main(argv: Sequence[str]) -> int:
    """Run ``verify EXPORT`` or ``prove-check BUNDLE``. Returns 0 to 4 (``Status``), or 64 when nothing could be read."""
    parser = _Parser(prog="auditlog.py", description="Check an export or a proof of Muster's audit log.")
    parser.add_argument("command", choices=["verify", "prove-check"])
    parser.add_argument("file", type=Path)
    parser.add_argument("--key", action="append", default=[], help="the log's key, from elsewhere than the file")
    parser.add_argument("--checkpoint", type=Path, action="append", default=[], help="a note that you kept: must agree")
    options = parser.parse_args(argv)
    try:
        keys = [LogKey.parse(text) for text in options.key]
        if not keys:
            sys.stderr.write("no --key given: judged by the key that the file names itself\n")
        if options.command == "prove-check":
            sys.stdout.write(f"good: {check_proof(json.loads(options.file.read_text()), keys=keys)} events are in the log\n")
            return Status.GOOD
        with options.file.open(encoding="utf-8", errors="replace") as lines:
            origin_keys = keys or read_header(next(lines, ""))[1]
            pinned = [open_note(path.read_text(encoding="utf-8"), origin_keys) for path in options.checkpoint]
            lines.seek(0)
            verdict = verify_export(iter(lines), keys=keys, pinned=pinned)
    except (OSError, AuditLogError, ValueError) as error:
        sys.stdout.write(f"{error}\n")
        is_unread = isinstance(error, OSError) or options.command == "verify"
        return USAGE_STATUS if is_unread else Status.BROKEN
    sys.stdout.write("\n".join(verdict.lines()) + "\n")
    return verdict.status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
