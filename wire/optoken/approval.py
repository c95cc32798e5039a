"""The stand-alone verifier of approvals: who signed what, and whether the policy finds that enough.

Standard library and ``cryptography`` only, nothing of ours, so that an auditor can read and run this one file:
``python approval.py BUNDLE``. The GPU node, the control plane and the auditor all use it. No clock; no file but in ``main``.

Statement and policy are canonical JSON (RFC 8785 without floats); people sign ``SHA-256(domain || 00 || statement)``, as the
challenge of a WebAuthn assertion (W3C Web Authentication Level 3, section 7.2) or with an Ed25519 key (RFC 8032).
"""

from __future__ import annotations

import base64
import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import combinations

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, padding, rsa
from cryptography.hazmat.primitives.hashes import SHA256

MAX_STATEMENT_BYTES, MAX_POLICY_BYTES, MAX_DEPTH, MAX_INTEGER = 8192, 65536, 8, 2**53 - 1
MAX_TARGETS, MAX_PROOFS, MAX_APPROVERS, MAX_KEYS_EACH, MAX_TEXT_CHARS = 64, 16, 64, 8, 300
MAX_CLASSES, MAX_FACTORS, MAX_ENCODED_CHARS = 64, 6, 2 * MAX_POLICY_BYTES
CLOCK_SKEW_S = 60  # a node whose clock is behind by this much still takes an approval in its first moment
STATEMENT_DOMAIN, RECEIPT_DOMAIN = b"op-statement/v1\x00", b"op-receipt/v1\x00"
BREAK_GLASS, POLICY_CHANGE = "break-glass", "policy-change"
_USER_PRESENT, _USER_VERIFIED, _BACKUP_ELIGIBLE, _BACKED_UP = 0x01, 0x04, 0x08, 0x10
_CONSONANTS, _VOWELS = "bdfghjklmnprstvz", "aiou"


class Rule(StrEnum):
    """The rule that refused. The value is the stable code that machines see."""

    NOT_CANONICAL = "not_canonical"
    BAD_STATEMENT = "bad_statement"
    BAD_POLICY = "bad_policy"
    BAD_PROOF = "bad_proof"
    BAD_RECEIPT = "bad_receipt"
    WRONG_POLICY = "wrong_policy"
    UNKNOWN_CLASS = "unknown_class"
    TOO_MANY_USES = "too_many_uses"
    WINDOW_TOO_LONG = "window_too_long"
    UNKNOWN_KEY = "unknown_key"
    WRONG_KEY_CLASS = "wrong_key_class"
    WRONG_CHALLENGE = "wrong_challenge"
    WRONG_ORIGIN = "wrong_origin"
    NOT_VERIFIED_BY_USER = "not_verified_by_user"
    NOT_DEVICE_BOUND = "not_device_bound"
    BAD_SIGNATURE = "bad_proof_signature"
    DUPLICATE_PROOF = "duplicate_proof"
    REQUESTER_APPROVES = "requester_approves"
    TOO_FEW_APPROVERS = "too_few_approvers"
    MISSING_FACTOR = "missing_factor"
    NOT_YET = "not_yet"
    TOO_LATE = "too_late"
    POLICY_ROLLBACK = "policy_rollback"
    POLICY_EXPIRED = "policy_expired"


class ApprovalError(Exception):
    """An approval that does not hold: ``rule`` refused, the text says what would satisfy it."""

    def __init__(self, rule: Rule, text: str) -> None:
        super().__init__(text)
        self.rule = rule


# Canonical JSON


def canonical(value: object) -> bytes:
    """Return the one encoding of a JSON value without floats and nulls. Raises ApprovalError."""
    _check_value(value, depth=0)
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), sort_keys=True).encode()


def read_canonical(raw: bytes, *, limit: int) -> dict[str, object]:
    """Return the object that ``raw`` is the canonical encoding of. Raises ApprovalError: any other spelling is refused."""
    if len(raw) > limit:
        raise ApprovalError(Rule.NOT_CANONICAL, f"more than {limit} bytes")
    try:
        value = json.loads(raw.decode(), object_pairs_hook=_unique)
        if not isinstance(value, dict) or canonical(value) != raw:
            raise ApprovalError(Rule.NOT_CANONICAL, "not the canonical encoding of a JSON object")
    except (ValueError, RecursionError):
        raise ApprovalError(Rule.NOT_CANONICAL, "not JSON, or a name occurs twice") from None
    return value


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise ValueError("duplicate name")
    return members


def _check_value(value: object, *, depth: int) -> None:
    if depth > MAX_DEPTH:
        raise ApprovalError(Rule.NOT_CANONICAL, f"nested deeper than {MAX_DEPTH}")
    match value:
        case bool():
            return
        case int() if abs(value) <= MAX_INTEGER:
            return
        case str() if value.isprintable():  # no control and no direction characters, no lone surrogates: people read this
            return
        case list() | tuple():
            for item in value:
                _check_value(item, depth=depth + 1)
        case dict():
            for name, item in value.items():
                if not (isinstance(name, str) and name.isascii() and name.isprintable()):
                    raise ApprovalError(Rule.NOT_CANONICAL, "a name that is not printable ASCII")
                _check_value(item, depth=depth + 1)
        case _:
            raise ApprovalError(Rule.NOT_CANONICAL, "only text, whole numbers, true, false, lists and objects can be signed")


