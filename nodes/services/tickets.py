"""Ticket keys: made when first needed, renewed, told to nodes; and where clients reach a node with a ticket.

Two keys may be valid at a time. A new one signs after ``ticket_settle_s``, when every node knows it; the one before it
verifies for ``ticket_overlap_s`` after it was replaced, which is longer than a ticket lives.
"""

from __future__ import annotations

import base64
import re
import uuid
from dataclasses import dataclass
from datetime import datetime, timedelta

from cryptography.fernet import Fernet, InvalidToken
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from django.conf import settings
from django.db import connection, transaction

from core.hints import publish_hint
from core.limits import limits
from governance.audit import record_event
from nodes.addresses import PARAM, resolve_direct_target
from nodes.errors import NodeError
from nodes.models import Node, ProviderState, TicketKey, read_clock
from wire import bridge, clock, ticket
from wire.credentials import derive_cipher
from wire.ids import new_uuid7

UNCHECKED = "was not looked at yet"
"""The ``ticket_error`` of a URL that a node has just named."""
_ORIGIN = re.compile(r"https?://(?:[A-Za-z0-9.-]+|\[[0-9A-Fa-f:.]+\])(?::[0-9]{1,5})?(?=/|\Z)")
_LOCK = 0x6D73_746B
"""Key of an advisory lock: of two that find no key, the second one finds that of the first."""


@dataclass(frozen=True, slots=True)
class KnownKey:
    """A key in memory. ``made_at``, ``retired_at``: clock.monotonic() seconds. ``private`` None: it cannot be decrypted."""

    kid: str
    public: bytes
    private: Ed25519PrivateKey | None
    made_at: float
    retired_at: float | None


class TicketKeyring:
    """The ticket keys of one gateway process as they were last read. Newest first."""

    def __init__(self) -> None:
        self._keys: tuple[KnownKey, ...] = ()

    def take(self, keys: tuple[KnownKey, ...]) -> None:
        self._keys = keys

    @property
    def is_empty(self) -> bool:
        """Whether nothing can be signed, so that a key has to be made."""
        return all(key.private is None or key.retired_at is not None for key in self._keys)

    def find_signing(self) -> ticket.TicketKey | None:
        """Return the newest key that every node has had the time to learn; None = there is none, or none can be read."""
        now, bounds = clock.monotonic(), limits().nodes
        usable = [key for key in self._keys if key.private is not None and self._is_valid(key, now)]
        settled = [key for key in usable if now - key.made_at >= bounds.ticket_settle_s]
        # The very first key has nobody before it.
        chosen = settled[0] if settled else usable[-1] if usable else None
        return None if chosen is None or chosen.private is None else ticket.TicketKey(chosen.kid, chosen.private)

    def list_public(self) -> list[bridge.TicketPublicKey]:
        """Return what nodes verify tickets with now."""
        now = clock.monotonic()
        return [
            bridge.TicketPublicKey(kid=key.kid, public_key=base64.urlsafe_b64encode(key.public).rstrip(b"=").decode())
            for key in self._keys
            if self._is_valid(key, now)
        ]

    @staticmethod
    def _is_valid(key: KnownKey, now: float) -> bool:
        return key.retired_at is None or now - key.retired_at < limits().nodes.ticket_overlap_s


def load_ticket_keys() -> tuple[KnownKey, ...]:
    """Return the keys that may be valid, newest first."""
    read_at, now = read_clock(), clock.monotonic()

    def place(moment: datetime | None) -> float | None:
        return None if moment is None else now - (read_at - moment).total_seconds()

    rows = TicketKey.objects.order_by("-created_at", "-pk")
    return tuple(
        KnownKey(row.kid, bytes(row.public), _open(row), place(row.created_at) or now, place(row.retired_at)) for row in rows
    )


