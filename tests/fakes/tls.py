"""TLS without sockets, and certificate requests: what a test of certificates needs of both ends."""

from __future__ import annotations

import base64
import ipaddress
import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

from controlplane.tls import Pair

PrivateKey = ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey | rsa.RSAPrivateKey


def make_key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


def make_request(key: PrivateKey, *extensions: x509.ExtensionType) -> str:
    """Return a PKCS #10 request (PEM) by a key."""
    builder = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
    for extension in extensions:
        builder = builder.add_extension(extension, critical=True)
    algorithm = None if isinstance(key, ed25519.Ed25519PrivateKey) else hashes.SHA256()
    return builder.sign(key, algorithm).public_bytes(serialization.Encoding.PEM).decode()


class Authority:
    """A CA of a test."""

    def __init__(self) -> None:
        self._key = make_key()
        self._name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "CA of the tests")])
        basic = x509.BasicConstraints(ca=True, path_length=0)
        self.certificate = self._sign(self._name, self._key, basic, timedelta(days=1000))

    def certify(self, key: PrivateKey | x509.CertificateSigningRequest, *, host: str, days: float = 30) -> str:
        is_address = host.replace(".", "").isdigit()
        name = x509.IPAddress(ipaddress.ip_address(host)) if is_address else x509.DNSName(host)
        return self._sign(x509.Name([]), key, x509.SubjectAlternativeName([name]), timedelta(days=days))

    def write_pair(self, folder: Path, *, host: str, days: float = 30) -> Pair:
        """Write what a server shows: its certificate with this CA's, and a key of its own."""
        key, pair = make_key(), Pair(folder / "cert.pem", folder / "key.pem")
        pair.certificate.write_text(self.certify(key, host=host, days=days) + self.certificate)
        pair.key.write_text(write_key(key))
        return pair

    def make_trust(self) -> ssl.SSLContext:
        """Return what a client trusts that knows nobody else."""
        return ssl.create_default_context(cadata=self.certificate)

    def _sign(
        self, name: x509.Name, key: PrivateKey | x509.CertificateSigningRequest, what: x509.ExtensionType, life: timedelta
    ) -> str:
        now = datetime.now(UTC)
        made = (
            x509.CertificateBuilder().subject_name(name).issuer_name(self._name).public_key(key.public_key())
            .serial_number(x509.random_serial_number()).not_valid_before(now - timedelta(minutes=1))
            .not_valid_after(now + life).add_extension(what, critical=True).sign(self._key, hashes.SHA256())
        )  # fmt: skip
        return made.public_bytes(serialization.Encoding.PEM).decode()


def write_key(key: PrivateKey) -> str:
    form = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return key.private_bytes(*form).decode()


def make_server(folder: Path, key: PrivateKey, certificate: str) -> ssl.SSLContext:
    """Return what a server shows: a certificate (PEM) and its key."""
    (folder / "server.pem").write_text(write_key(key) + certificate)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "server.pem")
    return context


def shake_hands(server: ssl.SSLContext, client: ssl.SSLContext, host: str) -> bytes:
    """Have a client connect to a server under a name; return the certificate (DER) that it saw. Raises ssl.SSLError."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        client.wrap_bio(to_client, to_server, server_hostname=host),
        server.wrap_bio(to_server, to_client, server_side=True),
    ]
    for _ in range(4):
        for end in ends:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
    shown = ends[0].getpeercert(binary_form=True)
    assert shown is not None
    return shown


def list_changed(pem: str) -> list[str]:
    """Return what a PEM text holds with one bit changed, once for each byte."""
    kind, text = pem.split("-----")[1:3]
    kind, der, changed = kind.removeprefix("BEGIN "), bytearray(base64.b64decode(text)), []
    for at in range(len(der)):
        der[at] ^= 1
        body = base64.encodebytes(der).decode()
        changed.append(f"-----BEGIN {kind}-----\n{body}-----END {kind}-----\n")
        der[at] ^= 1
    return changed
