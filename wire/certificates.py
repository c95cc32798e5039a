"""X.509 as both ends of a session need it: what reading a stranger's bytes may raise, keys to compare, hosts as names."""

from __future__ import annotations

import ipaddress

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.types import CertificatePublicKeyTypes

UNREADABLE_CERTIFICATE = (
    ValueError,
    TypeError,
    InvalidSignature,
    UnsupportedAlgorithm,
    x509.InvalidVersion,
    x509.DuplicateExtension,
    x509.ExtensionNotFound,
    x509.UnsupportedGeneralNameType,
)
"""Everything that cryptography raises for a certificate or request, or a part of it, that cannot be used; it has no base."""


def encode_key(key: CertificatePublicKeyTypes) -> bytes:
    """Return a public key as SPKI DER, by which keys are compared."""
    return key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)


def read_host(host: str) -> x509.DNSName | x509.IPAddress:
    """Return a host of a URL, without brackets, as certificates name it."""
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
