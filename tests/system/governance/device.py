"""A device with a passkey, as the sign-in pages see one: what ``PublicKeyCredential.toJSON()`` gives, made in software."""

from __future__ import annotations

import hashlib
import json
import struct
from dataclasses import dataclass, field, replace
from typing import Any

import cbor2
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from tests.fakes.passkeys import BACKED_UP, BACKUP_ELIGIBLE, SoftPasskey
from wire.optoken.approval import decode_bytes, encode_bytes

ATTESTED = 0x40
Answer = dict[str, Any]  # Any: JSON of a browser


@dataclass(frozen=True)
class Device:
    """One passkey on one device. ``changes`` is how its browser misbehaves when it makes the passkey."""

    passkey: SoftPasskey = field(default_factory=SoftPasskey)
    sign_count: int = 0

    def misbehaving(self, **changes: Any) -> Device:
        """The same device with a passkey that differs."""
        return replace(self, passkey=self.passkey.misbehaving(**changes))

    def synced(self) -> Device:
        """The same device, whose passkey is copied to others."""
        return self.misbehaving(flags=self.passkey.flags | BACKUP_ELIGIBLE | BACKED_UP)

    def make(self, options: Answer) -> Answer:
        """The answer to ``navigator.credentials.create``, without attestation."""
        kind = "webauthn.create" if self.passkey.client_type == "webauthn.get" else self.passkey.client_type
        client = {
            "type": kind,
            "challenge": options["challenge"],
            "origin": self.passkey.origin,
            "crossOrigin": False,
            **self.passkey.client_changes,
        }
        keyid = decode_bytes(self.passkey.keyid)
        head = hashlib.sha256(self.passkey.rp_id.encode()).digest()
        head += struct.pack(">BI", self.passkey.flags | ATTESTED, self.sign_count)
        data = head + bytes(16) + struct.pack(">H", len(keyid)) + keyid + self._cose()
        attestation = cbor2.dumps({"fmt": "none", "attStmt": {}, "authData": data})
        response = {
            "clientDataJSON": encode_bytes(json.dumps(client).encode()),
            "attestationObject": encode_bytes(attestation),
            "transports": ["internal", "smoke-signals"],
        }
        return {"id": self.passkey.keyid, "rawId": self.passkey.keyid, "type": "public-key", "response": response}

    def answer(self, options: Answer) -> Answer:
        """The answer to ``navigator.credentials.get``."""
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
