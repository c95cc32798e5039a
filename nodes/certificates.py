"""What goes between a gateway process and its nodes about certificates: the internal CAs there, requests back, answers."""

from __future__ import annotations

import asyncio
import logging
import ssl
import uuid
from collections.abc import Callable, Coroutine
from typing import Any

from cryptography import x509
from django.db import DatabaseError, InterfaceError

from core.db.threads import run_in_database
from core.limits import limits
from nodes.addresses import resolve_direct_target
from nodes.errors import CertificateRefused, NodeError
from nodes.links import LinkRegistry
from nodes.links.relay import RelayLink
from nodes.services.certificates import (
    NO_AUTHORITY,
    NO_CERTIFICATE,
    KnownAuthority,
    issue_certificate,
    join_authorities,
    read_request,
)
from wire import bridge, clock
from wire.certificates import UNREADABLE_CERTIFICATE, encode_key

logger = logging.getLogger("muster.nodes")

Judge = Callable[[RelayLink, str], Coroutine[Any, Any, None]]
"""Has it written down whether clients are sent to a node: why not, empty = what can be said of its URL."""


class CertificateChannel:
    """One per gateway process. ``spawn`` runs work beside."""

    def __init__(self, registry: LinkRegistry, *, spawn: Callable[[Coroutine[Any, Any, None]], object], judge: Judge) -> None:
        self._limits = limits().nodes
        self._registry = registry
        self._spawn = spawn
        self._judge = judge
        self._authorities: tuple[KnownAuthority, ...] = ()
        self._asked_at: dict[uuid.UUID, float] = {}
        """When each node last asked for a certificate, clock.monotonic()."""

    def take(self, authorities: tuple[KnownAuthority, ...]) -> None:
        self._authorities = authorities
        self._asked_at.clear()  # what nodes got before may hold no more

    @property
    def authorities(self) -> str:
        """The certificates of the CAs that hold now, as one PEM text."""
        return join_authorities(self._authorities)

    def welcome(self, link: RelayLink) -> None:
        """Tell a node that takes certificates which CAs there are. It answers whether it needs one."""
        link.told_authorities = self.authorities
        link.send_message(bridge.NodeAuthorities(certificates=link.told_authorities))

    def tell(self) -> None:
        """Tell the CAs to the nodes that take certificates and do not know them yet."""
        takers = [link for link in self._registry if isinstance(link, RelayLink) and link.told_authorities is not None]
        if not takers:
            return
        authorities = self.authorities
        for link in takers:
            if link.told_authorities != authorities:
                self.welcome(link)

    def take_request(self, link: RelayLink, message: bridge.CertificateRequest) -> None:
        """Note whether clients can verify a node, and answer its wish for a certificate."""
        link.holds_certificate = message.is_held
        if message.is_held:
            self._spawn(self._judge(link, ""))
        elif not self._authorities:
            self._spawn(self._judge(link, NO_AUTHORITY))
        elif not message.csr:  # another gateway was asked
            self._spawn(self._judge(link, NO_CERTIFICATE))
        if not message.csr:
            return
        now = clock.monotonic()
        if now - self._asked_at.get(link.node_id, float("-inf")) < self._limits.certificate_gap_s:
            link.send_message(bridge.NodeCertificate(error="The node has asked a moment ago."))
            return
        known = {node_id: at for node_id, at in self._asked_at.items() if now - at < self._limits.certificate_gap_s}
        self._asked_at = {**known, link.node_id: now}
        self._spawn(self._answer(link, link.named_url, message.csr))

    async def _answer(self, link: RelayLink, url: str, csr: str) -> None:
        try:
            if await find_served_key(url) != encode_key(read_request(csr)):
                raise CertificateRefused(f"Another key than the node's answers at {url}.")
            certificate = await run_in_database(issue_certificate, node_id=link.node_id, url=url, csr=csr)
        except NodeError as refusal:
            logger.warning("node.certificate_refused node=%s reason=%s", link.node_name, refusal.message)
            link.send_message(bridge.NodeCertificate(error=refusal.message))
            if not link.holds_certificate:
                await self._judge(link, f"gets no certificate: {refusal.message}")
        except (DatabaseError, InterfaceError):
            logger.warning("node.certificate_waits node=%s; the node asks again", link.node_name)
        else:
            logger.info("node.certificate_issued node=%s", link.node_name)
            link.send_message(bridge.NodeCertificate(certificate=certificate))


async def find_served_key(url: str) -> bytes:
    """Return the key (SPKI DER) that TLS at a node's URL shows, whoever certified it. Raises NodeError.

    Who can show a key there is who clients would talk to: that is what a certificate for the host is about to say.
    """
    target = await asyncio.to_thread(resolve_direct_target, url)  # a name server may be slow
    if target.scheme != "https":
        raise CertificateRefused(f"{url} is no https:// URL.")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        async with asyncio.timeout(limits().nodes.probe_s):
            _, writer = await asyncio.open_connection(target.address, target.port, ssl=context, server_hostname=target.host)
    except TimeoutError:
        raise CertificateRefused(f"Nothing answers at {url} within {limits().nodes.probe_s:g} s.") from None
    except OSError as error:  # ssl.SSLError is one
        raise CertificateRefused(f"TLS at {url} cannot be reached ({error.strerror or type(error).__name__}).") from None
    try:
        shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        return encode_key(x509.load_der_x509_certificate(shown).public_key())
    except UNREADABLE_CERTIFICATE:
        raise CertificateRefused(f"TLS at {url} shows no certificate that can be read.") from None
    finally:
        writer.transport.abort()
