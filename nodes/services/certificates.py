"""The internal CA: made and replaced by an operator, it gives nodes certificates for the hosts at which clients reach them.

A CA is good only for the hosts that were listed when it was made (RFC 5280 name constraints), so whoever steals its key can
pose as no other host to a client that trusts it. A new one is published at once and gives certificates after
``authority_settle_s``, when clients have fetched it; the one before is published until what it gave has expired.
"""

from __future__ import annotations

import ipaddress
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from urllib.parse import urlsplit

from cryptography import x509
from cryptography.fernet import Fernet, InvalidToken
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from django.conf import settings
from django.db import connection, transaction
from django.utils.translation import gettext as _

from core.hints import publish_hint
from core.limits import limits
from governance.audit import record_event
from nodes.addresses import LOOPBACK, AddressPolicy, parse_direct_url, parse_policy
from nodes.errors import CertificateRefused, Conflict
from nodes.models import Node, NodeAuthority, read_clock
from wire import COMMAND, clock
from wire.certificates import UNREADABLE_CERTIFICATE, read_host
from wire.credentials import derive_cipher

PublicKey = ec.EllipticCurvePublicKey | ed25519.Ed25519PublicKey | rsa.RSAPublicKey
NO_AUTHORITY = f"needs a certificate, and there is no internal CA: an operator runs {COMMAND} ca create"
NO_CERTIFICATE = "has no certificate of the internal CA yet"
"""A ``ticket_error``, as the one above."""
_LOCK = 0x6D73_6361
"""Key of an advisory lock: of two who make a CA, the second one finds that of the first."""


@dataclass(frozen=True, slots=True)
class KnownAuthority:
    """A CA in memory: its certificate as PEM, and the clock.monotonic() second from which it holds no more, None = none."""

    certificate: str
    dropped_at: float | None


def join_authorities(known: Sequence[KnownAuthority]) -> str:
    """Return the certificates that hold now as one PEM text, the newest first."""
    now = clock.monotonic()
    return "".join(one.certificate for one in known if one.dropped_at is None or now < one.dropped_at)


def load_authorities() -> tuple[KnownAuthority, ...]:
    """Return the CAs that hold, the newest first."""
    read_at, now = read_clock(), clock.monotonic()
    return tuple(
        KnownAuthority(row.certificate, None if row.dropped_at is None else now + (row.dropped_at - read_at).total_seconds())
        for row in _list_rows(read_at)
    )


def read_authorities() -> str:
    """Return the certificates that hold now as one PEM text, read anew."""
    return "".join(row.certificate for row in _list_rows(read_clock()))


def find_authorities(urls: Iterable[str]) -> str:
    """Return what ``read_authorities`` says for calls of these URLs; nothing is read where TLS has no part in them."""
    return read_authorities() if any(url.lower().startswith("https:") for url in urls) else ""


@transaction.atomic
def create_authority(*, actor: str) -> list[str]:
    """Make the first CA; return what ``describe_authorities`` says. Raises Conflict, CertificateRefused."""
    _lock()
    if _list_rows(read_clock()):
        raise Conflict(_("There is an internal CA already: %(muster)s ca rotate makes the next one.") % {"muster": COMMAND})
    _make(actor=actor, action="node_ca.create", settle_s=0.0)
    return describe_authorities()


@transaction.atomic
def rotate_authority(*, is_at_once: bool, actor: str) -> list[str]:
    """Make the next CA; return what ``describe_authorities`` says. Raises Conflict, CertificateRefused.

    ``is_at_once``: those before it hold no more from now on, as when a key of theirs was stolen.
    """
    _lock()
    now, bounds = read_clock(), limits().nodes
    rows = _list_rows(now)
    if not rows:
        raise Conflict(_("There is no internal CA yet: %(muster)s ca create makes one.") % {"muster": COMMAND})
    made = _make(actor=actor, action="node_ca.rotate", settle_s=0.0 if is_at_once else bounds.authority_settle_s)
    until = now if is_at_once else made.issues_at + timedelta(seconds=bounds.certificate_s)
    for row in rows:
        if row.dropped_at is None or is_at_once:
            row.dropped_at = until
            row.save(update_fields=["dropped_at"])
    return describe_authorities()


