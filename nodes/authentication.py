"""Bearer credentials of boxes on the REST API. Client keys and admin tokens are another kind and never pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from drf_spectacular.extensions import OpenApiAuthenticationExtension
from rest_framework.authentication import BaseAuthentication, get_authorization_header
from rest_framework.request import Request

from core.throttle import AuthThrottle
from nodes.errors import InvalidNodeToken, TooManyWrongTokens
from nodes.models import NodeCredential
from nodes.services.credentials import find_credential, read_credential_digests
from wire.credentials import CredentialKind, digest_credential, parse_keyid

SCHEME = "bearer"
CHALLENGE = 'Bearer realm="muster-nodes"'
_INVALID = "The node credential is not valid. Send Authorization: Bearer msw_…."

throttle = AuthThrottle(read_digests=read_credential_digests)
"""By address. Of this process alone: it spares the database, and nobody guesses a credential anyway."""


@dataclass(frozen=True, slots=True)
class CredentialHolder:
    """The caller of a node API: whoever holds ``credential``."""

    credential: NodeCredential
    is_authenticated: ClassVar[bool] = True


class NodeTokenAuthentication(BaseAuthentication):
    """``Authorization: Bearer msw_…``. There is no anonymous access: a missing token is an invalid one."""

    def authenticate(self, request: Request) -> tuple[CredentialHolder, None]:
        """Return the holder of the credential. Raises InvalidNodeToken (401), TooManyWrongTokens (429)."""
        scheme, _, text = get_authorization_header(request).decode("latin-1").partition(" ")
        text = text.strip()
        if scheme.lower() != SCHEME or parse_keyid(text, CredentialKind.WORKER) is None:
            raise InvalidNodeToken(_INVALID)  # it costs no query, so it is not counted
        return CredentialHolder(credential=_look_up(text, str(request.META.get("REMOTE_ADDR", "")))), None

    def authenticate_header(self, request: Request) -> str:
        """Return the challenge of a 401."""
        return CHALLENGE


def _look_up(text: str, address: str) -> NodeCredential:
    """Return the credential. Behind a proxy many boxes have one address, so a good one never waits."""
    if throttle.must_wait(address, digest_credential(text)):
        raise TooManyWrongTokens("Too many wrong node credentials came from this address; wait a second and try again.")
    credential = find_credential(text)
    if credential is None:
        throttle.record_failure(address)
        raise InvalidNodeToken(_INVALID)
    return credential


class NodeTokenScheme(OpenApiAuthenticationExtension):  # type: ignore[no-untyped-call]  # drf-spectacular registers by subclassing
    """How the OpenAPI document describes the credential."""

    target_class = "nodes.authentication.NodeTokenAuthentication"
    name = "nodeToken"

    def get_security_definition(self, auto_schema: object) -> dict[str, str]:
        """Return the OpenAPI security scheme."""
        return {"type": "http", "scheme": "bearer", "description": "Credential of a GPU box, msw_…"}