def encode_bytes(data: bytes) -> str:
    """Return unpadded base64url (RFC 4648 section 5)."""
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def decode_bytes(text: object) -> bytes:
    """Return the bytes of unpadded base64url. Raises ApprovalError for anything but their one spelling."""
    if isinstance(text, str) and text.isascii() and len(text) <= MAX_ENCODED_CHARS:
        try:
            data = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
        except ValueError:
            data = b""
        if encode_bytes(data) == text:
            return data
    raise ApprovalError(Rule.BAD_PROOF, "not base64url without padding")


def policy_words(sha256: str) -> str:
    """Return the fingerprint of a policy as twelve words.

    Six are enough for a statement, whose whole digest is signed. A policy is confirmed by its words alone, and whoever writes
    two policies must not find a pair with the same ones: 192 bits make that 2^96 tries.
    """
    return digest_words(bytes.fromhex(sha256), count=12)


def digest_words(digest: bytes, *, count: int = 6) -> str:
    """Return the first bits of a digest, 16 each, as words that can be read aloud (proquints: Wilkerson, arXiv:0901.4016)."""
    words = []
    for i in range(0, 2 * count, 2):
        n = int.from_bytes(digest[i : i + 2])
        words.append(
            _CONSONANTS[n >> 12] + _VOWELS[n >> 10 & 3] + _CONSONANTS[n >> 6 & 15] + _VOWELS[n >> 4 & 3] + _CONSONANTS[n & 15]
        )
    return "-".join(words)


# What is signed


@dataclass(frozen=True, slots=True)
class PolicyRef:
    """Which policy an operation is asked for under. ``sha256``: of the document, 64 hex digits."""

    id: str
    version: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Statement:
    """What approvers sign. ``raw`` are the very bytes; times are Unix seconds; ``targets`` name nodes or things."""

    raw: bytes
    version: int
    op_id: str
    operation: str
    op_class: str
    targets: tuple[str, ...]
    params: Mapping[str, object]
    policy: PolicyRef
    requested_by: str
    reason_digest: str
    requested_at: int
    not_before: int
    not_after: int
    max_uses: int
    stops_on_failure: bool  # the targets behind a failed one are left alone: version 2 says whether, version 1 always means it

    @property
    def digest(self) -> bytes:
        """The 32 bytes that approvers sign."""
        return hashlib.sha256(STATEMENT_DOMAIN + self.raw).digest()


def read_statement(raw: bytes) -> Statement:
    """Return the statement whose canonical bytes are ``raw``. Raises ApprovalError (not_canonical, bad_statement)."""
    bad = Rule.BAD_STATEMENT
    names = "v opId operation class targets params policy requestedBy reasonDigest requestedAt notBefore notAfter maxUses"
    found = read_canonical(raw, limit=MAX_STATEMENT_BYTES)
    version = _whole(found, "v", bad)
    members = _object(found, names if version == 1 else f"{names} stopsOnFailure", bad)
    policy, params = _object(members["policy"], "id version sha256", bad), members["params"]
    if version not in {1, 2} or not isinstance(params, dict):
        raise ApprovalError(bad, "version 1 or 2 with an object of params is what can be read")
    targets = _texts(members, "targets", bad)
    if not 1 <= len(targets) <= MAX_TARGETS:
        raise ApprovalError(bad, f"targets must be 1 to {MAX_TARGETS} names")
    return Statement(
        raw=raw, version=version, op_id=_text(members, "opId", bad), operation=_text(members, "operation", bad),
        op_class=_text(members, "class", bad), targets=targets, params=params,
        policy=PolicyRef(_text(policy, "id", bad), _whole(policy, "version", bad, least=1), _text(policy, "sha256", bad)),
        requested_by=_text(members, "requestedBy", bad), reason_digest=_text(members, "reasonDigest", bad),
        requested_at=_whole(members, "requestedAt", bad), not_before=_whole(members, "notBefore", bad),
        not_after=_whole(members, "notAfter", bad), max_uses=_whole(members, "maxUses", bad, least=1),
        stops_on_failure=version == 1 or _flag(members, "stopsOnFailure", bad),
    )  # fmt: skip


# The policy

PublicKey = ec.EllipticCurvePublicKey | ed25519.Ed25519PublicKey | rsa.RSAPublicKey


@dataclass(frozen=True, slots=True)
class Key:
    """A public key of an approver. ``kind``: webauthn or ed25519. ``thumbprint``: SHA-256 of its SPKI DER, hex."""

    approver: str
    keyid: str
    kind: str
    public_key: PublicKey = field(repr=False)
    thumbprint: str
    is_break_glass: bool


