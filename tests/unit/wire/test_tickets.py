"""Tickets: what is signed comes back, and nothing else does."""

from __future__ import annotations

import base64
import os
import random

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from wire.ticket import Caps, Ticket, TicketError, TicketFault, TicketKey, is_ticket, issue_ticket, verify_ticket

KEY, OTHER = (TicketKey(kid, Ed25519PrivateKey.from_private_bytes(kid.encode() * 32)) for kid in "ab")
KEYS = {"a": KEY.public}
NOW = 1_800_000_000.0
TICKET = Ticket(
    ticket_id="tkt_1", issued_at=NOW, expires_at=NOW + 5, gpu_endpoint="http://10.0.0.5:8000", model="m", audience="node_1",
    tenant="acme", key_id="key_1", record_id="req_1", caps=Caps(max_tokens=100),
)  # fmt: skip
TEXT = issue_ticket(KEY, TICKET)


def fault_of(text: str, *, audience: str = "node_1", now: float = NOW) -> TicketFault:
    with pytest.raises(TicketError) as refused:
        verify_ticket(text, KEYS, audience=audience, now=now)
    return refused.value.fault


def test_a_ticket_is_what_was_signed_until_it_expires() -> None:
    assert verify_ticket(TEXT, KEYS, audience="node_1", now=NOW + 4.999) == TICKET
    assert is_ticket(TEXT)
    assert not is_ticket("msw_0123456789ab_" + "x" * 38)


def forge(header: dict[str, object], claims: dict[str, object] | None = None, key: TicketKey = KEY) -> str:
    said = msgspec.to_builtins(TICKET) if claims is None else claims
    parts = [base64.urlsafe_b64encode(msgspec.json.encode(part)).rstrip(b"=").decode() for part in (header, said)]
    signature = base64.urlsafe_b64encode(key.private.sign(".".join(parts).encode())).rstrip(b"=").decode()
    return ".".join([*parts, signature])


HEADER: dict[str, object] = {"alg": "EdDSA", "kid": "a", "typ": "muster-ticket"}
CLAIMS: dict[str, object] = msgspec.to_builtins(TICKET)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", TicketFault.MALFORMED),
        (TEXT + "=", TicketFault.MALFORMED),
        (TEXT + "\n", TicketFault.MALFORMED),
        (f"{TEXT}.{TEXT}", TicketFault.MALFORMED),
        (TEXT[:-1] + {"A": "B", "Q": "R", "g": "h", "w": "x"}[TEXT[-1]], TicketFault.MALFORMED),  # the same bytes
        ("a" * 100_000, TicketFault.MALFORMED),
        (forge({**HEADER, "alg": "none"}), TicketFault.MALFORMED),
        (forge({**HEADER, "alg": "HS256"}), TicketFault.MALFORMED),
        (forge({**HEADER, "typ": "JWT"}), TicketFault.MALFORMED),
        (forge({**HEADER, "jwk": {}}), TicketFault.MALFORMED),
        (forge({**HEADER, "kid": "b"}), TicketFault.UNKNOWN_KEY),
        (forge(HEADER, key=OTHER), TicketFault.BAD_SIGNATURE),
        (forge(HEADER, {**CLAIMS, "admin": True}), TicketFault.MALFORMED),
        (forge(HEADER, {**CLAIMS, "expires_at": "never"}), TicketFault.MALFORMED),
        (forge(HEADER, {**CLAIMS, "audience": "node_2"}), TicketFault.WRONG_AUDIENCE),
        (forge(HEADER, {**CLAIMS, "issued_at": NOW + 3}), TicketFault.NOT_YET),
        (forge(HEADER, {**CLAIMS, "expires_at": NOW}), TicketFault.EXPIRED),
    ],
)
def test_every_other_text_is_refused_with_the_reason(text: str, fault: TicketFault) -> None:
    assert fault_of(text) is fault


def test_no_mutated_ticket_is_accepted() -> None:
    draw, letters = random.Random(20261128), "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_."
    accepted = 0
    for _ in range(int(os.environ.get("MUSTER_TEST_MUTATIONS", "5000"))):
        text = list(TEXT)
        for _ in range(draw.choice((1, 1, 1, 2, 5))):
            at = draw.randrange(len(text))
            kind = draw.randrange(3)
            if kind == 0:
                text[at] = draw.choice(letters)
            elif kind == 1:
                del text[at]
            else:
                text.insert(at, draw.choice(letters))
        mutated = "".join(text)
        if mutated == TEXT:
            continue
        try:
            verify_ticket(mutated, KEYS, audience="node_1", now=NOW)
        except TicketError:
            continue
        accepted += 1
    assert accepted == 0
