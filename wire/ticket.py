"""Ticket: the proof that lets a client talk to one node directly, once, for one model. A compact JWS signed with Ed25519.

Source: central-server document, sections 2.1 and 4; RFC 7515 (JWS), RFC 8037 (EdDSA). The document signs with HMAC, so one
node could forge tickets for another. Anybody may read a ticket, so it holds no secret; ``verify_ticket`` judges it offline.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

import msgspec
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from wire.limits import WIRE
from wire.unreadable import UNREADABLE

TYPE = "muster-ticket"
"""``typ`` of the header: no other JWS of ours, and none of anybody else's, is a ticket."""
_SHAPE = re.compile(r"([A-Za-z0-9_-]+)\.([A-Za-z0-9_-]+)\.([A-Za-z0-9_-]{86})\Z")


class TicketFault(StrEnum):
    """Why a ticket is refused. The first that holds, in this order."""

    MALFORMED = "ticket_malformed"
    UNKNOWN_KEY = "ticket_key_unknown"
    BAD_SIGNATURE = "ticket_signature_invalid"
    WRONG_AUDIENCE = "ticket_audience_wrong"
    NOT_YET = "ticket_not_yet_valid"
    EXPIRED = "ticket_expired"
    WRONG_MODEL = "ticket_model_wrong"
    TOO_MUCH = "ticket_cap_exceeded"
    SPENT = "ticket_spent"


class TicketError(Exception):
    """The ticket is refused; ``fault`` says why, and nothing of the ticket is in the text."""

    def __init__(self, fault: TicketFault) -> None:
        super().__init__(fault.value)
        self.fault = fault


class Caps(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the holder may ask: ``max_tokens`` of one answer (0 = as the model allows) and how many ``requests``."""

    max_tokens: int
    requests: int = 1


class Ticket(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is signed. Times in Unix seconds: from ``issued_at`` until before ``expires_at`` the request has to *begin*.

    ``audience``: the node's printed id, the only one that takes it; ``gpu_endpoint``: where that is, for the holder.
    ``record_id``: the request's record, under which its usage is reported. ``gpu_id`` may be empty: any of the node.
    """

    ticket_id: str
    issued_at: float
    expires_at: float
    gpu_endpoint: str
    model: str
    audience: str
    tenant: str
    key_id: str
    record_id: str
    caps: Caps
    gpu_id: str = ""


class _Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All that the header may say: the algorithm is ours to choose, and nothing there names a key but its id."""

    alg: str
    kid: str
    typ: str


@dataclass(frozen=True, slots=True)
class TicketKey:
    """A key that signs tickets and nothing else."""

    kid: str
    private: Ed25519PrivateKey

    @property
    def public(self) -> bytes:
        """The 32 bytes that nodes verify with."""
        return self.private.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)


_encoder = msgspec.json.Encoder()
_headers = msgspec.json.Decoder(_Header)
_tickets = msgspec.json.Decoder(Ticket)


def issue_ticket(key: TicketKey, ticket: Ticket) -> str:
    """Return the ticket as the text that a client sends as its bearer credential."""
    header = _Header(alg="EdDSA", kid=key.kid, typ=TYPE)
    signed = f"{_encode(_encoder.encode(header))}.{_encode(_encoder.encode(ticket))}"
    return f"{signed}.{_encode(key.private.sign(signed.encode()))}"


def is_ticket(text: str) -> bool:
    """Return whether a bearer credential has the shape of a ticket; no credential of ours does."""
    return len(text) <= WIRE.token_bytes and _SHAPE.match(text) is not None


def verify_ticket(text: str, keys: Mapping[str, bytes], *, audience: str, now: float) -> Ticket:
    """Return the ticket if one of ``keys`` (32 bytes by id) signed it for ``audience`` and it is valid at ``now``.

    ``now`` in Unix seconds of the server's clock. One clock reading, and bytes are opaque until their signature holds. Raises
    TicketError. Whether the ticket was used before, and what is asked with it, is for the caller to judge.
    """
    match = _SHAPE.match(text) if len(text) <= WIRE.token_bytes else None
    if match is None:
        raise TicketError(TicketFault.MALFORMED)
    try:
        header = _headers.decode(_decode(match[1]))
    except UNREADABLE:
        raise TicketError(TicketFault.MALFORMED) from None
    if (header.alg, header.typ) != ("EdDSA", TYPE):
        raise TicketError(TicketFault.MALFORMED)
    public = keys.get(header.kid)
    if public is None:
        raise TicketError(TicketFault.UNKNOWN_KEY)
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(_decode(match[3]), f"{match[1]}.{match[2]}".encode())
    except InvalidSignature:
        raise TicketError(TicketFault.BAD_SIGNATURE) from None
    try:
        ticket = _tickets.decode(_decode(match[2]))
    except UNREADABLE:
        raise TicketError(TicketFault.MALFORMED) from None
    if ticket.audience != audience:
        raise TicketError(TicketFault.WRONG_AUDIENCE)
    if now < ticket.issued_at - WIRE.ticket_early_s:
        raise TicketError(TicketFault.NOT_YET)
    if now >= ticket.expires_at:
        raise TicketError(TicketFault.EXPIRED)
    return ticket


def _encode(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _decode(text: str) -> bytes:
    """Return the bytes of a segment. Raises TicketError unless it is their one spelling: else one ticket would have several."""
    try:
        data = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
    except ValueError:
        raise TicketError(TicketFault.MALFORMED) from None
    if _encode(data) != text:
        raise TicketError(TicketFault.MALFORMED)
    return data