@dataclass(frozen=True, slots=True)
class OperationClass:
    """What a class of operations needs. ``factors``: how many of which group, one person counting for one factor.

    ``life_s``: how long a request may wait for approvals; ``usable_s``: longest time from notBefore to notAfter;
    ``file_proofs``: how many proofs must come from Ed25519 keys; ``solo``: the requester may count; ``device_bound``: passkeys
    that can be copied do not count, key files only if ``file_proofs`` asks; ``daily_cap``: uses that a node allows
    in 24 h, 0 = no cap (break-glass always has one). The requester chooses the class, and approvers sign its name: an operation
    that stands in several classes is as well guarded as the weakest of them.
    """

    name: str
    operations: frozenset[str]
    threshold: int
    factors: Mapping[str, int]
    deny_threshold: int
    life_s: int
    usable_s: int
    max_uses: int
    file_proofs: int
    daily_cap: int
    solo: bool
    device_bound: bool
    proposers: tuple[str, ...]

    @property
    def required(self) -> int:
        """How many people must approve at least."""
        return max(self.threshold, sum(self.factors.values()))


@dataclass(frozen=True, slots=True)
class Policy:
    """Who may approve what. ``groups``: approver → groups. ``previous``: SHA-256 of the version before, "" for version 1."""

    raw: bytes
    ref: PolicyRef
    previous: str
    expires_at: int
    origins: frozenset[str]
    rp_ids: frozenset[str]
    log_keys: tuple[str, ...]
    groups: Mapping[str, frozenset[str]]
    keys: Mapping[str, Key]
    classes: Mapping[str, OperationClass]


def read_policy(raw: bytes) -> Policy:
    """Return the policy whose canonical bytes are ``raw``. Raises ApprovalError (not_canonical, bad_policy)."""
    bad = Rule.BAD_POLICY
    names = "v id version previous issuedAt expiresAt origins rpIds logKeys approvers classes"
    members = _object(read_canonical(raw, limit=MAX_POLICY_BYTES), names, bad)
    classes = members["classes"]
    if _whole(members, "v", bad) != 1 or not isinstance(classes, dict) or len(classes) > MAX_CLASSES:
        raise ApprovalError(bad, f"version 1 with an object of at most {MAX_CLASSES} classes is what can be read")
    version, previous = _whole(members, "version", bad, least=1), _text(members, "previous", bad, may_be_empty=True)
    if (version == 1) != (previous == ""):
        raise ApprovalError(bad, "version 1 alone has no previous version")
    expires_at = _whole(members, "expiresAt", bad, least=_whole(members, "issuedAt", bad))
    groups, keys = _read_approvers(members["approvers"])
    needs = {name: _read_class(name, value, groups, keys) for name, value in classes.items()}
    change = needs.get(POLICY_CHANGE)
    # Whoever may change the policy may in the end do everything.
    if change and any(other.required > change.required or change.solo > other.solo for other in needs.values()):
        raise ApprovalError(bad, f"{POLICY_CHANGE} must need as many approvers as any class, and be solo only if all are")
    return Policy(
        raw=raw, ref=PolicyRef(_text(members, "id", bad), version, hashlib.sha256(raw).hexdigest()), previous=previous,
        expires_at=expires_at, origins=frozenset(_texts(members, "origins", bad)),
        rp_ids=frozenset(_texts(members, "rpIds", bad)), log_keys=_texts(members, "logKeys", bad), groups=groups, keys=keys,
        classes=needs,
    )  # fmt: skip


def _read_approvers(value: object) -> tuple[dict[str, frozenset[str]], dict[str, Key]]:
    """Return the groups of every approver, and every key by its id."""
    bad = Rule.BAD_POLICY
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_APPROVERS:
        raise ApprovalError(bad, f"a policy lists 1 to {MAX_APPROVERS} approvers")
    groups: dict[str, frozenset[str]] = {}
    keys: dict[str, Key] = {}
    thumbprints: set[str] = set()
    for item in value:
        approver = _object(item, "id groups keys", bad)
        name, listed = _text(approver, "id", bad), approver["keys"]
        if name in groups:
            raise ApprovalError(bad, f"the approver {name} is named twice")
        if not isinstance(listed, list) or not 1 <= len(listed) <= MAX_KEYS_EACH:
            raise ApprovalError(bad, f"{name} needs 1 to {MAX_KEYS_EACH} keys")
        groups[name] = frozenset(_texts(approver, "groups", bad))
        for key in (_read_key(name, its_key) for its_key in listed):
            if key.keyid in keys or key.thumbprint in thumbprints:
                raise ApprovalError(bad, f"a key of {name} stands in the policy twice; every key belongs to one person, once")
            keys[key.keyid] = key
            thumbprints.add(key.thumbprint)
    return groups, keys


