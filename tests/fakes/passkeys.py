"""A passkey in software: what authenticator and browser make of a challenge (W3C Web Authentication Level 3, section 6.1)."""

from __future__ import annotations

import hashlib
import json
import struct
from dataclasses import dataclass, field, replace
from typing import Any

import cbor2
from cryptography.hazmat.primitives.asymmetric.ec import ECDSA, SECP256R1, EllipticCurvePrivateKey, generate_private_key
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.padding import PKCS1v15
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature, encode_dss_signature
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from wire.optoken.approval import decode_bytes, encode_bytes

ORIGIN = "https://muster.example"
RP_ID = "muster.example"
USER_PRESENT, USER_VERIFIED, BACKUP_ELIGIBLE, BACKED_UP = 0x01, 0x04, 0x08, 0x10

P256_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
Proof = dict[str, Any]  # Any: tests put anything into a proof.


PrivateKey = EllipticCurvePrivateKey | Ed25519PrivateKey | RSAPrivateKey


def spki_of(key: PrivateKey) -> bytes:
    return key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


@dataclass(frozen=True)
class SoftPasskey:
    """A passkey of one site; ``replace`` a field to make it, or its browser, misbehave."""

    private_key: PrivateKey = field(default_factory=lambda: generate_private_key(SECP256R1()))
    rp_id: str = RP_ID
    origin: str = ORIGIN
    flags: int = USER_PRESENT | USER_VERIFIED
    client_type: str = "webauthn.get"
    client_changes: dict[str, Any] = field(default_factory=dict)
    """Members of the client data that differ; ``...`` leaves one out."""

    @property
    def public_key(self) -> bytes:
        return spki_of(self.private_key)

    @property
    def keyid(self) -> str:
        return encode_bytes(hashlib.sha256(b"credential" + self.public_key).digest()[:16])

    def misbehaving(self, **changes: Any) -> SoftPasskey:
        return replace(self, **changes)

    def sign(self, challenge: bytes, *, approver: str) -> Proof:
        """An assertion over ``challenge``, as the proof that a token carries."""
        client = {
            "type": self.client_type, "challenge": encode_bytes(challenge), "origin": self.origin, "crossOrigin": False,
            **self.client_changes,
        }  # fmt: skip
        client_data = json.dumps({name: value for name, value in client.items() if value is not ...}).encode()
        device_data = hashlib.sha256(self.rp_id.encode()).digest() + struct.pack(">BI", self.flags, 0)
        return {
            "type": "webauthn", "approver": approver, "keyid": self.keyid, "clientDataJSON": encode_bytes(client_data),
            "authenticatorData": encode_bytes(device_data),
            "signature": encode_bytes(self._sign(device_data + hashlib.sha256(client_data).digest())),
        }  # fmt: skip

    def _sign(self, message: bytes) -> bytes:
        if isinstance(self.private_key, Ed25519PrivateKey):
            return self.private_key.sign(message)
        if isinstance(self.private_key, RSAPrivateKey):
            return self.private_key.sign(message, PKCS1v15(), SHA256())
        return self.private_key.sign(message, ECDSA(SHA256()))


def twin_of(proof: Proof) -> Proof:
    """The other signature that ECDSA has for the same message, which anybody can compute from the first."""
    r, s = decode_dss_signature(decode_bytes(proof["signature"]))
    return proof | {"signature": encode_bytes(encode_dss_signature(r, P256_ORDER - s))}


@dataclass(frozen=True)
class KeyFile:
    """An Ed25519 key of an approver who signs on the command line."""

    private_key: Ed25519PrivateKey = field(default_factory=Ed25519PrivateKey.generate)

    @property
    def public_key(self) -> bytes:
        return spki_of(self.private_key)

    @property
    def keyid(self) -> str:
        return hashlib.sha256(self.public_key).hexdigest()[:32]

    def sign(self, challenge: bytes, *, approver: str) -> Proof:
        signature = encode_bytes(self.private_key.sign(challenge))
        return {"type": "ed25519", "approver": approver, "keyid": self.keyid, "signature": signature}


ATTESTED = 0x40
Answer = dict[str, Any]  # Any: JSON of a browser


@dataclass(frozen=True)
class Device:
    """One passkey on one device. ``changes`` is how its browser misbehaves when it makes the passkey."""

    passkey: SoftPasskey = field(default_factory=SoftPasskey)

    def misbehaving(self, **changes: Any) -> Device:
        return replace(self, passkey=self.passkey.misbehaving(**changes))

    def synced(self) -> Device:
        return self.misbehaving(flags=self.passkey.flags | BACKUP_ELIGIBLE | BACKED_UP)

    def make(self, options: Answer) -> Answer:
        kind = "webauthn.create" if self.passkey.client_type == "webauthn.get" else self.passkey.client_type
        client = {
            "type": kind, "challenge": options["challenge"], "origin": self.passkey.origin, "crossOrigin": False,
            **self.passkey.client_changes,
        }  # fmt: skip
        keyid = decode_bytes(self.passkey.keyid)
        head = hashlib.sha256(self.passkey.rp_id.encode()).digest()
        head += struct.pack(">BI", self.passkey.flags | ATTESTED, 0)
        data = head + bytes(16) + struct.pack(">H", len(keyid)) + keyid + self._cose()
        attestation = cbor2.dumps({"fmt": "none", "attStmt": {}, "authData": data})
        response = {
            "clientDataJSON": encode_bytes(json.dumps(client).encode()),
            "attestationObject": encode_bytes(attestation),
            "transports": ["internal", "smoke-signals"],
        }
        return {"id": self.passkey.keyid, "rawId": self.passkey.keyid, "type": "public-key", "response": response}

    def answer(self, options: Answer) -> Answer:
        proof = self.passkey.sign(decode_bytes(options["challenge"]), approver="")
        response = {name: proof[name] for name in ("clientDataJSON", "authenticatorData", "signature")}
        return {"id": self.passkey.keyid, "rawId": self.passkey.keyid, "type": "public-key", "response": response}

    def _cose(self) -> bytes:
        key = self.passkey.private_key
        if isinstance(key, Ed25519PrivateKey):
            raw = key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
            return cbor2.dumps({1: 1, 3: -8, -1: 6, -2: raw})
        if isinstance(key, RSAPrivateKey):
            public = key.public_key().public_numbers()
            return cbor2.dumps({1: 3, 3: -257, -1: public.n.to_bytes(key.key_size // 8), -2: public.e.to_bytes(3)})
        point = key.public_key().public_numbers()
        return cbor2.dumps({1: 2, 3: -7, -1: 1, -2: point.x.to_bytes(32), -3: point.y.to_bytes(32)})
