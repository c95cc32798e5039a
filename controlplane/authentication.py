"""Who may call the admin REST API: the bearer of an admin token, and nobody else."""

from __future__ import annotations

from drf_spectacular.extensions import OpenApiAuthenticationExtension
from rest_framework.authentication import BaseAuthentication, get_authorization_header
from rest_framework.request import Request

from governance.admin_tokens import TokenHolder, verify_admin_token
from governance.errors import InvalidAdminToken
from governance.operations.proposals import Proposer

SCHEME = "bearer"
CHALLENGE = 'Bearer realm="muster"'


class AdminTokenAuthentication(BaseAuthentication):
    """``Authorization: Bearer msa_…``. A client key, a worker credential or a browser session is refused."""

    def authenticate(self, request: Request) -> tuple[TokenHolder, None] | None:
        """Return the holder of the token, None without the header. Raises InvalidAdminToken (401), TooManyWrongTokens (429)."""
        scheme, _, text = get_authorization_header(request).decode("latin-1").partition(" ")
        if not scheme:
            return None
        address = str(request.META.get("REMOTE_ADDR", ""))
        token = verify_admin_token(text.strip(), address=address) if scheme.lower() == SCHEME else None
        if token is None:
            raise InvalidAdminToken("The admin token is not valid. Send Authorization: Bearer msa_….")
        owner, actor = token.owner, f"token:{token.name}"
        name = f"{actor}#{token.keyid}"
        proposer = Proposer(name) if owner is None else Proposer(owner.get_username(), owner.pk)
        return TokenHolder(actor, name, proposer, token.owner_id), None

    def authenticate_header(self, request: Request) -> str:
        """Return the challenge, which makes a missing token 401 and not 403."""
        return CHALLENGE


class AdminTokenScheme(OpenApiAuthenticationExtension):  # type: ignore[no-untyped-call]  # drf-spectacular registers by subclassing
    target_class = "controlplane.authentication.AdminTokenAuthentication"
    name = "adminToken"

    def get_security_definition(self, auto_schema: object) -> dict[str, str]:
        return {"type": "http", "scheme": "bearer", "description": "Token of an administrator, msa_…"}