def _read_key(approver: str, value: object) -> Key:
    bad = Rule.BAD_POLICY
    members = _object(value, "keyid type publicKey breakGlass", bad)
    kind, spki = _text(members, "type", bad), decode_bytes(members["publicKey"])
    public_key = load_public_key(spki)
    if kind not in {"webauthn", "ed25519"} or (kind == "ed25519" and not isinstance(public_key, ed25519.Ed25519PublicKey)):
        raise ApprovalError(bad, f"a key of {approver} is neither a passkey nor an Ed25519 key")
    return Key(
        approver=approver, keyid=_text(members, "keyid", bad), kind=kind, public_key=public_key,
        thumbprint=hashlib.sha256(spki).hexdigest(), is_break_glass=_flag(members, "breakGlass", bad),
    )  # fmt: skip


_RSA_BITS = frozenset({2048, 3072, 4096})
_FIELD_PRIME = 2**255 - 19
_ORDER_8 = 2707385501144840649318225287225658788936804267575313519463743609750303402022
_SMALL_ORDER = frozenset({0, 1, _FIELD_PRIME - 1, _ORDER_8, _FIELD_PRIME - _ORDER_8})
"""The y coordinates of the eight points of edwards25519 whose order divides 8."""


def load_public_key(spki: bytes) -> PublicKey:
    """Return the P-256, Ed25519 or RSA key in SPKI DER. Raises ApprovalError; a second spelling of a key is refused as well.

    RSA is what older Windows Hello makes passkeys with; of 2048 to 4096 bits, with the exponent that everybody uses.
    """
    try:
        key = serialization.load_der_public_key(spki)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise ApprovalError(Rule.BAD_POLICY, "not a public key in SPKI DER") from None
    spelling = key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    if spelling == spki and isinstance(key, ec.EllipticCurvePublicKey) and isinstance(key.curve, ec.SECP256R1):
        return key
    if spelling == spki and isinstance(key, ed25519.Ed25519PublicKey) and _is_sound(key):
        return key
    if spelling == spki and isinstance(key, rsa.RSAPublicKey) and _is_usual(key):
        return key
    raise ApprovalError(
        Rule.BAD_POLICY, "only P-256, Ed25519 and RSA keys of 2048, 3072 or 4096 bits in their usual encoding are accepted"
    )


def _is_usual(key: rsa.RSAPublicKey) -> bool:
    return key.key_size in _RSA_BITS and key.public_numbers().e == 65537


def _is_sound(key: ed25519.Ed25519PublicKey) -> bool:
    """Return whether only its holder can sign for it: with a point of small order anybody can, and OpenSSL takes those."""
    y = int.from_bytes(key.public_bytes_raw(), "little") & ((1 << 255) - 1)  # the top bit is the sign of x
    return y < _FIELD_PRIME and y not in _SMALL_ORDER


def _read_class(name: str, value: object, groups: Mapping[str, frozenset[str]], keys: Mapping[str, Key]) -> OperationClass:
    bad = Rule.BAD_POLICY
    names = "operations threshold factors denyThreshold lifeS usableS maxUses fileProofs dailyCap solo deviceBound proposers"
    members = _object(value, names, bad)
    factors = members["factors"]
    if not isinstance(factors, dict) or not all(type(count) is int and count > 0 for count in factors.values()):
        raise ApprovalError(bad, f"the factors of {name} must be counts by group")
    found = OperationClass(
        name=name, operations=frozenset(_texts(members, "operations", bad)), factors=dict(factors),
        threshold=_whole(members, "threshold", bad, least=1), deny_threshold=_whole(members, "denyThreshold", bad, least=1),
        life_s=_whole(members, "lifeS", bad, least=60), usable_s=_whole(members, "usableS", bad, least=60),
        max_uses=_whole(members, "maxUses", bad, least=1), file_proofs=_whole(members, "fileProofs", bad),
        daily_cap=_whole(members, "dailyCap", bad, least=int(name == BREAK_GLASS)), solo=_flag(members, "solo", bad),
        device_bound=_flag(members, "deviceBound", bad), proposers=_texts(members, "proposers", bad),
    )  # fmt: skip
    _check_reachable(found, groups, keys)
    return found


def _check_reachable(needed: OperationClass, groups: Mapping[str, frozenset[str]], keys: Mapping[str, Key]) -> None:
    """Refuse a class that its approvers cannot satisfy, or no longer when one of them loses a key (a solo class may)."""
    able = {key.approver: groups[key.approver] for key in keys.values() if _counts(key, needed)}
    with_files = {key.approver for key in keys.values() if _counts(key, needed) and key.kind == "ed25519"}
    spare = 0 if needed.solo else 1
    if needed.required + needed.file_proofs > MAX_PROOFS or len(needed.factors) > MAX_FACTORS:
        raise ApprovalError(Rule.BAD_POLICY, f"{needed.name} needs more than {MAX_PROOFS} proofs or {MAX_FACTORS} factors")
    wants = [("approvers", needed.threshold, len(able)), ("approvers with a key file", needed.file_proofs, len(with_files))]
    # Hall's theorem: people can fill all factors if every choice of factors finds as many people as it counts.
    for size in range(1, len(needed.factors) + 1):
        for chosen in combinations(sorted(needed.factors), size):
            members = sum(not its_groups.isdisjoint(chosen) for its_groups in able.values())
            wants.append((f"members of {' or '.join(chosen)}", sum(needed.factors[group] for group in chosen), members))
    for whom, count, found in wants:
        if count and found < count + spare:
            text = f"{needed.name} needs {count} {whom} and finds {found}; name at least {count + spare} with a key for it"
            raise ApprovalError(Rule.BAD_POLICY, text)