@transaction.atomic
def drop_authorities() -> None:
    """Forget CAs that hold no more, and the keys of those that another one has taken the place of."""
    _lock()
    now = read_clock()
    NodeAuthority.objects.filter(dropped_at__lte=now).delete()
    newest = NodeAuthority.objects.filter(issues_at__lte=now).order_by("-pk").first()
    if newest is not None:
        NodeAuthority.objects.filter(pk__lt=newest.pk).exclude(sealed_private="").update(sealed_private="")


def describe_authorities() -> list[str]:
    """Return what a person wants to know of each CA, the newest first."""
    now, lines = read_clock(), []
    rows = _list_rows(now)
    signing = next((row for row in rows if row.issues_at <= now), None)
    for row in rows:
        certificate = _load(row)
        state = "gives certificates" if row is signing else f"gives certificates from {row.issues_at:%Y-%m-%d %H:%M} UTC on"
        if row.dropped_at is not None:
            state = f"{'still gives certificates, and ' if row is signing else ''}holds until {row.dropped_at:%Y-%m-%d} UTC"
        if row.sealed_private and _open(row) is None:
            state += "; its key cannot be decrypted: MUSTER_SECRET_KEY has changed"
        lines += [
            f"{certificate.subject.rfc4514_string().removeprefix('CN=')}: {state}",
            f"  SHA-256 {certificate.fingerprint(hashes.SHA256()).hex(':').upper()}",
            f"  for {', '.join(_list_permitted(certificate))}; expires {certificate.not_valid_after_utc:%Y-%m-%d}",
        ]
    return lines


@dataclass(frozen=True, slots=True)
class ShownAuthority:
    """A CA that holds, as a page shows it."""

    name: str
    expires_at: datetime


def list_authorities() -> list[ShownAuthority]:
    """Return the CAs that hold, the newest first; two queries."""
    certificates = [_load(row) for row in _list_rows(read_clock())]
    return [ShownAuthority(one.subject.rfc4514_string().removeprefix("CN="), one.not_valid_after_utc) for one in certificates]


def find_authority_end() -> datetime | None:
    """Return when the CA that gives certificates expires; None when there is none."""
    now = read_clock()
    signing = next((row for row in _list_rows(now) if row.issues_at <= now), None)
    return _load(signing).not_valid_after_utc if signing is not None else None


def read_request(text: str) -> PublicKey:
    """Return the key of a PKCS #10 request (PEM) that is signed by it. Raises CertificateRefused."""
    try:
        if len(text) > limits().nodes.csr_chars:
            raise CertificateRefused(_("The certificate request is too long."), param="csr")
        request = x509.load_pem_x509_csr(text.encode())
        key, is_signed = request.public_key(), request.is_signature_valid
    except UNREADABLE_CERTIFICATE:
        raise CertificateRefused(_("The certificate request cannot be read."), param="csr") from None
    if not is_signed:
        raise CertificateRefused(_("The certificate request is not signed by its own key."), param="csr")
    match key:
        case ec.EllipticCurvePublicKey() if isinstance(key.curve, ec.SECP256R1 | ec.SECP384R1):
            return key
        case rsa.RSAPublicKey() if key.key_size in (2048, 3072, 4096):
            return key
        case ed25519.Ed25519PublicKey():
            return key
    raise CertificateRefused(_("The key has to be P-256, P-384, Ed25519, or RSA of 2048 to 4096 bits."), param="csr")


@transaction.atomic
def issue_certificate(*, node_id: uuid.UUID, url: str, csr: str) -> str:
    """Return a certificate (PEM) for the host of a URL that a node has named and where it was seen to hold the key.

    Raises CertificateRefused. Of ``csr`` only the key counts.
    """
    node = Node.objects.filter(pk=node_id, ticket_url=url).first()
    if node is None:
        raise CertificateRefused(_("The node has named another URL since."))
    return _issue([parse_direct_url(url).host], csr, unit=node.printed_id, actor=f"node:{node.name}", target=node.printed_id)


@transaction.atomic
def sign_request(*, csr: str, hosts: Sequence[str], actor: str) -> str:
    """Return a certificate (PEM) for a program that an operator vouches for. Raises CertificateRefused."""
    return _issue([host.lower() for host in hosts], csr, unit="operator", actor=actor, target=", ".join(hosts))


