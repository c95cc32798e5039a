"""TLS of a server's own port: certificate and key, judged in words, and taken over anew when their files change.

Connections that are open go on with the certificate with which they began.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization

from core.limits import limits
from wire import clock
from wire.certificates import UNREADABLE_CERTIFICATE

logger = logging.getLogger("muster.tls")


class CertificateError(Exception):
    """Certificate or key cannot be used; the text says why and what to do."""


@dataclass(frozen=True, slots=True)
class Pair:
    """The files of a certificate with its chain and of its key, which may be one. Their content is judged by ``check``."""

    certificate: Path
    key: Path

    def check(self) -> x509.Certificate:
        """Return the server's certificate, valid now or not. Raises CertificateError."""
        try:
            leaf = x509.load_pem_x509_certificates(_read(self.certificate))[0]
            shown = leaf.public_key()
        except UNREADABLE_CERTIFICATE:
            raise CertificateError(
                f"{self.certificate} holds no certificate in PEM form. Name the file with the certificate and its chain "
                "(certbot: fullchain.pem)"
            ) from None
        try:
            key = serialization.load_pem_private_key(_read(self.key), None)
        except TypeError:
            raise CertificateError(
                f"the key in {self.key} has a passphrase, which a server cannot type. Write it without one: "
                f"openssl pkey -in {self.key} -out key.pem"
            ) from None
        except (ValueError, UnsupportedAlgorithm):
            raise CertificateError(
                f"{self.key} holds no private key in PEM form. Name the file of the key (certbot: privkey.pem)"
            ) from None
        if key.public_key() != shown:
            raise CertificateError(
                f"the key in {self.key} does not belong to the first certificate in {self.certificate}. Name the key with "
                "which that certificate was requested; the server's own certificate comes first, its issuers after it"
            )
        return leaf


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise CertificateError(f"{path} cannot be read: {error.strerror}. It must exist, and this user must read it") from None


def explain_time(leaf: x509.Certificate) -> str:
    """Return why no client takes the certificate now, an empty text while it holds."""
    now = datetime.fromtimestamp(clock.unix_s(), UTC)
    if now >= leaf.not_valid_after_utc:
        return f"the certificate has expired at {leaf.not_valid_after_utc:%Y-%m-%d %H:%M} UTC. Renew it (certbot renew)"
    if now < leaf.not_valid_before_utc:
        return f"the certificate holds only from {leaf.not_valid_before_utc:%Y-%m-%d %H:%M} UTC on. Set this machine's clock"
    return ""


def list_hosts(leaf: x509.Certificate) -> list[str]:
    """Return the names and addresses for which a certificate holds, without those that have a wildcard."""
    try:
        names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except UNREADABLE_CERTIFICATE:
        return []
    hosts = [name.lower() for name in names.get_values_for_type(x509.DNSName)]
    return [host for host in hosts if "*" not in host] + [str(each) for each in names.get_values_for_type(x509.IPAddress)]


class ServedCertificate:
    """What a port shows. ``use`` makes new connections get the files of the pair as they are now; it may raise OSError."""

    def __init__(self, pair: Pair, use: Callable[[Pair], None]) -> None:
        self._pair = pair
        self._use = use
        self._leaf: x509.Certificate | None = None
        self._stamp = self._find_stamp()
        self._loop: asyncio.AbstractEventLoop | None = None

    def open(self) -> None:
        """Show the certificate, and log it when no client will take it. Raises CertificateError."""
        self._leaf = self._take()
        if trouble := explain_time(self._leaf):
            logger.error("tls_certificate_useless: %s. The server goes on with it: %s", trouble, self._pair.certificate)

    def watch(self, loop: asyncio.AbstractEventLoop) -> None:
        """Take over changed files from now on: on SIGHUP at once, else at the next look."""
        self._loop = loop
        if hasattr(signal, "SIGHUP"):
            loop.add_signal_handler(signal.SIGHUP, self.reload)
        loop.call_later(limits().core.tls_look_s, self._look)

    def reload(self) -> bool:
        """Show the files as they are now; return whether they can be used. Otherwise the certificate before stays."""
        self._stamp = self._find_stamp()
        try:
            leaf = self._pair.check()
            trouble = explain_time(leaf)
            if trouble and self._leaf is not None and not explain_time(self._leaf):
                raise CertificateError(trouble)
            self._leaf = self._take()
        except CertificateError as error:
            logger.error("tls_certificate_kept: %s. Clients go on to get the one before", error)  # noqa: TRY400  # for the owner
            return False
        logger.info("tls_certificate_taken until=%s", leaf.not_valid_after_utc.isoformat())
        return True

    def _take(self) -> x509.Certificate:
        leaf = self._pair.check()
        try:
            self._use(self._pair)
        except OSError as error:  # ssl.SSLError is one: a key too weak for OpenSSL, or files that are being replaced
            raise CertificateError(f"{self._pair.certificate} and its key cannot be used: {error}") from None
        return leaf

    def _look(self) -> None:
        stamp = self._find_stamp()
        if stamp is not None and stamp != self._stamp:
            self.reload()
        assert self._loop is not None
        self._loop.call_later(limits().core.tls_look_s, self._look)

    def _find_stamp(self) -> tuple[int, int] | None:
        try:
            return self._pair.certificate.stat().st_mtime_ns, self._pair.key.stat().st_mtime_ns
        except OSError:
            return None  # they are being replaced


def make_context() -> ssl.SSLContext:
    """Return what asyncio serves TLS by; ``load_pair`` gives it a certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    return context


def load_pair(context: ssl.SSLContext, pair: Pair) -> None:
    """Have new connections of ``context`` show ``pair``. Raises OSError, and nothing has changed then."""
    for each in (make_context(), context):  # a pair that does not match would leave half of the one before
        each.load_cert_chain(pair.certificate, pair.key, password=lambda: b"")