def _counts(key: Key, needed: OperationClass) -> bool:
    """Whether a class may be approved with a key at all."""
    is_refused_file = key.kind == "ed25519" and needed.device_bound and needed.file_proofs == 0
    return key.is_break_glass == (needed.name == BREAK_GLASS) and not is_refused_file


# The proofs


@dataclass(frozen=True, slots=True)
class Verdict:
    """How an operation stands. ``missing_factors``: group → how many more. ``missing`` counts people, of whatever group."""

    required: int
    approved_by: tuple[str, ...]
    missing_factors: Mapping[str, int]
    missing_file_proofs: int

    @property
    def missing(self) -> int:
        """How many more people must approve."""
        return max(0, self.required - len(self.approved_by))

    @property
    def is_met(self) -> bool:
        """Whether the policy is satisfied."""
        return self.missing == 0 and not self.missing_factors and self.missing_file_proofs == 0


def find_class(statement: Statement, policy: Policy) -> OperationClass:
    """Return the class that governs a statement, after checking that the statement keeps to its bounds.

    Raises ApprovalError (unknown_class, too_many_uses, window_too_long).
    """
    found = policy.classes.get(statement.op_class)
    if found is None or statement.operation not in found.operations:
        raise ApprovalError(Rule.UNKNOWN_CLASS, f"the policy has no class {statement.op_class} for {statement.operation}")
    if statement.max_uses > found.max_uses:
        raise ApprovalError(Rule.TOO_MANY_USES, f"{statement.max_uses} uses; {found.name} allows {found.max_uses}")
    if not 0 < statement.not_after - statement.not_before <= found.usable_s:
        raise ApprovalError(Rule.WINDOW_TOO_LONG, f"{found.name} allows a window of at most {found.usable_s} s")
    return found


def check_proof(proof: object, statement: Statement, policy: Policy) -> Key:
    """Return the key whose signature over the statement holds. Raises ApprovalError."""
    needed, bad = find_class(statement, policy), Rule.BAD_PROOF
    key = policy.keys.get(_keyid(proof))
    if not isinstance(proof, dict) or key is None or proof.get("approver") != key.approver or proof.get("type") != key.kind:
        raise ApprovalError(Rule.UNKNOWN_KEY, "the policy has no such key for this approver")
    if key.is_break_glass != (needed.name == BREAK_GLASS):
        raise ApprovalError(Rule.WRONG_KEY_CLASS, "break-glass keys are for break-glass alone, and nothing else opens it")
    if not _counts(key, needed):
        raise ApprovalError(Rule.NOT_DEVICE_BOUND, "this class needs passkeys that cannot be copied; a key file can")
    if key.kind == "ed25519":
        _object(proof, "type approver keyid signature", bad)
        _check_signature(key, decode_bytes(proof["signature"]), statement.digest)
        return key
    _object(proof, "type approver keyid clientDataJSON authenticatorData signature", bad)
    client, device = decode_bytes(proof["clientDataJSON"]), decode_bytes(proof["authenticatorData"])
    _check_client_data(client, statement.digest, policy)
    if len(device) < 37 or device[:32] not in {hashlib.sha256(rp.encode()).digest() for rp in policy.rp_ids}:
        raise ApprovalError(Rule.WRONG_ORIGIN, "the passkey was used for another site (relying party)")
    flags = device[32]
    if not (flags & _USER_PRESENT and flags & _USER_VERIFIED):
        raise ApprovalError(Rule.NOT_VERIFIED_BY_USER, "the passkey did not check its user (fingerprint, face or PIN)")
    if needed.device_bound and flags & (_BACKUP_ELIGIBLE | _BACKED_UP):
        raise ApprovalError(Rule.NOT_DEVICE_BOUND, "this class needs a passkey that cannot be copied to other devices")
    _check_signature(key, decode_bytes(proof["signature"]), device + hashlib.sha256(client).digest())
    return key


def _keyid(proof: object) -> str:
    keyid = proof.get("keyid") if isinstance(proof, dict) else None
    return keyid if isinstance(keyid, str) else ""