def _issue(hosts: Sequence[str], csr: str, *, unit: str, actor: str, target: str) -> str:
    key, now, bounds = read_request(csr), read_clock(), limits().nodes
    names = [_check_host(host) for host in hosts]
    row = NodeAuthority.objects.filter(issues_at__lte=now).exclude(dropped_at__lte=now).order_by("-pk").first()
    if row is None:
        raise CertificateRefused(_("There is no internal CA: an operator runs %(muster)s ca create.") % {"muster": COMMAND})
    private, authority = _open(row), _load(row)
    if private is None:
        raise CertificateRefused(
            _("The key of the internal CA cannot be decrypted: an operator runs %(muster)s ca rotate --now.")
            % {"muster": COMMAND}
        )
    for host, name in zip(hosts, names, strict=True):
        if not _covers(authority, name):
            raise CertificateRefused(
                _("The internal CA is older than %(host)s in MUSTER_DIRECT_HOSTS: an operator runs %(muster)s ca rotate.")
                % {"host": host, "muster": COMMAND}
            )
    until = min(now + timedelta(seconds=bounds.certificate_s), authority.not_valid_after_utc)
    usage = dict.fromkeys(_USAGES, False) | {"digital_signature": True}
    made = (
        x509.CertificateBuilder()
        # No common name: some clients take that for a host.
        .subject_name(_name((NameOID.ORGANIZATION_NAME, "Muster node"), (NameOID.ORGANIZATIONAL_UNIT_NAME, unit)))
        .issuer_name(authority.subject)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(seconds=bounds.certificate_backdate_s))
        .not_valid_after(until)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.KeyUsage(**usage), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(private.public_key()), critical=False)
        .sign(private, hashes.SHA256())
    )
    detail = {"hosts": list(hosts), "serial": f"{made.serial_number:x}", "until": until.isoformat(timespec="seconds")}
    record_event(actor=actor, action="node_ca.issue", target=target, detail=detail)
    return made.public_bytes(serialization.Encoding.PEM).decode()


