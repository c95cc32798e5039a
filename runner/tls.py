"""TLS of the node's own port: its key, which never leaves the node, its certificate, and the next one in good time.

The certificate comes from files of the owner, which are read again when they change, or from the internal CA of the
installation over the session. Connections that are open go on with the certificate with which they began.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from runner.config import TlsConfig
from runner.errors import ConfigError
from runner.limits import limits
from runner.operations.keys import read_private, write_private
from wire import clock
from wire.bridge import CertificateRequest, NodeCertificate
from wire.certificates import UNREADABLE_CERTIFICATE, read_host

log = logging.getLogger(__name__)

KEY_NAME, CERTIFICATE_NAME = "tls.key", "tls.pem"


@dataclass(frozen=True, slots=True)
class _Held:
    """The certificate that the port shows. Times are Unix seconds by the server's clock."""

    certificate: x509.Certificate
    renew_at: float
    until: float


class ServerTls:
    """Key and certificate of one node. ``now``: Unix seconds by the server's clock, which this machine's may differ from."""

    def __init__(self, config: TlsConfig, *, now: Callable[[], float]) -> None:
        self._config = config
        self._now = now
        self._authorities: tuple[x509.Certificate, ...] | None = None
        """The internal CAs that hold, as a gateway said last; None = none has said anything."""
        self._key: ec.EllipticCurvePrivateKey | None = None
        self._held: _Held | None = None
        self._stamp: tuple[float, float] = (0.0, 0.0)
        self._asked_at = float("-inf")
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        self.context.set_alpn_protocols(["http/1.1"])

    @property
    def is_from_gateways(self) -> bool:
        """Whether the internal CA certifies the port."""
        return self._config.folder is not None

    @property
    def is_held(self) -> bool:
        """Whether clients that trust the internal CAs can verify what the port shows now."""
        held = self._held
        if held is None or self._now() >= held.until or not _names(held.certificate, self._config.host):
            return False
        return any(_is_issued_by(held.certificate, authority) for authority in self._authorities or ())

    def open(self) -> None:
        """Read key and certificate, and make what is missing. Blocks. Raises ConfigError."""
        folder = self._config.folder
        if folder is None:
            self._read_files()
            return
        try:
            self._key = _read_key(folder / KEY_NAME)
            held = _read_held(folder / CERTIFICATE_NAME)
            if held is None or held.certificate.public_key() != self._key.public_key():
                write_private(folder / CERTIFICATE_NAME, _certify_alone(self._key, self._config.host, self._now()))
                held = None
            self._held = held
            self.context.load_cert_chain(folder / CERTIFICATE_NAME, folder / KEY_NAME)
        except (OSError, *UNREADABLE_CERTIFICATE) as error:
            raise ConfigError(
                f"{KEY_NAME} and {CERTIFICATE_NAME} in {folder} cannot be used ({error}); remove them: the node makes new ones"
            ) from None

    async def reload_files(self) -> None:
        """Take over files of the owner that have changed; those that cannot be used change nothing."""
        if self.is_from_gateways or self._stamp == await asyncio.to_thread(self._find_stamp):
            return
        try:
            self._read_files()  # here, because new connections read the context meanwhile
            log.info("certificate taken over file=%s", self._config.certificate)
        except ConfigError as error:
            self._stamp = self._find_stamp()  # said once
            log.error("certificate was not taken over: %s", error)  # noqa: TRY400  # text for the owner

    # what gateways say, and are told

    def hear_authorities(self, certificates: str) -> None:
        try:
            found = x509.load_pem_x509_certificates(certificates.encode()) if certificates else []
        except UNREADABLE_CERTIFICATE:
            log.warning("a gateway names internal CAs that cannot be read")
            return
        self._authorities = tuple(found)

    def describe(self) -> CertificateRequest:
        """Return how it stands."""
        return CertificateRequest(is_held=self.is_held)

    def ask(self) -> CertificateRequest | None:
        """Return a request for a certificate when one is due and none was asked for lately."""
        now = clock.monotonic()
        if self._key is None or not self._authorities or now - self._asked_at < limits().tls.retry_s:
            return None
        is_held = self.is_held
        if is_held and self._held is not None and self._now() < self._held.renew_at:
            return None
        self._asked_at = now
        request = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([])).sign(self._key, hashes.SHA256())
        return CertificateRequest(is_held=is_held, csr=request.public_bytes(serialization.Encoding.PEM).decode())

    async def take(self, answer: NodeCertificate) -> bool:
        """Show a certificate from the next connection on; return whether it could be used. Raises OSError."""
        folder = self._config.folder
        if folder is None or self._key is None:
            return False
        if answer.error:
            log.warning("no certificate of the internal CA: %s", answer.error)
            return False
        try:
            certificate = x509.load_pem_x509_certificate(answer.certificate.encode())
            is_own = certificate.public_key() == self._key.public_key()
        except UNREADABLE_CERTIFICATE:
            log.warning("a gateway sends a certificate that cannot be read")
            return False
        if not is_own or not _names(certificate, self._config.host):
            log.warning("a gateway sends a certificate of another key or host")
            return False
        content = certificate.public_bytes(serialization.Encoding.PEM)
        await asyncio.to_thread(write_private, folder / CERTIFICATE_NAME, content)
        self.context.load_cert_chain(folder / CERTIFICATE_NAME, folder / KEY_NAME)
        self._held, self._asked_at = _hold(certificate), float("-inf")
        log.info("certificate of the internal CA until=%s", certificate.not_valid_after_utc.isoformat())
        return True

    # inside

    def _read_files(self) -> None:
        certificate, key = self._config.certificate, self._config.key
        stamp = self._find_stamp()
        trial = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)  # else a pair that does not match would leave half of the old one
        try:
            for context in (trial, self.context):
                context.load_cert_chain(certificate or "", key, password=lambda: b"")
        except (OSError, ValueError) as error:  # ssl.SSLError is one
            raise ConfigError(f"--api-tls-cert {certificate} and its key cannot be used: {error}") from None
        self._stamp = stamp

    def _find_stamp(self) -> tuple[float, float]:
        paths = (self._config.certificate, self._config.key)
        try:
            first, second = (0.0 if path is None else path.stat().st_mtime for path in paths)
        except OSError:
            return self._stamp  # they are being replaced
        return first, second