def _check_client_data(raw: bytes, digest: bytes, policy: Policy) -> None:
    try:
        client = json.loads(raw.decode(), object_pairs_hook=_unique)
    except (ValueError, RecursionError):
        client = None
    if not isinstance(client, dict) or client.get("type") != "webauthn.get":
        raise ApprovalError(Rule.BAD_PROOF, "not the client data of an assertion")
    if client.get("challenge") != encode_bytes(digest):
        raise ApprovalError(Rule.WRONG_CHALLENGE, "another statement was signed")
    origin = client.get("origin")
    is_framed = client.get("crossOrigin", False) is not False or "topOrigin" in client
    if not isinstance(origin, str) or origin not in policy.origins or is_framed:
        raise ApprovalError(Rule.WRONG_ORIGIN, "signed on a page whose origin the policy does not name, or inside a frame")


def _check_signature(key: Key, signature: bytes, signed: bytes) -> None:
    try:
        if isinstance(key.public_key, ed25519.Ed25519PublicKey):
            key.public_key.verify(signature, signed)
        elif isinstance(key.public_key, rsa.RSAPublicKey):  # RS256 of WebAuthn: RFC 8812, section 2
            key.public_key.verify(signature, signed, padding.PKCS1v15(), SHA256())
        else:
            key.public_key.verify(signature, signed, ec.ECDSA(SHA256()))
    except InvalidSignature:
        raise ApprovalError(Rule.BAD_SIGNATURE, "the signature does not belong to this key and this statement") from None


def judge(statement: Statement, proofs: Sequence[object], policy: Policy) -> Verdict:
    """Return how far the proofs satisfy the policy. Raises ApprovalError when one of them does not hold."""
    needed = find_class(statement, policy)
    if not isinstance(proofs, list | tuple) or len(proofs) > MAX_PROOFS:
        raise ApprovalError(Rule.BAD_PROOF, f"proofs are a list of at most {MAX_PROOFS}")
    by_person: dict[str, Key] = {}
    thumbprints: set[str] = set()
    for proof in proofs:
        key = check_proof(proof, statement, policy)
        if key.approver == statement.requested_by and not needed.solo:
            raise ApprovalError(
                Rule.REQUESTER_APPROVES, f"{key.approver} asked for this and cannot approve it; someone else must"
            )
        if key.approver in by_person or key.thumbprint in thumbprints:
            raise ApprovalError(Rule.DUPLICATE_PROOF, f"{key.approver} approved already; one person counts once, with any key")
        by_person[key.approver] = key
        thumbprints.add(key.thumbprint)
    slots = [group for group, count in sorted(needed.factors.items()) for _ in range(count)]
    filled = _fill([policy.groups[person] for person in by_person], slots)
    missing = {group: slots.count(group) - filled.count(group) for group in set(slots)}
    file_proofs = sum(key.kind == "ed25519" for key in by_person.values())
    return Verdict(
        needed.required, tuple(by_person), {group: n for group, n in missing.items() if n},
        max(0, needed.file_proofs - file_proofs),
    )  # fmt: skip


def _fill(people: Sequence[frozenset[str]], slots: Sequence[str]) -> list[str]:
    """Return the largest set of slots that people can fill, each person one (augmenting paths)."""
    taken: dict[int, int] = {}

    def place(person: int, seen: set[int]) -> bool:
        for slot, group in enumerate(slots):
            if group in people[person] and slot not in seen:
                seen.add(slot)
                if slot not in taken or place(taken[slot], seen):
                    taken[slot] = person
                    return True
        return False

    for person in range(len(people)):
        place(person, set())
    return [slots[slot] for slot in taken]


def verify_approval(statement: Statement, proofs: Sequence[object], policy: Policy, *, now: float) -> Verdict:
    """Return the verdict of an approval that holds at ``now`` (Unix seconds) under ``policy``. Raises ApprovalError.

    The window opens ``CLOCK_SKEW_S`` early, for clocks that are behind; it closes on the second.
    """
    if statement.policy != policy.ref:
        raise ApprovalError(Rule.WRONG_POLICY, "approved under another version of the policy; ask for it again")
    if now > policy.expires_at:
        raise ApprovalError(Rule.POLICY_EXPIRED, "the policy has expired; approve a new version first")
    verdict = require_met(statement, proofs, policy)
    if now < statement.not_before - CLOCK_SKEW_S:
        raise ApprovalError(Rule.NOT_YET, "the approved window has not begun")
    if now > statement.not_after:
        raise ApprovalError(Rule.TOO_LATE, "the approved window is over; ask for it again")
    return verdict


def require_met(statement: Statement, proofs: Sequence[object], policy: Policy) -> Verdict:
    """Return the verdict when the proofs satisfy the policy. Raises ApprovalError, also when they are too few."""
    verdict = judge(statement, proofs, policy)
    if verdict.missing or verdict.missing_file_proofs:
        short = (
            f"{len(verdict.approved_by)} of {verdict.required} approvals, {verdict.missing_file_proofs} key-file proofs missing"
        )
        raise ApprovalError(Rule.TOO_FEW_APPROVERS, short)
    if verdict.missing_factors:
        raise ApprovalError(
            Rule.MISSING_FACTOR, f"approvals missing of the groups {', '.join(sorted(verdict.missing_factors))}"
        )
    return verdict