@transaction.atomic
def ensure_ticket_key() -> bool:
    """Make a key unless there is one that signs; return whether one was made."""
    _lock()
    if any(_open(row) is not None for row in TicketKey.objects.filter(retired_at=None)):
        return False
    _replace(actor="system:gateway")
    return True


@transaction.atomic
def rotate_ticket_key(*, actor: str) -> str:
    """Replace the key that signs; return the id of the new one. Tickets that are out, and those of the next minute, hold."""
    _lock()
    return _replace(actor=actor).kid


def describe_ticket_keys() -> list[str]:
    """Return a line for each key, the newest first."""
    return [
        f"{row.kid} made {row.created_at:%Y-%m-%d %H:%M} UTC"
        + (f", replaced {row.retired_at:%Y-%m-%d %H:%M} UTC" if row.retired_at is not None else "")
        + ("" if _open(row) is not None else ", cannot be decrypted: MUSTER_SECRET_KEY has changed")
        for row in TicketKey.objects.order_by("-created_at", "-pk")
    ]


@transaction.atomic
def renew_ticket_key() -> bool:
    """Replace a key that is older than ``ticket_key_s`` and forget those long replaced; return whether one was made."""
    _lock()
    now, bounds = read_clock(), limits().nodes
    TicketKey.objects.filter(retired_at__lt=now - timedelta(seconds=bounds.ticket_key_kept_s)).delete()
    newest = TicketKey.objects.filter(retired_at=None).first()
    if newest is None or now - newest.created_at < timedelta(seconds=bounds.ticket_key_s):
        return False
    _replace(actor="system:worker")
    return True


def find_ticket_refusal(url: str) -> str:
    """Return why clients are not sent to the URL that a node named; empty = they are. Blocks while a name is looked up."""
    try:
        resolve_direct_target(url)
    except NodeError as refusal:
        return refusal.message.removeprefix(PARAM).lstrip(": ")[: limits().nodes.probe_error_chars]
    return ""


@transaction.atomic
def store_ticket_refusal(*, node_id: uuid.UUID, url: str, error: str) -> None:
    """Store what ``find_ticket_refusal`` said. Nothing changes where the node has named another URL since."""
    changed = Node.objects.filter(pk=node_id, ticket_url=url).exclude(ticket_error=error)
    if changed.update(ticket_error=error, updated_at=clock.now()):
        publish_hint("nodes", str(node_id))


def list_ticket_origins(most: int) -> list[str]:
    """Return the origins (scheme, host and port) at which clients with tickets reach nodes, each once, ``most`` at most."""
    nodes = Node.objects.filter(ticket_error="", provider__state=ProviderState.ENABLED).exclude(ticket_url="")
    urls = nodes.order_by("-presence__last_heartbeat_at").values_list("ticket_url", flat=True)[:most]
    found = (_ORIGIN.match(url) for url in urls)  # what a node names ends up in a header
    return sorted({origin[0] for origin in found if origin is not None})


def _lock() -> None:
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_advisory_xact_lock(%s)", [_LOCK])


def _replace(*, actor: str) -> TicketKey:
    now, private = read_clock(), Ed25519PrivateKey.generate()
    TicketKey.objects.filter(retired_at=None).update(retired_at=now)
    made = TicketKey.objects.create(
        kid=f"tk_{new_uuid7().hex}",
        public=private.public_key().public_bytes_raw(),
        sealed_private=_cipher().encrypt(private.private_bytes_raw()).decode(),
        created_at=now,
    )
    record_event(actor=actor, action="ticket_key.rotate", target=made.kid)
    publish_hint("nodes")
    return made


def _open(row: TicketKey) -> Ed25519PrivateKey | None:
    """Return the private key; None where it was sealed under another MUSTER_SECRET_KEY."""
    try:
        return Ed25519PrivateKey.from_private_bytes(_cipher().decrypt(row.sealed_private.encode()))
    except InvalidToken:
        return None


def _cipher() -> Fernet:
    return derive_cipher(settings.SECRET_KEY, purpose="muster ticket keys")