def trust_also(authorities: Path) -> ssl.SSLContext:
    """Return what a client trusts: the CAs of this machine, and those of a file (PEM). Raises OSError."""
    context = ssl.create_default_context()
    context.load_verify_locations(authorities)
    return context


def _read_key(path: Path) -> ec.EllipticCurvePrivateKey:
    content = read_private(path)
    if content is None:
        made = ec.generate_private_key(ec.SECP256R1())
        pem = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        write_private(path, made.private_bytes(*pem))
        return made
    found = serialization.load_pem_private_key(content, None)
    if not isinstance(found, ec.EllipticCurvePrivateKey):
        raise ValueError("a key of another kind")  # noqa: TRY004  # of the file
    return found


def _read_held(path: Path) -> _Held | None:
    content = read_private(path)
    try:
        return None if content is None else _hold(x509.load_pem_x509_certificate(content))
    except UNREADABLE_CERTIFICATE:
        return None


def _hold(certificate: x509.Certificate) -> _Held:
    begins, ends = certificate.not_valid_before_utc.timestamp(), certificate.not_valid_after_utc.timestamp()
    return _Held(certificate, ends - (ends - begins) * limits().tls.renew_share, ends)


def _certify_alone(key: ec.EllipticCurvePrivateKey, host: str, now: float) -> bytes:
    """Return a certificate that shows the key until the internal CA has certified it. Nobody is to trust it."""
    name = x509.Name([x509.NameAttribute(NameOID.ORGANIZATION_NAME, "Muster node without certificate")])
    begins = datetime.fromtimestamp(now, UTC)
    made = (
        x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
        .serial_number(x509.random_serial_number()).not_valid_before(begins - timedelta(days=1))
        .not_valid_after(begins + timedelta(seconds=limits().tls.placeholder_s))
        .add_extension(x509.SubjectAlternativeName([read_host(host)]), critical=False)
    )  # fmt: skip
    return made.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def _names(certificate: x509.Certificate, host: str) -> bool:
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except UNREADABLE_CERTIFICATE:
        return False
    return read_host(host) in names


def _is_issued_by(certificate: x509.Certificate, authority: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(authority)
    except UNREADABLE_CERTIFICATE:
        return False
    return True