def select_proofs(proofs: object, policy: Policy) -> list[object]:
    """Return the proofs whose key the policy knows: a change of policy also carries proofs that only the other one knows."""
    return [proof for proof in proofs if _keyid(proof) in policy.keys] if isinstance(proofs, list | tuple) else []


def verify_successor(raw: bytes, statement: Statement, proofs: Sequence[object], *, current: Policy | None) -> Policy:
    """Return the policy ``raw`` after checking that both it and the current one accept it (as TUF chains its root role).

    ``current`` None: ``raw`` is version 1, which accepts itself and whose fingerprint a person must have confirmed.
    The window of the statement is not looked at: a node that was away learns of a change later. Raises ApprovalError.
    """
    policy = read_policy(raw)
    if statement.operation != POLICY_CHANGE or statement.op_class != POLICY_CHANGE:
        raise ApprovalError(Rule.BAD_STATEMENT, "a policy is changed by a policy-change and by nothing else")
    if canonical(dict(statement.params)) != canonical({"version": policy.ref.version, "sha256": policy.ref.sha256}):
        raise ApprovalError(Rule.WRONG_POLICY, "another policy document was approved")
    if current is None:
        if policy.ref.version != 1 or statement.policy != policy.ref:
            raise ApprovalError(Rule.WRONG_POLICY, "the first policy must be version 1 and be signed under itself")
    else:
        follows = PolicyRef(current.ref.id, current.ref.version + 1, policy.ref.sha256)
        if policy.ref != follows or policy.previous != current.ref.sha256:
            raise ApprovalError(Rule.POLICY_ROLLBACK, f"version {current.ref.version} is held; only the next one can follow")
        if statement.policy != current.ref:
            raise ApprovalError(Rule.WRONG_POLICY, "approved under another version of the policy")
    judges = [policy] if current is None else [current, policy]
    known = {keyid for judging in judges for keyid in judging.keys}
    if not isinstance(proofs, list | tuple) or not all(_keyid(proof) in known for proof in proofs):
        raise ApprovalError(Rule.UNKNOWN_KEY, "a proof with a key that neither policy knows")
    for judging in judges:
        require_met(statement, select_proofs(proofs, judging), judging)
    return policy


def verify_chain(links: object, *, current: Policy | None) -> tuple[Policy, ...]:
    """Return the policies that follow ``current`` (None: from version 1 on), oldest first. Raises ApprovalError.

    ``links``: a list of {"document", "statement", "proofs"}, the first two in base64url.
    """
    if not isinstance(links, list):
        raise ApprovalError(Rule.BAD_POLICY, "a chain of policies is a list")
    found: list[Policy] = []
    for item in links:
        link = _object(item, "document statement proofs", Rule.BAD_POLICY)
        statement, proofs = read_statement(decode_bytes(link["statement"])), link["proofs"]
        if not isinstance(proofs, list):
            raise ApprovalError(Rule.BAD_PROOF, "proofs are a list")
        current = verify_successor(decode_bytes(link["document"]), statement, proofs, current=current)
        found.append(current)
    return tuple(found)


# What nodes answer


def fingerprint_key(public_key: bytes) -> str:
    """Return the 130 bits of SHA-256(public key, SPKI DER) that stand behind the ``#`` of a node's id: base32, lower case."""
    return base64.b32encode(hashlib.sha256(public_key).digest())[:26].decode().lower()


def check_receipt(text: object, public_key: bytes) -> dict[str, object]:
    """Return the members of a receipt that the node whose id carries this key has signed. Raises ApprovalError (bad_receipt).

    ``text``: base64url of the canonical {"receipt": {...}, "signature"}. ``public_key``: Ed25519, SPKI DER.
    """
    key, bad = load_public_key(public_key), Rule.BAD_RECEIPT
    envelope = _object(read_canonical(decode_bytes(text), limit=MAX_STATEMENT_BYTES), "receipt signature", bad)
    receipt, signature = envelope["receipt"], decode_bytes(envelope["signature"])
    if not isinstance(receipt, dict) or not isinstance(key, ed25519.Ed25519PublicKey):
        raise ApprovalError(bad, "a receipt is an object signed with an Ed25519 key")
    try:
        key.verify(signature, RECEIPT_DOMAIN + canonical(receipt))
    except InvalidSignature:
        raise ApprovalError(bad, "signed by another key, or changed since") from None
    if _text(receipt, "runnerId", bad).partition("#")[2] != fingerprint_key(public_key):
        raise ApprovalError(bad, "the node that it names has another key")
    return receipt


# Members of objects


def _object(value: object, names: str, rule: Rule) -> dict[str, object]:
    if not isinstance(value, dict) or value.keys() != set(names.split()):
        raise ApprovalError(rule, f"an object must have exactly the members {names}")
    return value


