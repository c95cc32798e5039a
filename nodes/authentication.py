"""Bearer credentials of boxes on the REST API. Client keys and admin tokens are another kind and never pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from drf_spectacular.extensions import OpenApiAuthenticationExtension
from rest_framework.authentication import BaseAuthentication, get_authorization_header
from rest_framework.request import Request

from nodes.errors import InvalidNodeToken
from nodes.models import NodeCredential
from nodes.services import find_credential

SCHEME = "bearer"
CHALLENGE = 'Bearer realm="muster-nodes"'


@dataclass(frozen=True, slots=True)
class CredentialHolder:
    """The caller of a node API: whoever holds ``credential``."""

    credential: NodeCredential
    is_authenticated: ClassVar[bool] = True


class NodeTokenAuthentication(BaseAuthentication):
    """``Authorization: Bearer msw_…``. There is no anonymous access: a missing token is an invalid one."""

    def authenticate(self, request: Request) -> tuple[CredentialHolder, None]:
        """Return the holder of the credential. Raises InvalidNodeToken (401)."""
        scheme, _, text = get_authorization_header(request).decode("latin-1").partition(" ")
        credential = find_credential(text.strip()) if scheme.lower() == SCHEME else None
        if credential is None:
            raise InvalidNodeToken("The node credential is not valid. Send Authorization: Bearer msw_….")
        return CredentialHolder(credential=credential), None

    def authenticate_header(self, request: Request) -> str:
        """Return the challenge of a 401."""
        return CHALLENGE


class NodeTokenScheme(OpenApiAuthenticationExtension):  # type: ignore[no-untyped-call]  # drf-spectacular registers by subclassing
    """How the OpenAPI document describes the credential."""

    target_class = "nodes.authentication.NodeTokenAuthentication"
    name = "nodeToken"

    def get_security_definition(self, auto_schema: object) -> dict[str, str]:
        """Return the OpenAPI security scheme."""
        return {"type": "http", "scheme": "bearer", "description": "Credential of a GPU box, msw_…"}
