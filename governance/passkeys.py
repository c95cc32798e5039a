"""Passkeys (W3C Web Authentication Level 3): what a browser is asked for, and whether its answer holds. No rows, no sessions.

The library ``webauthn`` reads and judges the answers. Public keys leave here as SPKI DER, which every later verifier reads.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from django.conf import settings
from django.utils.crypto import salted_hmac
from django.utils.translation import gettext as _
from webauthn import (
    generate_authentication_options,
    generate_registration_options,
    verify_authentication_response,
    verify_registration_response,
)
from webauthn.helpers import (
    base64url_to_bytes,
    bytes_to_base64url,
    decode_credential_public_key,
    decoded_public_key_to_cryptography,
    encode_cbor,
    options_to_json_dict,
    parse_client_data_json,
)
from webauthn.helpers.cose import COSEAlgorithmIdentifier
from webauthn.helpers.exceptions import WebAuthnException
from webauthn.helpers.structs import (
    AuthenticatorSelectionCriteria,
    AuthenticatorTransport,
    CredentialDeviceType,
    PublicKeyCredentialDescriptor,
    ResidentKeyRequirement,
    UserVerificationRequirement,
)

from core.limits import limits
from governance.errors import GovernanceError, SignInRefused
from wire import COMMAND
from wire.optoken.approval import ApprovalError, load_public_key

ALGORITHMS = [
    COSEAlgorithmIdentifier.ECDSA_SHA_256,
    COSEAlgorithmIdentifier.EDDSA,
    COSEAlgorithmIdentifier.RSASSA_PKCS1_v1_5_SHA_256,
]
"""In the order of preference. The last is all that older Windows Hello has."""
SITE_NAME = "Muster"

Answer = Mapping[str, Any]
"""What a browser sent: ``PublicKeyCredential.toJSON()``. Nothing of it is believed before it is verified."""
Options = dict[str, Any]
"""The ``publicKey`` member of what a browser is asked, bytes in base64url."""

# What the library and the decoders below it raise for what cannot be read.
_UNREADABLE = (WebAuthnException, ValueError, TypeError, KeyError, IndexError, AttributeError)


class PasskeysUnavailable(GovernanceError):
    """No browser makes a passkey for the address at which this installation is opened."""


@dataclass(frozen=True, slots=True)
class Site:
    """What passkeys are bound to. ``rp_id``: the host name; ``origin``: scheme, host and port, as a browser spells it."""

    rp_id: str
    origin: str


@dataclass(frozen=True, slots=True)
class NewPasskey:
    """A passkey whose making was verified. ``public_key``: SPKI DER; ``keyid``: the credential id in base64url."""

    keyid: str
    public_key: bytes = field(repr=False)
    sign_count: int
    is_backup_eligible: bool
    transports: tuple[str, ...]


def read_site() -> Site:
    """Return what passkeys are bound to, from ``settings.PUBLIC_URL``. Raises PasskeysUnavailable with what would do."""
    parts = urlsplit(settings.PUBLIC_URL)
    host = (parts.hostname or "").lower()
    if _is_address(host):
        raise PasskeysUnavailable(
            _(
                "Passkeys need a host name, and this installation is opened at %(public_url)s. Give it a name and HTTPS "
                "and set MUSTER_PUBLIC_URL to that address. On this machine alone, http://localhost works. A key file "
                "and %(muster)s approve work everywhere."
            )
            % {"public_url": settings.PUBLIC_URL, "muster": COMMAND}
        )
    is_local = host == "localhost" or host.endswith(".localhost")
    if parts.scheme != "https" and not is_local:
        raise PasskeysUnavailable(
            _(
                "Passkeys need HTTPS, and this installation is opened at %(public_url)s. Put a proxy with TLS before it "
                "and set MUSTER_PUBLIC_URL to its https address. A key file and %(muster)s approve work without."
            )
            % {"public_url": settings.PUBLIC_URL, "muster": COMMAND}
        )
    default_port = 443 if parts.scheme == "https" else 80
    port = "" if parts.port in {None, default_port} else f":{parts.port}"
    return Site(rp_id=host, origin=f"{parts.scheme}://{host}{port}")


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return not host
    return True


def ask_for_new(*, person_id: int, name: str, full_name: str, known: Sequence[str], challenge: bytes) -> Options:
    """Return what a browser is asked to make: a discoverable passkey that checks its user. ``known``: key ids of the person."""
    site = read_site()
    options = generate_registration_options(
        rp_id=site.rp_id,
        rp_name=SITE_NAME,
        user_name=name,
        # Tells nothing of the person, and another installation on the same host name does not overwrite this one's passkeys.
        user_id=salted_hmac("governance.passkeys", str(person_id), algorithm="sha256").digest(),
        user_display_name=full_name or name,
        challenge=challenge,
        timeout=limits().governance.passkey_ms,
        authenticator_selection=AuthenticatorSelectionCriteria(
            resident_key=ResidentKeyRequirement.REQUIRED,
            require_resident_key=True,
            user_verification=UserVerificationRequirement.REQUIRED,
        ),
        exclude_credentials=[PublicKeyCredentialDescriptor(id=base64url_to_bytes(keyid)) for keyid in known],
        supported_pub_key_algs=ALGORITHMS,
    )
    return options_to_json_dict(options)


def ask_who(*, challenge: bytes) -> Options:
    """Return what a browser is asked at sign-in: any passkey for this site; it says itself whose it is."""
    options = generate_authentication_options(
        rp_id=read_site().rp_id,
        challenge=challenge,
        timeout=limits().governance.passkey_ms,
        user_verification=UserVerificationRequirement.REQUIRED,
    )
    return options_to_json_dict(options)


def verify_new(answer: Answer, *, challenge: bytes) -> NewPasskey:
    """Return the passkey that a browser made for ``challenge``. Raises SignInRefused."""
    site = read_site()
    try:
        made = verify_registration_response(
            credential=dict(answer),
            expected_challenge=challenge,
            expected_rp_id=site.rp_id,
            expected_origin=site.origin,
            require_user_verification=True,
            supported_pub_key_algs=ALGORITHMS,
        )
        _refuse_frames(answer)
        # No attestation is believed.
        public_key = _read_public_key(made.credential_public_key)
    except (*_UNREADABLE, ApprovalError):
        raise SignInRefused(_("This passkey could not be verified. Reload the page and try again.")) from None
    keyid = bytes_to_base64url(made.credential_id)
    if len(keyid) > limits().governance.passkey_id_chars:
        raise SignInRefused(_("The id of this passkey is too long to be kept. Use another device or security key."))
    return NewPasskey(
        keyid=keyid,
        public_key=public_key,
        sign_count=made.sign_count,
        is_backup_eligible=made.credential_device_type is CredentialDeviceType.MULTI_DEVICE,
        transports=_read_transports(answer),
    )


def verify_known(answer: Answer, *, keyid: str, public_key: bytes, challenge: bytes) -> int:
    """Return the sign count of an answer to ``challenge`` by a stored passkey (SPKI DER). Raises SignInRefused."""
    site = read_site()
    try:
        seen = verify_authentication_response(
            credential=dict(answer),
            expected_challenge=challenge,
            expected_rp_id=site.rp_id,
            expected_origin=site.origin,
            credential_public_key=_make_cose(public_key),
            # The count is for looking at only: passkeys that are copied between devices always say 0.
            credential_current_sign_count=0,
            require_user_verification=True,
        )
        _refuse_frames(answer)
    except (*_UNREADABLE, ApprovalError):
        raise SignInRefused(_("This passkey was not accepted. Reload the page and try again.")) from None
    if bytes_to_base64url(seen.credential_id) != keyid:
        raise SignInRefused(_("This passkey was not accepted. Reload the page and try again."))
    return seen.new_sign_count


def _refuse_frames(answer: Answer) -> None:
    # Given inside somebody else's page; the library does not look at it.
    if parse_client_data_json(base64url_to_bytes(answer["response"]["clientDataJSON"])).cross_origin:
        raise ValueError("made in a frame of another site")


def _read_public_key(cose: bytes) -> bytes:
    key = decoded_public_key_to_cryptography(decode_credential_public_key(cose))
    spki = key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    # A key that no later verifier reads is refused now, and not when its owner approves.
    load_public_key(spki)
    return spki


def _make_cose(spki: bytes) -> bytes:
    """Return a stored key as the library wants it (COSE_Key, RFC 9053 sections 7.1 and 7.2, RFC 8230 section 4)."""
    key = load_public_key(spki)
    if isinstance(key, ec.EllipticCurvePublicKey):
        numbers = key.public_numbers()
        point = {1: 2, 3: -7, -1: 1, -2: numbers.x.to_bytes(32), -3: numbers.y.to_bytes(32)}
        return encode_cbor(point)
    if isinstance(key, rsa.RSAPublicKey):
        public = key.public_numbers()
        return encode_cbor({1: 3, 3: -257, -1: public.n.to_bytes(key.key_size // 8), -2: public.e.to_bytes(3)})
    return encode_cbor({1: 1, 3: -8, -1: 6, -2: key.public_bytes(Encoding.Raw, PublicFormat.Raw)})


def _read_transports(answer: Answer) -> tuple[str, ...]:
    """Return how the device is reached, as far as it is known to us; a hint for the browser and nothing more."""
    listed = answer["response"].get("transports")
    known = {transport.value for transport in AuthenticatorTransport}
    return tuple(sorted(known & {name for name in listed if isinstance(name, str)})) if isinstance(listed, list) else ()


def read_keyid(answer: Answer) -> str:
    """Return which key an answer says it is by; "" when it says none."""
    keyid = answer.get("id")
    return (
        keyid if isinstance(keyid, str) and len(keyid) <= limits().governance.passkey_id_chars and "\x00" not in keyid else ""
    )