def _make(*, actor: str, action: str, settle_s: float) -> NodeAuthority:
    permitted = _list_constraints(_read_policy())
    now, private = read_clock(), ec.generate_private_key(ec.SECP256R1())
    serial = x509.random_serial_number()
    name = _name((NameOID.COMMON_NAME, f"Muster nodes {now:%Y-%m-%d} {serial:040x}"[:32]))
    usage = dict.fromkeys(_USAGES, False) | {"key_cert_sign": True, "crl_sign": True}
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(private.public_key())
        .serial_number(serial)
        .not_valid_before(now - timedelta(seconds=limits().nodes.certificate_backdate_s))
        .not_valid_after(now + timedelta(seconds=limits().nodes.authority_s))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.KeyUsage(**usage), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(permitted, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(private.public_key()), critical=False)
        .sign(private, hashes.SHA256())
    )
    der = private.private_bytes(serialization.Encoding.DER, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    row = NodeAuthority.objects.create(
        certificate=made.public_bytes(serialization.Encoding.PEM).decode(),
        sealed_private=_cipher().encrypt(der).decode(),
        created_at=now,
        issues_at=now + timedelta(seconds=settle_s),
    )
    fingerprint = made.fingerprint(hashes.SHA256()).hex()
    record_event(actor=actor, action=action, target=made.subject.rfc4514_string(), detail={"sha256": fingerprint})
    publish_hint("nodes")
    return row


_USAGES = (
    *("digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement", "key_cert_sign"),
    *("crl_sign", "encipher_only", "decipher_only"),
)


def _name(*parts: tuple[x509.ObjectIdentifier, str]) -> x509.Name:
    return x509.Name([x509.NameAttribute(oid, text) for oid, text in parts])


def _read_policy() -> AddressPolicy:
    return parse_policy(settings.NODE_DIRECT_HOSTS, allow_loopback=settings.NODE_DIRECT_ALLOW_LOOPBACK)


def _list_constraints(policy: AddressPolicy) -> x509.NameConstraints:
    """Return what a CA is good for: the hosts that are listed. Raises CertificateRefused where there is none."""
    names = [rule.name.removeprefix(".") for rule in policy.rules if rule.network is None]
    networks = [rule.network for rule in policy.rules if rule.network is not None]
    if policy.allow_loopback:
        names, networks = [*names, "localhost"], [*networks, *LOOPBACK]
    if not names and not networks:
        raise CertificateRefused(
            _("MUSTER_DIRECT_HOSTS lists no host, and the internal CA is good for listed hosts only: list them there first.")
        )
    permitted: list[x509.GeneralName] = [x509.DNSName(name) for name in dict.fromkeys(names)]
    permitted += [x509.IPAddress(network) for network in dict.fromkeys(networks)]
    # A kind of which nothing is permitted would be permitted as a whole.
    excluded: list[x509.GeneralName] = [] if names else [x509.DNSName("")]
    excluded += [] if networks else [x509.IPAddress(ipaddress.ip_network(every)) for every in ("0.0.0.0/0", "::/0")]
    return x509.NameConstraints(permitted_subtrees=permitted, excluded_subtrees=excluded or None)


def _list_permitted(authority: x509.Certificate) -> list[str]:
    constraints = authority.extensions.get_extension_for_class(x509.NameConstraints).value
    return [str(name.value) for name in constraints.permitted_subtrees or ()]


def _covers(authority: x509.Certificate, name: x509.DNSName | x509.IPAddress) -> bool:
    constraints = authority.extensions.get_extension_for_class(x509.NameConstraints).value
    for one in constraints.permitted_subtrees or ():
        if isinstance(one, x509.DNSName) and isinstance(name, x509.DNSName):
            if name.value == one.value or name.value.endswith(f".{one.value}"):
                return True
        elif isinstance(one, x509.IPAddress) and isinstance(name, x509.IPAddress) and name.value in one.value:  # type: ignore[operator]  # a network
            return True
    return False


def _check_host(host: str) -> x509.DNSName | x509.IPAddress:
    """Return a host as a certificate names it. Raises CertificateRefused unless it is listed by itself, and is no own one.

    That a name leads to a listed address is not enough: it may be that of another service in the network.
    """
    policy = _read_policy()
    own = (settings.PUBLIC_URL, settings.GATEWAY_PUBLIC_URL, *settings.GATEWAY_ADVERTISED_URLS)
    if any(parts.hostname == host for url in own if (parts := urlsplit(str(url))).scheme in {"https", "wss"}):
        raise CertificateRefused(
            _("%(host)s is the host of this installation itself; a node needs one of its own.") % {"host": host}
        )
    name = read_host(host)
    if isinstance(name, x509.DNSName):
        is_listed = any(
            host.endswith(rule.name) if rule.name.startswith(".") else host == rule.name
            for rule in policy.rules
            if rule.network is None
        )
        if is_listed or (policy.allow_loopback and host == "localhost"):
            return name
    else:
        networks = [*(LOOPBACK if policy.allow_loopback else ()), *(rule.network for rule in policy.rules)]
        if any(network is not None and name.value in network for network in networks):
            return name
    raise CertificateRefused(
        _(
            "MUSTER_DIRECT_HOSTS does not list %(host)s; certificates are for names that stand there, and addresses "
            "of its networks."
        )
        % {"host": host}
    )


def _list_rows(now: datetime) -> list[NodeAuthority]:
    return list(NodeAuthority.objects.exclude(dropped_at__lte=now).order_by("-pk"))


def _load(row: NodeAuthority) -> x509.Certificate:
    return x509.load_pem_x509_certificate(row.certificate.encode())


def _open(row: NodeAuthority) -> ec.EllipticCurvePrivateKey | None:
    """Return the private key; None where it was sealed under another MUSTER_SECRET_KEY, or forgotten."""
    try:
        key = serialization.load_der_private_key(_cipher().decrypt(row.sealed_private.encode()), None)
    except InvalidToken:
        return None
    return key if isinstance(key, ec.EllipticCurvePrivateKey) else None


def _cipher() -> Fernet:
    return derive_cipher(settings.SECRET_KEY, purpose="muster node ca")


def _lock() -> None:
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_advisory_xact_lock(%s)", [_LOCK])