def _text(members: Mapping[str, object], name: str, rule: Rule, *, may_be_empty: bool = False) -> str:
    value = members.get(name)
    if not _is_text(value) and not (may_be_empty and value == ""):
        raise ApprovalError(rule, f"{name} must be a text of 1 to {MAX_TEXT_CHARS} characters without outer blanks")
    return str(value)


def _texts(members: Mapping[str, object], name: str, rule: Rule) -> tuple[str, ...]:
    value = members.get(name)
    if not isinstance(value, list) or not all(map(_is_text, value)) or len(set(value)) != len(value):
        raise ApprovalError(rule, f"{name} must be a list of different texts without outer blanks")
    return tuple(value)


def _is_text(value: object) -> bool:
    return isinstance(value, str) and 0 < len(value) <= MAX_TEXT_CHARS and value == value.strip()


def _whole(members: Mapping[str, object], name: str, rule: Rule, *, least: int = 0) -> int:
    value = members.get(name)
    if type(value) is not int or value < least:  # true and false are integers to Python
        raise ApprovalError(rule, f"{name} must be a whole number of at least {least}")
    return value


def _flag(members: Mapping[str, object], name: str, rule: Rule) -> bool:
    value = members.get(name)
    if not isinstance(value, bool):
        raise ApprovalError(rule, f"{name} must be true or false")
    return value


# The evidence of an operation, for auditors


def verify_bundle(bundle: Mapping[str, object]) -> tuple[Policy, Statement, Verdict]:
    """Check an evidence bundle: the chain of policies from version 1, then the statement under the one it names.

    ``bundle``: {"policies": see ``verify_chain``, "statement": base64url, "proofs"}; whatever else it holds proves nothing. The
    window is not looked at: an auditor comes later. Raises ApprovalError.
    """
    policies = {policy.ref: policy for policy in verify_chain(bundle.get("policies"), current=None)}
    statement, proofs = read_statement(decode_bytes(bundle.get("statement"))), bundle.get("proofs")
    policy = policies.get(statement.policy)
    if policy is None or not isinstance(proofs, list):
        raise ApprovalError(Rule.WRONG_POLICY, "the bundle does not hold the policy that the statement names, or no proofs")
    return policy, statement, require_met(statement, proofs, policy)


def verify_receipts(bundle: Mapping[str, object], statement: Statement) -> list[dict[str, object]]:
    """Return the receipts of a bundle, each about this statement and from a node that it names. Raises ApprovalError.

    They are a list of {"receipt", "publicKey"}, both in base64url, under the name "receipts"; none at all is fine.
    """
    listed, found = bundle.get("receipts", []), []
    for item in listed if isinstance(listed, list) else [None]:
        pair = _object(item, "receipt publicKey", Rule.BAD_RECEIPT)
        receipt = check_receipt(pair["receipt"], decode_bytes(pair["publicKey"]))
        if receipt.get("statementDigest") != statement.digest.hex() or receipt["runnerId"] not in statement.targets:
            raise ApprovalError(Rule.BAD_RECEIPT, "a receipt of another operation, or of a node that it was not approved for")
        found.append(receipt)
    return found


def main(arguments: Sequence[str]) -> int:
    """Check a bundle file and say what it proves. Exit status: 0 it holds, 1 it does not, 2 it cannot be read."""
    try:
        with open(arguments[0], "rb") as file:  # noqa: PTH123 - this file stands alone
            bundle = json.load(file)
        bundle = bundle.get("operation", bundle)
        policy, statement, verdict = verify_bundle(bundle)
        first = verify_chain(bundle["policies"][:1], current=None)[0]
        receipts = verify_receipts(bundle, statement)
    except (IndexError, OSError, ValueError, RecursionError, AttributeError) as error:
        sys.stderr.write(f"usage: approval.py BUNDLE - {error}\n")
        return 2
    except ApprovalError as error:
        sys.stdout.write(f"NOT APPROVED ({error.rule}): {error}\n")
        return 1
    sys.stdout.write(
        f"APPROVED {statement.operation} on {', '.join(statement.targets)} by {', '.join(verdict.approved_by)}, asked for by "
        f"{statement.requested_by}\n  {json.dumps(dict(statement.params))}\n  statement {digest_words(statement.digest)}\n"
        f"  policy {policy.ref.id} version {policy.ref.version}; compare version 1 with what was confirmed on the node: "
        f"{policy_words(first.ref.sha256)}\n"
    )
    if len(statement.targets) > 1:
        sys.stdout.write(f"  a batch: {'stops at a failure' if statement.stops_on_failure else 'goes on after failures'}\n")
    said = bundle.get("decisions")
    for each in said if isinstance(said, list) else []:
        if isinstance(each, dict) and each.get("broughtBy"):
            by, who = json.dumps(each["broughtBy"]), json.dumps(each.get("approver"))
            sys.stdout.write(f"  brought by {by} for {who}, says the server; nobody signed that\n")
    for receipt in receipts:
        sys.stdout.write(f"  {receipt['runnerId']} says {json.dumps(receipt.get('outcome'))}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
