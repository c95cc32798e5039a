"""Who may call the admin REST API: the bearer of an admin token, and nobody else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from drf_spectacular.extensions import OpenApiAuthenticationExtension
from rest_framework.authentication import BaseAuthentication, get_authorization_header
from rest_framework.permissions import BasePermission
from rest_framework.request import Request

from core.roles import find_tenants, may
from governance.admin_tokens import TokenHolder, find_holder
from governance.errors import InvalidAdminToken, NotPermitted

if TYPE_CHECKING:
    from rest_framework.views import APIView

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
        holder = find_holder(text.strip(), address=address) if scheme.lower() == SCHEME else None
        if holder is None:
            raise InvalidAdminToken("The admin token is not valid or has expired. Send Authorization: Bearer msa_….")
        return holder, None

    def authenticate_header(self, request: Request) -> str:
        """Return the challenge, which makes a missing token 401 and not 403."""
        return CHALLENGE


class MayCall(BasePermission):
    """Lets a token call what its role allows: ``needs`` of the view, by method, says the permission; without one nobody may.

    ``is_per_tenant`` of the view: it also answers somebody who has the permission in some tenants, with what is theirs.
    """

    def has_permission(self, request: Request, view: APIView) -> bool:
        """Return whether the token may call. Raises NotPermitted (403), which names the permission."""
        holder: object = request.user
        if not isinstance(holder, TokenHolder):
            return False
        method = "GET" if request.method in {"HEAD", "OPTIONS"} else str(request.method)
        needs: Mapping[str, str] = getattr(view, "needs", {})
        needed = needs.get(method)
        if needed is None:
            return not hasattr(view, method.lower())  # 405 then says so
        in_some = getattr(view, "is_per_tenant", False) and find_tenants(holder, needed)
        if may(holder, needed) or in_some:
            return True
        raise NotPermitted(f"This admin token may not do this: its role needs the permission {needed}.")


class AdminTokenScheme(OpenApiAuthenticationExtension):  # type: ignore[no-untyped-call]  # drf-spectacular registers by subclassing
    target_class = "controlplane.authentication.AdminTokenAuthentication"
    name = "adminToken"

    def get_security_definition(self, auto_schema: object) -> dict[str, str]:
        return {"type": "http", "scheme": "bearer", "description": "Token of an administrator, msa_…"}
